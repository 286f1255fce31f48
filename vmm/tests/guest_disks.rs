//! A Linux guest's disks under the load of `disks.c`: engines with several queues and many parallel
//! requests, media that change under them, file systems whose machine is killed.

mod support;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use podvisor_vmm::devices::GuestRam;
use podvisor_vmm::devices::blk::{
    Disk, Operation, OverlayFormat, Submitted, create_overlay, create_qcow2, open_disk,
};
use podvisor_vmm::{BlockDevice, FsDevice, IoEngine, MemorySize, Transport, Vm, VmExit};
use support::mounts::{mount, own_mounts};
use support::{Console, PATIENCE, busybox_with, linux_with, program};

const MIB: usize = 1 << 20;
/// The size of the disks under load, whose content follows from each piece's position (`disks.c`).
const LEN: usize = 8 * MIB;
const PIECE: usize = 128 << 10;
/// The size of a medium, its blocks, and the number of the last one (`disks.c`).
const MEDIUM: usize = MIB;
const BLOCK: usize = 4096;
const LAST: u64 = 12;
/// The size of a file system, and the files that are durable before its machine is killed.
const FILE_SYSTEM: usize = 32 * MIB;
const SYNCED: usize = 8;
const LONGEST: u64 = 65536;

#[test]
fn guest_disks_hold_what_was_written_under_load_while_media_change_and_when_it_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let file = |name: &str, len: usize| {
        File::create_new(path(name))
            .unwrap()
            .set_len(len as u64)
            .unwrap();
        path(name)
    };
    let queues = |name: &str, len: usize, engine| {
        BlockDevice::open_with(file(name, len), engine)
            .unwrap()
            .queues(4)
    };
    let cached = CachedDisk::new(FILE_SYSTEM);
    let loads = overlay(&file("empty", LEN), &file("changes", 0));
    let overlay = overlay(&file("image", FILE_SYSTEM), &file("overlay", 0));
    let script = "for disk in vda vdb vdf; do disks load /dev/$disk; done; disks watch /dev/vdc\n\
         mkdir /host /cached /overlay; mount -t virtiofs host /host; mount -o bind /dev /host/dev\n\
         for disk in vdd vde; do chroot /host mkfs.ext4 -q -F /dev/$disk || echo bad mkfs; done\n\
         mount -t ext4 /dev/vdd /cached; mount -t ext4 /dev/vde /overlay; echo made\n\
         disks files /cached & disks files /overlay & wait; echo bad end";
    let console = Console::default();
    let vm = linux_with(
        busybox_with(script, &[("disks", &program("disks.c"))]),
        &console,
    )
    .transport(Transport::Pci)
    .vcpus(4)
    .memory(MemorySize::mib(256))
    .block(queues("sync", LEN, IoEngine::Sync))
    .block(queues("uring", LEN, IoEngine::Uring))
    .block(BlockDevice::new(medium(0)).read_only().queues(4))
    .block(BlockDevice::new(Box::new(cached.clone())).queues(4))
    .block(overlay.queues(4))
    .block(loads.queues(4))
    .fs(FsDevice::open("host", "/").unwrap().read_only().unwrap())
    .build()
    .unwrap();
    let loaded = loaded();
    let media: Vec<_> = (1..=LAST).map(medium).collect();
    vm.start().unwrap();

    console.wait_for("load /dev/vdf ok");
    for name in ["sync", "uring"] {
        assert!(fs::read(path(name)).unwrap() == loaded, "{name}");
    }
    changes_media(&vm, media, &console);
    console.wait_for("made");
    for name in ["cached", "overlay"] {
        console.wait_for(&format!("synced /{name} {SYNCED} end"));
    }
    let synced = |name: &str| {
        let text = console.text();
        let told = |n: &usize| text.contains(&format!("synced /{name} {n} end"));
        (1..).take_while(told).last().unwrap()
    };
    let before_cut = synced("cached");
    fs::write(path("cached"), cached.after_power_cut()).unwrap();
    vm.stop().unwrap();
    assert_eq!(vm.wait().unwrap(), VmExit::Stopped);
    let text = console.text();
    assert!(
        text.contains("watch /dev/vdc ok") && !text.contains("bad "),
        "{text}"
    );
    assert!(vm.faults().is_empty());
    is_whole(&path("cached"), before_cut);
    drop(vm);
    let raw = |name: &str| {
        run("qemu-img", &["check", "-q"], &path(name));
        let raw = path(&format!("{name}.raw"));
        let overlay = path(name);
        let overlay = overlay.to_str().unwrap();
        run("qemu-img", &["convert", "-O", "raw", overlay], &raw);
        raw
    };
    is_whole(&raw("overlay"), synced("overlay"));
    assert!(fs::read(raw("changes")).unwrap() == loaded, "changes");
    for image in ["image", "empty"] {
        let image = fs::read(path(image)).unwrap();
        assert!(image.iter().all(|byte| *byte == 0), "the image was written");
    }
}

