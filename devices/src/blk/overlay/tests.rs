use std::io::Write as _;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Command;

use vm_memory::{Bytes, GuestAddress, GuestMemory};

use super::header::{CLUSTER, COUNTS, ENTRIES, MAX_SIZE};
use super::tables::MAX_TABLES;
use super::*;
use crate::GuestRam;
use crate::blk::{BlockDevice, BlockDeviceError, Disk, Operation, Submitted};
use crate::testing::memory;

mod anything;
mod flat;
mod refused;
mod sizes;
mod transfers;

/// Guest memory, and the address of data in it, such that none of its pieces is aligned.
const RAM: usize = 4 << 20;
const BUF: u64 = 0x123;

/// An image, its overlay, and the disk of both.
struct Rig {
    dir: tempfile::TempDir,
    mem: GuestRam,
    disk: Option<Qcow2Disk>,
}

impl Rig {
    fn new(base: &[u8]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("base"), base).unwrap();
        File::create_new(dir.path().join("overlay")).unwrap();
        let rig = Self {
            dir,
            mem: memory(RAM),
            disk: None,
        };
        create_qcow2(&rig.base(), &rig.path("base"), &rig.overlay()).unwrap();
        rig.opened()
    }

    fn sparse(len: u64) -> Self {
        let mut rig = Self::new(&[]);
        rig.disk = None;
        std::fs::remove_file(rig.path("overlay")).unwrap();
        File::create(rig.path("base"))
            .unwrap()
            .set_len(len)
            .unwrap();
        File::create_new(rig.path("overlay")).unwrap();
        create_qcow2(&rig.base(), &rig.path("base"), &rig.overlay()).unwrap();
        rig.opened()
    }

    fn opened(mut self) -> Self {
        self.disk = Some(self.open().unwrap());
        self
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn base(&self) -> File {
        File::open(self.path("base")).unwrap()
    }

    fn overlay(&self) -> File {
        let mut options = File::options();
        options
            .read(true)
            .write(true)
            .open(self.path("overlay"))
            .unwrap()
    }

    fn open(&self) -> Result<Qcow2Disk, Qcow2Error> {
        Qcow2Disk::open(self.base(), self.overlay())
    }

    /// The disk after a kill at this point: a copy of the overlay.
    fn killed(&self) -> Qcow2Disk {
        let copy = self.path("killed");
        std::fs::copy(self.path("overlay"), &copy).unwrap();
        let file = File::options().read(true).write(true).open(copy).unwrap();
        Qcow2Disk::open(self.base(), file).unwrap()
    }

    fn reopen(&mut self) {
        self.disk = None;
        self.disk = Some(self.open().unwrap());
    }

    fn ask(&mut self, operation: Operation<'_, '_>) -> io::Result<()> {
        submit(self.disk.as_mut().unwrap(), &self.mem, operation)
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) {
        self.mem.write_slice(bytes, GuestAddress(BUF)).unwrap();
        let mem = self.mem.clone();
        let slices = pieces(&mem, bytes.len());
        self.ask(Operation::Write {
            offset,
            slices: &slices,
        })
        .unwrap();
    }

    fn read(&mut self, offset: u64, len: usize) -> Vec<u8> {
        read(self.disk.as_mut().unwrap(), &self.mem, offset, len).unwrap()
    }

    fn flush(&mut self) {
        self.ask(Operation::Flush).unwrap();
    }

    /// Checks with qemu-img that the file is consistent and holds `contents`.
    fn agrees_with_qemu(&mut self, contents: &[u8]) {
        self.disk.as_mut().unwrap().settle().unwrap();
        qemu_img(&["check", "-q", "-f", "qcow2"], &[&self.path("overlay")]);
        let raw = self.path("raw");
        let convert = ["convert", "-f", "qcow2", "-O", "raw"];
        qemu_img(&convert, &[&self.path("overlay"), &raw]);
        assert!(
            std::fs::read(raw).unwrap() == contents,
            "qemu-img reads something else"
        );
    }
}

