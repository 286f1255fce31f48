//! The port, and the loop that waits for it, for programs and for signals.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ioctl_fionbio};

use super::guest::Guest;
use super::kernel::Kernel;
use super::signals::Signals;
use super::sys;
use super::text::read_text;
use crate::protocol::Session;

/// The port's name.
const NAME: &str = "org.qemu.guest_agent.0";

/// Where the kernel names its ports, and where their devices are.
const PORTS: &str = "/sys/class/virtio-ports";
const DEVICES: &str = "/dev";

/// Bytes that are read at once.
const PIECE: usize = 16 << 10;

/// How often a host that is away is looked for, if its return is not told.
const AWAY: Duration = Duration::from_secs(10);

/// Why there is no port.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PortError {
    /// The machine has none.
    #[error(
        "the machine has no port {NAME}; is the kernel's module virtio_console loaded, and was \
         the machine started by podvisor or another host that has it?"
    )]
    Missing,
    /// Another agent has it.
    #[error("another agent has the port {}", .0.display())]
    Taken(PathBuf),
    /// It cannot be opened.
    #[error("failed to open the port {}", .path.display())]
    Open {
        /// The port's device.
        path: PathBuf,
        #[allow(missing_docs)]
        source: io::Error,
    },
}

/// What happens when the host goes away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HostEnd {
    /// It may come back.
    MayReturn,
    /// There is nothing more.
    IsLast,
}

/// What a wait has seen of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HostState {
    Gone,
    Unknown,
}

/// A port of the machine, or another stream to a host.
#[derive(Debug)]
pub struct Port {
    file: File,
    end: HostEnd,
}

impl Port {
    /// Opens the machine's port.
    ///
    /// # Errors
    /// [`PortError`].
    pub fn find() -> Result<Self, PortError> {
        let path = find_in(Path::new(PORTS), Path::new(DEVICES)).ok_or(PortError::Missing)?;
        Self::open(&path)
    }

    /// Opens a port by its device, or connects to a socket.
    ///
    /// # Errors
    /// [`PortError`].
    pub fn open(path: &Path) -> Result<Self, PortError> {
        let failed = |source| PortError::Open {
            path: path.to_owned(),
            source,
        };
        if fs::metadata(path).map_err(failed)?.file_type().is_socket() {
            let stream = UnixStream::connect(path).map_err(failed)?;
            return Self::stream(stream.into()).map_err(failed);
        }
        let opened = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(path);
        let file = match opened {
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                return Err(PortError::Taken(path.to_owned()));
            }
            opened => opened.map_err(failed)?,
        };
        // Where the kernel cannot tell, it is looked for.
        let _ = sys::notify(file.as_fd());
        Ok(Self {
            file,
            end: HostEnd::MayReturn,
        })
    }

    /// Takes a stream that ends when its other end is closed.
    ///
    /// # Errors
    /// The kernel's.
    pub fn stream(stream: OwnedFd) -> io::Result<Self> {
        ioctl_fionbio(&stream, true)?;
        Ok(Self {
            file: stream.into(),
            end: HostEnd::IsLast,
        })
    }
}

/// Looks for the port's device by what the kernel says of all ports.
fn find_in(ports: &Path, devices: &Path) -> Option<PathBuf> {
    let named =
        |port: &PathBuf| read_text(&port.join("name")).is_ok_and(|name| name.trim_end() == NAME);
    let mut found = fs::read_dir(ports).ok()?.flatten().map(|it| it.path());
    let port = found.find(named)?;
    Some(devices.join(port.file_name()?))
}

/// The host's side of the port.
#[derive(Default)]
struct Link {
    session: Session,
    /// Bytes that were read and not looked at.
    input: Vec<u8>,
    /// What is still to be written of an answer.
    output: Vec<u8>,
    written: usize,
    is_away: bool,
}

impl Link {
    fn lose(&mut self) {
        *self = Self {
            is_away: true,
            ..Self::default()
        };
    }

    fn has_output(&self) -> bool {
        self.written < self.output.len()
    }

    /// Answers requests that were read, up to the first answer that is to be written.
    fn answer<K: Kernel>(&mut self, guest: &mut Guest<K>) {
        let mut taken = 0;
        while !self.has_output() {
            let rest = self.input.get(taken..).unwrap_or_default();
            if rest.is_empty() {
                break;
            }
            let (count, answer) = self.session.take(rest, guest);
            taken += count;
            if let Some(answer) = answer {
                (self.output, self.written) = (answer, 0);
            }
        }
        self.input.drain(..taken.min(self.input.len()));
    }

