//! Requests of which `fuse-backend-rs` would log a line each.

use super::*;

/// Counts what a thread logs with the macros of `log`, which `fuse-backend-rs` uses.
struct CountLogged;

thread_local! {
    static LOGGED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

impl log::Log for CountLogged {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }
    fn log(&self, record: &log::Record<'_>) {
        let len = record.args().to_string().len();
        LOGGED.with(|logged| logged.set(logged.get() + len));
    }
    fn flush(&self) {}
}

fn count_logged() {
    // Another test may have set it.
    let _ = log::set_logger(&CountLogged);
    log::set_max_level(log::LevelFilter::Info);
}

#[test]
fn requests_that_cannot_be_served_are_answered_and_logged_by_nobody() {
    count_logged();
    let mut rig = rig();
    std::fs::write(rig.dir.path().join("file"), "text").unwrap();
    let hello = |major, minor, flags: u32, rest: &[u8]| {
        let hello = InitIn {
            major,
            minor,
            max_readahead: 0x2_0000,
            flags,
        };
        [hello.as_slice(), rest].concat()
    };
    rig.begin();
    for (body, error) in [
        (hello(6, 99, u32::MAX, &[0; 48]), libc::EPROTO),
        (hello(0, 0, 0, &[]), libc::EPROTO),
        (hello(7, 22, u32::MAX, &[0; 48]), libc::EPROTO),
        (hello(7, 38, u32::MAX, &[]), libc::EINVAL),
        (hello(7, 38, 0, &[])[..15].to_vec(), libc::EINVAL),
        (hello(7, 38, 0, &[]), 0),
        (hello(8, 0, 0, &[]), 0),
    ] {
        let reply = rig.call(Opcode::Init, 0, &body);
        assert_eq!(reply.error, error, "{body:?}");
        if error == 0 {
            let told: InitOut = reply.object();
            assert_eq!((told.major, told.minor), (7, 33));
        }
    }
    assert_eq!(
        rig.call_with_room(Opcode::Init, 0, &hello(7, 38, 0, &[]), 63)
            .error,
        libc::EINVAL
    );
    let file = rig.look_up(b"file\0").nodeid;
    let of_file = rig.open(file, libc::O_RDONLY);
    let opened: OpenOut = rig.call(Opcode::Opendir, ROOT, &[0; 8]).object();
    for opcode in [Opcode::Readdir, Opcode::Readdirplus] {
        for (node, fh, offset, size, error) in [
            (ROOT, opened.fh + 99, 0, 100, libc::EBADF),
            (99, opened.fh, 0, 100, libc::ESTALE),
            (file, of_file, 0, 100, libc::ENOTDIR),
            (ROOT, opened.fh, u64::MAX, 100, libc::EINVAL),
            (ROOT, opened.fh, 0, u32::MAX, 0),
            (ROOT, opened.fh, 0, 1016, 0),
            (ROOT, opened.fh, 0, 0, 0),
        ] {
            let list = ReadIn {
                fh,
                offset,
                size,
                ..ReadIn::default()
            };
            let reply = rig.call_with_room(opcode, node, list.as_slice(), 1000);
            assert_eq!(reply.error, error, "{fh} {offset} {size}");
            assert_eq!(reply.body.is_empty(), error != 0 || size == 0);
            // A list of which not even the first entry fits.
            let reply = rig.call_with_room(opcode, node, list.as_slice(), 4);
            assert!(reply.body.is_empty(), "{:?}", reply.body);
        }
    }
    for opcode in [Opcode::SetupMapping, Opcode::RemoveMapping] {
        for body in [&[0xff; 64][..], &[]] {
            assert_eq!(rig.call(opcode, ROOT, body).error, libc::ENOSYS);
        }
    }
    let malformed = rig.counter("malformed_requests");
    for (len, error) in [(1 << 20 | 0x1000, 0), (1 << 20 | 0x1001, libc::ENOMEM)] {
        let mut bytes = message(Opcode::Getattr, ROOT, &[0; 16]);
        bytes[..4].copy_from_slice(&u32::to_le_bytes(len));
        assert_eq!(rig.send(&bytes, 200).error, error);
    }
    let mut forget = message(Opcode::Forget, ROOT, &[0; 8]);
    forget[..4].copy_from_slice(&u32::MAX.to_le_bytes());
    rig.mem.write_slice(&forget, GuestAddress(IN)).unwrap();
    rig.requests.add(&[(IN, 48)], &[(OUT, 16)]);
    // There is no room for this one's answer.
    let destroy = message(Opcode::Destroy, 0, &[]);
    let at = GuestAddress(IN + 0x1000);
    rig.mem.write_slice(&destroy, at).unwrap();
    rig.requests.add(&[(IN + 0x1000, 40)], &[(OUT, 15)]);
    rig.notify(1);
    let used: Vec<_> = std::iter::from_fn(|| rig.requests.take_used()).collect();
    assert_eq!(used.iter().map(|used| used.len).collect::<Vec<_>>(), [0, 0]);
    assert_eq!(rig.counter("malformed_requests"), malformed + 2);
    assert_eq!(rig.counter("open_handles"), 0, "the client is gone");
    assert_eq!(LOGGED.get(), 0, "bytes were logged");
}

#[test]
fn names_without_an_end_are_refused_and_logged_by_nobody() {
    count_logged();
    let mut rig = rig();
    rig.begin();
    // The number of bytes before the names, and the number of names.
    let requests = [
        (Opcode::Lookup, 0, 1),
        (Opcode::Symlink, 0, 2),
        (Opcode::Mknod, 16, 1),
        (Opcode::Mkdir, 8, 1),
        (Opcode::Unlink, 0, 1),
        (Opcode::Rmdir, 0, 1),
        (Opcode::Rename, 8, 2),
        (Opcode::Rename2, 16, 2),
        (Opcode::Link, 8, 1),
        (Opcode::Setxattr, 8, 1),
        (Opcode::Getxattr, 8, 1),
        (Opcode::Removexattr, 0, 1),
        (Opcode::Create, 16, 1),
    ];
    for (opcode, before, names) in requests {
        let number = opcode as u32;
        let mut body = vec![0; before];
        for _ in 0..names {
            for cut in 0..=body.len() {
                // Partial arguments, no name, or only one of two.
                let error = rig.call(opcode, ROOT, &body[..cut]).error;
                assert_eq!(error, libc::EINVAL, "{number}, {cut} bytes");
            }
            let begun = [&body[..], b"name"].concat();
            assert_eq!(
                rig.call(opcode, ROOT, &begun).error,
                libc::EINVAL,
                "{number}"
            );
            // With a terminator beyond the request's own length.
            let mut bytes = message(opcode, ROOT, &[&begun[..], b"\0"].concat());
            let len = u32::try_from(bytes.len() - 1).unwrap();
            bytes[..4].copy_from_slice(&len.to_le_bytes());
            assert_eq!(rig.send(&bytes, 100).error, libc::EINVAL, "{number}");
            body.extend(b"name\0");
        }
        // The complete request is carried out, with any result.
        let malformed = rig.counter("malformed_requests");
        let reply = rig.call(opcode, ROOT, &body);
        assert_eq!(
            rig.counter("malformed_requests"),
            malformed,
            "{number}: {reply:?}"
        );
    }
    assert_eq!(LOGGED.get(), 0, "bytes were logged");
}
