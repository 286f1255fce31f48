# Makes the root of a cloud image in ./root, whose file system has the UUID $UUID. Arguments: Debian's suite, then
# sources for apt. As root.
#
# What Debian's own images have: its cloud kernel with an initial file system of all modules,
# systemd, cloud-init with netplan and growpart, an SSH server, and the guest agent.
set -eu
umask 022
suite=$1
shift
packages=linux-image-cloud-amd64,initramfs-tools,systemd-sysv,systemd-resolved,libpam-systemd,udev,dbus
packages=$packages,cloud-init,netplan.io,cloud-guest-utils,fdisk,e2fsprogs
packages=$packages,openssh-server,sudo,qemu-guest-agent,iproute2,iputils-ping,ca-certificates

mmdebstrap --quiet --mode=root --variant=minbase --include="$packages" \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' \
    "$suite" root "$@"
rm -f root/etc/machine-id root/etc/hostname root/etc/resolv.conf root/etc/ssh/ssh_host_*
touch root/etc/machine-id
ln -s ../run/systemd/resolve/stub-resolv.conf root/etc/resolv.conf
ln -sf /usr/lib/systemd/system/systemd-networkd.service root/etc/systemd/system/multi-user.target.wants/
# Looks for snapshots of LVM, which takes minutes in an emulated host.
rm -f root/etc/systemd/system/multi-user.target.wants/e2scrub_reap.service
rm -rf root/var/cache/apt/*.bin root/var/lib/apt/lists/*
echo "UUID=$UUID / ext4 defaults 0 1" >root/etc/fstab

# As grub-mkconfig writes it for one kernel.
release=$(basename root/boot/vmlinuz-* | sed 's/^vmlinuz-//')
mkdir -p root/boot/grub
sed -e "s/@RELEASE@/$release/g" -e "s/@UUID@/$UUID/g" "$GRUB" >root/boot/grub/grub.cfg
