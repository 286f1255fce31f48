use super::*;
use crate::testing::{
    CountingInterrupt, DriverQueue, counter, memory, memory_in_pieces, start, stop,
};
use fuse_backend_rs::abi::fuse_abi::{
    EntryOut, ForgetIn, InHeader, InitIn, InitOut, OpenIn, OpenOut, ReadIn, ReleaseIn, WriteIn,
};
use proptest::prelude::*;
use std::sync::atomic::Ordering::SeqCst;
use vm_memory::{ByteValued, Bytes, GuestAddress};

mod counted;
mod logged;

const IN: u64 = 0x10_0000;
const OUT: u64 = 0x20_0000;
const ROOT: u64 = 1;

struct Rig {
    mem: GuestRam,
    urgent: DriverQueue,
    requests: DriverQueue,
    device: FsDevice,
    irq: Arc<CountingInterrupt>,
    dir: tempfile::TempDir,
}

fn rig_with(make: impl FnOnce(FsDevice) -> FsDevice) -> Rig {
    rig_in(memory(4 << 20), make)
}

fn rig_in(mem: GuestRam, make: impl FnOnce(FsDevice) -> FsDevice) -> Rig {
    let urgent = DriverQueue::new(&mem, 0x1_0000, 128);
    let requests = DriverQueue::new(&mem, 0x2_0000, 512);
    let irq = Arc::new(CountingInterrupt::default());
    let dir = tempfile::tempdir().unwrap();
    let mut device = make(FsDevice::open("share", dir.path()).unwrap());
    start(&mut device, &[&urgent, &requests], &irq, 0);
    Rig {
        mem,
        urgent,
        requests,
        device,
        irq,
        dir,
    }
}

fn rig() -> Rig {
    rig_with(|device| device)
}

fn message(opcode: Opcode, node: u64, body: &[u8]) -> Vec<u8> {
    let header = InHeader {
        len: u32::try_from(size_of::<InHeader>() + body.len()).unwrap(),
        opcode: opcode as u32,
        unique: 4711,
        nodeid: node,
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        pid: 1,
        padding: 0,
    };
    [header.as_slice(), body].concat()
}

/// The error of a reply (0 for none) and the bytes after its header.
#[derive(Debug)]
struct Reply {
    error: i32,
    body: Vec<u8>,
}

impl Reply {
    fn object<T: ByteValued + Default>(&self) -> T {
        assert_eq!(self.error, 0);
        let mut object = T::default();
        let len = size_of::<T>();
        object.as_mut_slice().copy_from_slice(&self.body[..len]);
        object
    }
}

#[test]
fn buffers_across_regions_of_memory_are_served() {
    let pieces = [IN as usize + 50, OUT as usize - IN as usize, 1 << 20];
    let mut rig = rig_in(memory_in_pieces(&pieces), |device| device);
    let reply = rig.call(Opcode::Getattr, ROOT, &[0; 16]);
    assert_eq!((reply.error, reply.body.len()), (0, 104));
}

impl Rig {
    fn notify(&mut self, queue: u16) {
        while self.device.on_queue(queue).unwrap() == Progress::More {}
    }

    fn call(&mut self, opcode: Opcode, node: u64, body: &[u8]) -> Reply {
        self.call_with_room(opcode, node, body, 0x1_0000)
    }

    fn call_with_room(&mut self, opcode: Opcode, node: u64, body: &[u8], room: u32) -> Reply {
        self.send(&message(opcode, node, body), room)
    }

    fn send(&mut self, bytes: &[u8], room: u32) -> Reply {
        self.mem.write_slice(bytes, GuestAddress(IN)).unwrap();
        let len = u32::try_from(bytes.len()).unwrap();
        self.requests.add(
            &[(IN, 40), (IN + 40, len - 40)],
            &[(OUT, 16), (OUT + 16, room)],
        );
        self.notify(1);
        let used = self.requests.take_used().unwrap().len as usize;
        assert!(used >= 16);
        let mut reply = vec![0; used];
        self.mem.read_slice(&mut reply, GuestAddress(OUT)).unwrap();
        let number = |at: usize| i32::from_le_bytes(reply[at..at + 4].try_into().unwrap());
        assert_eq!(
            number(0) as usize,
            used,
            "the header says how long the reply is"
        );
        assert_eq!(reply[8..16], 4711u64.to_le_bytes());
        Reply {
            error: -number(4),
            body: reply[16..].to_vec(),
        }
    }