fn submit(disk: &mut Qcow2Disk, mem: &GuestRam, operation: Operation<'_, '_>) -> io::Result<()> {
    match disk.submit(mem, 0, operation) {
        Submitted::Done(result) => result,
        Submitted::Queued => panic!("it works at once"),
    }
}

fn read(disk: &mut Qcow2Disk, mem: &GuestRam, at: u64, len: usize) -> io::Result<Vec<u8>> {
    mem.write_slice(&vec![0xa5; len], GuestAddress(BUF))
        .unwrap();
    let slices = pieces(mem, len);
    submit(
        disk,
        mem,
        Operation::Read {
            offset: at,
            slices: &slices,
        },
    )?;
    let mut bytes = vec![0; len];
    mem.read_slice(&mut bytes, GuestAddress(BUF)).unwrap();
    Ok(bytes)
}

/// `len` bytes of memory in three pieces of odd lengths.
fn pieces(mem: &GuestRam, len: usize) -> Vec<vm_memory::VolatileSlice<'_>> {
    let (first, second) = ((len / 3) | 1, (len / 2) | 1);
    let bounds = [(0, first), (first, second), (second, len)];
    let slice =
        |(from, to): (usize, usize)| mem.get_slice(GuestAddress(BUF + from as u64), to - from);
    bounds.map(slice).map(Result::unwrap).into()
}

fn qemu_img(arguments: &[&str], paths: &[&Path]) {
    let output = Command::new("qemu-img")
        .args(arguments)
        .args(paths)
        .output();
    let output = output.expect("qemu-utils: run `cargo xtask setup`");
    assert!(
        output.status.success(),
        "qemu-img {arguments:?}: {output:?}"
    );
}

/// Bytes that encode their position.
fn numbered(len: usize) -> Vec<u8> {
    (0..len as u32 / 4)
        .flat_map(|n| (n | 1 << 30).to_le_bytes())
        .collect()
}

#[test]
fn what_is_written_is_in_the_overlay_and_the_image_stays_as_it_was() {
    let image = numbered(5 << 16);
    let mut rig = Rig::new(&image);
    let mut contents = image.clone();
    // A part of a cluster, the end of one and two complete ones with a sector of the next.
    for (at, len) in [(512, 1024), (65536 + 512, 3 * 65536)] {
        let bytes = vec![0x77; len];
        rig.write(at as u64, &bytes);
        contents[at..at + len].copy_from_slice(&bytes);
    }
    assert!(rig.read(0, contents.len()) == contents);
    rig.agrees_with_qemu(&contents);
    rig.reopen();
    assert!(rig.read(0, contents.len()) == contents);
    assert!(std::fs::read(rig.path("base")).unwrap() == image);
}

#[test]
fn zeroes_and_holes_cover_the_image_and_take_no_room() {
    let mut rig = Rig::new(&numbered(8 << 16));
    let mut contents = numbered(8 << 16);
    rig.write(0, &[1; 4 << 16]);
    contents[..4 << 16].fill(1);
    rig.flush();
    let blocks = rig.overlay().metadata().unwrap().blocks();
    // Half a written cluster, a complete one, three of the image, and a half of another.
    let zeroes = 3 * 32768..(6 << 16) + 32768;
    let (offset, len) = (zeroes.start as u64, zeroes.len() as u64);
    contents[zeroes].fill(0);
    rig.ask(Operation::WriteZeroes {
        offset,
        len,
        unmap: true,
    })
    .unwrap();
    assert!(rig.read(0, contents.len()) == contents);
    // Blocks in the file are given back, and the image's content is still visible.
    rig.ask(Operation::Discard {
        offset: 0,
        len: 8 << 16,
    })
    .unwrap();
    contents[..4 << 16].fill(0);
    contents[6 << 16..7 << 16].fill(0);
    assert!(rig.read(0, contents.len()) == contents);
    assert!(rig.overlay().metadata().unwrap().blocks() < blocks);
    rig.agrees_with_qemu(&contents);
    // A cluster that reads as zeroes is written again.
    rig.write((4 << 16) + 512, &[9; 512]);
    contents[(4 << 16) + 512..(4 << 16) + 1024].fill(9);
    rig.agrees_with_qemu(&contents);
}

