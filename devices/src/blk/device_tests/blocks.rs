//! Block devices of the host whose logical blocks are several sectors.

use std::process::Command;

use rustix::event::{PollFd, PollFlags, poll};

use super::*;
use crate::blk::UringDisk;

const SECTORS: u64 = 64;

/// A block device with logical blocks of 4 KiB; each sector is filled with its number.
struct Loop {
    device: String,
    _file: tempfile::NamedTempFile,
}

impl Loop {
    fn new() -> Self {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        for n in 0..SECTORS as u8 {
            file.write_all(&[n; 512]).unwrap();
        }
        let made = Command::new("losetup")
            .args(["--sector-size", "4096", "--find", "--show"])
            .arg(file.path())
            .output()
            .expect("losetup of util-linux");
        assert!(made.status.success(), "as root: {made:?}");
        let device = String::from_utf8(made.stdout).unwrap().trim().to_owned();
        Self {
            device,
            _file: file,
        }
    }

    fn open(&self) -> File {
        let opened = File::options().read(true).write(true).open(&self.device);
        opened.unwrap()
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let detached = Command::new("losetup").args(["-d", &self.device]).status();
        assert!(detached.unwrap().success());
    }
}

impl Rig {
    /// Waits for the only request, and returns its status.
    fn wait(&mut self) -> u8 {
        while self.driver.take_used().is_none() {
            let backend = self.device.backend().expect("a disk that goes on later");
            let mut fds = [PollFd::from_borrowed_fd(backend, PollFlags::IN)];
            poll(&mut fds, None).unwrap();
            let _ = self.device.on_backend().unwrap();
        }
        self.status()
    }

    fn change(&mut self, kind: u32, sector: u64, count: u32, flags: u32) -> u8 {
        self.range(kind, sector, count, flags);
        self.wait()
    }

    /// Returns the first byte of each sector.
    fn sectors(&mut self) -> Vec<u8> {
        let first = |sector| {
            self.read(sector, 512);
            assert_eq!(self.wait(), 0);
            self.mem.read_obj(GuestAddress(DATA)).unwrap()
        };
        (0..SECTORS).map(first).collect()
    }
}

#[test]
fn parts_of_a_hosts_blocks_are_zeroed_and_kept_when_they_are_discarded() {
    let disk = Loop::new();
    let engines: [fn(File) -> Box<dyn Disk>; 2] = [
        |file| Box::new(FileDisk::new(file).unwrap()),
        |file| Box::new(UringDisk::new(file).unwrap()),
    ];
    let mut expected: Vec<u8> = (0..SECTORS as u8).collect();
    // Each engine uses one half of the disk: four blocks.
    for (open, half) in engines.into_iter().zip([0, 32]) {
        let mut rig = Rig::over(BlockDevice::new(open(disk.open())));
        for (sector, count, flags) in [(1, 1, 0), (3, 1, 1), (6, 4, 1), (16, 8, 0)] {
            let at = half + sector;
            assert_eq!(
                rig.change(WRITE_ZEROES, at, count, flags),
                0,
                "{at} {count}"
            );
            expected[at as usize..][..count as usize].fill(0);
            assert_eq!(rig.sectors(), expected);
        }
        for (sector, count) in [(2, 1), (12, 4), (10, 13)] {
            let at = half + sector;
            assert_eq!(rig.change(DISCARD, at, count, 0), 0, "{at} {count}");
            assert_eq!(rig.sectors(), expected, "no whole block");
        }
        // Two blocks, and a part of the one before; a loop device then reads as zeroes.
        assert_eq!(rig.change(DISCARD, half + 15, 17, 0), 0);
        expected[half as usize + 16..][..16].fill(0);
        assert_eq!(rig.sectors(), expected);
        stop(&mut rig.device);
    }
}
