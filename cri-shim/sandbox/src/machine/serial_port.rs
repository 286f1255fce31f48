//! A serial port as a stream: what the guest sends can be read from it, and what is written to it
//! is typed. It outlives its machine, so that a guest that reboots in a new one keeps its streams.
//!
//! Output passes through a buffer of limited size, which a thread of the port empties: a reader
//! that stands still never stalls a vCPU. What does not fit is lost, and a line says how much.

use std::collections::VecDeque;
use std::fmt::{self, Write as _};
use std::io::{self, Read as _, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use podvisor_vmm::Vm;
use tokio::sync::watch;
use tracing::debug;

/// Most output that waits for its reader, in bytes: some minutes of a verbose boot.
const MAX_WAITING: usize = 1 << 20;

/// The end of the output that is kept for reports, in bytes.
const TAIL: usize = 4 << 10;

/// What each line of the loader has.
const LOADER: &[u8] = b"podvisor-loader: ";

/// Most bytes that are moved in one call.
const CHUNK: usize = 16 << 10;

/// How long input waits before it is offered again to a guest that takes none. The guest's reading
/// wakes it earlier.
const RETRY: Duration = Duration::from_secs(1);

/// Stack of the port's threads.
const STACK: usize = 128 << 10;

/// A serial port.
#[derive(Debug)]
pub(crate) struct SerialPort {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// Notified when there is output, room for input, another machine, or the end.
    changed: Condvar,
    /// The loader has written a line since the machine was connected.
    has_loader: watch::Sender<bool>,
}

/// Reads along with the output; returns false when it wants no more.
type Reader = Box<dyn FnMut(&[u8]) -> bool + Send>;

#[derive(Default)]
struct State {
    waiting: VecDeque<u8>,
    /// Bytes that did not fit since the last ones that did.
    lost: u64,
    tail: VecDeque<u8>,
    vm: Weak<Vm>,
    is_closed: bool,
    /// Counts what may give room for input.
    drained: u64,
    reader: Option<Reader>,
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("State")
            .field("waiting", &self.waiting.len())
            .field("lost", &self.lost)
            .field("is_closed", &self.is_closed)
            .finish_non_exhaustive()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn push(&mut self, bytes: &[u8]) {
        let excess = (self.tail.len() + bytes.len()).saturating_sub(TAIL);
        self.tail.drain(..excess.min(self.tail.len()));
        self.tail.extend(bytes.iter().rev().take(TAIL).rev());
        if self.lost > 0 {
            let mut note = String::new();
            // Writing to a string cannot fail.
            let _ = write!(note, "\n[{} bytes of the console were lost]\n", self.lost);
            if self.waiting.len() + note.len() + bytes.len() > MAX_WAITING {
                self.lost += bytes.len() as u64;
                return;
            }
            self.waiting.extend(note.as_bytes());
            self.lost = 0;
        }
        match self.waiting.len() + bytes.len() > MAX_WAITING {
            true => self.lost += bytes.len() as u64,
            false => self.waiting.extend(bytes),
        }
    }

    /// Whether the end of the output contains `text`, and not only before the last `new` bytes.
    fn has_at_end(&mut self, text: &[u8], new: usize) -> bool {
        let tail = self.tail.make_contiguous();
        let from = tail.len().saturating_sub(new + text.len());
        let end = tail.get(from..).unwrap_or_default();
        end.windows(text.len()).any(|part| part == text)
    }

    /// Takes the next bytes for the reader; empty if there are none.
    fn take(&mut self) -> Vec<u8> {
        let count = self.waiting.len().min(CHUNK);
        self.waiting.drain(..count).collect()
    }
}

impl SerialPort {
    /// Creates a port, and the stream that is its other end.
    ///
    /// # Errors
    /// The host has no more descriptors or threads.
    pub(crate) fn new() -> io::Result<(Self, UnixStream)> {
        let (ours, theirs) = UnixStream::pair()?;
        let shared = Arc::<Shared>::default();
        let (output, input) = (ours.try_clone()?, ours);
        let (writer, reader) = (Arc::clone(&shared), Arc::clone(&shared));
        spawn("serial-out", move || write_output(&writer, output))?;
        spawn("serial-in", move || read_input(&reader, input))?;
        Ok((Self { shared }, theirs))
    }

    /// Returns the writer for a machine's output.
    pub(super) fn writer(&self) -> impl Write + Send + use<> {
        Output(Arc::clone(&self.shared))
    }

    /// Types input in this machine from now on.
    pub(super) fn connect(&self, vm: &Arc<Vm>) {
        let shared = Arc::clone(&self.shared);
        vm.on_serial_drained(move || {
            shared.lock().drained += 1;
            shared.changed.notify_all();
        });
        let mut state = self.shared.lock();
        state.vm = Arc::downgrade(vm);
        // What the machine before has written says nothing about this one.
        state.tail.clear();
        self.shared.has_loader.send_replace(false);
        drop(state);
        self.shared.changed.notify_all();
    }

    /// Waits until the loader writes a line.
    pub(crate) async fn loader_writes(&self) {
        let mut has_loader = self.shared.has_loader.subscribe();
        // The sender is this port's.
        let _ = has_loader.wait_for(|has_loader| *has_loader).await;
    }

    /// Lets `reader` read along with what the guest writes from now on, in place of another one,
    /// until it returns false. It must not block: a vCPU waits for it.
    pub(crate) fn read_along(&self, reader: impl FnMut(&[u8]) -> bool + Send + 'static) {
        self.shared.lock().reader = Some(Box::new(reader));
    }

    /// Ends the stream after the last output.
    pub(crate) fn close(&self) {
        self.shared.lock().is_closed = true;
        self.shared.changed.notify_all();
    }

    /// Returns the end of the output.
    pub(crate) fn tail(&self) -> String {
        let state = self.shared.lock();
        let (first, second) = state.tail.as_slices();
        String::from_utf8_lossy(&[first, second].concat()).into_owned()
    }
}

impl Drop for SerialPort {
    fn drop(&mut self) {
        self.close();
    }
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let thread = thread::Builder::new().name(name.to_owned());
    thread.stack_size(STACK).spawn(run).map(drop)
}

/// Moves output to the stream until the port is closed or nobody reads any more.
fn write_output(shared: &Shared, mut stream: UnixStream) {
    loop {
        let chunk = {
            let mut state = shared.lock();
            while state.waiting.is_empty() && !state.is_closed {
                let woken = shared.changed.wait(state);
                state = woken.unwrap_or_else(PoisonError::into_inner);
            }
            state.take()
        };
        if chunk.is_empty() {
            break;
        }
        if let Err(error) = stream.write_all(&chunk) {
            debug!(%error, "nobody reads the serial port any more");
            break;
        }
    }
    // Ends the thread that reads input, too.
    if let Err(error) = stream.shutdown(Shutdown::Both) {
        debug!(%error, "the stream of a serial port was closed already");
    }
}

/// Types what comes from the stream until it ends or the port is closed.
fn read_input(shared: &Shared, mut stream: UnixStream) {
    let mut buffer = [0; 64];
    loop {
        let count = match stream.read(&mut buffer) {
            Ok(0) => return,
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return debug!(%error, "the input of a serial port ended"),
        };
        let mut rest = buffer.get(..count).unwrap_or_default();
        while !rest.is_empty() {
            let (vm, drained) = {
                let state = shared.lock();
                if state.is_closed {
                    return;
                }
                (state.vm.upgrade(), state.drained)
            };
            // Without the lock: a vCPU that writes output has the port's own lock, and wants this
            // one.
            let taken = vm.and_then(|vm| vm.serial_input(rest)).unwrap_or(0);
            rest = rest.get(taken..).unwrap_or_default();
            if rest.is_empty() {
                break;
            }
            let state = shared.lock();
            if state.drained == drained && !state.is_closed {
                // A guest may never read, and may be replaced meanwhile.
                let woken = shared.changed.wait_timeout(state, RETRY);
                drop(woken.unwrap_or_else(PoisonError::into_inner));
            }
        }
    }
}

struct Output(Arc<Shared>);

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut state = self.0.lock();
        state.push(bytes);
        if bytes.contains(&LOADER[LOADER.len() - 1])
            && !*self.0.has_loader.borrow()
            && state.has_at_end(LOADER, bytes.len())
        {
            self.0.has_loader.send_replace(true);
        }
        if let Some(mut reader) = state.reader.take()
            && reader(bytes)
        {
            state.reader = Some(reader);
        }
        drop(state);
        self.0.changed.notify_all();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_read_to_its_end_after_the_port_is_closed() {
        let (port, mut stream) = SerialPort::new().unwrap();
        let mut writer = port.writer();
        writer.write_all(b"Welcome\n").unwrap();
        // The writer of the next machine continues the stream.
        port.writer().write_all(b"again\n").unwrap();
        assert!(port.tail().ends_with("Welcome\nagain\n"));
        port.close();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        assert_eq!(text, "Welcome\nagain\n");
    }

    #[test]
    fn a_reader_that_stands_still_stalls_nobody_and_learns_what_is_lost() {
        let (port, mut stream) = SerialPort::new().unwrap();
        let mut writer = port.writer();
        let line = [b'x'; 999];
        let count = 4 * MAX_WAITING / line.len();
        for _ in 0..count {
            writer.write_all(&line).unwrap();
        }
        let reader = thread::spawn(move || {
            let mut text = String::new();
            stream.read_to_string(&mut text).map(|_| text)
        });
        // Written as soon as there is room.
        while port.shared.lock().lost > 0 {
            writer.write_all(b"y").unwrap();
            thread::yield_now();
        }
        drop(port);
        let text = reader.join().unwrap().unwrap();
        let note = text
            .lines()
            .find(|line| line.contains("were lost"))
            .unwrap();
        let lost: usize = note.split([' ', '[']).nth(1).unwrap().parse().unwrap();
        let kept = text.matches(['x', 'y']).count();
        assert!(lost > 0 && kept >= MAX_WAITING, "{note}");
        let x = text.matches('x').count();
        assert!(x % line.len() == 0 && x < count * line.len(), "{x}");
    }

    #[tokio::test]
    async fn the_loaders_line_is_noticed_in_pieces_of_any_size() {
        for size in [1, 2, 5, 100] {
            let (port, _stream) = SerialPort::new().unwrap();
            let mut writer = port.writer();
            writer
                .write_all(b"[    0.1] podvisor-load: no \r\n")
                .unwrap();
            assert!(!*port.shared.has_loader.borrow());
            for piece in b"podvisor-loader: disk vda\r\n".chunks(size) {
                writer.write_all(piece).unwrap();
            }
            port.loader_writes().await;
        }
    }

    #[test]
    fn a_reader_reads_along_until_it_has_enough() {
        let (port, _stream) = SerialPort::new().unwrap();
        let (told, reads) = std::sync::mpsc::channel();
        port.read_along(move |bytes| {
            told.send(bytes.to_vec()).unwrap();
            bytes != b"enough"
        });
        for text in ["one", "enough", "more"] {
            port.writer().write_all(text.as_bytes()).unwrap();
        }
        let read: Vec<Vec<u8>> = reads.iter().collect();
        assert_eq!(read, [b"one".to_vec(), b"enough".to_vec()]);
    }

    #[test]
    fn the_tail_is_the_end_of_the_output() {
        let mut state = State::default();
        state.push(&[b'a'; TAIL]);
        state.push(b"end");
        assert_eq!(state.tail.len(), TAIL);
        state.push(&[b'b'; 2 * TAIL]);
        assert_eq!(state.tail, vec![b'b'; TAIL]);
    }
}
