//! The disks of a VM besides its own: files and block devices that somebody named, and files that
//! podvisor has made in the VM's directory.
//!
//! The record has them in the order in which the guest got them. It is written before the guest
//! gets a disk, and after it has lost one: so it has all that the guest has. A command that is
//! killed in between is completed by the same command again; whatever saves the VM gives its guest
//! what the record has.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt as _, FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};

use super::disk;
use crate::cli::container::{AttachedDisk, Record};
use crate::machine::{DiskContents, DiskMove, MachineDisk};
use crate::sandbox::SandboxClient;

/// What the names of podvisor's files begin with; the serial number follows.
const OWN: &str = "attached-";

/// Longest serial number of a disk, in bytes (virtio 1.3 §5.2.6.1).
const MAX_SERIAL: usize = 20;

/// The unit of a disk, in bytes.
const SECTOR: u64 = 512;

/// What files begin with that are disks in another format than raw.
const FORMATS: [(&[u8], &str); 3] = [
    (b"QFI\xfb", "qcow2"),
    (b"KDMV", "VMDK"),
    (b"vhdxfile", "VHDX"),
];

/// Parses a serial number.
pub(super) fn parse_serial(text: &str) -> Result<String, String> {
    let is_inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    let is_serial = text.len() <= MAX_SERIAL
        && text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.chars().all(is_inner);
    match is_serial {
        true => Ok(text.to_owned()),
        false => Err(format!(
            "write at most {MAX_SERIAL} letters, digits, `_`, `.` and `-`"
        )),
    }
}

/// Returns the disks of a VM.
pub(super) fn of(record: &Record) -> &[AttachedDisk] {
    record.vm.as_ref().map_or(&[], |vm| &vm.attached)
}

/// Returns their serial numbers, in order.
pub(super) fn serials(record: &Record) -> Vec<String> {
    of(record).iter().map(|one| one.serial.clone()).collect()
}

impl AttachedDisk {
    /// Returns where it is, for the VM with this directory.
    pub(super) fn path(&self, dir: &Path) -> PathBuf {
        match &self.path {
            Some(path) => path.clone(),
            None => own_path(dir, &self.serial),
        }
    }

    /// Whether its file is podvisor's, in the VM's directory.
    pub(super) fn is_own(&self) -> bool {
        self.path.is_none()
    }

    /// Opens it for the VM's process.
    fn open(&self, dir: &Path) -> anyhow::Result<File> {
        let path = self.path(dir);
        let mut options = File::options();
        // A FIFO would wait for a writer.
        options.custom_flags(libc::O_NONBLOCK);
        let opened = options.read(true).write(!self.is_read_only).open(&path);
        let what = || format!("cannot open the disk {} ({})", self.serial, path.display());
        let file = opened.with_context(what)?;
        let kind = file.metadata().with_context(what)?.file_type();
        ensure!(
            kind.is_file() || kind.is_block_device(),
            "the disk {} ({}) is neither a file nor a block device",
            self.serial,
            path.display()
        );
        Ok(file)
    }
}

/// Returns where podvisor's file of a disk is.
pub(super) fn own_path(dir: &Path, serial: &str) -> PathBuf {
    dir.join(format!("{OWN}{serial}.raw"))
}

/// Makes podvisor's file of a disk, which is empty.
pub(super) fn create(dir: &Path, serial: &str, size: u64) -> anyhow::Result<()> {
    let path = own_path(dir, serial);
    let make = || -> io::Result<()> {
        let mut options = File::options();
        let file = options
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)?;
        file.set_len(size)
    };
    make().with_context(|| format!("cannot make the disk {}", path.display()))
}

/// Checks that somebody's file or device is a disk in the format raw; returns its whole path.
pub(super) fn check_file(path: &Path, is_read_only: bool) -> anyhow::Result<PathBuf> {
    let whole = fs::canonicalize(path);
    let whole = whole.with_context(|| format!("there is no disk {}", path.display()))?;
    let disk = AttachedDisk {
        serial: String::new(),
        path: Some(whole.clone()),
        is_read_only,
    };
    let shown = path.display();
    let kind = fs::metadata(&whole).with_context(|| format!("cannot read {shown}"))?;
    let kind = kind.file_type();
    ensure!(
        kind.is_file() || kind.is_block_device(),
        "{shown} is neither a file nor a block device"
    );
    let file = disk.open(Path::new(""))?;
    let mut first = [0; 8];
    let read = file.read_at(&mut first, 0);
    let read = read.with_context(|| format!("cannot read {shown}"))?;
    let first = first.get(..read).unwrap_or_default();
    if let Some((_, format)) = FORMATS.iter().find(|(magic, _)| first.starts_with(magic)) {
        bail!(
            "{shown} is a {format} file, whose format the guest would see: convert it first by \
             `qemu-img convert -O raw {shown} {shown}.raw`"
        );
    }
    if kind.is_file() {
        let len = file
            .metadata()
            .context("cannot read the disk's size")?
            .len();
        ensure!(
            len > 0 && len.is_multiple_of(SECTOR),
            "{shown} has {len} bytes, but a disk has a multiple of {SECTOR}: `truncate -s` \
             makes it longer"
        );
    }
    Ok(whole)
}

