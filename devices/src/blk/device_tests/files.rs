//! Files as disks: who may write to them, and when.

use super::*;
use crate::blk::open_disk_for_writing;
use vm_memory::GuestMemory;

#[test]
fn a_file_that_may_not_be_written_needs_read_only() {
    assert!(matches!(
        BlockDevice::open("/nonexistent/disk"),
        Err(BlockDeviceError::Open { .. })
    ));
    assert!(matches!(
        BlockDevice::open("/"),
        Err(BlockDeviceError::NotADisk { .. })
    ));
    assert!(matches!(
        BlockDevice::open("/dev/null"),
        Err(BlockDeviceError::NotADisk { .. })
    ));
    let file = tempfile::NamedTempFile::new().unwrap();
    assert!(BlockDevice::open(file.path()).unwrap().check().is_ok());
}

#[test]
fn a_fifo_is_refused_without_waiting_for_its_writer() {
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    use std::os::unix::fs::OpenOptionsExt;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("fifo");
    let mode = Mode::RUSR | Mode::WUSR;
    mknodat(CWD, &path, FileType::Fifo, mode, 0).unwrap();
    let fifo = path.clone();
    let opening = std::thread::spawn(move || BlockDevice::open(fifo).map(drop));
    let mut writer = std::fs::OpenOptions::new();
    writer.write(true).custom_flags(libc::O_NONBLOCK);
    while !opening.is_finished() {
        // ENXIO, unless somebody has it open for reading.
        assert!(writer.open(&path).is_err(), "it was opened");
        std::thread::yield_now();
    }
    assert!(matches!(
        opening.join().unwrap(),
        Err(BlockDeviceError::NotADisk { .. })
    ));
}

#[test]
fn a_writable_disk_is_opened_for_writing_late_and_locked() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1024).unwrap();
    let writable_here = |path: &std::path::Path| {
        // /proc/self/fdinfo says how each descriptor of this file was opened.
        std::fs::read_dir("/proc/self/fd").unwrap().any(|entry| {
            let entry = entry.unwrap();
            let info = std::path::Path::new("/proc/self/fdinfo").join(entry.file_name());
            std::fs::read_link(entry.path()).is_ok_and(|target| target == path)
                && std::fs::read_to_string(info).is_ok_and(|text| {
                    text.lines()
                        .any(|l| l.starts_with("flags:") && l.ends_with('2'))
                })
        })
    };
    let (own, path) = file.into_parts();
    drop(own);
    let mut shared = BlockDevice::open(&path).unwrap().read_only();
    shared.check().unwrap();
    assert!(!writable_here(&path), "a read-only disk");
    let mut first = BlockDevice::open(&path).unwrap();
    assert!(!writable_here(&path));
    first.check().unwrap();
    assert!(writable_here(&path));
    let mut second = BlockDevice::open(&path).unwrap();
    assert!(matches!(
        second.check(),
        Err(BlockDeviceError::InUse { .. })
    ));
    let opened = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    let mut third = BlockDevice::from_file(opened.try_clone().unwrap()).unwrap();
    assert!(third.check().is_err(), "by descriptor, too");
    drop(first);
    let mut fourth = BlockDevice::from_file(opened).unwrap();
    fourth.check().unwrap();
    let directory = std::fs::File::open("/").unwrap();
    assert!(matches!(
        BlockDevice::from_file(directory),
        Err(BlockDeviceError::NotADisk { .. })
    ));
}

#[test]
fn a_disk_that_is_to_be_swapped_in_is_locked_as_well() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let open = || {
        let mut options = std::fs::OpenOptions::new();
        options.read(true).write(true).open(file.path()).unwrap()
    };
    for engine in [IoEngine::Sync, IoEngine::Uring] {
        let disk = open_disk_for_writing(open(), engine).unwrap();
        let second = open_disk_for_writing(open(), engine);
        assert!(matches!(second, Err(BlockDeviceError::InUse { .. })));
        let mut device = BlockDevice::from_file(open()).unwrap();
        assert!(matches!(
            device.check(),
            Err(BlockDeviceError::InUse { .. })
        ));
        drop(disk);
    }
    let refused = |path| open_disk_for_writing(std::fs::File::open(path).unwrap(), IoEngine::Sync);
    assert!(matches!(
        refused(file.path()),
        Err(BlockDeviceError::NotWritable { .. })
    ));
    assert!(matches!(
        refused(std::path::Path::new("/dev/null")),
        Err(BlockDeviceError::NotADisk { .. })
    ));
}