    fn begin(&mut self) -> InitOut {
        let hello = InitIn {
            major: 7,
            minor: 38,
            max_readahead: 0x2_0000,
            flags: u32::MAX,
        };
        let body = [hello.as_slice(), &[0xff; 4], &[0; 44]].concat();
        self.call(Opcode::Init, 0, &body).object()
    }

    fn look_up(&mut self, name: &[u8]) -> EntryOut {
        self.call(Opcode::Lookup, ROOT, name).object()
    }

    fn open(&mut self, node: u64, flags: i32) -> u64 {
        let open = OpenIn {
            flags: flags.cast_unsigned(),
            fuse_flags: 0,
        };
        let opened: OpenOut = self.call(Opcode::Open, node, open.as_slice()).object();
        opened.fh
    }

    fn counter(&self, name: &str) -> u64 {
        counter(&self.device, name)
    }
}

#[test]
fn a_client_begins_looks_up_reads_and_writes() {
    let mut rig = rig();
    std::fs::write(rig.dir.path().join("file"), "old text").unwrap();
    let hello = rig.begin();
    assert_eq!(
        (hello.major, hello.max_write, hello.max_pages),
        (7, 1 << 20, 256)
    );
    // SUBMOUNTS and AUTO_INVAL_DATA are on, locks and write-back are off.
    assert_eq!(hello.flags & 0x800_1002, 0x800_1000);
    assert_eq!(hello.flags & (1 << 16), 0);
    let entry = rig.look_up(b"file\0");
    assert_eq!((entry.attr.size, entry.entry_valid), (8, 0));
    let handle = rig.open(entry.nodeid, libc::O_RDWR);
    let read = ReadIn {
        fh: handle,
        offset: 4,
        size: 100,
        ..ReadIn::default()
    };
    let reply = rig.call(Opcode::Read, entry.nodeid, read.as_slice());
    assert_eq!(
        (reply.error, reply.body.as_slice()),
        (0, b"text".as_slice())
    );
    let write = WriteIn {
        fh: handle,
        offset: 0,
        size: 3,
        ..WriteIn::default()
    };
    let reply = rig.call(
        Opcode::Write,
        entry.nodeid,
        &[write.as_slice(), b"new"].concat(),
    );
    assert_eq!((reply.error, reply.body[0]), (0, 3));
    assert_eq!(
        std::fs::read(rig.dir.path().join("file")).unwrap(),
        b"new text"
    );
    let counts = [
        "read_bytes",
        "written_bytes",
        "open_objects",
        "open_handles",
    ];
    assert_eq!(counts.map(|name| rig.counter(name)), [4, 3, 1, 1]);
    let release = ReleaseIn {
        fh: handle,
        ..ReleaseIn::default()
    };
    assert_eq!(
        rig.call(Opcode::Release, entry.nodeid, release.as_slice())
            .error,
        0
    );
    assert_eq!(rig.counter("open_handles"), 0);
    assert!(rig.irq.queue.load(SeqCst) > 0);
    assert_eq!(rig.call(Opcode::Destroy, 0, &[]).error, 0);
    assert_eq!(rig.counter("open_objects"), 0);
}

#[test]
fn files_of_proc_have_contents() {
    let mut rig = rig_with(|_| FsDevice::open("share", "/proc").unwrap());
    rig.begin();
    let entry = rig.look_up(b"version\0");
    assert_eq!(entry.attr.size, 0);
    let open = OpenIn::default();
    let opened: OpenOut = rig
        .call(Opcode::Open, entry.nodeid, open.as_slice())
        .object();
    // FOPEN_DIRECT_IO and FOPEN_NOFLUSH
    assert_eq!(opened.open_flags, 1 | 1 << 5);
    let read = ReadIn {
        fh: opened.fh,
        offset: 6,
        size: 7,
        ..ReadIn::default()
    };
    let reply = rig.call(Opcode::Read, entry.nodeid, read.as_slice());
    assert_eq!(reply.body, b"version");
}

