//! Where a disk goes: a file of a directory, or a block device.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt as _, FileTypeExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use podvisor_cluster_types::datavolume;
use podvisor_disk_streams::blocks::Reader;
use podvisor_images::{copy_disk, disk_len, zero_disk};
use rustix::fs::{FallocateFlags, fallocate};

use super::source::Source;
use super::{ImportError, Options};

/// The file of a disk, as VMs look for it.
const DISK: &str = "disk.img";

/// What is being written has its place here.
const WORK: &str = ".podvisor-import";

/// Of a device, so many bytes are written last: boot sector, partition table and the first
/// superblock. Without them there is no disk.
const HEAD: u64 = 1 << 20;

/// Disks have whole sectors.
const SECTOR: u64 = 512;

/// Is told how many bytes of how many are done.
pub(super) type Tell<'a> = &'a dyn Fn(u64, u64);

/// Where a disk goes.
#[derive(Debug)]
pub(super) struct Target {
    place: Place,
    scratch: Option<PathBuf>,
}

#[derive(Debug)]
enum Place {
    Directory(PathBuf),
    Device(PathBuf),
}

impl Target {
    pub(super) fn of(options: &Options) -> Self {
        let place = match (&options.directory, &options.device) {
            (Some(directory), _) => Place::Directory(directory.clone()),
            (None, device) => Place::Device(device.clone().unwrap_or_default()),
        };
        Self {
            place,
            scratch: options.scratch.as_ref().map(|scratch| scratch.join(WORK)),
        }
    }

    /// The directory of what is being written into a directory.
    fn own_work(&self) -> Option<PathBuf> {
        match &self.place {
            Place::Directory(directory) => Some(directory.join(WORK)),
            Place::Device(_) => None,
        }
    }

    /// Where a source may keep files.
    pub(super) fn work(&self, source: &Source) -> PathBuf {
        let own = self.own_work();
        let chosen = match source.needs_scratch() {
            true => self.scratch.clone().or(own),
            false => own.or_else(|| self.scratch.clone()),
        };
        chosen.unwrap_or_else(|| PathBuf::from(WORK))
    }