#[test]
fn zeroes_at_the_end_of_the_file_are_there_when_it_is_read() {
    let mut rig = Rig::new(&numbered(2 << 16));
    let (offset, len) = (512, 65536 - 512);
    rig.ask(Operation::WriteZeroes {
        offset,
        len,
        unmap: true,
    })
    .unwrap();
    let mut contents = numbered(2 << 16);
    contents[512..65536].fill(0);
    assert!(rig.read(0, 2 << 16) == contents);
}

#[test]
fn what_was_flushed_survives_a_kill_and_what_was_not_is_old_or_new() {
    let mut rig = Rig::new(&numbered(4 << 16));
    let flushed = [5; 3000];
    rig.write(512, &flushed[..2560]);
    rig.flush();
    rig.write(1 << 16, &[6; 512]);
    let mem = rig.mem.clone();
    let mut killed = rig.killed();
    assert_eq!(read(&mut killed, &mem, 512, 2560).unwrap(), flushed[..2560]);
    // Nothing points yet to data that may not be durable.
    let old = numbered(4 << 16)[1 << 16..][..1024].to_vec();
    assert_eq!(read(&mut killed, &mem, 1 << 16, 1024).unwrap(), old);
    drop(killed);
    // Then its place is free, and allocated again.
    let len = |name: &str| std::fs::metadata(rig.path(name)).unwrap().len();
    let before = len("killed");
    assert_eq!(before, len("overlay"));
    let mut again = rig.killed();
    rig.mem.write_slice(&[7; 512], GuestAddress(BUF)).unwrap();
    let slices = pieces(&mem, 512);
    submit(
        &mut again,
        &mem,
        Operation::Write {
            offset: 2 << 16,
            slices: &slices,
        },
    )
    .unwrap();
    drop(again);
    assert_eq!(len("killed"), before);
    qemu_img(&["check", "-q"], &[&rig.path("killed")]);
    assert_eq!(
        read(&mut rig.killed(), &mem, 1 << 16, 1024).unwrap()[..512],
        old[..512]
    );
}

#[test]
fn a_write_that_failed_maps_nothing() {
    let mut rig = Rig::new(&numbered(2 << 16));
    // A descriptor that refuses data; only the mapping is in memory.
    let file = File::open(rig.path("overlay")).unwrap();
    rig.disk = Some(Qcow2Disk::open(rig.base(), file).unwrap());
    let mem = rig.mem.clone();
    let slices = pieces(&mem, 1 << 16);
    let write = Operation::Write {
        offset: 0,
        slices: &slices,
    };
    assert!(rig.ask(write).is_err());
    assert!(rig.read(0, 2 << 16) == numbered(2 << 16));
}

#[test]
fn a_stopped_disk_is_complete_for_others() {
    let mut rig = Rig::new(&numbered(2 << 16));
    rig.write(0, &[3; 512]);
    rig.disk.as_mut().unwrap().settle().unwrap();
    let mem = rig.mem.clone();
    assert_eq!(read(&mut rig.killed(), &mem, 0, 512).unwrap(), [3; 512]);
    rig.write(1 << 16, &[4; 512]);
    rig.reopen();
    assert_eq!(rig.read(1 << 16, 512), [4; 512]);
}

