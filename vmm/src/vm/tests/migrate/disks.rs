//! Disks whose contents move with the memory.

use podvisor_devices::blk::{Disk, read_disk, write_disk};

use super::*;
use crate::MovingDisk;

/// A file of some megabytes, opened again and again.
struct Place(tempfile::NamedTempFile);

impl Place {
    fn new() -> Self {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4 << 20).unwrap();
        Self(file)
    }

    fn open(&self) -> std::fs::File {
        let options = std::fs::File::options().read(true).write(true).to_owned();
        options.open(self.0.path()).unwrap()
    }

    fn disk(&self) -> Box<dyn Disk> {
        Box::new(FileDisk::new(self.open()).unwrap())
    }

    /// As a driver writes it.
    fn write(guest: &Guest, offset: u64, value: u8) {
        let disk = guest.vm.block("blk0").unwrap();
        let written = disk.run(move |device| {
            write_disk(device.disk_mut(), offset, &mut [value; 4096]).unwrap();
        });
        written.unwrap();
    }
}

#[test]
fn a_disk_that_moves_has_what_was_written_in_every_round() {
    let (here, there) = (Place::new(), Place::new());
    let device = BlockDevice::from_file(here.open()).unwrap().copied();
    let guest = Guest::start(|vm| vm.block(device));
    Place::write(&guest, 0, 1);
    Place::write(&guest, 1 << 20, 1);
    let (one, other) = connection();
    let (to, file) = (there.disk(), there.open());
    let receiver = std::thread::spawn(move || {
        let incoming = IncomingMigration::open(other, limits()).unwrap();
        assert_eq!(incoming.disks()[0].identity, "image");
        let incoming = incoming.store_disks(vec![to]);
        let arrived = incoming.receive(&KvmDevice::open().unwrap()).unwrap();
        let disk = BlockDevice::from_file(file).unwrap();
        let vm = arrived.builder().block(disk).build().unwrap();
        arrived.start(&vm).unwrap();
        vm
    });
    let mut options = rounds(3);
    options.disks = vec![MovingDisk {
        device: "blk0".to_owned(),
        identity: "image".to_owned(),
        len: 0,
    }];
    let answered = |answer: u32| {
        let offset = 2 << 20 | u64::from(answer) << 16;
        Place::write(&guest, offset, u8::try_from(answer).unwrap() + 5);
        // What was sent is zero again.
        Place::write(&guest, 0, 0);
    };
    let moved = send(&guest.vm, one, &options, answered, go_on);
    assert_eq!(moved.unwrap().rounds, 3);
    receiver.join().unwrap();
    let [mut source, mut target] = [vec![0; 4 << 20], vec![0; 4 << 20]];
    read_disk(&mut *here.disk(), 0, &mut source).unwrap();
    read_disk(&mut *there.disk(), 0, &mut target).unwrap();
    assert!(source == target);
    assert_eq!([target[0], target[1 << 20], target[2 << 20]], [0, 1, 5]);
}

#[test]
fn a_disk_without_a_log_or_a_place_does_not_move() {
    let (here, there) = (Place::new(), Place::new());
    let device = |is_copied| {
        let device = BlockDevice::from_file(here.open()).unwrap();
        match is_copied {
            true => device.copied(),
            false => device,
        }
    };
    let mut options = rounds(3);
    options.disks = vec![MovingDisk {
        device: "blk0".to_owned(),
        identity: String::new(),
        len: 0,
    }];
    let guest = Guest::start(|vm| vm.block(device(false)));
    let (one, _other) = connection();
    let error = guest
        .vm
        .migrate(one, &options, |_| ControlFlow::Continue(()));
    assert!(
        matches!(error, Err(MigrateError::NotCopied { .. })),
        "{error:?}"
    );
    guest.runs_on();
    drop(guest);

    let guest = Guest::start(|vm| vm.block(device(true)));
    let (one, other) = connection();
    let receiver = receive(other, guest.mem.clone(), |vm| vm);
    let error = guest
        .vm
        .migrate(one, &options, |_| ControlFlow::Continue(()));
    let reason = error.unwrap_err().to_string();
    assert!(
        reason.contains("1 disks of the migrated VM come with it"),
        "{reason}"
    );
    assert!(receiver.join().unwrap().is_err());
    guest.runs_on();
    drop(there);
}