#[test]
fn a_read_beyond_the_room_for_it_is_cut_off_there() {
    let mut rig = rig();
    std::fs::write(rig.dir.path().join("file"), vec![7; 5000]).unwrap();
    rig.begin();
    let entry = rig.look_up(b"file\0");
    let handle = rig.open(entry.nodeid, 0);
    rig.mem.write_slice(&[9; 200], GuestAddress(OUT)).unwrap();
    let read = ReadIn {
        fh: handle,
        size: u32::MAX,
        ..ReadIn::default()
    };
    let reply = rig.call_with_room(Opcode::Read, entry.nodeid, read.as_slice(), 100);
    assert_eq!(reply.body, [7; 100]);
    assert_eq!(rig.mem.read_obj::<u8>(GuestAddress(OUT + 116)).unwrap(), 9);
}

#[test]
fn no_more_is_read_or_written_at_once_than_the_client_was_told() {
    const MOST: u64 = 1 << 20;
    let asked = u32::try_from(MOST + MOST / 2).unwrap();
    let mut rig = rig();
    let path = rig.dir.path().join("file");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(4 * MOST).unwrap();
    rig.begin();
    let node = rig.look_up(b"file\0").nodeid;
    let fh = rig.open(node, libc::O_RDWR);
    let read = ReadIn {
        fh,
        size: u32::MAX,
        ..ReadIn::default()
    };
    let reply = rig.call_with_room(Opcode::Read, node, read.as_slice(), asked);
    assert_eq!((reply.error, reply.body.len() as u64), (0, MOST));
    for (from, fuse_flags) in [(0, 0), (2 * MOST, 1)] {
        let write = WriteIn {
            fh,
            offset: from,
            size: asked,
            fuse_flags,
            ..WriteIn::default()
        };
        let body = [write.as_slice(), &vec![7; asked as usize]].concat();
        let mut bytes = message(Opcode::Write, node, &body);
        assert_eq!(rig.send(&bytes, 100).error, libc::ENOMEM);
        // The length in the header does not limit the data of a write.
        bytes[..4].copy_from_slice(&80u32.to_le_bytes());
        let reply = rig.send(&bytes, 100);
        assert_eq!(reply.error, 0);
        assert_eq!(reply.body[..4], (1u32 << 20).to_le_bytes());
        let there = std::fs::read(&path).unwrap();
        let (_, there) = there.split_at(usize::try_from(from).unwrap());
        let end = there.iter().position(|byte| *byte != 7);
        assert_eq!(end, Some(1 << 20));
    }
    assert_eq!(rig.counter("read_bytes"), MOST);
    assert_eq!(rig.counter("written_bytes"), 2 * MOST);
}

#[test]
fn forgetting_is_not_answered_and_forgetting_too_much_is_harmless() {
    let mut rig = rig();
    std::fs::write(rig.dir.path().join("file"), "").unwrap();
    rig.begin();
    let entry = rig.look_up(b"file\0");
    for node in [entry.nodeid, entry.nodeid, 999, ROOT] {
        let forget = ForgetIn { nlookup: u64::MAX };
        let bytes = message(Opcode::Forget, node, forget.as_slice());
        rig.mem.write_slice(&bytes, GuestAddress(IN)).unwrap();
        rig.urgent.add(&[(IN, 48)], &[]);
        rig.notify(0);
        assert_eq!(rig.urgent.take_used().unwrap().len, 0);
    }
    assert_eq!(rig.counter("open_objects"), 0);
    assert_eq!(rig.look_up(b"file\0").attr.size, 0);
}