/// Opens the disks of a VM that begins, in their order.
pub(super) fn open_all(dir: &Path, record: &Record) -> anyhow::Result<Vec<MachineDisk>> {
    let open = |one: &AttachedDisk| {
        let file = one.open(dir).with_context(|| {
            format!(
                "VM {name} has the disk {serial}: bring it back, or `podvisor vm detach-disk \
                 {name} {serial}` while it is off",
                name = record.name,
                serial = one.serial
            )
        })?;
        Ok(MachineDisk {
            contents: DiskContents::Raw {
                file,
                is_read_only: one.is_read_only,
            },
            serial: one.serial.clone(),
            moves: DiskMove::Shared,
        })
    };
    of(record).iter().map(open).collect()
}

/// Has the machine of a VM that runs get those of its disks that it does not have.
pub(super) async fn plug_all(
    client: &SandboxClient,
    dir: &Path,
    record: &Record,
) -> anyhow::Result<()> {
    for one in of(record) {
        let file = one.open(dir)?;
        let plugged = client.plug_disk(&record.id, &one.serial, file, one.is_read_only);
        let path = one.path(dir);
        let failed = || format!("cannot attach the disk {} ({})", one.serial, path.display());
        plugged.await.with_context(failed)?;
    }
    Ok(())
}

/// Checks that nobody has changed a disk since the VM's state was saved: its guest knows what was
/// there then. Nobody says it of block devices.
pub(super) fn must_be_unchanged(
    dir: &Path,
    record: &Record,
    saved: &File,
    includes_own: bool,
) -> anyhow::Result<()> {
    let changed = |meta: fs::Metadata| (meta.ctime(), meta.ctime_nsec());
    let saved = saved
        .metadata()
        .context("cannot read when the VM was saved")?;
    let saved = (saved.mtime(), saved.mtime_nsec());
    for one in of(record)
        .iter()
        .filter(|one| includes_own || !one.is_own())
    {
        let meta = one.open(dir)?.metadata();
        let meta = meta.with_context(|| format!("cannot read the disk {}", one.serial))?;
        if meta.is_file() && changed(meta) > saved {
            bail!(
                "the disk {} ({}) was changed or replaced since VM {} was saved, whose guest \
                 would destroy what is on it",
                one.serial,
                one.path(dir).display(),
                record.name
            );
        }
    }
    Ok(())
}

/// Checks that a copy of a VM may have copies of its disks.
pub(super) fn must_be_copyable(record: &Record) -> anyhow::Result<()> {
    let foreign = of(record)
        .iter()
        .find(|one| !one.is_own() && !one.is_read_only);
    if let Some(AttachedDisk { serial, path, .. }) = foreign {
        bail!(
            "VM {name} has the disk {serial} ({path}), which is not podvisor's to copy: `podvisor \
             vm detach-disk {name} {serial}` first; disks that are attached by --size are copied",
            name = record.name,
            path = path.as_deref().unwrap_or(Path::new("")).display()
        );
    }
    Ok(())
}

/// Makes the empty files for copies of podvisor's disks, in the directory of a snapshot.
pub(super) fn create_copies(record: &Record, snapshot: &Path) -> anyhow::Result<Vec<OwnedFd>> {
    let create = |one: &AttachedDisk| {
        let path = own_path(snapshot, &one.serial);
        let mut options = File::options();
        let options = options.read(true).write(true).create_new(true).mode(0o600);
        let made = options.open(&path);
        let made = made.with_context(|| format!("cannot make {}", path.display()))?;
        Ok(made.into())
    };
    own(record).map(create).collect()
}

/// Makes the disks of a clone, of those of a snapshot.
pub(super) fn clone(record: &Record, snapshot: &Path, dir: &Path) -> anyhow::Result<()> {
    for one in own(record) {
        disk::copy(
            &own_path(snapshot, &one.serial),
            &own_path(dir, &one.serial),
        )?;
    }
    Ok(())
}