#[test]
fn guest_loads_disks_whose_queues_have_threads_on_mmio() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let queues = |name: &str, engine| {
        let file = File::create_new(path(name)).unwrap();
        file.set_len(LEN as u64).unwrap();
        BlockDevice::open_with(path(name), engine)
            .unwrap()
            .queues(4)
    };
    let script = "disks load /dev/vda && disks load /dev/vdb; echo done";
    let console = Console::default();
    let vm = linux_with(
        busybox_with(script, &[("disks", &program("disks.c"))]),
        &console,
    )
    .transport(Transport::Mmio)
    .vcpus(4)
    .memory(MemorySize::mib(256))
    .block(queues("sync", IoEngine::Sync))
    .block(queues("uring", IoEngine::Uring))
    .build()
    .unwrap();
    vm.start().unwrap();
    console.wait_for("load /dev/vdb ok");
    vm.stop().unwrap();
    assert!(vm.faults().is_empty() && !console.text().contains("bad "));
    let loaded = loaded();
    for name in ["sync", "uring"] {
        assert!(fs::read(path(name)).unwrap() == loaded, "{name}");
    }
}

#[test]
fn guest_disk_over_an_image_shares_its_blocks_where_the_file_system_can() {
    own_mounts();
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let container = File::create_new(path("container")).unwrap();
    container.set_len(256 << 20).unwrap();
    run("mkfs.btrfs", &["-q"], &path("container"));
    fs::create_dir(path("mounted")).unwrap();
    let [from, to] = ["container", "mounted"].map(|name| path(name).display().to_string());
    mount(&["-t", "btrfs", "-o", "loop", &from, &to]);
    fs::write(path("mounted/image"), bytes(1, MIB)).unwrap();
    let image = File::open(path("mounted/image")).unwrap();
    let new = |name: &str| {
        let mut options = File::options();
        options
            .read(true)
            .write(true)
            .create_new(true)
            .open(path(name))
            .unwrap()
    };
    let file = new("mounted/overlay");
    let format = create_overlay(&image, &path("mounted/image"), &file).unwrap();
    assert_eq!(format, OverlayFormat::Reflink);
    let mut disk = BlockDevice::overlay(image.try_clone().unwrap(), file, format).unwrap();
    disk.check().unwrap();
    let overlay = File::options()
        .write(true)
        .open(path("mounted/overlay"))
        .unwrap();
    overlay.write_all_at(&[7; 512], 512).unwrap();
    let mut expected = bytes(1, MIB);
    assert!(fs::read(path("mounted/image")).unwrap() == expected);
    expected[512..1024].fill(7);
    assert!(fs::read(path("mounted/overlay")).unwrap() == expected);
    // Two file systems cannot share extents.
    let format = create_overlay(&image, &path("mounted/image"), &new("overlay")).unwrap();
    assert_eq!(format, OverlayFormat::Qcow2);
    drop((disk, image, overlay));
    run("umount", &[], &path("mounted"));
}

