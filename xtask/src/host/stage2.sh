#!/run/podvisor-host/busybox sh
# Second stage of the test host, process 1 in the machine's own root: shares, copies, then
# the command between its streams, then the end. `conf` and `run` come from the caller.
H=/run/podvisor-host
B=$H/busybox
. $H/conf

# The virtio-serial ports announce themselves a little after the modules are there.
port() {
    while :; do
        for p in /sys/class/virtio-ports/*; do
            [ -e "$p/name" ] || continue
            read -r name < "$p/name"
            [ "$name" = "$1" ] && [ -c "/dev/${p##*/}" ] && { PORT=/dev/${p##*/}; return; }
        done
        $B usleep 20000
    done
}
port status
STATUS=$PORT

# kvm, tun and vsock for every user, as tests may drop privileges.
for d in kvm net/tun vhost-vsock; do [ -e /dev/$d ] && $B chmod 666 /dev/$d; done
$B hostname testhost
$B ip link set lo up
$B mkdir -p "/lib/modules/$RELEASE" && $B mount -o bind "$MODULES" "/lib/modules/$RELEASE"
# mkdir and chmod above went to the overlay: the machine's own files never change.

share() { # TAG DIR
    $B mkdir -p "$2"
    $B mount -t 9p -o rw,trans=virtio,version=9p2000.L,msize=524288,cache=mmap "$1" "$2" ||
        echo "test host: $2 cannot be shared"
}
copy() { # INDEX FILE
    $B mkdir -p $H/copies
    $B cp -p "$2" "$H/copies/$1" && $B mount -o bind "$H/copies/$1" "$2"
}
network() {
    $B ip link set eth0 up
    $B ip addr add 10.0.2.15/24 dev eth0
    $B ip route add default via 10.0.2.2
    echo nameserver 10.0.2.3 > $H/resolv.conf
    $B mount -o bind $H/resolv.conf /etc/resolv.conf
}
prepare
echo "test host: the shares are mounted"

# Without it, nobody could tell a command that takes long from a machine that hangs.
pulse() {
    [ "$PULSE" = 0 ] || while $B sleep "$PULSE"; do echo alive; done > "$STATUS" &
}

if [ "$TERMINAL" = 1 ]; then
    port size
    # Held open: a terminal that nobody has open forgets its size.
    exec 4<> /dev/hvc0
    $B stty -F /dev/hvc0 rows "$ROWS" cols "$COLUMNS"
    while read -r rows columns; do
        $B stty -F /dev/hvc0 rows "$rows" cols "$columns"
    done < "$PORT" &
    keep=$!
    echo up > "$STATUS"
    pulse 4<&-
    $B setsid -c $B sh $H/run < /dev/hvc0 > /dev/hvc0 2>&1 4<&-
    rc=$?
    exec 4<&-
else
    # A fifo's ends are opened while descriptor 5 holds it: none of them blocks, so no child
    # that ends meanwhile can interrupt it.
    $B mkfifo $H/out $H/err $H/in
    port stdout
    exec 5<> $H/out 8> $H/out
    $B cat < $H/out > "$PORT" 5<&- 8>&- &
    out=$!
    port stderr
    exec 5<> $H/err 9> $H/err
    $B cat < $H/err > "$PORT" 5<&- 8>&- 9>&- &
    err=$!
    exec 5<&- 6< /dev/null
    if [ "$STDIN" = 1 ]; then
        port stdin
        exec 5<> $H/in 6< $H/in 7> $H/in 5<&-
        $B cat < "$PORT" >&7 6<&- 8>&- 9>&- &
        exec 7>&-
    fi
    keep="$out $err"
    echo up > "$STATUS"
    pulse 6<&- 8>&- 9>&-
    $B sh $H/run <&6 >&8 2>&9 6<&- 8>&- 9>&-
    rc=$?
    exec 6<&- 8>&- 9>&-
fi

# What the command left running would hold its streams open.
for p in /proc/[0-9]*; do
    id=${p#/proc/}
    case " 1 $keep " in *" $id "*) continue ;; esac
    [ -e "$p/exe" ] && kill -9 "$id"
done 2> /dev/null
[ "$TERMINAL" = 1 ] || wait $out $err
$B sync
unshare_all
# QEMU drops what it has not written when it ends: until the status is seen, it goes on.
n=0
until { echo "rc=$rc" >&5; read -t 10 -r seen <&5; :; } 5<> "$STATUS" || [ $n = 50 ]; do
    n=$((n + 1))
    $B usleep 20000
done
# QEMU's debug-exit port: the host is gone at once.
printf '\0' | $B dd of=/dev/port bs=1 seek=1281 2> /dev/null
$B reboot -f