    /// Removes what an earlier run left, or this one does not need any longer.
    pub(super) fn clear(&self) -> Result<(), ImportError> {
        for directory in [self.own_work(), self.scratch.clone()].iter().flatten() {
            match fs::remove_dir_all(directory) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(ImportError::io("remove", directory)(error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Returns the bytes that the disk may have: `size`, or less if there is less room.
    pub(super) fn room(&self, size: u64, leave_overhead: bool) -> Result<u64, ImportError> {
        let (path, free) = match &self.place {
            Place::Device(path) => {
                let device = open(path)?;
                let kind = device
                    .metadata()
                    .map_err(ImportError::io("look at", path))?;
                if !kind.file_type().is_block_device() && !kind.file_type().is_file() {
                    let error = io::Error::other("it is not a block device");
                    return Err(ImportError::io("write to", path)(error));
                }
                let size = disk_len(&device).map_err(ImportError::io("measure", path))?;
                (path, size)
            }
            Place::Directory(path) => {
                let found = rustix::fs::statvfs(path);
                let found =
                    found.map_err(|error| ImportError::io("measure", path)(error.into()))?;
                let mut free = found.f_bavail.saturating_mul(found.f_frsize);
                // An older disk is replaced.
                if let Ok(old) = fs::metadata(path.join(DISK)) {
                    use std::os::unix::fs::MetadataExt as _;
                    free = free.saturating_add(old.blocks().saturating_mul(512));
                }
                (path, datavolume::usable(free, leave_overhead))
            }
        };
        let room = size.min(free) / SECTOR * SECTOR;
        if room == 0 {
            let path = path.clone();
            return Err(ImportError::NoRoom { path, free });
        }
        Ok(room)
    }

    /// Makes an empty file, of which `put` can make the disk.
    pub(super) fn create(&self) -> Result<(PathBuf, File), ImportError> {
        let work = self.own_work().or_else(|| self.scratch.clone());
        create(&work.unwrap_or_else(|| PathBuf::from(WORK)))
    }

    /// Makes the raw disk at `disk` the target's disk, of `size` bytes.
    pub(super) fn put(
        &self,
        disk: &Path,
        size: u64,
        preallocate: bool,
        tell: Tell<'_>,
    ) -> Result<(), ImportError> {
        match &self.place {
            Place::Directory(directory) => {
                let inside = directory.join(WORK);
                let path = if disk.starts_with(&inside) {
                    disk.to_owned()
                } else {
                    let from = crate::disk::open(disk).map_err(ImportError::io("open", disk))?;
                    let (path, file) = create(&inside)?;
                    let copied = disk_len(&from)
                        .and_then(|len| copy_disk(&from, &file, 0..len, 0, &|at| tell(at, len)));
                    copied.map_err(ImportError::io("write", &path))?;
                    path
                };
                publish(directory, &path, size, preallocate)
            }
            Place::Device(path) => {
                let from = crate::disk::open(disk).map_err(ImportError::io("open", disk))?;
                let device = open(path)?;
                write_device(&from, &device, tell).map_err(ImportError::io("write", path))
            }
        }
    }

    /// Makes the disk whose data arrive the target's disk, of `size` bytes.
    pub(super) fn receive(
        &self,
        data: impl Read,
        size: u64,
        preallocate: bool,
        tell: Tell<'_>,
    ) -> Result<(), ImportError> {
        let mut data = Reader::new(data).map_err(ImportError::Copy)?;
        let length = data.disk_len();
        if length > size {
            let (size, room) = (length, size);
            return Err(ImportError::Larger { size, room });
        }
        match &self.place {
            Place::Directory(directory) => {
                let (path, file) = create(&directory.join(WORK))?;
                let write = || ImportError::io("write", &path);
                file.set_len(length).map_err(write())?;
                while let Some((at, block)) = data.next_block().map_err(ImportError::Copy)? {
                    file.write_all_at(block, at).map_err(write())?;
                    tell(at, length);
                }
                publish(directory, &path, size, preallocate)
            }
            Place::Device(path) => receive_device(data, &open(path)?, path, tell),
        }
    }

    /// Makes the target an empty disk.
    pub(super) fn put_blank(&self, size: u64, preallocate: bool) -> Result<(), ImportError> {
        match &self.place {
            Place::Directory(directory) => {
                let (path, _) = create(&directory.join(WORK))?;
                publish(directory, &path, size, preallocate)
            }
            Place::Device(path) => {
                let device = open(path)?;
                let zeroed = disk_len(&device)
                    .and_then(|size| zero_disk(&device, 0..size))
                    .and_then(|()| device.sync_all());
                zeroed.map_err(ImportError::io("write", path))
            }
        }
    }
}

fn open(path: &Path) -> Result<File, ImportError> {
    let file = OpenOptions::new().read(true).write(true).open(path);
    file.map_err(ImportError::io("open", path))
}

fn create(work: &Path) -> Result<(PathBuf, File), ImportError> {
    fs::create_dir_all(work).map_err(ImportError::io("create", work))?;
    let path = work.join(DISK);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)
        .map_err(ImportError::io("create", &path))?;
    Ok((path, file))
}

/// Gives a complete disk its length and then its name.
fn publish(directory: &Path, path: &Path, size: u64, preallocate: bool) -> Result<(), ImportError> {
    let failed = || ImportError::io("write", path);
    let file = open(path)?;
    let length = file.metadata().map_err(failed())?.len();
    // Grown, and never shrunk: the source kept to the limit.
    if length < size {
        file.set_len(size).map_err(failed())?;
    }
    if preallocate {
        let allocated = fallocate(&file, FallocateFlags::empty(), 0, size);
        allocated.map_err(|error| ImportError::io("allocate the space of", path)(error.into()))?;
    }
    file.set_permissions(Permissions::from_mode(0o660))
        .map_err(failed())?;
    file.sync_all().map_err(failed())?;
    let name = directory.join(DISK);
    fs::rename(path, &name).map_err(ImportError::io("create", &name))?;
    let synced = File::open(directory).and_then(|directory| directory.sync_all());
    synced.map_err(ImportError::io("sync", directory))
}

/// Writes a disk, the beginning last, and zeros behind it.
fn write_device(disk: &File, device: &File, tell: Tell<'_>) -> io::Result<()> {
    let (len, size) = (disk_len(disk)?, disk_len(device)?);
    let head = HEAD.min(len);
    let tell = |at| tell(at, len);
    zero_disk(device, 0..HEAD.min(size))?;
    copy_disk(disk, device, head..len, head, &tell)?;
    zero_disk(device, len..size.max(len))?;
    device.sync_all()?;
    copy_disk(disk, device, 0..head, 0, &|_| ())?;
    device.sync_all()
}

/// Writes a disk whose data arrive, the beginning last, and zeros wherever none arrive.
fn receive_device(
    mut data: Reader<impl Read>,
    device: &File,
    path: &Path,
    tell: Tell<'_>,
) -> Result<(), ImportError> {
    let write = || ImportError::io("write to", path);
    let size = disk_len(device).map_err(ImportError::io("measure", path))?;
    let length = data.disk_len();
    zero_disk(device, 0..HEAD.min(size)).map_err(write())?;
    let mut head = vec![0; usize::try_from(HEAD.min(length)).unwrap_or_default()];
    // All before this is as it is to be, but for the beginning.
    let mut written = HEAD.min(length);
    while let Some((at, block)) = data.next_block().map_err(ImportError::Copy)? {
        let begin = usize::try_from(at).unwrap_or(usize::MAX);
        let in_head = head.len().saturating_sub(begin).min(block.len());
        let (first, rest) = block.split_at(in_head);
        if let Some(place) = head.get_mut(begin..begin.saturating_add(in_head)) {
            place.copy_from_slice(first);
        }
        if !rest.is_empty() {
            let at = at + in_head as u64;
            zero_disk(device, written..at).map_err(write())?;
            device.write_all_at(rest, at).map_err(write())?;
            written = at + rest.len() as u64;
        }
        tell(at, length);
    }
    zero_disk(device, written..size.max(written)).map_err(write())?;
    device.sync_all().map_err(write())?;
    device.write_all_at(&head, 0).map_err(write())?;
    device.sync_all().map_err(write())
}

#[cfg(test)]
mod tests {
    use podvisor_disk_streams::blocks;

    use super::*;

    fn device(length: u64) -> (tempfile::TempDir, PathBuf, Target) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("device");
        let file = File::create(&path).unwrap();
        file.set_len(length).unwrap();
        file.write_all_at(&[0xff; 8192], HEAD - 4096).unwrap();
        let target = Target {
            place: Place::Device(path.clone()),
            scratch: Some(directory.path().join("scratch")),
        };
        (directory, path, target)
    }

    #[test]
    fn a_device_has_the_disk_and_zeros_behind_it() {
        let (directory, path, target) = device(4 << 20);
        assert_eq!(target.room(1 << 30, true).unwrap(), 4 << 20);
        let disk = directory.path().join("disk");
        let mut content = vec![0; 2 << 20];
        content[0] = 1;
        content[(HEAD as usize) + 5000] = 2;
        fs::write(&disk, &content).unwrap();
        target.put(&disk, 4 << 20, false, &|_, _| ()).unwrap();
        let found = fs::read(&path).unwrap();
        assert_eq!(found.len(), 4 << 20);
        assert!(found[..2 << 20] == content && found[2 << 20..].iter().all(|byte| *byte == 0));
        target.put_blank(4 << 20, false).unwrap();
        assert!(fs::read(&path).unwrap().iter().all(|byte| *byte == 0));
    }

    #[test]
    fn a_device_gets_a_copy_and_zeros_where_nothing_arrives() {
        let (directory, path, target) = device(4 << 20);
        let block = vec![5; 8192];
        // One block is on both sides of what is written last.
        let places = [0, HEAD - 4096, HEAD + 65536];
        let mut sent = blocks::header(2 << 20);
        let mut content = vec![0; 4 << 20];
        for at in places {
            blocks::push_block(&mut sent, at, &block);
            content[at as usize..][..8192].copy_from_slice(&block);
        }
        let cut = sent.clone();
        let cut = target.receive(&*cut, 4 << 20, false, &|_, _| ());
        assert!(matches!(cut, Err(ImportError::Copy(_))));
        let head = &fs::read(&path).unwrap()[..HEAD as usize];
        assert!(head.iter().all(|byte| *byte == 0), "there is no disk yet");
        blocks::push_end(&mut sent);
        target.receive(&*sent, 4 << 20, false, &|_, _| ()).unwrap();
        assert!(fs::read(&path).unwrap() == content);
        assert!(matches!(
            target.receive(&*sent, 1 << 20, false, &|_, _| ()),
            Err(ImportError::Larger { .. })
        ));

        let volume = directory.path().join("volume");
        fs::create_dir(&volume).unwrap();
        let target = Target {
            place: Place::Directory(volume.clone()),
            scratch: None,
        };
        target.receive(&*sent, 4 << 20, false, &|_, _| ()).unwrap();
        let disk = volume.join(DISK);
        assert!(fs::read(&disk).unwrap() == content);
        let blocks = std::os::unix::fs::MetadataExt::blocks(&fs::metadata(disk).unwrap());
        assert!(blocks * 512 < 1 << 20, "sparse areas stay sparse: {blocks}");
    }

    #[test]
    fn a_disk_is_smaller_than_asked_for_where_there_is_less_room() {
        let (_directory, _, target) = device(2 << 20);
        assert_eq!(target.room(4 << 20, false).unwrap(), 2 << 20);
        assert_eq!(target.room(1000, false).unwrap(), 512);
        assert!(matches!(
            target.room(100, false),
            Err(ImportError::NoRoom { .. })
        ));
    }

    #[test]
    fn what_an_earlier_run_left_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let target = Target {
            place: Place::Directory(directory.path().to_owned()),
            scratch: None,
        };
        create(&directory.path().join(WORK)).unwrap();
        target.clear().unwrap();
        target.clear().unwrap();
        target.put_blank(1 << 20, true).unwrap();
        target.clear().unwrap();
        let names: Vec<_> = fs::read_dir(directory.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert_eq!(names, [DISK]);
        let disk = fs::metadata(directory.path().join(DISK)).unwrap();
        assert_eq!(disk.len(), 1 << 20);
        assert_eq!(disk.permissions().mode() & 0o777, 0o660);
    }
}