/// Returns the names of podvisor's files.
pub(super) fn own_names(record: &Record) -> Vec<PathBuf> {
    let own = own(record);
    own.map(|one| own_path(Path::new(""), &one.serial))
        .collect()
}

fn own(record: &Record) -> impl Iterator<Item = &AttachedDisk> {
    of(record).iter().filter(|one| one.is_own())
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use crate::cli::container::{VmRecord, sample_record};

    use super::*;

    fn record(attached: Vec<AttachedDisk>) -> Record {
        Record {
            vm: Some(VmRecord {
                attached,
                ..VmRecord::default()
            }),
            ..sample_record("a", "web")
        }
    }

    fn disk(serial: &str, path: Option<&Path>, is_read_only: bool) -> AttachedDisk {
        AttachedDisk {
            serial: serial.to_owned(),
            path: path.map(Path::to_owned),
            is_read_only,
        }
    }

    #[test]
    fn what_is_no_raw_disk_is_refused_by_what_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("disk");
        for (bytes, said) in [
            (&b"QFI\xfb and more"[..], "qemu-img convert"),
            (&[0; 700], "700 bytes"),
            (&[], "0 bytes"),
        ] {
            fs::write(&file, bytes).unwrap();
            let error = check_file(&file, false).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
        fs::write(&file, [0; 1024]).unwrap();
        assert_eq!(
            check_file(&file, true).unwrap(),
            file.canonicalize().unwrap()
        );
        for (path, said) in [
            (dir.path().to_owned(), "neither a file"),
            (PathBuf::from("/dev/null"), "neither a file"),
            (dir.path().join("none"), "there is no disk"),
        ] {
            let error = check_file(&path, false).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
        for serial in ["", "-a", "a/b", "a b", "twenty-one-characters"] {
            assert!(parse_serial(serial).is_err(), "{serial}");
        }
        assert_eq!(parse_serial("data.1").unwrap(), "data.1");
    }

    #[test]
    fn a_saved_vm_goes_on_only_with_the_disks_that_it_knows() {
        let dir = tempfile::tempdir().unwrap();
        let (foreign, state) = (dir.path().join("foreign"), dir.path().join("state"));
        fs::write(&foreign, [0; 512]).unwrap();
        create(dir.path(), "own", 4096).unwrap();
        let record = record(vec![
            disk("own", None, false),
            disk("other", Some(&foreign), true),
        ]);
        assert_eq!(serials(&record), ["own", "other"]);
        fs::write(&state, "").unwrap();
        let state = File::options().write(true).open(&state).unwrap();
        let check = |includes_own| must_be_unchanged(dir.path(), &record, &state, includes_own);
        let saved_at = |time| state.set_modified(time).unwrap();
        saved_at(SystemTime::now() + Duration::from_secs(60));
        check(true).unwrap();
        assert_eq!(open_all(dir.path(), &record).unwrap().len(), 2);
        // As if they had been written later.
        saved_at(SystemTime::now() - Duration::from_secs(60));
        let said = check(true).unwrap_err().to_string();
        assert!(said.contains("own") && said.contains("VM web"), "{said}");
        let said = check(false).unwrap_err().to_string();
        assert!(said.contains("other"), "{said}");
        fs::remove_file(&foreign).unwrap();
        let said = format!("{:#}", open_all(dir.path(), &record).unwrap_err());
        assert!(said.contains("detach-disk web other"), "{said}");
        assert!(said.contains("foreign"), "{said}");
    }

    #[test]
    fn only_podvisors_own_disks_are_copied() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| {
            let path = dir.path().join(name);
            fs::create_dir_all(&path).unwrap();
            path
        };
        let (snapshot, new) = (path("snapshot"), path("new"));
        let foreign = |is_read_only| disk("other", Some(Path::new("/x")), is_read_only);
        let refused = must_be_copyable(&record(vec![foreign(false)])).unwrap_err();
        let said = refused.to_string();
        assert!(
            said.contains("/x") && said.contains("detach-disk web other"),
            "{said}"
        );
        let record = record(vec![disk("own", None, false), foreign(true)]);
        must_be_copyable(&record).unwrap();
        assert_eq!(create_copies(&record, &snapshot).unwrap().len(), 1);
        fs::write(own_path(&snapshot, "own"), "then").unwrap();
        clone(&record, &snapshot, &new).unwrap();
        assert_eq!(fs::read_to_string(own_path(&new, "own")).unwrap(), "then");
        assert_eq!(own_names(&record), [Path::new("attached-own.raw")]);
    }
}
