//! Tests of `frame`: effects of a hostile or dying peer on a reader.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::process::Command;

use proptest::prelude::*;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::*;

fn run<T>(future: impl Future<Output = T>) -> T {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().build().unwrap().block_on(future)
}

/// A reader and the raw other end; within a runtime.
fn reader() -> (FrameReader, StdUnixStream) {
    let (ours, theirs) = StdUnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let stream = Arc::new(UnixStream::from_std(ours).unwrap());
    (FrameReader::new(stream), theirs)
}

fn pair() -> (FrameReader, FrameWriter) {
    let (reader, theirs) = reader();
    theirs.set_nonblocking(true).unwrap();
    let stream = Arc::new(UnixStream::from_std(theirs).unwrap());
    (reader, FrameWriter::new(stream))
}

/// A file that contains `text`, at offset 0.
fn file(text: &str) -> OwnedFd {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    io::Seek::rewind(&mut file).unwrap();
    file.into()
}

fn text_of(fd: OwnedFd) -> String {
    let mut text = String::new();
    File::from(fd).read_to_string(&mut text).unwrap();
    text
}

#[test]
fn frames_come_in_order_each_with_its_own_files() {
    run(async {
        let (mut reader, mut writer) = pair();
        let long = vec![b'x'; 3 << 20];
        let send = async {
            writer.send(b"one", &[file("a"), file("b")]).await.unwrap();
            writer.send(b"", &[]).await.unwrap();
            writer.send(&long, &[file("c")]).await.unwrap();
            drop(writer);
        };
        let receive = async {
            let mut frames = Vec::new();
            while let Some(frame) = reader.next().await.unwrap() {
                frames.push(frame);
            }
            frames
        };
        let ((), frames) = tokio::join!(send, receive);
        let bodies: Vec<&[u8]> = frames.iter().map(|frame| frame.body.as_slice()).collect();
        assert_eq!(bodies.len(), 3);
        assert_eq!(bodies[..2], [b"one".as_slice(), b""]);
        assert!(bodies[2] == long);
        let texts: Vec<Vec<String>> = frames
            .into_iter()
            .map(|frame| frame.fds.into_iter().map(text_of).collect())
            .collect();
        assert_eq!(texts, [vec!["a", "b"], vec![], vec!["c"]]);
    });
}

#[test]
fn a_length_beyond_the_bound_is_refused_before_anything_is_read_or_kept() {
    run(async {
        for length in [MAX_FRAME as u32 + 1, u32::MAX] {
            let (mut reader, mut theirs) = reader();
            theirs.write_all(&length.to_le_bytes()).unwrap();
            let refused = reader.next().await.unwrap_err();
            assert!(matches!(refused, FrameError::TooLong(_)), "{refused:?}");
        }
    });
}

#[test]
fn a_frame_that_is_cut_off_anywhere_is_an_error_and_between_frames_an_end() {
    run(async {
        let whole = [3u32.to_le_bytes().as_slice(), b"abc"].concat();
        for end in 0..=whole.len() {
            let (mut reader, mut theirs) = reader();
            theirs.write_all(&whole[..end]).unwrap();
            drop(theirs);
            match (end, reader.next().await) {
                (0, Ok(None)) => {}
                (7, Ok(Some(frame))) => assert_eq!(frame.body, b"abc"),
                (1..7, Err(FrameError::Cut)) => {}
                (_, other) => panic!("after {end} bytes: {other:?}"),
            }
        }
    });
}

/// Sends bytes with descriptors, beyond the limits of a `FrameWriter`.
fn send_raw(to: &StdUnixStream, bytes: &[u8], fds: &[OwnedFd]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let bytes = [IoSlice::new(bytes)];
    sendmsg(to, &bytes, &mut control, SendFlags::empty()).unwrap();
}

fn open_fds() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn more_descriptors_than_allowed_are_refused() {
    run(async {
        let (mut reader, theirs) = reader();
        let fds: Vec<OwnedFd> = (0..=MAX_FDS).map(|_| file("")).collect();
        send_raw(&theirs, &0u32.to_le_bytes(), &fds);
        let refused = reader.next().await.unwrap_err();
        assert!(matches!(refused, FrameError::TooManyFds), "{refused:?}");

        let (_reader, mut writer) = pair();
        let refused = writer.send(b"", &fds).await.unwrap_err();
        assert!(matches!(refused, FrameError::TooManyFds), "{refused:?}");
    });
}

