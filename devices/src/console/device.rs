//! The console device and its two queues.

use std::fmt;
use std::io::{self, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::input::{ConsoleError, Input};
use crate::GuestRam;
use crate::virtio::{
    Chain, ConfigSpace, Count, Counter, DeviceInfo, DeviceType, Fault, Placement, Progress, Queue,
    ReadCounters, RestoreError, SavedDevice, SpareList, StartError, VirtioDevice,
};

/// Queue numbers (§5.3.2).
const RX: u16 = 0;
const TX: u16 = 1;

const QUEUE_SIZES: [u16; 2] = [64, 64];

/// `VIRTIO_CONSOLE_F_SIZE` (§5.3.3).
const F_SIZE: u64 = 1 << 0;

/// The maximum number of bytes that a driver may transmit in one chain; Linux never sends more than
/// a page.
pub const MAX_TRANSMIT: usize = 1 << 20;

/// Bytes in each direction before the event loop gets control back.
const BUDGET: usize = 256 << 10;

/// Bytes copied out of guest memory per step.
const PIECE: usize = 4096;

/// A virtio console with one port.
///
/// The device has a thread of its own, on which the writer is called: one that blocks delays the
/// guest's output, and no other device. One that is non-blocking, or fails, loses what it did not
/// take, which `lost_bytes` counts.
pub struct ConsoleDevice {
    out: Box<dyn Write + Send>,
    input: Option<Input>,
    rx: Option<Queue>,
    tx: Option<Queue>,
    /// The list of a receive buffer's segments, of which there are at most `MAX_SEGMENTS`.
    slices: SpareList,
    config: Arc<ConfigSpace>,
    counters: Arc<Counters>,
}

#[derive(Debug, Default)]
struct Counters {
    tx_bytes: Count,
    lost_bytes: Count,
    rx_bytes: Count,
}

impl ReadCounters for Counters {
    fn read(&self) -> Vec<Counter> {
        vec![
            self.tx_bytes.named("tx_bytes"),
            self.lost_bytes.named("lost_bytes"),
            self.rx_bytes.named("rx_bytes"),
        ]
    }
}

impl fmt::Debug for ConsoleDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConsoleDevice")
            .field("input", &self.input)
            .field("rx", &self.rx)
            .field("tx", &self.tx)
            .field("config", &self.config)
            .field("counters", &self.counters)
            .finish_non_exhaustive()
    }
}

impl ConsoleDevice {
    /// Creates a console of 80 columns and 25 rows that writes to `out` and has no input.
    #[must_use]
    pub fn new(out: Box<dyn Write + Send>) -> Self {
        Self {
            out,
            input: None,
            rx: None,
            tx: None,
            slices: SpareList::default(),
            config: Arc::new(ConfigSpace::new(size_bytes(80, 25))),
            counters: Arc::default(),
        }
    }

    /// Sets the input of the driver: a terminal, pipe or socket.
    ///
    /// # Errors
    /// If `fd` cannot be waited for.
    pub fn input(mut self, fd: OwnedFd) -> Result<Self, ConsoleError> {
        self.input = Some(Input::new(fd)?);
        Ok(self)
    }

    /// Sets the initial size that the driver sees.
    #[must_use]
    pub fn size(mut self, columns: u16, rows: u16) -> Self {
        self.config = Arc::new(ConfigSpace::new(size_bytes(columns, rows)));
        self
    }

    /// Sets a new size of the terminal and notifies the driver (§5.3.4).
    pub fn resize(&mut self, columns: u16, rows: u16) {
        self.config.update(0, &size_bytes(columns, rows));
    }

    fn transmit(&mut self) -> Result<Progress, Fault> {
        let Some(tx) = &mut self.tx else {
            return Ok(Progress::Idle);
        };
        let (out, counters) = (&mut self.out, &self.counters);
        let progress = tx.serve(BUDGET, |tx, chain| {
            let len = chain.readable_len();
            if len > MAX_TRANSMIT {
                return Err(Fault::protocol("a console transmission that is too long"));
            }
            write_out(out, counters, tx.memory(), &chain)?;
            tx.complete(chain, 0)?;
            Ok(len)
        });
        // Errors were reported when the bytes were written.
        let _ = self.out.flush();
        progress
    }