#[test]
fn requests_that_are_none_are_answered_with_an_error() {
    let mut rig = rig();
    rig.begin();
    let invalid = Errno::INVAL.raw_os_error();
    // Without the NUL after the name, without a name, without the arguments.
    assert_eq!(rig.call(Opcode::Lookup, ROOT, b"file").error, invalid);
    assert_eq!(rig.call(Opcode::Symlink, ROOT, b"name\0").error, invalid);
    assert_eq!(rig.call(Opcode::Getattr, ROOT, &[0; 3]).error, invalid);
    assert_eq!(rig.call(Opcode::Lookup, ROOT, b"..\0").error, invalid);
    // A length beyond the end of the request.
    let mut bytes = message(Opcode::Lookup, ROOT, b"name\0");
    bytes[..4].copy_from_slice(&u32::MAX.to_le_bytes());
    rig.mem.write_slice(&bytes, GuestAddress(IN)).unwrap();
    rig.requests.add(&[(IN, 45)], &[(OUT, 100)]);
    // An unknown opcode.
    let mut bytes = message(Opcode::Lookup, ROOT, &[]);
    bytes[4..8].copy_from_slice(&0xdead_u32.to_le_bytes());
    rig.mem
        .write_slice(&bytes, GuestAddress(IN + 0x1000))
        .unwrap();
    rig.requests
        .add(&[(IN + 0x1000, 40)], &[(OUT + 0x1000, 100)]);
    // No memory is mapped through this device.
    let body = message(Opcode::SetupMapping, ROOT, &[0; 40]);
    rig.mem
        .write_slice(&body, GuestAddress(IN + 0x2000))
        .unwrap();
    rig.requests
        .add(&[(IN + 0x2000, 80)], &[(OUT + 0x2000, 100)]);
    // There is no room for this answer either.
    rig.requests
        .add(&[(IN + 0x1000, 40)], &[(OUT + 0x3000, 15)]);
    rig.notify(1);
    let errors: Vec<i32> = (0..3u64)
        .map(|n| {
            assert_eq!(rig.requests.take_used().unwrap().len, 16);
            let at = GuestAddress(OUT + n * 0x1000 + 4);
            -rig.mem.read_obj::<i32>(at).unwrap()
        })
        .collect();
    assert_eq!(errors, [libc::ENOMEM, libc::ENOSYS, libc::ENOSYS]);
    assert_eq!(rig.requests.take_used().unwrap().len, 0);
    assert!(rig.counter("malformed_requests") >= 4);
}

#[test]
fn a_request_shorter_than_its_header_is_a_fault() {
    let mut rig = rig();
    rig.requests.add(&[(IN, 39)], &[(OUT, 100)]);
    assert!(matches!(rig.device.on_queue(1), Err(Fault::Guest(_))));
    assert_eq!(stop(&mut rig.device).len(), 2);
    assert_eq!(rig.device.on_queue(1).unwrap(), Progress::Idle);
    assert_eq!(rig.device.on_queue(7).unwrap(), Progress::Idle);
}

/// A client with so many requests in the queue.
fn rig_with_requests(count: usize) -> Rig {
    let mut rig = rig();
    rig.begin();
    let bytes = message(Opcode::Statfs, ROOT, &[]);
    rig.mem.write_slice(&bytes, GuestAddress(IN)).unwrap();
    for _ in 0..count {
        rig.requests.add(&[(IN, 40)], &[]);
    }
    rig
}

#[test]
fn a_flood_of_requests_leaves_the_event_loop_its_turn() {
    let mut rig = rig_with_requests(500);
    let mut turns = 1;
    while rig.device.on_queue(1).unwrap() == Progress::More {
        turns += 1;
    }
    assert!((2..20).contains(&turns), "{turns}");
    assert_eq!(std::iter::from_fn(|| rig.requests.take_used()).count(), 500);
}

