#!/bin/busybox sh
# The small system's initial file system: loads the modules, mounts root= and goes on there.
/bin/busybox --install -s /bin
mkdir -p /proc /sys /dev /root
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
for module in $(cat /modules/*/order); do
    insmod "$module" || echo "small: cannot load $module"
done
flags=
for word in $(cat /proc/cmdline); do
    case $word in
    root=*) root=${word#root=} ;;
    rootflags=*) flags=",${word#rootflags=}" ;;
    rootfstype=*) type="-t ${word#rootfstype=}" ;;
    esac
done
case $root in
UUID=* | LABEL=*) device=$(findfs "$root") ;;
*) device=$root ;;
esac
if ! mount ${type:--t ext4} -o "rw$flags" "$device" /root; then
    echo "small: no root at $root"
    cat /proc/partitions
    poweroff -f
fi
mount -o move /dev /root/dev
umount /proc /sys
exec switch_root /root /sbin/init
