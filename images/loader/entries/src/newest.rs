//! When nothing says what to boot: the newest kernel, beside its initial file system, with the root
//! that was found.

use crate::files::Files;
use crate::signature::Kind;
use crate::volumes::{FileError, Volume, VolumeId};
use crate::{BootEntry, FileRef, Format, version};

/// Directories that have kernels.
pub const DIRECTORIES: &[&str] = &["boot", ""];

/// How kernels' names begin.
const KERNELS: &[&str] = &["vmlinuz", "bzImage", "kernel", "linux"];

/// Returns an entry for the newest kernel of a volume; `None` if it has none.
///
/// # Errors
///
/// If a directory cannot be read.
pub fn load(files: &Files<'_>, volume: VolumeId) -> Result<Option<BootEntry>, FileError> {
    for directory in DIRECTORIES {
        let names = files.list(volume, directory)?;
        let mut kernels: Vec<(&str, &str)> = names
            .iter()
            .filter_map(|name| Some((version_of(name)?, name.as_str())))
            .filter(|(version, _)| !version.contains("rescue") && !version.ends_with(".old"))
            .collect();
        kernels.sort_by(|a, b| version::compare(b.0, a.0).then(a.1.cmp(b.1)));
        let path = |name: &str| match *directory {
            "" => name.to_owned(),
            directory => format!("{directory}/{name}"),
        };
        let found = kernels
            .iter()
            .find(|(_, name)| files.is_file(volume, &path(name)));
        let Some((version, kernel)) = found else {
            continue;
        };
        let initrd = initrds_of(version)
            .into_iter()
            .find(|wanted| names.contains(wanted) && files.is_file(volume, &path(wanted)));
        return Ok(Some(BootEntry {
            title: (*kernel).to_owned(),
            format: Format::Newest,
            config: FileRef::whole(volume, path(kernel)),
            kernel: FileRef::whole(volume, path(kernel)),
            initrds: initrd
                .iter()
                .map(|name| FileRef::whole(volume, path(name)))
                .collect(),
            cmdline: root_parameters(files, volume, initrd.is_some()),
        }));
    }
    Ok(None)
}

/// The version in a kernel's name: what follows `vmlinuz-`; nothing for a `vmlinuz` alone.
fn version_of(name: &str) -> Option<&str> {
    KERNELS.iter().find_map(|kernel| {
        let rest = name.strip_prefix(kernel)?;
        match rest.strip_prefix('-') {
            Some(version) => Some(version),
            None => rest.is_empty().then_some(""),
        }
    })
}

/// What Debian, Fedora, SUSE, Alpine and Arch call the initial file system of a version.
fn initrds_of(version: &str) -> Vec<String> {
    if version.is_empty() {
        return ["initrd.img", "initrd", "initramfs.img", "initramfs"]
            .map(str::to_owned)
            .into();
    }
    vec![
        format!("initrd.img-{version}"),
        format!("initramfs-{version}.img"),
        format!("initrd-{version}"),
        format!("initramfs-{version}"),
        format!("initrd-{version}.img"),
    ]
}

/// The root of the operating system: in this volume, on its disk, on any.
fn root_parameters(files: &Files<'_>, volume: VolumeId, has_initrd: bool) -> String {
    let own = files.volume(volume);
    let is_root = |volume: &&Volume| volume.root.is_some();
    let all = files.volumes();
    let root = own
        .filter(is_root)
        .or_else(|| {
            let is_near = |volume: &&Volume| own.is_some_and(|own| own.disk == volume.disk);
            all.iter().filter(is_root).find(is_near)
        })
        .or_else(|| all.iter().find(is_root))
        .or(own);
    let Some(root) = root else {
        return "ro".to_owned();
    };
    // Only an initial file system finds a UUID; FAT's and ISO 9660's are no roots.
    let name = match (&root.uuid, has_initrd) {
        (Some(uuid), true) if !matches!(root.kind, Kind::Vfat | Kind::Iso9660) => {
            format!("root=UUID={uuid}")
        }
        _ => format!("root=/dev/{}", root.device),
    };
    let flags = root.root.as_ref().and_then(|root| root.flags.as_deref());
    match flags {
        Some(flags) => format!("{name} rootflags={flags} ro"),
        None => format!("{name} ro"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::MemoryVolumes;
    use crate::volumes::Root;

    #[test]
    fn the_newest_kernel_has_its_initrd_and_its_root() {
        let mut volumes = MemoryVolumes::new().ext4(
            "aa",
            &[
                ("boot/vmlinuz-6.1.0-9-amd64", b"x"),
                ("boot/initrd.img-6.1.0-9-amd64", b"x"),
                ("boot/vmlinuz-6.1.0-50-amd64", b"x"),
                ("boot/initrd.img-6.1.0-50-amd64", b"x"),
                ("boot/vmlinuz-0-rescue-abc", b"x"),
                ("boot/vmlinuz-7.0", b""),
            ],
        );
        volumes.last().root = Some(Root::default());
        let entry = load(&Files::new(&volumes), VolumeId(0)).unwrap().unwrap();
        assert_eq!(entry.kernel.path, "boot/vmlinuz-6.1.0-50-amd64");
        assert_eq!(entry.initrds[0].path, "boot/initrd.img-6.1.0-50-amd64");
        assert_eq!(entry.cmdline, "root=UUID=aa ro");
    }

    #[test]
    fn a_boot_partition_starts_with_the_root_of_its_disk() {
        let mut volumes = MemoryVolumes::new()
            .ext4(
                "boot",
                &[("vmlinuz-linux", b"x"), ("initramfs-linux.img", b"x")],
            )
            .ext4("root", &[]);
        volumes.last().kind = Kind::Btrfs;
        volumes.last().root = Some(Root {
            flags: Some("subvol=@".to_owned()),
        });
        let entry = load(&Files::new(&volumes), VolumeId(0)).unwrap().unwrap();
        assert_eq!(entry.cmdline, "root=UUID=root rootflags=subvol=@ ro");
        assert_eq!(entry.initrds[0].path, "initramfs-linux.img");
    }

    #[test]
    fn without_an_initrd_the_root_is_a_device() {
        let volumes = MemoryVolumes::new().ext4("aa", &[("vmlinuz", b"x")]);
        let entry = load(&Files::new(&volumes), VolumeId(0)).unwrap().unwrap();
        assert_eq!(entry.cmdline, "root=/dev/vda1 ro");
        let none = MemoryVolumes::new().ext4("aa", &[("etc/fstab", b"x")]);
        assert_eq!(load(&Files::new(&none), VolumeId(0)), Ok(None));
    }
}
