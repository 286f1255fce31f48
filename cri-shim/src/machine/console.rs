//! A machine's serial console: its output goes to a file and to whoever is attached, from whom its
//! input comes. It needs nothing of the guest but a kernel that drives the port.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use podvisor_vmm::Vm;
use tokio::io::AsyncReadExt as _;
use tokio::net::UnixStream;
use tokio::sync::Notify;
use tracing::debug;

/// Output that whoever attaches is shown first, in bytes.
const SCROLLBACK: usize = 64 << 10;

/// Output that the file gets, in bytes.
const MAX_FILE_SIZE: usize = 4 << 20;

/// What it gets last.
const CUT: &[u8] = b"\n[the console's file ends here: it keeps 4 MiB]\n";

/// Attached at once.
const ATTACHED_MAX: usize = 16;

/// Input that is read at once: the port's own buffer.
const INPUT_CHUNK: usize = 64;

/// Where output goes.
#[derive(Debug)]
pub(super) struct Console {
    sinks: Mutex<Sinks>,
    /// The guest has read all input.
    drained: Notify,
}

#[derive(Debug)]
struct Sinks {
    file: File,
    /// Bytes that the file still gets.
    room: usize,
    recent: VecDeque<u8>,
    attached: Vec<StdUnixStream>,
}

impl Sinks {
    /// Writes to the file what it has room for. The console goes on where the file does not.
    fn keep(&mut self, bytes: &[u8]) {
        if self.room == 0 {
            return;
        }
        let kept = bytes.get(..self.room).unwrap_or(bytes);
        self.room -= kept.len();
        let written = self.file.write_all(kept).and_then(|()| match self.room {
            0 => self.file.write_all(CUT),
            _ => Ok(()),
        });
        if let Err(error) = written {
            debug!(%error, "the console's file lost output");
        }
    }
}

/// Whether a write to it never waits for somebody who reads.
fn takes_at_once(file: &File) -> io::Result<bool> {
    let kind = file.metadata()?.file_type();
    // Its number is the same on every Linux.
    let null = rustix::fs::makedev(1, 3);
    Ok(kind.is_file() || kind.is_char_device() && rustix::fs::fstat(file)?.st_rdev == null)
}

impl Console {
    /// A vCPU waits for what is written to `file`, which is therefore one that takes it at once.
    ///
    /// # Errors
    /// It is neither a regular file nor `/dev/null`.
    pub(super) fn new(file: File) -> io::Result<Arc<Self>> {
        if !takes_at_once(&file)? {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "it is neither a regular file nor /dev/null",
            ));
        }
        Ok(Arc::new(Self {
            sinks: Mutex::new(Sinks {
                file,
                room: MAX_FILE_SIZE,
                recent: VecDeque::new(),
                attached: Vec::new(),
            }),
            drained: Notify::new(),
        }))
    }

    /// What the port writes to.
    pub(super) fn writer(self: &Arc<Self>) -> impl Write + Send + use<> {
        Output(Arc::clone(self))
    }

    /// The port has room again.
    pub(super) fn drained(&self) {
        self.drained.notify_waiters();
    }

    fn sinks(&self) -> MutexGuard<'_, Sinks> {
        self.sinks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connects a stream: recent output and all that comes goes there, what comes from it is typed.
    /// One that does not read loses output.
    ///
    /// # Errors
    /// Too many are attached, or the stream is of no use.
    pub(super) fn attach(self: &Arc<Self>, vm: &Arc<Vm>, stream: StdUnixStream) -> io::Result<()> {
        stream.set_nonblocking(true)?;
        let (input, output) = (stream.try_clone()?, stream);
        {
            let mut sinks = self.sinks();
            sinks.attached.retain(is_open);
            if sinks.attached.len() >= ATTACHED_MAX {
                return Err(io::Error::new(
                    io::ErrorKind::QuotaExceeded,
                    format!("{ATTACHED_MAX} are attached to the console already"),
                ));
            }
            let (first, second) = sinks.recent.as_slices();
            for recent in [first, second] {
                write(&output, recent);
            }
            sinks.attached.push(output);
        }
        let input = UnixStream::from_std(input)?;
        // Not kept alive by whoever is attached.
        tokio::spawn(take_input(Arc::clone(self), Arc::downgrade(vm), input));
        Ok(())
    }
}