    /// Sends input to the driver, as long as it has buffers.
    fn receive(&mut self) -> Result<Progress, Fault> {
        let Some(input) = &mut self.input else {
            return Ok(Progress::Idle);
        };
        let Some(rx) = &mut self.rx else {
            // The driver only transmits, or has stopped this queue.
            input.ignore();
            return Ok(Progress::Idle);
        };
        let mem = rx.shared_memory();
        let mut spent = 0usize;
        let mut slices = self.slices.take();
        while input.is_ready() && spent < BUDGET {
            let Some(chain) = rx.next_or_enable_kicks()? else {
                input.ignore();
                break;
            };
            let room = chain.writable_len().min(PIECE);
            if room == 0 {
                spent = spent.saturating_add(chain.cost());
                rx.complete(chain, 0)?;
                continue;
            }
            chain.writable_slices(&mem, 0, room, &mut slices)?;
            let len = input.read(&slices).min(room);
            if len == 0 {
                rx.undo_pop(chain);
                break;
            }
            spent = spent.saturating_add(len).saturating_add(chain.cost());
            // At most PIECE.
            rx.complete(chain, u32::try_from(len).unwrap_or(0))?;
            self.counters.rx_bytes.add(len as u64);
        }
        self.slices.put_back(slices);
        rx.notify()?;
        // Remaining input keeps the backend readable.
        Ok(if spent >= BUDGET {
            Progress::More
        } else {
            Progress::Idle
        })
    }

    fn queue_mut(&mut self, index: u16) -> Option<&mut Option<Queue>> {
        match index {
            RX => Some(&mut self.rx),
            TX => Some(&mut self.tx),
            _ => None,
        }
    }
}

/// `struct virtio_console_config` (§5.3.4): columns and rows; the other fields are not offered.
fn size_bytes(columns: u16, rows: u16) -> [u8; 4] {
    let [a, b] = columns.to_le_bytes();
    let [c, d] = rows.to_le_bytes();
    [a, b, c, d]
}

/// Writes the chain's bytes; counts those that the writer does not take.
fn write_out(
    out: &mut dyn Write,
    counters: &Counters,
    mem: &GuestRam,
    chain: &Chain,
) -> Result<(), Fault> {
    let len = chain.readable_len();
    let mut piece = [0u8; PIECE];
    let mut done = 0usize;
    while done < len {
        let want = len.saturating_sub(done).min(PIECE);
        let Some(bytes) = piece.get_mut(..want) else {
            break;
        };
        chain.read(mem, done, bytes)?;
        let taken = write_some(out, bytes);
        let lost = want.saturating_sub(taken);
        counters.tx_bytes.add(taken as u64);
        counters.lost_bytes.add(lost as u64);
        done = done.saturating_add(want);
    }
    Ok(())
}

fn write_some(out: &mut dyn Write, bytes: &[u8]) -> usize {
    let mut rest = bytes;
    while !rest.is_empty() {
        match out.write(rest) {
            Ok(taken) if taken > 0 => rest = rest.get(taken..).unwrap_or(&[]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            _ => break,
        }
    }
    bytes.len().saturating_sub(rest.len())
}

impl VirtioDevice for ConsoleDevice {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            device_type: DeviceType::Console,
            queue_sizes: QUEUE_SIZES.to_vec(),
            features: F_SIZE,
            config: self.config.clone(),
            counters: self.counters.clone(),
        }
    }

    fn placement(&self) -> Placement {
        Placement::Own
    }

    fn start_queue(&mut self, queue: Queue) -> Result<(), StartError> {
        let index = queue.index();
        match self.queue_mut(index) {
            Some(place @ None) => *place = Some(queue),
            Some(Some(_)) => return Err(StartError::Running { index }),
            None => return Err(StartError::NoSuchQueue { index }),
        }
        Ok(())
    }

    fn stop_queue(&mut self, index: u16) -> Option<Queue> {
        self.queue_mut(index)?.take()
    }

    fn on_queue(&mut self, index: u16) -> Result<Progress, Fault> {
        match (index, &mut self.input) {
            (TX, _) => self.transmit(),
            (RX, Some(input)) => {
                input
                    .watch()
                    .map_err(|error| Fault::host("failed to watch the console's input", error))?;
                self.receive()
            }
            _ => Ok(Progress::Idle),
        }
    }

    fn backend(&self) -> Option<BorrowedFd<'_>> {
        self.input.as_ref().map(Input::backend)
    }

    fn on_backend(&mut self) -> Result<Progress, Fault> {
        self.receive()
    }

    fn save(&self) -> SavedDevice {
        let mut bytes = vec![0; 4];
        self.config.read(0, &mut bytes);
        SavedDevice { version: 1, bytes }
    }

    fn restore(&mut self, saved: &SavedDevice) -> Result<(), RestoreError> {
        let size =
            <[u8; 4]>::try_from(saved.of_version(1)?).map_err(|_| RestoreError::Invalid {
                what: "a console's size is four bytes",
            })?;
        self.config.update(0, &size);
        Ok(())
    }
}

#[cfg(test)]
#[path = "device_tests.rs"]
mod tests;
