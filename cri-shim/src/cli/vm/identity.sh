# Gives a cloned guest its own identity: $1 is its host name.
old=$(cat /proc/sys/kernel/hostname)
echo "$1" >/proc/sys/kernel/hostname || exit
[ ! -e /etc/hostname ] || echo "$1" >/etc/hostname
if [ -e /etc/hosts ]; then
    # The line of the guest's own name.
    sed "s/^\(127\.0\.1\.1[[:space:]]\).*/\1$1 $1/" /etc/hosts >/etc/hosts.new
    cat /etc/hosts.new >/etc/hosts && rm /etc/hosts.new
fi
if [ -s /etc/machine-id ]; then
    tr -d - </proc/sys/kernel/random/uuid >/etc/machine-id
fi
if ls /etc/ssh/ssh_host_*_key >/dev/null 2>&1 && command -v ssh-keygen >/dev/null; then
    rm -f /etc/ssh/ssh_host_*
    ssh-keygen -A >/dev/null && for unit in ssh sshd; do
        systemctl try-restart "$unit" 2>/dev/null
    done
fi
true
