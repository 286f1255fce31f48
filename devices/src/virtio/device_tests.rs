//! What a device does and says that says nothing else.

use super::*;
use crate::balloon::BalloonDevice;
use crate::blk::{BlockDevice, FileDisk, UringDisk};
use crate::console::ConsoleDevice;
use crate::fs::FsDevice;
use crate::legacy::serial::SerialPort;
use crate::net::{MemoryNic, NetDevice, Nic};
use crate::rng::RngDevice;
use crate::vsock::VsockDevice;

#[test]
fn a_device_that_says_no_more_has_no_state_no_backend_and_no_threads() {
    let mut device = RngDevice::new();
    assert_eq!(device.placement(), Placement::Shared);
    assert!(device.queue_threads().bodies().is_empty() && device.backend().is_none());
    assert!(device.is_quiet());
    assert_eq!(device.on_backend().unwrap(), Progress::Idle);
    let saved = device.save();
    assert_eq!(saved, SavedDevice::default());
    device.restore(&saved).unwrap();
    let of = |version, bytes: &[u8]| SavedDevice {
        version,
        bytes: bytes.to_vec(),
    };
    for other in [of(0, &[1]), of(1, &[])] {
        assert!(device.restore(&other).is_err(), "{other:?}");
    }
}

#[derive(Debug)]
struct NoLine;
impl crate::virtio::InterruptLine for NoLine {
    fn raise(&self) {}
}

#[test]
fn what_is_printed_of_a_device_for_debugging_names_it() {
    let dir = tempfile::tempdir().unwrap();
    let card = |pairs: usize| {
        let nics = (0..pairs).map(|_| Box::new(MemoryNic::pair().0) as Box<dyn Nic>);
        NetDevice::over(nics.collect()).unwrap()
    };
    let mut vsock = VsockDevice::in_process(3).unwrap();
    vsock.listen(7, drop);
    let uring = UringDisk::new(tempfile::tempfile().unwrap()).unwrap();
    for (printed, part) in [
        (
            format!("{:?}", BalloonDevice::new()),
            "BalloonDevice { queues: ",
        ),
        (
            format!("{:?}", BlockDevice::new(Box::new(uring))),
            "UringDisk { disk: ",
        ),
        (
            format!("{:?}", ConsoleDevice::new(Box::new(std::io::sink()))),
            "ConsoleDevice { input: ",
        ),
        (
            format!("{:?}", FsDevice::open("tagged", dir.path()).unwrap()),
            "FsDevice { tag: \"tagged\"",
        ),
        (format!("{:?}", card(2)), "NetDevice { host: "),
        (format!("{vsock:?}"), "7: OnConnect"),
        (
            format!("{:?}", SerialPort::new(NoLine, Box::new(std::io::sink()))),
            "SerialPort",
        ),
    ] {
        assert!(printed.contains(part), "{part} in {printed}");
    }
    // Much traffic does not delay other devices.
    assert_eq!(card(1).placement(), Placement::Shared);
    assert_eq!(card(2).placement(), Placement::Own);
}

/// The feature bits with these numbers.
fn bits(numbers: &[u32]) -> u64 {
    numbers.iter().map(|number| 1 << number).sum()
}

#[test]
fn the_features_of_a_device_have_the_numbers_of_the_specification() {
    let dir = tempfile::tempdir().unwrap();
    let disk = || {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        BlockDevice::new(Box::new(FileDisk::new(file).unwrap()))
    };
    let card = |pairs: usize| {
        let nics = (0..pairs).map(|_| Box::new(MemoryNic::pair().0) as Box<dyn Nic>);
        NetDevice::over(nics.collect()).unwrap()
    };
    let features = |device: &dyn VirtioDevice| device.info().features;
    // SEG_MAX, BLK_SIZE, FLUSH, TOPOLOGY, DISCARD, WRITE_ZEROES; RO; MQ.
    assert_eq!(features(&disk()), bits(&[2, 6, 9, 10, 13, 14]));
    assert_eq!(features(&disk().read_only()), bits(&[2, 5, 6, 10]));
    assert_eq!(
        features(&disk().queues(2)),
        bits(&[2, 6, 9, 10, 12, 13, 14])
    );
    // STATS_VQ, DEFLATE_ON_OOM, REPORTING; SIZE; STREAM, NO_IMPLIED_STREAM.
    assert_eq!(features(&BalloonDevice::new()), bits(&[1, 2, 5]));
    let console = ConsoleDevice::new(Box::new(std::io::sink()));
    assert_eq!(features(&console), bits(&[0]));
    let vsock = VsockDevice::in_process(3).unwrap();
    assert_eq!(features(&vsock), bits(&[0, 2]));
    assert_eq!(features(&RngDevice::new()), 0);
    assert_eq!(features(&FsDevice::open("a", dir.path()).unwrap()), 0);
    // MQ.
    assert_eq!(features(&card(2)) & !features(&card(1)), bits(&[22]));
    // INDIRECT_DESC, EVENT_IDX, VERSION_1.
    assert_eq!(crate::virtio::features::RING, bits(&[28, 29, 32]));
}