#[test]
fn an_overlay_of_qemu_img_is_used_and_one_of_ours_by_qemu() {
    let mut rig = Rig::new(&numbered(3 << 16));
    rig.disk = None;
    std::fs::remove_file(rig.path("overlay")).unwrap();
    let base = rig.path("base");
    let create = [
        "create",
        "-q",
        "-f",
        "qcow2",
        "-F",
        "raw",
        "-b",
        base.to_str().unwrap(),
    ];
    qemu_img(&create, &[&rig.path("overlay")]);
    let mut rig = rig.opened();
    let mut contents = numbered(3 << 16);
    rig.write(1 << 16, &[8; 1024]);
    contents[1 << 16..][..1024].fill(8);
    rig.agrees_with_qemu(&contents);
    rig.disk = None;
    let status = Command::new("qemu-io")
        .args([
            "-f",
            "qcow2",
            "-c",
            "write -P 9 130k 4k",
            "-c",
            "write -z 64k 64k",
        ])
        .arg(rig.path("overlay"))
        .output();
    assert!(status.unwrap().status.success());
    contents[1 << 16..2 << 16].fill(0);
    contents[130 << 10..134 << 10].fill(9);
    let mut rig = rig.opened();
    assert!(rig.read(0, 3 << 16) == contents);
    // A cluster that reads as zeroes but has a place: qemu-io left it that way.
    rig.write((1 << 16) + 512, &[1; 512]);
    contents[(1 << 16) + 512..][..512].fill(1);
    rig.agrees_with_qemu(&contents);
}

#[test]
fn more_tables_than_memory_takes_are_written_and_read_again() {
    let tables = MAX_TABLES as u64 * 2 + 3;
    let mut rig = Rig::sparse(tables * ENTRIES * CLUSTER);
    for n in 0..tables {
        rig.write(n * ENTRIES * CLUSTER + 512, &[n as u8 + 1; 512]);
    }
    let cached = |rig: &Rig| rig.disk.as_ref().unwrap().tables.cached();
    assert_eq!(cached(&rig), MAX_TABLES);
    for n in (0..tables).rev() {
        let bytes = rig.read(n * ENTRIES * CLUSTER, 1536);
        assert_eq!(
            [bytes[0], bytes[512], bytes[1024]],
            [0, n as u8 + 1, 0],
            "{n}"
        );
    }
    assert_eq!(cached(&rig), MAX_TABLES);
    rig.reopen();
    assert_eq!(
        rig.read((tables - 1) * ENTRIES * CLUSTER + 512, 1),
        [tables as u8]
    );
    rig.disk = None;
    qemu_img(&["check", "-q"], &[&rig.path("overlay")]);
}

#[test]
fn a_request_that_creates_two_tables_keeps_to_the_number_in_memory() {
    let tables = MAX_TABLES as u64 + 1;
    let mut rig = Rig::sparse(tables * ENTRIES * CLUSTER);
    // All but one have changes that are only in memory.
    for n in 0..tables - 2 {
        rig.write(n * ENTRIES * CLUSTER, &[1; 512]);
    }
    // The end of the first table of both, and the start of the second one.
    let end = (tables - 1) * ENTRIES * CLUSTER - 512;
    rig.write(end, &[2; 1024]);
    let disk = rig.disk.as_ref().unwrap();
    assert_eq!(disk.tables.cached(), MAX_TABLES);
    rig.reopen();
    assert_eq!(rig.read(end, 1024), [2; 1024]);
}

#[test]
fn counts_are_written_once_many_ranges_wait_for_them() {
    let mut rig = Rig::new(&numbered(4 << 16));
    rig.disk = None;
    // Free clusters with used ones in between: each is a range of its own.
    let count = 4096;
    rig.overlay().set_len(count * CLUSTER).unwrap();
    let mut rig = rig.opened();
    rig.write(0, &[1; 512]);
    let clusters = &mut rig.disk.as_mut().unwrap().clusters;
    for index in (100..count).step_by(2) {
        clusters.claim(index * CLUSTER).unwrap();
    }
    while !clusters.is_behind() {
        clusters.allocate().unwrap();
    }
    rig.write(1 << 16, &[2; 512]);
    assert!(!rig.disk.as_ref().unwrap().clusters.is_behind());
}