/// Creates a disk over `image` that stores writes in the empty file `overlay`.
fn overlay(image: &Path, overlay: &Path) -> BlockDevice {
    let base = File::open(image).unwrap();
    let mut options = File::options();
    let file = options.read(true).write(true).open(overlay).unwrap();
    create_qcow2(&base, image, &file).unwrap();
    BlockDevice::overlay(base, file, OverlayFormat::Qcow2).unwrap()
}

/// Returns what the guest leaves on a disk under load.
fn loaded() -> Vec<u8> {
    let pieces = (0..LEN).step_by(PIECE);
    let pieces: Vec<_> = pieces.map(|at| bytes(mixed(at as u64), PIECE)).collect();
    pieces.concat()
}

/// Inserts one medium after the other into the third disk, each when the guest has read from the
/// last.
fn changes_media(vm: &Vm, media: Vec<Box<dyn Disk>>, console: &Console) {
    let disk = vm.block("blk2").unwrap();
    let reads = || {
        let counters = disk.counters();
        counters
            .iter()
            .find(|counter| counter.name == "reads")
            .unwrap()
            .value
    };
    for (number, medium) in media.into_iter().enumerate() {
        let deadline = Instant::now() + PATIENCE;
        let before = reads();
        while reads() < before + 100 {
            assert!(Instant::now() < deadline, "{}", console.text());
            std::thread::sleep(Duration::from_millis(1));
        }
        disk.replace_disk(medium, &format!("medium{number}"))
            .unwrap();
    }
}

/// Creates a disk whose words contain the numbers of their medium and of their block.
fn medium(number: u64) -> Box<dyn Disk> {
    let mut file = tempfile::tempfile().unwrap();
    for block in 0..(MEDIUM / BLOCK) as u64 {
        let word = (number << 32 | block).to_le_bytes();
        file.write_all(&word.repeat(BLOCK / 8)).unwrap();
    }
    // One after the other by the device's thread, or many in parallel by the kernel.
    let engine = if number.is_multiple_of(2) {
        IoEngine::Sync
    } else {
        IoEngine::Uring
    };
    open_disk(file, engine).unwrap()
}

/// Checks that the file system in `image` needs only its journal, and has the files that were
/// synced.
fn is_whole(image: &Path, synced: usize) {
    // 1: the journal was replayed, and perhaps orphans were freed, without a question.
    let (code, said) = outcome("e2fsck", &["-p"], image);
    assert!(code <= 1, "{}: {said}", image.display());
    run("e2fsck", &["-f", "-n"], image);
    let copies = tempfile::tempdir().unwrap();
    let dump = |n| format!("dump /file{n} {}/{n}\n", copies.path().display());
    let dumps = copies.path().join("dumps");
    fs::write(&dumps, (1..=synced).map(dump).collect::<String>()).unwrap();
    run("debugfs", &["-f", dumps.to_str().unwrap()], image);
    for n in 1..=synced {
        let len = usize::try_from(mixed(n as u64) % LONGEST).unwrap() / 8 * 8;
        let copy = fs::read(copies.path().join(n.to_string())).unwrap();
        let same = copy == bytes(n as u64, len);
        assert!(same, "{}: file{n} of {synced}", image.display());
    }
}

/// Returns the exit status of a program on `image`, and its output.
fn outcome(program: &str, arguments: &[&str], image: &Path) -> (i32, String) {
    let output = Command::new(program).args(arguments).arg(image).output();
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}"));
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    (output.status.code().unwrap(), said)
}

fn run(program: &str, arguments: &[&str], image: &Path) {
    let (code, said) = outcome(program, arguments, image);
    assert_eq!(code, 0, "{program} {}: {said}", image.display());
}

/// A disk with a volatile write cache: unflushed data may be lost at a power cut.
#[derive(Clone, Debug)]
struct CachedDisk(Arc<(Mutex<Cache>, Condvar)>);

