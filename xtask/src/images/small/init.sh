#!/bin/busybox sh
# The small system's init: address by DHCP, identity from the disk `cidata`, a shell on ttyS0.
export PATH=/bin:/sbin HOME=/root TERM=vt100
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
mkdir -p /dev/pts && mount -t devpts devpts /dev/pts
echo "small: $(uname -s -r), $(nproc) CPUs, boot $(($(cat /var/boots 2>/dev/null) + 1))"
echo "$(($(cat /var/boots 2>/dev/null) + 1))" >/var/boots
sync
echo "small: cmdline $(cat /proc/cmdline)"
hostname small

for label in cidata CIDATA config-2; do
    disk=$(findfs "LABEL=$label" 2>/dev/null) || continue
    mkdir -p /run/seed
    mount -t vfat -o ro "$disk" /run/seed 2>/dev/null || mount -t iso9660 -o ro "$disk" /run/seed || continue
    echo "small: seed $label:" $(cd /run/seed && find . -type f | sed 's|^\./||' | sort)
    # YAML, or JSON with quoted keys.
    name=$(sed -n "s/^ *[\"']\\?local-hostname[\"']\\?: *//p" /run/seed/meta-data 2>/dev/null |
        tr -d "\"'," | head -n 1)
    [ -z "$name" ] || hostname "$name"
    break
done
echo "small: hostname $(hostname)"

ip link set lo up
for card in /sys/class/net/eth*; do
    [ -e "$card" ] || continue
    card=${card##*/}
    ip link set "$card" up
    udhcpc -i "$card" -s /etc/udhcpc -t 5 -T 2 -A 1 -n -q -S -x "hostname:$(hostname)" >/dev/null 2>&1 ||
        echo "small: $card has no address"
done

# What a test can fetch from outside: http://ADDRESS/hostname.
mkdir -p /run/www && hostname >/run/www/hostname
[ ! -x /bin/httpd ] || httpd -p 80 -h /run/www

# Of cloud-init's vendor-data, a boothook that stands alone: run at each boot.
if [ "$(head -n 1 /run/seed/vendor-data 2>/dev/null)" = "#cloud-boothook" ]; then
    tail -n +2 /run/seed/vendor-data >/run/boothook && chmod 700 /run/boothook
    /run/boothook && echo "small: boothook done" || echo "small: boothook failed"
fi

# QEMU's guest agent, where the machine has its port and the boothook has brought no other one.
for port in /sys/class/virtio-ports/*; do
    [ "$(cat "$port/name" 2>/dev/null)" = org.qemu.guest_agent.0 ] || continue
    [ ! -x /sbin/qemu-ga ] || [ -e /etc/no-agent ] || [ -x /usr/local/sbin/podvisor-ga ] ||
        qemu-ga -d -m virtio-serial -p "/dev/${port##*/}" -t /run -f /run/qemu-ga.pid -l /run/qemu-ga.log
done

# The power button is an input device; an event of it is 24 bytes.
for button in /dev/input/event*; do
    [ -e "$button" ] || continue
    (
        head -c 24 "$button" >/dev/null && echo "small: power button" && sync && poweroff -f
    ) &
done
echo "small: ready"
while true; do
    setsid cttyhack sh -l
done
