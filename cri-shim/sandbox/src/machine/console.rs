//! A machine's serial console: its output goes to a file and to attached clients, and its input
//! comes from these. All that it needs of the guest is a kernel that drives the port.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use podvisor_host::stall_timeout::timeout;
use podvisor_vmm::Vm;
use tokio::io::AsyncReadExt as _;
use tokio::net::UnixStream;
use tokio::sync::Notify;
use tracing::debug;

/// Size of the recent output that a client gets first when it attaches, in bytes.
const SCROLLBACK: usize = 64 << 10;

/// Most output that is written to the file, in bytes.
const MAX_FILE_SIZE: usize = 4 << 20;

/// The last line in a file that is full.
const CUT: &[u8] = b"\n[the console's file ends here: it keeps 4 MiB]\n";

/// Most clients that are attached at the same time.
const ATTACHED_MAX: usize = 16;

/// Most input that is read in one call, in bytes: the size of the port's own buffer.
const INPUT_CHUNK: usize = 64;

/// How long input of a client that is gone waits for a guest that reads none.
const UNREAD_TIMEOUT: Duration = Duration::from_secs(10);

/// Passes output on to the file and the clients.
#[derive(Debug)]
pub(super) struct Console {
    sinks: Mutex<Sinks>,
    /// Notified when the guest has read all input.
    drained: Notify,
}

#[derive(Debug)]
struct Sinks {
    file: File,
    /// Bytes for which the file has room.
    room: usize,
    recent: VecDeque<u8>,
    attached: Vec<StdUnixStream>,
    /// Set when the machine has ended.
    is_closed: bool,
}

impl Sinks {
    /// Writes to the file as much as it has room for. The console continues if the file fails.
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

/// Whether writes to a file never block for a reader.
fn takes_at_once(file: &File) -> io::Result<bool> {
    let kind = file.metadata()?.file_type();
    // The device number of `/dev/null` is the same on every Linux.
    let null = rustix::fs::makedev(1, 3);
    Ok(kind.is_file() || kind.is_char_device() && rustix::fs::fstat(file)?.st_rdev == null)
}

impl Console {
    /// Creates a console that writes to `file`. A vCPU waits for each write, so the file must be of
    /// a kind that never blocks for a reader.
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
                is_closed: false,
            }),
            drained: Notify::new(),
        }))
    }

    /// Returns the writer for the port's output.
    pub(super) fn writer(self: &Arc<Self>) -> impl Write + Send + use<> {
        Output(Arc::clone(self))
    }

    /// Reports that the port has room for input again.
    pub(super) fn drained(&self) {
        self.drained.notify_waiters();
    }

    /// Reports that the machine has ended: clients get the end of the stream after the last output.
    pub(super) fn close(&self) {
        let attached = {
            let mut sinks = self.sinks();
            sinks.is_closed = true;
            std::mem::take(&mut sinks.attached)
        };
        attached.iter().for_each(end);
        self.drained.notify_waiters();
    }

    fn sinks(&self) -> MutexGuard<'_, Sinks> {
        self.sinks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connects a stream: it gets recent output and all that follows, and its input is typed. A
    /// client that does not read loses output. The stream ends with the machine, immediately if it
    /// has ended.
    ///
    /// # Errors
    /// Too many clients are attached, or the stream cannot be used.
    pub(super) fn attach(self: &Arc<Self>, vm: &Arc<Vm>, stream: StdUnixStream) -> io::Result<()> {
        // A client does not keep the machine alive.
        let vm = Arc::downgrade(vm);
        self.connect(stream, move |input| {
            let taken = vm.upgrade()?.serial_input(input);
            Some(taken.unwrap_or(input.len()))
        })
    }

    /// As [`Self::attach`], with a function that passes input on: it returns how many bytes were
    /// taken, or `None` if the machine is gone.
    fn connect(
        self: &Arc<Self>,
        stream: StdUnixStream,
        put: impl Fn(&[u8]) -> Option<usize> + Send + 'static,
    ) -> io::Result<()> {
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
            if sinks.is_closed {
                end(&output);
                return Ok(());
            }
            sinks.attached.push(output);
        }
        let input = UnixStream::from_std(input)?;
        tokio::spawn(take_input(Arc::clone(self), input, put));
        Ok(())
    }
}

/// Types a client's input until the client or the machine ends. What a client has sent before it
/// closed the stream is typed as long as the guest reads.
async fn take_input(
    console: Arc<Console>,
    mut input: UnixStream,
    put: impl Fn(&[u8]) -> Option<usize>,
) {
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
            // Registered before the check for room, so that no notification is missed.
            drained.as_mut().enable();
            if console.sinks().is_closed {
                return;
            }
            let Some(taken) = put(rest) else { return };
            rest = &rest[taken..];
            if !rest.is_empty() {
                // A guest may never read.
                let waited = timeout(UNREAD_TIMEOUT, drained).await;
                if waited.is_err() && !is_open(&input) {
                    return;
                }
            }
        }
    }
}

/// Ends a stream in both directions. What was written to it can still be read.
fn end(stream: &StdUnixStream) {
    if let Err(error) = stream.shutdown(Shutdown::Both) {
        debug!(%error, "a client of the console was gone already");
    }
}

/// Whether the other side is still connected.
fn is_open(stream: &impl AsFd) -> bool {
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

/// Writes as much as there is room for; false if the other side is gone. Uses write(2), as vCPU
/// threads may make no other system call.
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

    /// Attaches a client whose input the guest does not read.
    fn unread(console: &Arc<Console>) -> StdUnixStream {
        let (ours, theirs) = StdUnixStream::pair().unwrap();
        console.connect(theirs, |_| Some(0)).unwrap();
        ours
    }

    /// Waits until no client's input is taken any more.
    async fn all_input_ended(console: &Arc<Console>) {
        while Arc::strong_count(console) > 1 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    #[tokio::test]
    async fn clients_get_the_end_of_the_stream_after_the_last_output() {
        let (console, _file) = console();
        let (idle, mut typing) = (unread(&console), unread(&console));
        typing.write_all(b"x").unwrap();
        tokio::time::sleep(Duration::from_millis(10)).await;
        console.writer().write_all(b"bye").unwrap();
        console.close();
        let late = unread(&console);
        for mut client in [idle, typing, late] {
            let patience = Some(Duration::from_secs(60));
            client.set_read_timeout(patience).unwrap();
            let mut output = String::new();
            client.read_to_string(&mut output).unwrap();
            assert_eq!(output, "bye");
        }
        timeout(Duration::from_secs(60), all_input_ended(&console))
            .await
            .unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn input_of_a_client_that_is_gone_does_not_wait_for_ever() {
        let (console, _file) = console();
        let [mut gone, mut there] = [(); 2].map(|()| unread(&console));
        for client in [&mut gone, &mut there] {
            client.write_all(b"x").unwrap();
        }
        drop(gone);
        tokio::time::sleep(UNREAD_TIMEOUT * 3).await;
        // The console, and the input of the client that is there.
        assert_eq!(Arc::strong_count(&console), 2);
        drop(there);
        tokio::time::sleep(UNREAD_TIMEOUT * 3).await;
        assert_eq!(Arc::strong_count(&console), 1);
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
