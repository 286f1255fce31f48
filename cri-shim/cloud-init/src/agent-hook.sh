#!/bin/sh
# podvisor's guest agent, from the disk that this came from: installed once, started at each boot.
root=
name=podvisor-ga
program=$root/usr/local/sbin/$name
unit=$root/etc/systemd/system/$name.service
say() {
    echo "$name: $*" >&2
}

for other in /usr/sbin/qemu-ga /usr/bin/qemu-ga; do
    [ ! -x "$root$other" ] || {
        say "the system has $other, which answers the host"
        exit 0
    }
done

[ ! -L "$unit" ] || {
    say "the system has masked $name.service"
    exit 0
}

disk=$(findfs LABEL=@LABEL@ 2>/dev/null) || disk=$(blkid -L @LABEL@ 2>/dev/null)
[ -n "$disk" ] || {
    say "no disk has the label @LABEL@"
    exit 1
}
place=$(mktemp -d) || exit 1
trap 'umount "$place" 2>/dev/null; rmdir "$place"' EXIT
mount -t vfat -o ro "$disk" "$place" || {
    say "failed to mount $disk"
    exit 1
}

start=start
if ! cmp -s "$place/$name" "$program"; then
    # Another one may be running: it is replaced, not written over.
    mkdir -p "${program%/*}" && cp "$place/$name" "$program.new" && chmod 0755 "$program.new" &&
        mv -f "$program.new" "$program" || {
        say "failed to install $program"
        exit 1
    }
    ! command -v restorecon >/dev/null || restorecon "$program"
    start=restart
fi
modprobe virtio_console 2>/dev/null

if [ ! -d $root/run/systemd/system ]; then
    # One that runs already has the port, and this one ends.
    setsid "$program" </dev/null >/dev/null 2>&1 &
    exit 0
fi
# The port's appearance starts it, early in later boots: it needs neither a network nor cloud-init.
mkdir -p $root/etc/systemd/system $root/etc/udev/rules.d
cat >"$unit" <<'UNIT'
[Unit]
Description=Guest agent of podvisor
DefaultDependencies=no
RequiresMountsFor=/usr/local/sbin
Conflicts=shutdown.target
Before=shutdown.target
ConditionPathExistsGlob=/dev/vport*
ConditionPathExists=!/usr/sbin/qemu-ga
ConditionPathExists=!/usr/bin/qemu-ga

[Service]
ExecStart=/usr/local/sbin/podvisor-ga
Restart=on-failure
RestartSec=5
UNIT
cat >$root/etc/udev/rules.d/60-$name.rules <<'RULE'
SUBSYSTEM=="virtio-ports", ATTR{name}=="org.qemu.guest_agent.0", TAG+="systemd", ENV{SYSTEMD_WANTS}+="podvisor-ga.service"
RULE
udevadm control --reload
systemctl daemon-reload
systemctl --no-block $start $name.service
