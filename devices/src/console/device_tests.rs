use super::*;
use crate::allocations::allocations;
use crate::testing::{CountingInterrupt, DriverQueue, F_INDIRECT, F_NEXT, memory, start, stop};
use std::io::Read as _;
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::sync::atomic::Ordering::SeqCst;
use vm_memory::{Bytes, GuestAddress};

const BUF: u64 = 0x40000;
const RX_BUF: u64 = 0x80000;

#[derive(Clone, Debug, Default)]
struct Shared(Arc<Mutex<Vec<u8>>>);

impl Write for Shared {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(buf);
        Ok(buf.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Rig {
    mem: GuestRam,
    rx: DriverQueue,
    tx: DriverQueue,
    device: ConsoleDevice,
    irq: Arc<CountingInterrupt>,
}

fn rig(mut device: ConsoleDevice) -> Rig {
    let mem = memory(4 << 20);
    let rx = DriverQueue::new(&mem, 0x10000, 16);
    let tx = DriverQueue::new(&mem, 0x20000, 16);
    let irq = Arc::new(CountingInterrupt::default());
    start(&mut device, &[&rx, &tx], &irq, 0);
    Rig {
        mem,
        rx,
        tx,
        device,
        irq,
    }
}

impl Rig {
    fn transmit(&mut self, bytes: &[u8]) -> Result<Progress, Fault> {
        self.mem.write_slice(bytes, GuestAddress(BUF)).unwrap();
        self.tx.add(&[(BUF, bytes.len() as u32)], &[]);
        self.device.on_queue(TX)
    }

    fn received(&mut self) -> Vec<u8> {
        let used = self.rx.take_used().unwrap();
        let mut bytes = vec![0; used.len as usize];
        self.mem
            .read_slice(&mut bytes, GuestAddress(RX_BUF))
            .unwrap();
        bytes
    }

    fn backend_readable(&self) -> bool {
        crate::testing::backend_readable(&self.device)
    }

    fn counter(&self, name: &str) -> u64 {
        crate::testing::counter(&self.device, name)
    }
}

#[test]
fn what_the_driver_transmits_reaches_the_writer() {
    let out = Shared::default();
    let mut rig = rig(ConsoleDevice::new(Box::new(out.clone())));
    let text: Vec<u8> = (0..10_000u32).map(|n| n as u8).collect();
    assert_eq!(rig.transmit(&text).unwrap(), Progress::Idle);
    assert_eq!(*out.0.lock().unwrap(), text);
    assert_eq!(rig.tx.take_used().unwrap().len, 0);
    assert_eq!(rig.counter("tx_bytes"), 10_000);
    assert_eq!(rig.irq.queue.load(SeqCst), 1);
}

#[test]
fn a_writer_that_is_full_loses_bytes_and_does_not_stop_the_guest() {
    let (out, mut peer) = UnixStream::pair().unwrap();
    out.set_nonblocking(true).unwrap();
    peer.set_nonblocking(true).unwrap();
    let mut rig = rig(ConsoleDevice::new(Box::new(out)));
    let mut sent = 0;
    while rig.counter("lost_bytes") == 0 {
        let _ = rig.transmit(&[b'x'; 100_000]).unwrap();
        rig.tx.take_used().unwrap();
        sent += 100_000;
    }
    let mut got = 0;
    while let Ok(n) = peer.read(&mut [0; 65536]) {
        got += n as u64;
    }
    assert_eq!(got, rig.counter("tx_bytes"));
    assert_eq!(got + rig.counter("lost_bytes"), sent);
}

#[test]
fn an_absurd_transmission_is_a_fault_and_a_flood_leaves_the_event_loop_its_turn() {
    let mut one = rig(ConsoleDevice::new(Box::new(io::sink())));
    let most = [(BUF, 0x8_0000), (BUF, 0x8_0000)];
    one.tx.add(&most, &[]);
    assert_eq!(one.device.on_queue(TX).unwrap(), Progress::More);
    assert_eq!(one.counter("tx_bytes"), MAX_TRANSMIT as u64);
    one.tx.add(&[most[0], most[1], (BUF, 1)], &[]);
    assert!(matches!(one.device.on_queue(TX), Err(Fault::Guest(_))));

    let mut two = rig(ConsoleDevice::new(Box::new(io::sink())));
    two.tx.add(&[(BUF, 0x8_0000)], &[]);
    two.tx.add(&[(BUF, 0x8_0000)], &[]);
    assert_eq!(two.device.on_queue(TX).unwrap(), Progress::More);
    assert_eq!(two.device.on_queue(TX).unwrap(), Progress::More);
    assert_eq!(two.device.on_queue(TX).unwrap(), Progress::Idle);
}

#[test]
fn input_waits_for_buffers_without_spinning() {
    let (input, mut peer) = UnixStream::pair().unwrap();
    let device = ConsoleDevice::new(Box::new(io::sink()))
        .input(input.into())
        .unwrap();
    let mut rig = rig(device);
    peer.write_all(b"hello").unwrap();
    assert!(rig.backend_readable());
    assert_eq!(rig.device.on_backend().unwrap(), Progress::Idle);
    assert!(!rig.backend_readable(), "no buffers, no interest");
    rig.rx.add(&[], &[(RX_BUF, 3)]);
    assert_eq!(rig.device.on_queue(RX).unwrap(), Progress::Idle);
    assert_eq!(rig.received(), b"hel");
    assert!(!rig.backend_readable());
    rig.rx.add(&[], &[(RX_BUF, 100)]);
    assert_eq!(rig.device.on_queue(RX).unwrap(), Progress::Idle);
    assert_eq!(rig.received(), b"lo");
    peer.write_all(b"!").unwrap();
    rig.rx.add(&[], &[(RX_BUF, 100)]);
    assert!(rig.backend_readable());
    assert_eq!(rig.device.on_backend().unwrap(), Progress::Idle);
    assert_eq!(rig.received(), b"!");
}

#[test]
fn receive_buffers_without_room_are_given_back_and_the_next_one_is_filled() {
    let (input, mut peer) = UnixStream::pair().unwrap();
    let device = ConsoleDevice::new(Box::new(io::sink()));
    let mut rig = rig(device.input(input.into()).unwrap());
    peer.write_all(b"typed").unwrap();
    rig.rx.add(&[(BUF, 8)], &[]);
    rig.rx.add(&[], &[(RX_BUF, 0)]);
    rig.rx.add(&[], &[(RX_BUF, 100)]);
    assert_eq!(rig.device.on_queue(RX).unwrap(), Progress::Idle);
    assert_eq!(rig.received(), b"");
    assert_eq!(rig.received(), b"");
    assert_eq!(rig.received(), b"typed");
    assert_eq!(rig.counter("rx_bytes"), 5);
    // Under a flood of them the event loop still gets control back.
    peer.write_all(b"!").unwrap();
    let (table, len) = (0x10_0000, 1024u16);
    let chain = DriverQueue::new(&rig.mem, table, len);
    for at in 0..len - 1 {
        chain.descriptor(at, BUF, 1, F_NEXT, at + 1);
    }
    chain.descriptor(len - 1, BUF, 1, 0, 0);
    for head in 0..8 {
        rig.rx
            .descriptor(head, table, u32::from(len) * 16, F_INDIRECT, 0);
        rig.rx.make_available(head);
    }
    assert_eq!(rig.device.on_queue(RX).unwrap(), Progress::More);
    assert_eq!(rig.device.on_queue(RX).unwrap(), Progress::More);
    assert_eq!(rig.device.on_queue(RX).unwrap(), Progress::Idle);
}

#[test]
fn input_for_a_driver_that_only_transmits_does_not_spin() {
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let device = ConsoleDevice::new(Box::<Shared>::default());
    let mut rig = rig(device.input(theirs.into()).unwrap());
    let rx = rig.device.stop_queue(RX).unwrap();
    ours.write_all(b"typed").unwrap();
    assert!(rig.backend_readable());
    assert_eq!(rig.device.on_backend().unwrap(), Progress::Idle);
    assert!(!rig.backend_readable(), "nobody takes it");
    rig.rx.add(&[], &[(RX_BUF, 100)]);
    rig.device.start_queue(rx).unwrap();
    assert_eq!(rig.device.on_queue(RX).unwrap(), Progress::Idle);
    assert_eq!(rig.received(), b"typed");
}

#[test]
fn the_end_of_the_input_is_reported_once() {
    let (input, peer) = UnixStream::pair().unwrap();
    let device = ConsoleDevice::new(Box::new(io::sink()))
        .input(input.into())
        .unwrap();
    let mut rig = rig(device);
    rig.rx.add(&[], &[(RX_BUF, 100)]);
    drop(peer);
    assert!(rig.backend_readable());
    assert_eq!(rig.device.on_backend().unwrap(), Progress::Idle);
    assert!(!rig.backend_readable());
    assert_eq!(rig.device.on_queue(RX).unwrap(), Progress::Idle);
    assert!(!rig.backend_readable());
    assert!(rig.rx.take_used().is_none());
}

#[test]
fn an_input_that_cannot_be_waited_for_is_refused() {
    let file = tempfile::tempfile().unwrap();
    assert!(matches!(
        ConsoleDevice::new(Box::new(io::sink())).input(file.into()),
        Err(ConsoleError::NotPollable(_))
    ));
}

#[test]
fn a_new_size_is_a_configuration_change() {
    let device = ConsoleDevice::new(Box::new(io::sink())).size(132, 50);
    let mut rig = rig(device);
    let mut config = [9; 12];
    rig.device.info().config.read(0, &mut config);
    assert_eq!(config, [132, 0, 50, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    rig.device.resize(132, 50);
    assert_eq!(rig.device.info().config.generation(), 0);
    rig.device.resize(300, 100);
    assert_eq!(rig.device.info().config.generation(), 1);
    rig.device.info().config.read(0, &mut config);
    assert_eq!(&config[..4], &[44, 1, 100, 0]);
}

#[test]
fn a_console_without_input_keeps_its_buffers() {
    let mut rig = rig(ConsoleDevice::new(Box::new(io::sink())));
    assert!(rig.device.backend().is_none());
    rig.rx.add(&[], &[(RX_BUF, 100)]);
    assert_eq!(rig.device.on_queue(RX).unwrap(), Progress::Idle);
    assert_eq!(rig.device.on_backend().unwrap(), Progress::Idle);
    assert!(rig.rx.take_used().is_none());
    assert_eq!(stop(&mut rig.device).len(), 2);
}

#[test]
fn a_restored_console_has_the_size_that_was_saved() {
    let device = || ConsoleDevice::new(Box::new(io::sink()));
    let size = |device: &ConsoleDevice| {
        let mut size = [0; 4];
        device.info().config.read(0, &mut size);
        size
    };
    let mut saved = device();
    saved.resize(132, 43);
    let mut other = device();
    assert_ne!(size(&other), size(&saved));
    let state = saved.save();
    other.restore(&state).unwrap();
    assert_eq!(size(&other), [132, 0, 43, 0]);
    for bytes in [vec![0; 3], vec![0; 5]] {
        let version = state.version;
        assert!(other.restore(&SavedDevice { version, bytes }).is_err());
    }
    assert_eq!(size(&other), [132, 0, 43, 0]);
}

#[test]
fn a_turn_of_either_queue_needs_no_allocation() {
    let (mut peer, ours) = UnixStream::pair().unwrap();
    let device = ConsoleDevice::new(Box::new(io::sink()));
    let mut rig = rig(device.input(ours.into()).unwrap());
    let mut round = || {
        peer.write_all(b"typed").unwrap();
        rig.rx.add(&[], &[(RX_BUF, 3), (RX_BUF + 3, 100)]);
        rig.mem.write_slice(b"shown", GuestAddress(BUF)).unwrap();
        rig.tx.add(&[(BUF, 5)], &[]);
        let allocations = allocations(|| {
            for index in [RX, TX] {
                assert_eq!(rig.device.on_queue(index).unwrap(), Progress::Idle);
            }
        });
        assert_eq!(rig.received(), b"typed");
        rig.tx.take_used().unwrap();
        allocations
    };
    // The lists get their size.
    round();
    for _ in 0..3 {
        assert_eq!(round(), 0);
    }
}
