# Makes the images in the current directory and pushes them to $REGISTRY. Arguments: Debian's suite, then sources for apt.
# As root: images have owners, device nodes and capabilities.
set -eu
umask 022
suite=$1
shift

# A full Debian: about 200 MB and 10,000 files, with what the tests call in it.
mmdebstrap --quiet --mode=root --variant=minbase \
    --include=attr,acl,libcap2-bin,ca-certificates,perl,python3-minimal \
    "$suite" root.tar "$@"
umoci init --layout oci
umoci new --image oci:debian
umoci raw add-layer --image oci:debian root.tar
umoci config --image oci:debian --config.cmd /bin/sh --os linux --architecture amd64
rm root.tar

# The same in four layers that do not overlap.
umoci unpack --image oci:debian bundle
umoci new --image oci:split
for part in usr/lib usr/share usr/bin .; do
    tar -C bundle/rootfs --format=pax --exclude='./usr/lib/*' --exclude='./usr/share/*' --exclude='./usr/bin/*' \
        -cf part.tar "$part"
    umoci raw add-layer --image oci:split part.tar
done
umoci config --image oci:split --config.cmd /bin/sh --os linux --architecture amd64
rm part.tar

# A second layer: every kind of file, and every kind of change to what the first has.
(
    cd bundle/rootfs
    mkdir -p srv/tree/kinds srv/tree/sizes srv/tree/names srv/tree/times srv/tree/modes
    cd srv/tree

    cd kinds
    mknod null c 1 3
    mknod disk b 259 70000
    mkfifo pipe
    ln -s nowhere dangling
    ln -s "$(printf '%01000d' 0)" long
    echo one >a
    ln a b
    ln a c
    ln ../../../usr/bin/perl perl
    truncate -s 3M sparse
    printf end >>sparse
    mkdir empty
    cd ..

    for size in 0 1 2048 2049 4095 4096 4097 65536 1048577; do
        yes "$size bytes" | head -c "$size" >"sizes/$size"
    done

    touch "names/$(printf '%0255d' 0)" "names/$(printf 'not UTF-8 \377\376')" "names/$(printf 'new\nline')" \
        'names/back\slash' 'names/tab	and space' 'names/=quote"'
    deep=names
    for _ in 1 2 3 4 5 6 7 8; do deep=$deep/$(printf '%050d' 0); done
    mkdir -p "$deep"
    echo deep >"$deep/file"

    for mode in 0000 0644 4755 2755 1777 6711; do
        touch "modes/$mode"
        chmod "$mode" "modes/$mode"
    done
    touch modes/owned modes/owned-32
    chown 1234:50 modes/owned
    chown 100000:4000000000 modes/owned-32
    mkdir modes/shared
    chmod 3775 modes/shared

    cp ../../bin/true modes/capable
    setcap cap_net_raw,cap_sys_time=ep modes/capable
    touch modes/attributes modes/acl
    setfattr -n user.text -v hello modes/attributes
    setfattr -n user.binary -v "0x00ff$(printf '%0600d' 0)" modes/attributes
    setfattr -n user.directory -v yes modes
    setfacl -m u:1234:rw,g:50:r modes/acl
    mkdir modes/acl-default
    setfacl -d -m g:50:rx modes/acl-default

    touch -d '1970-01-01 00:00:00 UTC' times/epoch
    touch -d '1960-01-01 00:00:00 UTC' times/before
    touch -d '2100-01-01 00:00:00 UTC' times/later
    touch -d '2001-02-03 04:05:06.789012345 UTC' times/fraction
    touch -h -d '2001-02-03 04:05:06 UTC' kinds/dangling kinds/null kinds/pipe
    touch -d '2001-02-03 04:05:06 UTC' kinds times

    cd ../../usr/share
    rm -r doc/perl-base common-licenses/BSD
    rm -r lintian && ln -s /nowhere lintian
    rm common-licenses/GPL-1 && mkdir common-licenses/GPL-1 && echo text >common-licenses/GPL-1/text
    rm -r bug && echo file >bug
    chmod 0600 common-licenses/Artistic
    chown 7:8 common-licenses/Apache-2.0
    setfattr -n user.late -v 1 common-licenses/GPL-3
    echo more >>common-licenses/GPL-2
)
umoci repack --image oci:layers bundle
rm -r bundle

# The third and fourth: an opaque directory and a whiteout, as umoci writes them.
mkdir new
echo 'only this' >new/file
umoci insert --image oci:layers --opaque new /usr/share/pam
umoci insert --image oci:layers --whiteout /usr/share/pam-configs
rm -r new

# What the layers make, by umoci's own hand; whoever started this lists and removes it.
umoci unpack --image oci:layers bundle

# Busybox by buildah: two layers, with settings.
storage="--root $PWD/storage/root --runroot $PWD/storage/run --storage-driver vfs"
export BUILDAH_ISOLATION=chroot
buildah() { command buildah $storage "$@" >/dev/null; }
work() { command buildah $storage from --pull-never "$1"; }
first=$(work scratch)
buildah copy "$first" /bin/busybox /bin/busybox
buildah config --entrypoint '["/bin/busybox"]' --env FROM=buildah "$first"
buildah commit --quiet "$first" base
second=$(work localhost/base)
printf 'root:x:0:0::/:\nuser:x:1000:50::/home:\n' >passwd
buildah copy --chmod 644 "$second" passwd /etc/passwd
mkdir home && echo "buildah's" >home/file
buildah copy --chown 1000:50 "$second" home /home
buildah config --user user --workingdir /home --cmd 'cat file' "$second"
buildah commit --quiet --format docker "$second" docker-archive:busybox.docker.tar:example.org/busybox:buildah
buildah commit --quiet --format oci "$second" oci:oci:busybox
buildah rm --all
buildah rmi --all --force
rm -r storage home passwd

# The same by skopeo, and more forms in a registry that only listens while this runs.
skopeo copy --quiet oci:oci:busybox oci-archive:busybox.oci.tar:example.org/busybox:skopeo
push() { skopeo copy --quiet --dest-tls-verify=false "$@"; }
push oci:oci:debian "docker://$REGISTRY/debian:1"
push oci:oci:split "docker://$REGISTRY/split:1"
push oci:oci:layers "docker://$REGISTRY/layers:1"
push --dest-compress --dest-compress-format zstd oci:oci:debian "docker://$REGISTRY/zstd:1"
push --format v2s2 oci:oci:busybox "docker://$REGISTRY/schema2:1"
rm -r oci