    /// Writes and reads what is possible without waiting, one piece at most, so that programs have
    /// their turn; whether the host is there.
    fn exchange<K: Kernel>(&mut self, file: &File, guest: &mut Guest<K>) -> io::Result<bool> {
        let mut file = file;
        let mut has_read = false;
        loop {
            while let Some(rest) = self.output.get(self.written..)
                && !rest.is_empty()
            {
                match file.write(rest) {
                    Ok(0) => return Ok(false),
                    Ok(count) => self.written += count,
                    Err(error) => return is_there(error),
                }
            }
            self.output = Vec::new();
            self.written = 0;
            self.answer(guest);
            if self.has_output() {
                continue;
            }
            if has_read {
                return Ok(true);
            }
            has_read = true;
            let mut piece = vec![0; PIECE];
            match file.read(&mut piece) {
                Ok(0) => return Ok(false),
                Ok(count) => {
                    piece.truncate(count);
                    self.input = piece;
                }
                Err(error) => return is_there(error),
            }
        }
    }
}

/// Whether the host is there although this was not done.
fn is_there(error: io::Error) -> io::Result<bool> {
    match error.raw_os_error() {
        _ if error.kind() == io::ErrorKind::WouldBlock => Ok(true),
        _ if error.kind() == io::ErrorKind::Interrupted => Ok(true),
        // The port's other end is closed, or the stream's.
        Some(libc::EPIPE | libc::ECONNRESET | libc::EIO) => Ok(false),
        _ => Err(error),
    }
}

/// Answers the host until the stream ends, or a signal ends this process.
///
/// # Errors
/// The port failed.
pub fn serve<K: Kernel>(
    port: &Port,
    guest: &mut Guest<K>,
    mut signals: Option<Signals>,
) -> io::Result<()> {
    let mut link = Link::default();
    let served = loop {
        guest.turn();
        match link.exchange(&port.file, guest) {
            Ok(true) => link.is_away = false,
            Ok(false) if port.end == HostEnd::IsLast => break Ok(()),
            Ok(false) => link.lose(),
            Err(error) => break Err(error),
        }
        match wait(port, &link, guest, signals.as_ref()) {
            // It takes no answer any more, and does not say so.
            Ok(HostState::Gone) if link.has_output() && port.end == HostEnd::MayReturn => {
                link.lose();
            }
            Ok(_) => {}
            Err(error) => break Err(error),
        }
        if signals.as_mut().is_some_and(Signals::ends) {
            break Ok(());
        }
    };
    guest.leave();
    served
}

/// Waits until something can be done.
fn wait<K: Kernel>(
    port: &Port,
    link: &Link,
    guest: &Guest<K>,
    signals: Option<&Signals>,
) -> io::Result<HostState> {
    let mut fds = Vec::new();
    // A port without a host is always ready, for nothing.
    if !link.is_away {
        let fd = port.file.as_fd();
        let flags = match link.has_output() {
            true => PollFlags::OUT,
            false => PollFlags::IN,
        };
        fds.push(PollFd::from_borrowed_fd(fd, flags));
    }
    fds.extend(guest.waits_for());
    if let Some(signals) = signals {
        fds.push(PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN));
    }
    let now = Instant::now();
    let mut deadline = guest.deadline();
    if link.is_away {
        let again = now + AWAY;
        deadline = Some(deadline.map_or(again, |deadline| deadline.min(again)));
    }
    let timeout = deadline.map(|deadline| deadline.saturating_duration_since(now));
    // A little later is never too early.
    let timeout = timeout.and_then(|left| Timespec::try_from(left + Duration::from_millis(1)).ok());
    match poll(&mut fds, timeout.as_ref()) {
        Err(Errno::INTR) => return Ok(HostState::Unknown),
        polled => polled?,
    };
    let is_gone = |fd: &PollFd<'_>| fd.revents().contains(PollFlags::HUP);
    Ok(match !link.is_away && fds.first().is_some_and(is_gone) {
        true => HostState::Gone,
        false => HostState::Unknown,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_port_is_found_by_its_name_without_udev() {
        let dir = tempfile::tempdir().unwrap();
        for (port, name) in [("vport1p1", "console"), ("vport1p2", NAME)] {
            let port = dir.path().join(port);
            fs::create_dir(&port).unwrap();
            fs::write(port.join("name"), format!("{name}\n")).unwrap();
        }
        let dev = Path::new("/dev");
        let found = find_in(dir.path(), dev);
        assert_eq!(found, Some(dev.join("vport1p2")));
        assert_eq!(find_in(&dir.path().join("none"), dev), None);
    }
}