/// Set for a process that runs only one test.
const ALONE: &str = "PODVISOR_TEST_ALONE";

#[test]
fn a_frame_whose_descriptors_cannot_be_opened_comes_without() {
    if std::env::var_os(ALONE).is_none() {
        // The limit applies to a process.
        let name = "a_frame_whose_descriptors_cannot_be_opened_comes_without";
        let (_, module) = module_path!().split_once("::").unwrap();
        let mut alone = Command::new(std::env::current_exe().unwrap());
        let alone = alone.args(["--exact", &format!("{module}::{name}")]);
        let output = alone.env(ALONE, "1").output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("1 passed"), "{text}");
        return;
    }
    run(async {
        let (mut reader, mut writer) = pair();
        let sent = [file("a"), file("b")];
        let limit = getrlimit(Resource::Nofile);
        // Only one of the two can be opened.
        let highest = sent.iter().map(AsRawFd::as_raw_fd).max().unwrap();
        let short = Rlimit {
            current: Some(u64::try_from(highest).unwrap() + 2),
            ..limit
        };
        setrlimit(Resource::Nofile, short).unwrap();
        writer.send(b"one", &sent).await.unwrap();
        let frame = reader.next().await.unwrap().unwrap();
        assert_eq!((&*frame.body, frame.fds.len()), (&b"one"[..], 0));
        setrlimit(Resource::Nofile, limit).unwrap();
        writer.send(b"two", &sent).await.unwrap();
        let frame = reader.next().await.unwrap().unwrap();
        assert_eq!((&*frame.body, frame.fds.len()), (&b"two"[..], 2));
    });
}

#[test]
fn descriptors_in_the_middle_of_a_frame_are_closed() {
    run(async {
        let (mut reader, theirs) = reader();
        let (witness, sent) = StdUnixStream::pair().unwrap();
        (&theirs).write_all(&4u32.to_le_bytes()).unwrap();
        send_raw(&theirs, b"body", &[sent.into()]);
        let frame = reader.next().await.unwrap().unwrap();
        assert_eq!(frame.body, b"body");
        assert!(frame.fds.is_empty());
        // The other end is closed.
        assert_eq!((&witness).read(&mut [0]).unwrap(), 0);
    });
}

#[test]
fn received_descriptors_are_not_inherited_by_other_programs() {
    run(async {
        let (mut reader, mut writer) = pair();
        writer.send(b"x", &[file("")]).await.unwrap();
        let frame = reader.next().await.unwrap().unwrap();
        let flags = rustix::io::fcntl_getfd(&frame.fds[0]).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    });
}

proptest! {
    #[test]
    fn any_bytes_in_any_pieces_give_frames_or_an_error(
        bytes in proptest::collection::vec(0u8..6, 0..200),
        pieces in proptest::collection::vec(1usize..20, 1..20),
    ) {
        run(async {
            let (mut reader, theirs) = reader();
            theirs.set_nonblocking(true).unwrap();
            let theirs = UnixStream::from_std(theirs).unwrap();
            let send = async {
                let mut rest = bytes.as_slice();
                for piece in pieces.iter().cycle() {
                    let (now, later) = rest.split_at((*piece).min(rest.len()));
                    // The reader may have stopped.
                    let _ = theirs.try_write(now);
                    tokio::task::yield_now().await;
                    rest = later;
                    if rest.is_empty() {
                        break;
                    }
                }
                drop(theirs);
            };
            let receive = async {
                let mut read = 0;
                while let Ok(Some(frame)) = reader.next().await {
                    read += LENGTH_PREFIX + frame.body.len();
                }
                read
            };
            let ((), read) = tokio::join!(send, receive);
            assert!(read <= bytes.len());
        });
    }
}

#[test]
fn an_exchange_leaves_no_descriptor_behind() {
    // Other tests open files meanwhile: the number must not grow with each exchange.
    run(async {
        let before = open_fds();
        for _ in 0..200 {
            let (mut reader, mut writer) = pair();
            writer.send(b"x", &[file(""), file("")]).await.unwrap();
            reader.next().await.unwrap().unwrap();
        }
        assert!(open_fds() < before + 200);
    });
}