#[test]
fn a_turn_ends_when_it_has_taken_long_enough() {
    let mut rig = rig_with_requests(3);
    rig.device.max_turn = Duration::ZERO;
    for progress in [Progress::More, Progress::More, Progress::Idle] {
        assert_eq!(rig.device.on_queue(1).unwrap(), progress);
        assert!(rig.requests.take_used().is_some(), "one at a time");
        assert!(rig.requests.take_used().is_none());
    }
}

#[test]
fn numbers_of_a_client_before_a_restore_are_nobodys_after_it() {
    let mut one = rig();
    std::fs::write(one.dir.path().join("file"), "text").unwrap();
    one.begin();
    let old = one.look_up(b"file\0").nodeid;
    stop(&mut one.device);
    let saved = one.device.save();
    let mut two = rig_with(|mut device| {
        device.restore(&saved).unwrap();
        device
    });
    std::fs::write(two.dir.path().join("other"), "text").unwrap();
    let new = two.look_up(b"other\0").nodeid;
    assert!(new > old);
    assert_eq!(two.call(Opcode::Getattr, old, &[0; 16]).error, libc::ESTALE);
    for bytes in [vec![], vec![0; 8], vec![0xff; 8], vec![1; 9]] {
        let saved = SavedDevice { version: 1, bytes };
        assert!(two.device.restore(&saved).is_err());
    }
}

#[test]
fn a_pause_keeps_what_is_open_and_a_reset_closes_it() {
    let mut rig = rig();
    std::fs::write(rig.dir.path().join("file"), "text").unwrap();
    rig.begin();
    let entry = rig.look_up(b"file\0");
    let handle = rig.open(entry.nodeid, 0);
    let restart = |rig: &mut Rig, reset: bool| {
        let queues = stop(&mut rig.device);
        if reset {
            rig.device.reset();
        }
        for queue in queues {
            rig.device.start_queue(queue).unwrap();
        }
    };
    let read = ReadIn {
        fh: handle,
        size: 10,
        ..ReadIn::default()
    };
    restart(&mut rig, false);
    let reply = rig.call(Opcode::Read, entry.nodeid, read.as_slice());
    assert_eq!(reply.body, b"text");
    restart(&mut rig, true);
    assert_eq!(rig.counter("open_handles"), 0);
    let reply = rig.call(Opcode::Read, entry.nodeid, read.as_slice());
    assert_eq!(reply.error, libc::EBADF);
}

