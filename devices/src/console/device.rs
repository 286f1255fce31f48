//! The console device and its two queues.

use std::fmt;
use std::io::{self, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::input::{ConsoleError, Input};
use crate::GuestRam;
use crate::virtio::{
    Chain, Counter, DeviceType, Fault, Interrupt, Progress, Queue, Resources, StartError,
    VirtioDevice, read_config,
};

/// Queue numbers (§5.3.2).
const RX: u16 = 0;
const TX: u16 = 1;

const QUEUE_SIZES: [u16; 2] = [64, 64];

/// `VIRTIO_CONSOLE_F_SIZE` (§5.3.3).
const F_SIZE: u64 = 1 << 0;

/// Bytes that a driver may transmit in one chain; Linux never has more than a page.
pub const MAX_TRANSMIT: usize = 1 << 20;

/// Bytes in each direction before the event loop gets its turn again.
const BUDGET: usize = 256 << 10;

/// What a chain counts for at least, so that empty ones are bounded too.
const CHAIN_COST: usize = 64;

/// Bytes copied out of guest memory at once.
const PIECE: usize = 4096;

/// A virtio console with one port.
///
/// The writer is called on the thread that serves the device: one that blocks holds up that
/// thread and with it the guest's output; one that does not block, or fails, loses what it
/// did not take, which `lost_bytes` counts.
pub struct ConsoleDevice {
    out: Box<dyn Write + Send>,
    input: Option<Input>,
    columns: u16,
    rows: u16,
    running: Option<Running>,
    counters: Counters,
}

#[derive(Debug)]
struct Running {
    mem: GuestRam,
    rx: Queue,
    tx: Queue,
    irq: Arc<dyn Interrupt>,
}

#[derive(Debug, Default)]
struct Counters {
    tx_bytes: u64,
    lost_bytes: u64,
    rx_bytes: u64,
}

impl fmt::Debug for ConsoleDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConsoleDevice")
            .field("input", &self.input)
            .field("columns", &self.columns)
            .field("rows", &self.rows)
            .field("running", &self.running)
            .field("counters", &self.counters)
            .finish_non_exhaustive()
    }
}

impl ConsoleDevice {
    /// A console of 80 columns and 25 rows that writes to `out` and has no input.
    #[must_use]
    pub fn new(out: Box<dyn Write + Send>) -> Self {
        Self {
            out,
            input: None,
            columns: 80,
            rows: 25,
            running: None,
            counters: Counters::default(),
        }
    }

    /// The driver receives what `fd` (a terminal, pipe or socket) brings.
    ///
    /// # Errors
    /// When `fd` cannot be waited for.
    pub fn input(mut self, fd: OwnedFd) -> Result<Self, ConsoleError> {
        self.input = Some(Input::new(fd)?);
        Ok(self)
    }

    /// The size that the driver sees first.
    #[must_use]
    pub fn size(mut self, columns: u16, rows: u16) -> Self {
        self.columns = columns;
        self.rows = rows;
        self
    }

    /// The terminal changed its size: the driver is told (§5.3.4).
    pub fn resize(&mut self, columns: u16, rows: u16) {
        if (self.columns, self.rows) == (columns, rows) {
            return;
        }
        self.columns = columns;
        self.rows = rows;
        if let Some(running) = &self.running {
            running.irq.signal_config();
        }
    }

    fn transmit(&mut self) -> Result<Progress, Fault> {
        let Some(running) = &mut self.running else {
            return Ok(Progress::Idle);
        };
        let mut spent = 0usize;
        loop {
            running.tx.disable_kicks()?;
            while spent < BUDGET {
                let Some(chain) = running.tx.next()? else {
                    break;
                };
                let len = chain.readable_len();
                if len > MAX_TRANSMIT {
                    return Err(Fault::protocol("a console transmission that is too long"));
                }
                write_out(&mut self.out, &mut self.counters, &running.mem, &chain)?;
                running.tx.complete(chain, 0)?;
                spent = spent.saturating_add(len.max(CHAIN_COST));
            }
            // Errors showed when the bytes were written.
            let _ = self.out.flush();
            running.tx.notify()?;
            if spent >= BUDGET {
                return Ok(Progress::More);
            }
            if !running.tx.enable_kicks()? {
                return Ok(Progress::Idle);
            }
        }
    }

