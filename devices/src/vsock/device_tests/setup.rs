//! Setting up, stopping and starting.

use super::*;

#[test]
fn the_guest_reads_its_cid() {
    let rig = Rig::new();
    let mut data = [0; 12];
    rig.device.info().config.read(0, &mut data);
    assert_eq!(data, [3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(rig.device.guest_cid(), 3);
}

#[derive(Debug)]
struct OwnHost;
impl VsockHost for OwnHost {
    fn connect(&mut self, _: u32) -> std::io::Result<std::os::fd::OwnedFd> {
        Err(std::io::ErrorKind::ConnectionRefused.into())
    }
}

#[test]
fn a_host_side_uses_paths_unless_it_says_that_it_does_not() {
    let dir = tempfile::tempdir().unwrap();
    let bind = |name| UnixListener::bind(dir.path().join(name)).unwrap();
    let uses = |device: Result<VsockDevice, VsockError>| device.unwrap().uses_paths();
    assert!(uses(VsockDevice::unix_mux(3, dir.path().join("mux"))));
    assert!(uses(VsockDevice::new(3, Box::new(OwnHost))));
    assert!(!uses(VsockDevice::from_listener(3, bind("own"))));
    assert!(!uses(VsockDevice::in_process(3)));
}

#[test]
fn cids_that_mean_something_else_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for cid in [0, 1, 2, 0xffff_ffff, 1 << 32, u64::MAX] {
        assert!(matches!(
            VsockDevice::unix_mux(cid, dir.path().join("v")),
            Err(VsockError::GuestCid { .. })
        ));
    }
    assert!(!dir.path().join("v").exists());
}

#[test]
fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vsock");
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let first = VsockDevice::unix_mux(3, &path).unwrap();
    assert!(matches!(
        VsockDevice::unix_mux(4, &path),
        Err(VsockError::InUse { .. })
    ));
    drop(first);
    assert!(!path.exists(), "the file goes with the device");
}

#[test]
fn what_is_no_socket_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("precious");
    std::fs::write(&path, "data").unwrap();
    assert!(matches!(
        VsockDevice::unix_mux(3, &path),
        Err(VsockError::NotASocket { .. })
    ));
    assert_eq!(std::fs::read(&path).unwrap(), b"data");
}

#[test]
fn a_file_that_replaced_the_socket_is_not_removed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vsock");
    let device = VsockDevice::unix_mux(3, &path).unwrap();
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "other").unwrap();
    drop(device);
    assert!(path.exists());
}

#[test]
fn a_missing_directory_and_a_long_path_are_named() {
    let missing = VsockDevice::unix_mux(3, "/nonexistent/x/vsock").unwrap_err();
    assert!(missing.to_string().contains("/nonexistent/x/vsock"));
    let long = format!("/tmp/{}", "x".repeat(100));
    assert!(matches!(
        VsockDevice::unix_mux(3, long),
        Err(VsockError::PathTooLong { .. })
    ));
}

#[test]
fn a_device_without_all_queues_does_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut device = VsockDevice::unix_mux(3, dir.path().join("v")).unwrap();
    let mem = memory(1 << 20);
    let queue = DriverQueue::new(&mem, 0x10000, 16);
    let irq = Arc::new(CountingInterrupt::default());
    start(&mut device, &[&queue], &irq, 0);
    for queue in [RX, TX, EVENT, 3] {
        assert_eq!(device.on_queue(queue).unwrap(), Progress::Idle);
    }
    assert_eq!(stop(&mut device).len(), 1);
}

#[test]
fn a_pause_keeps_connections_and_a_reset_ends_them() {
    let mut rig = Rig::ready();
    let (ports, mut host) = rig.open_from_guest(1);
    let queues = stop(&mut rig.device);
    assert_eq!(queues.len(), 3);
    assert!(stop(&mut rig.device).is_empty());
    host.write_all(b"meanwhile").unwrap();
    for queue in queues {
        rig.device.start_queue(queue).unwrap();
    }
    rig.run();
    assert_eq!(rig.expect(Op::Data).1, b"meanwhile");
    rig.data(ports, b"yes");
    assert_eq!(read(&mut host, 3), b"yes");
    stop(&mut rig.device);
    rig.device.reset();
    assert!(is_closed(&mut host));
    assert_eq!(rig.device.statistics(), (0, 0, 0, 0));
}

#[test]
fn a_reset_of_the_transport_is_an_event() {
    let mut rig = Rig::ready();
    let (_, mut host) = rig.open_from_guest(1);
    rig.device.reset_transport();
    assert!(is_closed(&mut host));
    assert!(rig.event.take_used().is_none(), "no buffer yet");
    rig.mem.write_obj(7u32, GuestAddress(EVENT_BUF)).unwrap();
    rig.event.add(&[], &[(EVENT_BUF, 4)]);
    rig.run();
    assert_eq!(rig.event.take_used().unwrap().len, 4);
    assert_eq!(rig.mem.read_obj::<u32>(GuestAddress(EVENT_BUF)).unwrap(), 0);
    rig.event.add(&[], &[(EVENT_BUF, 4)]);
    rig.run();
    assert!(rig.event.take_used().is_none(), "told once");
    rig.expect_nothing();
}

#[test]
fn new_connections_wait_until_the_driver_has_worked_off_the_reset() {
    let mut rig = Rig::ready();
    rig.event.add(&[], &[(EVENT_BUF, 4)]);
    rig.event.add(&[], &[(EVENT_BUF + 4, 4)]);
    rig.device.reset_transport();
    let _stream = rig.device.connect(1024).unwrap();
    rig.run();
    assert!(rig.event.take_used().is_some());
    rig.expect_nothing();
    // The driver ends all its connections, and makes its buffer available again.
    rig.event.add(&[], &[(EVENT_BUF, 4)]);
    rig.run();
    rig.expect(Op::Request);
    assert!(rig.event.take_used().is_none(), "told once");
}