#[test]
fn configuration_space_is_the_tag_and_one_queue() {
    let rig = rig();
    let mut config = [9; 44];
    rig.device.info().config.read(0, &mut config);
    assert_eq!(config[..6], *b"share\0");
    assert!(config[6..36].iter().all(|byte| *byte == 0));
    assert_eq!(config[36..], [1, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn bad_tags_and_roots_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for tag in ["", "a\0b", "0123456789012345678901234567890123456"] {
        let error = FsDevice::open(tag, dir.path()).unwrap_err();
        assert!(matches!(error, FsDeviceError::Tag { .. }), "{error}");
    }
    let root = FsDevice::open(&"x".repeat(MAX_TAG_LEN), dir.path()).unwrap();
    let flags = rustix::io::fcntl_getfd(&root.root).unwrap();
    assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    let flags = rustix::fs::fcntl_getfl(&root.root).unwrap();
    assert!(flags.contains(OFlags::PATH));
    let file = tempfile::NamedTempFile::new().unwrap();
    let error = FsDevice::open("a", file.path()).unwrap_err();
    assert!(matches!(error, FsDeviceError::Open { .. }), "{error}");
    let missing = FsDevice::open("a", dir.path().join("x")).unwrap_err();
    assert!(matches!(missing, FsDeviceError::Open { .. }));
    let file = tempfile::tempfile().unwrap();
    let error = FsDevice::new("a", file.into()).unwrap_err();
    assert!(matches!(error, FsDeviceError::Root(_)));
}

#[test]
fn a_read_only_device_refuses_to_open_for_writing() {
    let mut rig = rig_with(|device| device.read_only().unwrap());
    std::fs::write(rig.dir.path().join("file"), "text").unwrap();
    rig.begin();
    let entry = rig.look_up(b"file\0");
    let open = OpenIn {
        flags: libc::O_RDWR.cast_unsigned(),
        fuse_flags: 0,
    };
    let reply = rig.call(Opcode::Open, entry.nodeid, open.as_slice());
    assert_eq!(reply.error, libc::EROFS);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Any request gets an answer that fits, and the next one is served.
    #[test]
    fn any_request_is_answered_within_its_room(
        opcode in 0u32..60,
        node in 0u64..4,
        body in proptest::collection::vec(prop_oneof![Just(0u8), 0u8..4, any::<u8>()], 0..200),
        room in 0u32..300,
    ) {
        let mut rig = rig_with(|device| device.max_open(20).unwrap());
        std::fs::write(rig.dir.path().join("file"), "text").unwrap();
        rig.begin();
        rig.look_up(b"file\0");
        let mut bytes = message(Opcode::Lookup, node, &body);
        bytes[4..8].copy_from_slice(&opcode.to_le_bytes());
        rig.mem.write_slice(&bytes, GuestAddress(IN)).unwrap();
        rig.mem.write_slice(&[0x5a; 400], GuestAddress(OUT)).unwrap();
        let len = u32::try_from(bytes.len()).unwrap();
        rig.requests.add(&[(IN, len)], &[(OUT, room)]);
        rig.notify(1);
        let used = rig.requests.take_used().unwrap();
        prop_assert!(used.len <= room);
        let mut after = [0; 100];
        rig.mem.read_slice(&mut after, GuestAddress(OUT + u64::from(room))).unwrap();
        prop_assert_eq!(after, [0x5a; 100]);
        prop_assert_eq!(rig.call(Opcode::Statfs, ROOT, &[]).error, 0);
    }
}

#[test]
fn a_file_appends_as_long_as_its_program_says() {
    let mut rig = rig();
    let path = rig.dir.path().join("file");
    rig.begin();
    for opened in [libc::O_RDWR, libc::O_RDWR | libc::O_APPEND] {
        std::fs::write(&path, "0123456789").unwrap();
        let entry = rig.look_up(b"file\0");
        let fh = rig.open(entry.nodeid, opened);
        let mut write = |text: &[u8], offset, fuse_flags, flags: i32| {
            let write = WriteIn {
                fh,
                offset,
                size: u32::try_from(text.len()).unwrap(),
                fuse_flags,
                flags: flags.cast_unsigned(),
                ..WriteIn::default()
            };
            let body = [write.as_slice(), text].concat();
            assert_eq!(rig.call(Opcode::Write, entry.nodeid, &body).error, 0);
            std::fs::read(&path).unwrap()
        };
        let append = libc::O_RDWR | libc::O_APPEND;
        assert_eq!(write(b"a", 3, 0, append), b"0123456789a");
        assert_eq!(write(b"HEAD", 0, 0, libc::O_RDWR), b"HEAD456789a");
        assert_eq!(write(b"b", 3, 0, append), b"HEAD456789ab");
        // FUSE_WRITE_CACHE: of a mapping, which has its place whatever the file's flags are.
        assert_eq!(write(b"c", 4, 1, append), b"HEADc56789ab");
        assert_eq!(write(b"d", 0, 0, append), b"HEADc56789abd");
    }
}

#[test]
fn a_file_system_is_synced_when_a_client_asks_for_it() {
    let mut rig = rig();
    rig.begin();
    let mut sync = |process: u32, node| {
        let mut bytes = message(Opcode::Getattr, node, &[0; 8]);
        bytes[4..8].copy_from_slice(&SYNCFS.to_le_bytes());
        bytes[32..36].copy_from_slice(&process.to_le_bytes());
        rig.send(&bytes, 100)
    };
    let synced = sync(77, ROOT);
    assert_eq!((synced.error, synced.body.len()), (0, 0));
    assert_eq!(sync(77, 99).error, libc::ESTALE);
    // A sync by the guest's first process, before it powers off, is not carried out.
    assert_eq!(sync(1, 99).error, 0);
}