#[test]
fn a_descriptor_that_only_reads_is_no_writable_disk() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let open = || std::fs::File::open(file.path()).unwrap();
    assert!(matches!(
        BlockDevice::from_file(open()).unwrap().check(),
        Err(BlockDeviceError::NotWritable { .. })
    ));
    let mut read_only = BlockDevice::from_file(open()).unwrap().read_only();
    read_only.check().unwrap();
}

#[test]
fn a_spare_disk_is_a_sector_of_zeroes_that_nobody_writes() {
    let mut rig = Rig::over(BlockDevice::spare());
    rig.mem.write_slice(&[9; 512], GuestAddress(DATA)).unwrap();
    assert_eq!(rig.read(0, 512), 0);
    assert_eq!(rig.first_byte(0), 0);
    assert_eq!(rig.read(1, 512), 1, "behind its end");
    assert_eq!(rig.write(0, 512), 1);
    let mem = memory(1 << 20);
    let copy = EmptySlot.try_clone().unwrap().unwrap();
    assert!(copy.len() == 512 && !copy.is_empty());
    for operation in [
        Operation::Flush,
        Operation::Discard {
            offset: 0,
            len: 512,
        },
    ] {
        let flushes = matches!(operation, Operation::Flush);
        let Submitted::Done(result) = EmptySlot.submit(&mem, 0, operation) else {
            panic!("it waits");
        };
        assert_eq!(result.is_ok(), flushes);
    }
}

#[test]
fn a_copy_of_a_files_disk_sees_what_the_other_one_has_written() {
    let file = tempfile_of(4096);
    let mem = memory(1 << 20);
    let slice = |at| mem.get_slice(GuestAddress(at), 512).unwrap();
    let uring = crate::blk::UringDisk::new(file.try_clone().unwrap()).unwrap();
    let plain = FileDisk::new(file).unwrap();
    for mut disk in [Box::new(uring) as Box<dyn Disk>, Box::new(plain)] {
        let copy = disk.try_clone().unwrap().expect("a copy");
        let carry_out = |disk: &mut dyn Disk, operation: Operation<'_, '_>| {
            if let Submitted::Done(result) = disk.submit(&mem, 0, operation) {
                return result.unwrap();
            }
            disk.commit().unwrap();
            disk.wait().unwrap();
            disk.completed().unwrap().result.unwrap();
        };
        mem.write_slice(&[7; 512], GuestAddress(0)).unwrap();
        let slices = [slice(0)];
        let slices = &slices;
        carry_out(
            &mut *disk,
            Operation::Write {
                offset: 512,
                slices,
            },
        );
        let (mut copy, slices) = (copy, [slice(0x1000)]);
        let slices = &slices;
        carry_out(
            &mut *copy,
            Operation::Read {
                offset: 512,
                slices,
            },
        );
        let mut read = [0; 512];
        mem.read_slice(&mut read, GuestAddress(0x1000)).unwrap();
        assert_eq!(read, [7; 512]);
        mem.write_slice(&[0; 512], GuestAddress(0x1000)).unwrap();
    }
}

#[test]
fn a_disk_that_cannot_be_written_is_told_with_advice_that_helps() {
    let told = |code| {
        let error = BlockDeviceError::NotWritable {
            path: "/d".into(),
            source: std::io::Error::from_raw_os_error(code),
        };
        error.to_string()
    };
    for code in [libc::EACCES, libc::EPERM] {
        assert!(told(code).ends_with("or change its permissions"), "{code}");
    }
    assert!(told(libc::EROFS).ends_with("make its file system writable"));
    assert!(told(libc::EBADF).ends_with("open the file for reading and writing"));
    for code in [libc::ETXTBSY, libc::EIO, libc::EMFILE] {
        assert_eq!(told(code), "the disk /d cannot be written");
    }
}