#[test]
fn a_restored_device_gives_no_port_that_the_guest_may_still_know() {
    let mut rig = Rig::ready();
    let _known = rig.device.connect(1024).unwrap();
    rig.run();
    let (known, _) = rig.expect(Op::Request);
    let saved = rig.device.save();
    let dir = tempfile::tempdir().unwrap();
    let mut other = Rig::over(VsockDevice::in_process(CID).unwrap(), dir);
    other.device.restore(&saved).unwrap();
    other.post_rx(usize::from(QUEUE));
    let _new = other.device.connect(1024).unwrap();
    other.run();
    let (new, _) = other.expect(Op::Request);
    assert_ne!(new.src_port, known.src_port);
    for port in [0, 1023, (1 << 30) - 1, u32::MAX] {
        let bytes = port.to_le_bytes().into();
        let saved = SavedDevice { version: 1, bytes };
        assert!(other.device.restore(&saved).is_err(), "{port}");
    }
}

#[test]
fn this_process_connects_and_listens_without_a_path() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::over(VsockDevice::in_process(CID).unwrap(), dir);
    rig.post_rx(usize::from(QUEUE));
    let mut stream = rig.device.connect(1024).unwrap();
    limit(&stream);
    stream.write_all(b"early").unwrap();
    assert!(rig.backend_readable(), "the event loop hears of it");
    rig.run();
    let (header, _) = rig.expect(Op::Request);
    rig.expect_nothing();
    let ports = Ports {
        guest: header.dst_port,
        host: header.src_port,
    };
    assert_eq!(ports.guest, 1024);
    rig.send(ports, Op::Response);
    rig.run();
    assert_eq!(rig.expect(Op::Data).1, b"early");
    rig.data(ports, b"answer");
    assert_eq!(read(&mut stream, 6), b"answer", "and no line before it");

    let (tx, streams) = std::sync::mpsc::channel();
    rig.device.listen(7, move |stream| tx.send(stream).unwrap());
    let ports = Ports { guest: 50, host: 7 };
    rig.send(ports, Op::Request);
    rig.expect(Op::Response);
    let mut stream = streams.try_recv().unwrap();
    limit(&stream);
    rig.data(ports, b"hello");
    assert_eq!(read(&mut stream, 5), b"hello");
    rig.send(Ports { guest: 51, host: 8 }, Op::Request);
    rig.expect(Op::Reset);
    assert_eq!(rig.counter("connections_refused"), 1);
}

#[test]
fn a_connection_of_this_process_that_the_guest_refuses_ends() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::over(VsockDevice::in_process(CID).unwrap(), dir);
    rig.post_rx(4);
    let mut stream = rig.device.connect(1).unwrap();
    limit(&stream);
    rig.run();
    let (header, _) = rig.expect(Op::Request);
    let ports = Ports {
        guest: header.dst_port,
        host: header.src_port,
    };
    rig.send(ports, Op::Reset);
    assert!(is_closed(&mut stream));
}

#[test]
fn a_listening_socket_is_handed_in() {
    let dir = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(dir.path().join("vsock")).unwrap();
    let mut rig = Rig::over(VsockDevice::from_listener(CID, listener).unwrap(), dir);
    rig.post_rx(usize::from(QUEUE));
    let (ports, mut host) = rig.open_from_host(9);
    rig.data(ports, b"yes");
    assert_eq!(read(&mut host, 3), b"yes");
    assert!(VsockDevice::in_process(2).is_err());
}

/// Gives the device to a driver that accepts these of its features.
fn start_with(rig: &mut Rig, features: u64) {
    let queues = stop(&mut rig.device);
    rig.device.reset();
    rig.device.negotiated(features);
    for queue in queues {
        rig.device.start_queue(queue).unwrap();
    }
}

#[test]
fn a_driver_that_has_no_streams_gets_none() {
    let mut rig = Rig::ready();
    assert_eq!(rig.device.info().features, 0b101);
    let mut early = rig.device.connect(1).unwrap();
    limit(&early);
    start_with(&mut rig, 0b100);
    assert!(is_closed(&mut early));
    // As for any unknown type.
    let listener = rig.listen(7);
    listener.set_nonblocking(true).unwrap();
    rig.send(Ports { guest: 1, host: 7 }, Op::Request);
    rig.expect(Op::Reset);
    assert!(listener.accept().is_err());
    assert_eq!(rig.counter("invalid_packets"), 1);

    let mut host = UnixStream::connect(rig.path()).unwrap();
    limit(&host);
    host.write_all(b"CONNECT 1\n").unwrap();
    rig.run();
    assert!(is_closed(&mut host));
    let refused = rig.device.connect(1).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::ESOCKTNOSUPPORT));
    rig.expect_nothing();
    assert_eq!(rig.device.statistics(), (0, 0, 0, 0));
}

#[test]
fn a_driver_has_streams_unless_it_chooses_to_have_none() {
    for features in [0, 0b001, 0b101] {
        let mut rig = Rig::ready();
        start_with(&mut rig, 0b100);
        start_with(&mut rig, features);
        rig.open_from_guest(1);
        rig.open_from_host(2);
    }
    // A driver that has not started yet has made no choice.
    let mut rig = Rig::ready();
    start_with(&mut rig, 0b100);
    rig.device.reset();
    rig.device.connect(1).unwrap();
}
