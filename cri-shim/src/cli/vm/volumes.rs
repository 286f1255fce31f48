//! `vm run -v DIR:TAG|DIR:/PATH[:ro]`: directories of this host that the guest mounts by virtio-fs.
//!
//! Each is bind-mounted in the mount namespace of the VM's process at every start, and is one
//! device of the machine. The guest mounts it by its tag; where a path was given, cloud-init does.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, ensure};
use podvisor_cloud_init::{GuestMount, MountSource};

use crate::cli::container::{Entry, Record, Volume, volumes};
use crate::machine::MachineShare;
use crate::sandbox::{BootMachine, SandboxClient};

/// Most bytes of a tag.
const MAX_TAG: usize = 36;

/// How tags begin that nobody chose; a number follows.
const OWN_TAG: &str = "volume";

/// Parses a volume of a VM.
pub(super) fn parse(text: &str) -> Result<Volume, String> {
    let usage = || {
        "write DIR:TAG or DIR:/PATH, and :ro after it if the guest is only to read; DIR is \
         absolute or begins with ./ or ../, and a tag has up to 36 letters, digits, -, _ or ."
            .to_owned()
    };
    let mut parts = text.split(':');
    let (Some(source), Some(destination)) = (parts.next(), parts.next()) else {
        return Err(usage());
    };
    let read_only = match parts.next() {
        None | Some("rw") => false,
        Some("ro") => true,
        Some(_) => return Err(usage()),
    };
    if parts.next().is_some() {
        return Err(usage());
    }
    if is_tag(destination) {
        // Of the source, the same is true as for containers.
        let volume = volumes::new(source, "/tag", read_only, false).ok_or_else(usage)?;
        return Ok(Volume {
            destination: destination.to_owned(),
            ..volume
        });
    }
    volumes::new(source, destination, read_only, false).ok_or_else(usage)
}

fn is_tag(text: &str) -> bool {
    let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=MAX_TAG).contains(&text.len()) && text.bytes().all(is_letter)
}

/// Checks a VM's volumes before anything is created for them.
pub(super) fn check(all: &[Volume]) -> anyhow::Result<()> {
    ensure!(
        all.len() <= BootMachine::MAX_SHARES,
        "--volume: {} directories, but a VM has at most {}: share one that they are in",
        all.len(),
        BootMachine::MAX_SHARES
    );
    volumes::check(all)?;
    volumes::check_distinct(all.iter().map(|volume| volume.destination.as_str()))?;
    for (number, volume) in all.iter().enumerate() {
        let source = volume.source.display();
        let meta = fs::metadata(&volume.source);
        let meta = meta.with_context(|| format!("--volume: cannot share {source}"))?;
        ensure!(
            meta.is_dir(),
            "--volume: {source} is not a directory: share the one that it is in, or copy the file \
             by `podvisor vm cp`"
        );
        let tag = tag(number, volume);
        let others = all.iter().enumerate().skip(number + 1);
        let mut others = others.map(|(number, other)| self::tag(number, other));
        ensure!(
            !others.any(|other| other == tag),
            "--volume: two directories have the tag {tag}: choose another one"
        );
    }
    Ok(())
}

/// Returns the tag of a VM's volume with this number.
pub(super) fn tag(number: usize, volume: &Volume) -> String {
    match path(volume) {
        Some(_) => format!("{OWN_TAG}{number}"),
        None => volume.destination.clone(),
    }
}

/// Returns where the guest mounts a volume by itself.
pub(super) fn path(volume: &Volume) -> Option<&str> {
    let is_path = volume.destination.starts_with('/');
    is_path.then_some(volume.destination.as_str())
}

/// Returns what cloud-init mounts.
pub(super) fn mounts(record: &Record) -> Vec<GuestMount> {
    let all = record.volumes.iter().enumerate();
    let mounts = all.filter_map(|(number, volume)| {
        Some(GuestMount {
            source: MountSource::Share {
                tag: tag(number, volume),
            },
            path: path(volume)?.to_owned(),
            read_only: volume.read_only,
        })
    });
    mounts.collect()
}

