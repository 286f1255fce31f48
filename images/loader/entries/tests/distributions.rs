//! Disks in the form that distributions' tools write them: `tests/data/NAME` has the files of each
//! volume, what the volumes are, and what must be booted.

use std::fs;
use std::path::{Path, PathBuf};

use podvisor_boot_entries::memory::MemoryVolumes;
use podvisor_boot_entries::signature::Kind;
use podvisor_boot_entries::{FileRef, Root, Volume, Volumes, find};
use serde::Deserialize;

#[derive(Deserialize)]
struct Described {
    device: String,
    kind: String,
    uuid: Option<String>,
    label: Option<String>,
    /// The flags of the root that is in it; empty for none.
    root: Option<String>,
}

#[derive(Debug, Deserialize, PartialEq)]
struct Expected {
    title: String,
    format: String,
    config: String,
    kernel: String,
    initrds: Vec<String>,
    cmdline: String,
}

fn files_below(root: &Path, directory: &Path, files: &mut Vec<(String, Vec<u8>)>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files_below(root, &path, files);
        } else {
            let name = path
                .strip_prefix(root)
                .unwrap()
                .to_str()
                .unwrap()
                .to_owned();
            files.push((name, fs::read(&path).unwrap()));
        }
    }
}

fn volumes(case: &Path) -> MemoryVolumes {
    let text = fs::read_to_string(case.join("volumes.json")).unwrap();
    let described: Vec<Described> = serde_json::from_str(&text).unwrap();
    described
        .into_iter()
        .fold(MemoryVolumes::new(), |volumes, one| {
            let mut files = Vec::new();
            let directory = case.join(&one.device);
            if directory.is_dir() {
                files_below(&directory, &directory, &mut files);
            }
            let volume = Volume {
                disk: 0,
                partition: one
                    .device
                    .strip_prefix("vda")
                    .and_then(|number| number.parse().ok()),
                kind: match one.kind.as_str() {
                    "ext4" => Kind::Ext4,
                    "btrfs" => Kind::Btrfs,
                    "xfs" => Kind::Xfs,
                    "vfat" => Kind::Vfat,
                    "iso9660" => Kind::Iso9660,
                    kind => panic!("{kind}"),
                },
                device: one.device,
                uuid: one.uuid,
                label: one.label,
                root: one.root.map(|flags| Root {
                    flags: (!flags.is_empty()).then_some(flags),
                }),
            };
            let files: Vec<(&str, &[u8])> = files
                .iter()
                .map(|(name, bytes)| (name.as_str(), bytes.as_slice()))
                .collect();
            volumes.volume(volume, &files)
        })
}

fn booted(volumes: &MemoryVolumes) -> Expected {
    let found = find(volumes).unwrap_or_else(|error| panic!("{error}"));
    assert!(found.failed.is_empty(), "{:?}", found.failed);
    let name = |file: &FileRef| {
        let volume = &volumes.volumes()[file.volume.0];
        format!("{}/{}", volume.device, file.path)
    };
    let entry = found.entry;
    Expected {
        title: entry.title,
        format: entry.format.to_string(),
        config: name(&entry.config),
        kernel: name(&entry.kernel),
        initrds: entry.initrds.iter().map(name).collect(),
        cmdline: entry.cmdline,
    }
}

#[test]
fn what_distributions_write_is_booted_as_they_would() {
    let data = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data"));
    let mut cases = 0;
    for case in fs::read_dir(data).unwrap() {
        let case = case.unwrap().path();
        let text = fs::read_to_string(case.join("expected.json")).unwrap();
        let expected: Expected = serde_json::from_str(&text).unwrap();
        assert_eq!(booted(&volumes(&case)), expected, "{}", case.display());
        cases += 1;
    }
    assert_eq!(cases, 8);
}

#[test]
fn nothing_to_boot_lists_what_was_looked_for() {
    let volumes = MemoryVolumes::new().ext4("1", &[("etc/fstab", b"x")]);
    let text = find(&volumes).unwrap_err().to_string();
    for part in [
        "vda1 (ext4)",
        "boot/grub/grub.cfg",
        "loader/entries",
        "EFI/Linux",
        "extlinux.conf",
        "vmlinuz*",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let none = find(&MemoryVolumes::new()).unwrap_err().to_string();
    assert!(none.contains("on nothing"), "{none}");
}

#[test]
fn a_format_that_fails_is_passed_over_and_told() {
    let volumes = MemoryVolumes::new()
        .ext4(
            "1",
            &[
                ("boot/grub/grub.cfg", b"\nfrobnicate\n"),
                ("boot/vmlinuz-1", b"x"),
            ],
        )
        .ext4("2", &[("extlinux.conf", b"label a\nkernel /k\n")]);
    let found = find(&volumes).unwrap();
    assert_eq!(found.entry.kernel.path, "k");
    let text = found.failed[0].to_string();
    assert!(
        text.starts_with("vda1: line 2 of boot/grub/grub.cfg"),
        "{text}"
    );

    // Without another configuration, the newest kernel is better than nothing.
    let volumes = MemoryVolumes::new().ext4(
        "1",
        &[
            ("boot/grub/grub.cfg", b"\nfrobnicate\n"),
            ("boot/vmlinuz-1", b"x"),
        ],
    );
    let found = find(&volumes).unwrap();
    assert_eq!(
        (found.entry.kernel.path.as_str(), found.failed.len()),
        ("boot/vmlinuz-1", 1)
    );
}

#[test]
fn of_two_disks_with_one_uuid_each_finds_its_own() {
    let menu = b"menuentry a { search --fs-uuid --set=root same\n linux /k\n}\n";
    let volume = |disk: usize, partition: u32| Volume {
        disk,
        partition: Some(partition),
        device: format!("vd{}{partition}", ["a", "b"][disk]),
        kind: Kind::Ext4,
        uuid: Some("same".to_owned()),
        label: None,
        root: None,
    };
    let volumes = MemoryVolumes::new()
        .volume(volume(0, 1), &[("marker", b"x")])
        .volume(volume(1, 1), &[("boot/grub/grub.cfg", menu)]);
    let found = find(&volumes).unwrap();
    assert_eq!(found.entry.kernel.volume.0, 1);
}