    /// Gives the driver what the input has, as far as it has buffers.
    fn receive(&mut self) -> Result<Progress, Fault> {
        let (Some(running), Some(input)) = (&mut self.running, &mut self.input) else {
            return Ok(Progress::Idle);
        };
        let mem = running.mem.clone();
        let mut spent = 0usize;
        let mut slices = Vec::new();
        while input.is_ready() && spent < BUDGET {
            let Some(chain) = running.next_buffer()? else {
                input.ignore();
                break;
            };
            let room = chain.writable_len().min(PIECE);
            chain.writable_slices(&mem, 0, room, &mut slices)?;
            if room == 0 {
                return Err(Fault::protocol("a console receive buffer without room"));
            }
            let len = input.read(&slices).min(room);
            if len == 0 {
                running.rx.undo(chain);
                break;
            }
            // At most PIECE.
            running
                .rx
                .complete(chain, u32::try_from(len).unwrap_or(0))?;
            self.counters.rx_bytes = self.counters.rx_bytes.saturating_add(len as u64);
            spent = spent.saturating_add(len.max(CHAIN_COST));
        }
        running.rx.notify()?;
        // What is left keeps the backend readable by itself.
        Ok(if spent >= BUDGET {
            Progress::More
        } else {
            Progress::Idle
        })
    }
}

impl Running {
    /// The next receive buffer. Without one the driver is asked to notify.
    fn next_buffer(&mut self) -> Result<Option<Chain>, Fault> {
        loop {
            if let Some(chain) = self.rx.next()? {
                return Ok(Some(chain));
            }
            if !self.rx.enable_kicks()? {
                return Ok(None);
            }
        }
    }
}

/// Writes the chain's bytes; counts those that the writer does not take.
fn write_out(
    out: &mut dyn Write,
    counters: &mut Counters,
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
        counters.tx_bytes = counters.tx_bytes.saturating_add(taken as u64);
        counters.lost_bytes = counters.lost_bytes.saturating_add(lost as u64);
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
    fn device_type(&self) -> DeviceType {
        DeviceType::Console
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn features(&self) -> u64 {
        F_SIZE
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        // `struct virtio_console_config` (§5.3.4): columns, rows, and what is not offered.
        let [a, b] = self.columns.to_le_bytes();
        let [c, d] = self.rows.to_le_bytes();
        read_config(&[a, b, c, d], offset, data);
    }

    fn start(&mut self, mut resources: Resources) -> Result<(), StartError> {
        if self.running.is_some() {
            return Err(StartError::Running);
        }
        let rx = resources.require(usize::from(RX))?;
        let tx = resources.require(usize::from(TX))?;
        self.running = Some(Running {
            mem: resources.mem,
            rx,
            tx,
            irq: resources.irq,
        });
        Ok(())
    }

    fn stop(&mut self) -> Vec<Option<Queue>> {
        match self.running.take() {
            Some(running) => vec![Some(running.rx), Some(running.tx)],
            None => Vec::new(),
        }
    }

    fn is_running(&self) -> bool {
        self.running.is_some()
    }

    fn on_queue(&mut self, index: u16) -> Result<Progress, Fault> {
        match (index, &mut self.input) {
            (TX, _) => self.transmit(),
            (RX, Some(input)) => {
                input
                    .watch()
                    .map_err(|error| Fault::host("watching the console's input", error))?;
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

    fn counters(&self) -> Vec<Counter> {
        let c = &self.counters;
        [
            ("tx_bytes", c.tx_bytes),
            ("lost_bytes", c.lost_bytes),
            ("rx_bytes", c.rx_bytes),
        ]
        .into_iter()
        .map(|(name, value)| Counter { name, value })
        .collect()
    }
}

#[cfg(test)]
#[path = "device_tests.rs"]
mod tests;