/// Types what comes until the other side, or the machine, ends.
async fn take_input(console: Arc<Console>, vm: Weak<Vm>, mut input: UnixStream) {
    let mut buffer = [0; INPUT_CHUNK];
    loop {
        let count = match input.read(&mut buffer).await {
            Ok(0) => return,
            Ok(count) => count,
            Err(error) => {
                debug!(%error, "an input of the console ended");
                return;
            }
        };
        let mut rest = &buffer[..count];
        while !rest.is_empty() {
            let drained = console.drained.notified();
            tokio::pin!(drained);
            // Listened for before it is looked whether there is room.
            drained.as_mut().enable();
            let Some(vm) = vm.upgrade() else { return };
            let taken = vm.serial_input(rest).unwrap_or(rest.len());
            drop(vm);
            rest = &rest[taken..];
            if !rest.is_empty() {
                drained.await;
            }
        }
    }
}

/// Whether the other side is still there.
fn is_open(stream: &StdUnixStream) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut fds = [PollFd::new(stream, PollFlags::empty())];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    match poll(&mut fds, Some(&now)) {
        Ok(_) => !fds[0].revents().contains(PollFlags::HUP),
        Err(_) => true,
    }
}

/// Writes what there is room for; false when the other side is gone. By write(2): the threads of
/// vCPUs may make no other call.
fn write(stream: &StdUnixStream, mut bytes: &[u8]) -> bool {
    while !bytes.is_empty() {
        match rustix::io::write(stream, bytes) {
            Ok(count) => bytes = bytes.get(count..).unwrap_or_default(),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return error == rustix::io::Errno::AGAIN,
        }
    }
    true
}

struct Output(Arc<Console>);

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut sinks = self.0.sinks();
        let excess = (sinks.recent.len() + bytes.len()).saturating_sub(SCROLLBACK);
        let excess = excess.min(sinks.recent.len());
        sinks.recent.drain(..excess);
        sinks.recent.extend(bytes);
        sinks.attached.retain(|stream| write(stream, bytes));
        sinks.keep(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    fn console() -> (Arc<Console>, tempfile::NamedTempFile) {
        let file = tempfile::NamedTempFile::new().unwrap();
        (Console::new(file.reopen().unwrap()).unwrap(), file)
    }

    fn connect(console: &Console) -> StdUnixStream {
        let (ours, theirs) = StdUnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        console.sinks().attached.push(theirs);
        ours
    }

    #[test]
    fn output_goes_to_the_file_and_to_all_that_are_attached() {
        let (console, file) = console();
        let (mut one, mut two) = (connect(&console), connect(&console));
        console.writer().write_all(b"hello").unwrap();
        let mut bytes = [0; 5];
        one.read_exact(&mut bytes).unwrap();
        two.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"hello");
        assert_eq!(std::fs::read(file.path()).unwrap(), b"hello");
    }

    #[test]
    fn one_that_does_not_read_holds_up_nobody_and_one_that_is_gone_is_forgotten() {
        let (console, _file) = console();
        let stuck = connect(&console);
        drop(connect(&console));
        for _ in 0..100 {
            console.writer().write_all(&[b'x'; 10_000]).unwrap();
        }
        let sinks = console.sinks();
        assert_eq!((sinks.attached.len(), sinks.recent.len()), (1, SCROLLBACK));
        drop(sinks);
        drop(stuck);
    }

    #[test]
    fn the_file_gets_so_much_and_says_so_once() {
        let (console, file) = console();
        let line = [b'x'; 1000];
        for _ in 0..MAX_FILE_SIZE / line.len() + 1000 {
            console.writer().write_all(&line).unwrap();
        }
        let kept = std::fs::read(file.path()).unwrap();
        assert_eq!(kept.len(), MAX_FILE_SIZE + CUT.len());
        assert!(kept.ends_with(CUT) && kept[..MAX_FILE_SIZE].iter().all(|byte| *byte == b'x'));
    }

    #[test]
    fn what_may_keep_a_vcpu_waiting_is_no_place_for_output() {
        assert!(Console::new(File::options().write(true).open("/dev/null").unwrap()).is_ok());
        let (_reader, pipe) = std::io::pipe().unwrap();
        let (socket, _peer) = StdUnixStream::pair().unwrap();
        let pty = File::options().read(true).write(true).open("/dev/ptmx");
        let others: [std::os::fd::OwnedFd; 3] = [pipe.into(), socket.into(), pty.unwrap().into()];
        for other in others {
            let error = Console::new(other.into()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        }
    }
}