#[test]
fn counts_beyond_their_first_block_get_another_one() {
    let mut rig = Rig::new(&numbered(4 << 16));
    rig.disk = None;
    // The next cluster to be allocated is the last but one that the first block counts.
    rig.overlay().set_len((COUNTS - 2) * CLUSTER).unwrap();
    let mut rig = rig.opened();
    let mut contents = numbered(4 << 16);
    // The clusters within that are free are used first; after that none of them is left.
    let clusters = &mut rig.disk.as_mut().unwrap().clusters;
    while clusters.count() == COUNTS - 2 {
        clusters.allocate().unwrap();
    }
    rig.write(0, &[2; 4 << 16]);
    contents.fill(2);
    rig.flush();
    assert!(rig.overlay().metadata().unwrap().len() > COUNTS * CLUSTER);
    rig.reopen();
    assert!(rig.read(0, 4 << 16) == contents);
    rig.disk = None;
    // Clusters that were allocated and never used are only a leak (3).
    let check = Command::new("qemu-img")
        .arg("check")
        .arg(rig.path("overlay"))
        .output();
    assert_eq!(check.unwrap().status.code(), Some(3));
}

#[test]
fn an_overlay_is_made_of_an_empty_file_alone() {
    let rig = Rig::new(&numbered(1 << 16));
    let name = rig.path("base");
    let made = |overlay: &File| create_overlay(&rig.base(), &name, overlay);
    assert!(matches!(made(&rig.overlay()), Err(Qcow2Error::NotEmpty)));
    let mut full = tempfile::tempfile().unwrap();
    full.write_all(b"what is there").unwrap();
    assert!(matches!(made(&full), Err(Qcow2Error::NotEmpty)));
    assert_eq!(full.metadata().unwrap().len(), 13);
    let long = PathBuf::from("x".repeat(1024));
    let refused = create_qcow2(&rig.base(), &long, &tempfile::tempfile().unwrap());
    assert!(matches!(refused, Err(Qcow2Error::Name)));
    let large = tempfile::tempfile().unwrap();
    large.set_len(MAX_SIZE + 512).unwrap();
    let refused = create_qcow2(&large, &name, &tempfile::tempfile().unwrap());
    assert!(matches!(refused, Err(Qcow2Error::TooLarge { .. })));
}

#[test]
fn an_overlay_is_one_disks_alone_and_nobody_writes_its_image() {
    let rig = Rig::new(&numbered(1 << 16));
    let (base, name) = (rig.path("base"), rig.path("second"));
    let second = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(name)
        .unwrap();
    let format = create_overlay(&rig.base(), &base, &second).unwrap();
    let device = |overlay: File| BlockDevice::overlay(rig.base(), overlay, OverlayFormat::Qcow2);
    let mut first = device(rig.overlay()).unwrap();
    first.check().unwrap();
    let refused = device(rig.overlay()).unwrap_err();
    assert!(matches!(refused, BlockDeviceError::InUse { .. }));
    // Another overlay of the same image is another disk.
    BlockDevice::overlay(rig.base(), second, format)
        .unwrap()
        .check()
        .unwrap();
    let writer = BlockDevice::open(&base).unwrap().check().unwrap_err();
    assert!(matches!(writer, BlockDeviceError::InUse { .. }));
    drop(first);
    BlockDevice::open(&base).unwrap().check().unwrap();
    let refused = device(rig.base()).unwrap_err();
    assert!(matches!(refused, BlockDeviceError::NotWritable { .. }));
}

#[test]
fn entries_of_a_table_that_was_there_before_are_written_wherever_they_are() {
    let mut rig = Rig::sparse(ENTRIES * CLUSTER);
    rig.write(CLUSTER, &[1; 512]);
    rig.flush();
    rig.reopen();
    // Some in each part of the table that is written at once, and all at its ends.
    let last = ENTRIES - 1;
    let clusters = [0, 63, 64, 65, 127, 128, 4000, 8127, 8128, last];
    for cluster in clusters {
        rig.write(cluster * CLUSTER, &[(cluster % 251) as u8 + 2; 512]);
        rig.flush();
        rig.reopen();
    }
    assert_eq!(rig.read(CLUSTER, 512), [1; 512]);
    for cluster in clusters {
        let expected = [(cluster % 251) as u8 + 2; 512];
        assert_eq!(rig.read(cluster * CLUSTER, 512), expected, "{cluster}");
    }
}