/// Makes the directory in which the volumes of a VM that starts are mounted, in place of that of an
/// earlier start.
pub(super) fn prepare(entry: &Entry) -> anyhow::Result<()> {
    let shared = entry.shared();
    volumes::remove(&shared, &entry.record)?;
    match fs::remove_dir(&shared) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("cannot remove {}", shared.display()));
        }
        _ => {}
    }
    volumes::make_shared(&shared, entry.record.jailed)
}

/// Mounts the volumes for the VM's process; returns its machine's shares.
pub(super) fn mount(
    client: &SandboxClient,
    shared: &Path,
    record: &Record,
) -> anyhow::Result<Vec<MachineShare>> {
    volumes::mount(client, shared, record)?;
    let all = record.volumes.iter().enumerate();
    let shares = all.map(|(number, volume)| MachineShare {
        tag: tag(number, volume),
        name: volumes::name(record, number),
        is_read_only: volume.read_only,
    });
    Ok(shares.collect())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use crate::cli::container::sample_record;

    use super::*;

    #[test]
    fn a_volume_is_a_directory_and_a_tag_or_a_path() {
        let volume = parse("/srv/work:work").unwrap();
        assert_eq!(volume.source, PathBuf::from("/srv/work"));
        assert_eq!((tag(0, &volume).as_str(), path(&volume)), ("work", None));
        assert!(!volume.read_only);
        let volume = parse("./work:/mnt/work:ro").unwrap();
        assert!(volume.source.is_absolute() && volume.read_only);
        assert_eq!(
            (tag(3, &volume).as_str(), path(&volume)),
            ("volume3", Some("/mnt/work"))
        );
        for bad in [
            "",
            "/a",
            "work:/mnt",
            "/a:",
            "/a:a b",
            "/a:/",
            "/a:/x/../y",
            "/a:/b:rslave",
            "/a:/b:ro:",
            "/a:0123456789012345678901234567890123456",
        ] {
            let said = parse(bad).unwrap_err();
            assert!(said.contains("DIR:TAG"), "{bad}: {said}");
        }
    }

    #[test]
    fn what_cannot_be_shared_is_refused_before_anything_is_made() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        let refused = |all: &[String]| {
            let all: Vec<Volume> = all.iter().map(|text| parse(text).unwrap()).collect();
            format!("{:#}", check(&all).unwrap_err())
        };
        if !rustix::process::geteuid().is_root() {
            assert!(refused(&["/tmp:a".to_owned()]).contains("root"));
            return;
        }
        let at = |path: &Path, end: &str| format!("{}:{end}", path.display());
        let (good, file) = (at(dir.path(), "a"), at(&file, "f"));
        assert!(refused(&[file]).contains("not a directory"));
        assert!(refused(&[at(&dir.path().join("none"), "a")]).contains("cannot share"));
        assert!(refused(&[good.clone(), good.clone()]).contains("duplicate"));
        let named = [at(dir.path(), "/x"), at(dir.path(), "volume0")];
        assert!(refused(&named).contains("the tag volume0"));
        let many: Vec<String> = (0..9).map(|n| at(dir.path(), &format!("t{n}"))).collect();
        assert!(refused(&many).contains("at most 8"));
        check(&[parse(&good).unwrap()]).unwrap();
    }

    #[test]
    fn cloud_init_mounts_those_that_have_a_path() {
        let record = Record {
            volumes: vec![
                parse("/srv/a:work").unwrap(),
                parse("/srv/b:/mnt/b:ro").unwrap(),
            ],
            ..sample_record("a", "one")
        };
        let mounts = mounts(&record);
        assert_eq!(mounts.len(), 1);
        assert_eq!(
            mounts[0].source,
            MountSource::Share {
                tag: "volume1".to_owned()
            }
        );
        assert_eq!(
            (mounts[0].path.as_str(), mounts[0].read_only),
            ("/mnt/b", true)
        );
    }
}