#[derive(Debug)]
struct Cache {
    now: Vec<u8>,
    durable: Vec<u8>,
    /// Sectors in which they differ.
    dirty: BTreeSet<usize>,
    /// Whether to cut the power as soon as enough writes are in flight, and what is left then.
    cut: bool,
    left: Option<Vec<u8>>,
}

const SECTOR: usize = 512;
/// The number of sectors that is enough.
const UNDER_WAY: usize = 16;

impl CachedDisk {
    fn new(len: usize) -> Self {
        let cache = Cache {
            now: vec![0; len],
            durable: vec![0; len],
            dirty: BTreeSet::new(),
            cut: false,
            left: None,
        };
        Self(Arc::new((Mutex::new(cache), Condvar::new())))
    }

    /// Returns the content of the disk if the power is cut in the middle of writes.
    fn after_power_cut(&self) -> Vec<u8> {
        let mut cache = self.0.0.lock().unwrap();
        cache.cut = true;
        let waits = |cache: &mut Cache| cache.left.is_none();
        let cache = self
            .0
            .1
            .wait_timeout_while(cache, PATIENCE, waits)
            .unwrap()
            .0;
        cache.left.clone().expect("writes between two flushes")
    }
}

impl Cache {
    fn changed(&mut self, offset: usize, len: usize) {
        self.dirty.extend(offset / SECTOR..(offset + len) / SECTOR);
        if self.cut && self.left.is_none() && self.dirty.len() >= UNDER_WAY {
            // Every other sector reached the disk, in no particular order.
            let mut left = self.durable.clone();
            for sector in self
                .dirty
                .iter()
                .filter(|sector| mixed(**sector as u64).is_multiple_of(2))
            {
                copy_sector(&self.now, &mut left, *sector);
            }
            self.left = Some(left);
        }
    }

    fn flush(&mut self) {
        for sector in std::mem::take(&mut self.dirty) {
            copy_sector(&self.now, &mut self.durable, sector);
        }
    }
}

fn copy_sector(from: &[u8], to: &mut [u8], sector: usize) {
    let range = sector * SECTOR..(sector + 1) * SECTOR;
    to[range.clone()].copy_from_slice(&from[range]);
}

impl Disk for CachedDisk {
    fn len(&self) -> u64 {
        self.0.0.lock().unwrap().now.len() as u64
    }

    fn submit(&mut self, _: &GuestRam, _: u16, operation: Operation<'_, '_>) -> Submitted {
        let mut cache = self.0.0.lock().unwrap();
        let at = |offset: u64| usize::try_from(offset).unwrap();
        match operation {
            Operation::Read { offset, slices } => {
                let mut from = at(offset);
                for slice in slices {
                    slice.copy_from(&cache.now[from..from + slice.len()]);
                    from += slice.len();
                }
            }
            Operation::Write { offset, slices } => {
                let mut to = at(offset);
                for slice in slices {
                    slice.copy_to(&mut cache.now[to..to + slice.len()]);
                    cache.changed(to, slice.len());
                    to += slice.len();
                }
            }
            Operation::Flush => cache.flush(),
            Operation::Discard { offset, len } | Operation::WriteZeroes { offset, len, .. } => {
                let (from, len) = (at(offset), at(len));
                cache.now[from..from + len].fill(0);
                cache.changed(from, len);
            }
        }
        self.0.1.notify_all();
        Submitted::Done(Ok(()))
    }
}

/// As in `disks.c`.
fn mixed(mut x: u64) -> u64 {
    x ^= x >> 33;
    x = x.wrapping_mul(0xff51_afd7_ed55_8ccd);
    x ^= x >> 33;
    x = x.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ x >> 33
}

/// As `fill` in `disks.c`.
fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len);
    for n in 0..len as u64 / 8 {
        bytes.extend_from_slice(&mixed(seed.wrapping_add(n)).to_le_bytes());
    }
    bytes
}
