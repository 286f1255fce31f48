#!/bin/busybox sh
# First stage of the test host, in its initramfs: modules, then the root: the machine's own
# directories, read-only below a tmpfs.
B=/bin/busybox
$B mount -t proc proc /proc
$B mount -t sysfs sys /sys
$B mount -t devtmpfs dev /dev
while read -r module; do
    options=
    # KVM goes by the frequency of the TSC that the kernel knows when it is loaded, and gets along
    # badly with another one that is measured later.
    [ "$module" = kvm.ko ] && $B timeout 10 $B grep -q -m 1 'tsc: Refined' /dev/kmsg
    [ "$module" = kvm-amd.ko ] && options=nested=0
    # shellcheck disable=SC2086
    # A dot for each: who waits sees that there is progress.
    $B printf .
    $B insmod "/modules/$module" $options || echo "test host: $module cannot be loaded"
done < /modules/order

echo "test host: the modules are loaded"
$B mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=524288,cache=loose root /lower ||
    echo "test host: the machine's root cannot be mounted"
$B mount -t tmpfs -o size=75% tmpfs /upper
$B mkdir /upper/data /upper/work
$B mount -t overlay -o lowerdir=/lower,upperdir=/upper/data,workdir=/upper/work overlay /machine ||
    echo "test host: the overlay cannot be mounted"
N=/new
# An overlay has no mounts with mapped users, a disk has: where there is one, it is the root, with
# the machine's directories mounted in it, and where volumes are.
if [ -b /dev/vda ]; then
    $B mount -t ext4 -o noatime,noinit_itable /dev/vda $N ||
        echo "test host: the disk cannot be mounted"
    for entry in /machine/*; do
        at=$N/${entry##*/}
        if [ -L "$entry" ]; then
            $B cp -d "$entry" "$at"
        elif [ -d "$entry" ]; then
            $B mkdir -p "$at"
            case $at in */proc | */sys | */dev | */run | */lost+found) continue ;; esac
            $B mount -o bind "$entry" "$at"
        fi
    done
    for at in var/lib/kubelet var/lib/podvisor run; do
        $B mkdir -p "$N/$at" "$N/volumes/$at"
        $B mount -o bind "$N/volumes/$at" "$N/$at"
    done
else
    $B mount -o bind /machine $N
    $B mount -t tmpfs -o mode=755 tmpfs $N/run
fi
$B mount -t proc proc $N/proc
$B mount -t sysfs sys $N/sys
$B mount -t devtmpfs dev $N/dev
$B mkdir -p $N/dev/pts $N/dev/shm $N/dev/mqueue
$B mount -t devpts -o ptmxmode=666,mode=620,gid=5 devpts $N/dev/pts
$B mount -t tmpfs -o mode=1777 tmpfs $N/dev/shm
$B mount -t mqueue mqueue $N/dev/mqueue 2>/dev/null
$B mount -t cgroup2 cgroup2 $N/sys/fs/cgroup
$B ln -sf /proc/self/fd $N/dev/fd
$B ln -sf /proc/self/fd/0 $N/dev/stdin
$B ln -sf /proc/self/fd/1 $N/dev/stdout
$B ln -sf /proc/self/fd/2 $N/dev/stderr
$B cp -a /host $N/run/podvisor-host
$B cp $B $N/run/podvisor-host/busybox
echo "test host: the root is mounted"
exec $B switch_root $N /run/podvisor-host/stage2
echo "test host: the root cannot be switched"
