//! COM1: a 16550A, whose output goes to any writer.
//!
//! Registers and the receive FIFO come from `vm-superio`. The interrupt enable register and the
//! causes of interrupts are handled here: `vm-superio` reports several causes at the same time, and
//! clears those that were read.

use std::convert::Infallible;
use std::fmt;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use vm_superio::Trigger;
use vm_superio::serial::{SerialEvents, SerialState};

use crate::virtio::{InterruptLine, RestoreError, SavedDevice};

/// Version of the saved state.
const VERSION: u32 = 1;

/// First I/O port of COM1.
pub const PORT: u16 = 0x3f8;
/// Number of ports.
pub const PORTS: u16 = 8;
/// The interrupt line of COM1.
pub const IRQ: u32 = 4;

/// Offsets of registers; the first two if the divisor latch is not selected.
const DATA: u8 = 0;
const INTERRUPT_ENABLE: u8 = 1;
/// The cause of an interrupt when read; FIFO control when written.
const INTERRUPT_ID: u8 = 2;
const FIFO_CONTROL: u8 = 2;
const LINE_CONTROL: u8 = 3;
const LINE_STATUS: u8 = 5;

/// Bits of registers.
const ENABLE_RECEIVED: u8 = 1 << 0;
const ENABLE_EMPTY: u8 = 1 << 1;
const ENABLE_BITS: u8 = 0x0f;
const CLEAR_RECEIVED: u8 = 1 << 1;
const DIVISOR_LATCH: u8 = 1 << 7;
const DATA_READY: u8 = 1 << 0;

/// Values of the interrupt identification register: FIFOs are enabled, and the cause.
const FIFOS: u8 = 0xc0;
const NO_CAUSE: u8 = 1;
const TRANSMITTER_EMPTY: u8 = 2;
const RECEIVED: u8 = 4;

/// The trigger of `vm-superio`, which never fires: no interrupt is enabled there.
#[derive(Debug)]
struct Never;

impl Trigger for Never {
    type E = Infallible;

    fn trigger(&self) -> Result<(), Infallible> {
        Ok(())
    }
}

/// The callback that is called when the guest has read all input.
type Tell = Arc<dyn Fn() + Send + Sync>;

/// Whether the guest has read all input since this was last checked.
#[derive(Default)]
struct Drained(AtomicBool);

impl SerialEvents for Drained {
    fn buffer_read(&self) {}
    fn out_byte(&self) {}
    fn tx_lost_byte(&self) {}

    fn in_buffer_empty(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The serial port. Accesses come from vCPU threads; the writer is called on them, byte by byte:
/// one that blocks stalls the guest, and one that fails loses the byte.
pub struct SerialPort {
    uart: vm_superio::Serial<Never, Arc<Drained>, Box<dyn Write + Send>>,
    line: Box<dyn InterruptLine>,
    /// The interrupt enable register.
    enabled: u8,
    /// The guest was not yet notified that the transmitter is empty.
    emptied: bool,
    drained: Arc<Drained>,
    tell: OnceLock<Tell>,
}

impl fmt::Debug for SerialPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SerialPort").finish_non_exhaustive()
    }
}

impl SerialPort {
    /// Creates a port that interrupts on `line` and writes the guest's output to `out`.
    #[must_use]
    pub fn new(line: impl InterruptLine + 'static, out: Box<dyn Write + Send>) -> Self {
        let drained = Arc::<Drained>::default();
        Self {
            uart: vm_superio::Serial::with_events(Never, Arc::clone(&drained), out),
            line: Box::new(line),
            enabled: 0,
            emptied: false,
            drained,
            tell: OnceLock::new(),
        }
    }

    /// Creates a port with this state, which is not trusted.
    ///
    /// # Errors
    /// If it is not a state of a serial port.
    pub fn restored(
        line: impl InterruptLine + 'static,
        out: Box<dyn Write + Send>,
        saved: &SavedDevice,
    ) -> Result<Self, RestoreError> {
        let invalid = |what| RestoreError::Invalid { what };
        let bytes = saved.of_version(VERSION)?;
        let (registers, in_buffer) = bytes
            .split_first_chunk()
            .ok_or(invalid("it is too short"))?;
        let [
            baud_divisor_low,
            baud_divisor_high,
            interrupt_enable,
            interrupt_identification,
            line_control,
            line_status,
            modem_control,
            modem_status,
            scratch,
        ] = *registers;
        let state = SerialState {
            baud_divisor_low,
            baud_divisor_high,
            interrupt_enable: 0,
            interrupt_identification: NO_CAUSE,
            line_control,
            line_status,
            modem_control,
            modem_status,
            scratch,
            in_buffer: in_buffer.to_vec(),
        };
        let drained = Arc::<Drained>::default();
        let uart = vm_superio::Serial::from_state(&state, Never, Arc::clone(&drained), out)
            .map_err(|_| invalid("more input than the port holds"))?;
        let mut port = Self {
            uart,
            line: Box::new(line),
            enabled: interrupt_enable & ENABLE_BITS,
            emptied: interrupt_identification & TRANSMITTER_EMPTY != 0,
            drained,
            tell: OnceLock::new(),
        };
        // An interrupt may have been in flight when the state was saved.
        port.raise_for(0);
        Ok(port)
    }

    /// Returns the registers and the receive FIFO, for a snapshot.
    #[must_use]
    pub fn save(&self) -> SavedDevice {
        let state = self.uart.state();
        let causes = self.causes(state.line_status);
        let mut bytes = vec![
            state.baud_divisor_low,
            state.baud_divisor_high,
            self.enabled,
            if causes == 0 { NO_CAUSE } else { causes },
            state.line_control,
            state.line_status,
            state.modem_control,
            state.modem_status,
            state.scratch,
        ];
        bytes.extend(state.in_buffer);
        SavedDevice {
            version: VERSION,
            bytes,
        }
    }

    /// Reads register `offset` (0 to 7) for the guest.
    pub fn read(&mut self, offset: u8) -> u8 {
        match offset {
            INTERRUPT_ENABLE if !self.latched() => self.enabled,
            INTERRUPT_ID => self.identify(),
            DATA if !self.latched() => {
                let byte = self.uart.read(DATA);
                // A driver that reads one byte per interrupt gets another interrupt for the next.
                self.raise_for(0);
                byte
            }
            _ => self.uart.read(offset),
        }
    }

    /// Writes register `offset` (0 to 7) for the guest.
    pub fn write(&mut self, offset: u8, value: u8) {
        let before = self.pending();
        match offset {
            INTERRUPT_ENABLE if !self.latched() => {
                let value = value & ENABLE_BITS;
                if (value ^ self.enabled) & ENABLE_EMPTY != 0 {
                    // The transmitter is always empty; the guest is notified when it enables that
                    // interrupt.
                    self.emptied = value & ENABLE_EMPTY != 0;
                }
                self.enabled = value;
            }
            FIFO_CONTROL => {
                if value & CLEAR_RECEIVED != 0 {
                    self.clear_received();
                }
            }
            _ => {
                self.emptied |= offset == DATA && !self.latched();
                // The guest's driver polls the line status; a byte that the writer refused is lost.
                let _ = self.uart.write(offset, value);
            }
        }
        self.raise_for(before);
    }

    /// Returns the cause with the highest priority. An empty transmitter is reported once.
    fn identify(&mut self) -> u8 {
        let pending = self.pending();
        let cause = if pending & RECEIVED != 0 {
            RECEIVED
        } else if pending != 0 {
            self.emptied = false;
            TRANSMITTER_EMPTY
        } else {
            NO_CAUSE
        };
        FIFOS | cause
    }

    /// The causes of an interrupt that are present and enabled.
    fn pending(&mut self) -> u8 {
        let status = self.uart.read(LINE_STATUS);
        self.causes(status)
    }

    fn causes(&self, line_status: u8) -> u8 {
        let mut causes = 0;
        if line_status & DATA_READY != 0 && self.enabled & ENABLE_RECEIVED != 0 {
            causes |= RECEIVED;
        }
        if self.emptied && self.enabled & ENABLE_EMPTY != 0 {
            causes |= TRANSMITTER_EMPTY;
        }
        causes
    }

    /// Raises the line if there is a cause that was not present `before`.
    fn raise_for(&mut self, before: u8) {
        if self.pending() & !before != 0 {
            self.line.raise();
        }
    }

    /// Whether the divisor is accessed at the offsets of data and interrupt enable.
    fn latched(&mut self) -> bool {
        self.uart.read(LINE_CONTROL) & DIVISOR_LATCH != 0
    }

    fn clear_received(&mut self) {
        let control = self.uart.read(LINE_CONTROL);
        let _ = self.uart.write(LINE_CONTROL, control & !DIVISOR_LATCH);
        while self.uart.read(LINE_STATUS) & DATA_READY != 0 {
            self.uart.read(DATA);
        }
        let _ = self.uart.write(LINE_CONTROL, control);
    }

    /// Sets the callback for each time that the guest has read all input, so that there is room for
    /// more. Only the first call has an effect.
    pub fn on_drained(&self, tell: impl Fn() + Send + Sync + 'static) {
        // Ignored: a callback is set already.
        let _ = self.tell.set(Arc::new(tell));
    }

    /// Returns the callback if the last access has read or cleared all input. The caller that made
    /// the access calls it without holding the port, since the callback may add input.
    #[must_use]
    pub fn take_drained(&mut self) -> Option<Arc<dyn Fn() + Send + Sync>> {
        let drained = self.drained.0.swap(false, Ordering::Relaxed);
        self.tell.get().filter(|_| drained).cloned()
    }

    /// Puts bytes into the receive FIFO, as far as there is room (at most 64 bytes). Returns how
    /// many were taken.
    pub fn input(&mut self, bytes: &[u8]) -> usize {
        let before = self.pending();
        let room = self.uart.fifo_capacity().min(bytes.len());
        let bytes = bytes.get(..room).unwrap_or(&[]);
        let taken = self.uart.enqueue_raw_bytes(bytes).unwrap_or(0);
        self.raise_for(before);
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;
    use std::sync::mpsc;
    use vmm_sys_util::eventfd::EventFd;

    struct Chan(mpsc::Sender<u8>);
    impl Write for Chan {
        fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
            buf.iter()
                .try_for_each(|b| self.0.send(*b))
                .map_err(io::Error::other)?;
            Ok(buf.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn port() -> (SerialPort, mpsc::Receiver<u8>) {
        let (tx, rx) = mpsc::channel();
        let line = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        (SerialPort::new(line, Box::new(Chan(tx))), rx)
    }

    #[test]
    fn what_the_guest_sends_reaches_the_writer() {
        let (mut port, rx) = port();
        b"hi".iter().for_each(|b| port.write(0, *b));
        assert_eq!(rx.try_iter().collect::<Vec<_>>(), b"hi");
        assert_ne!(port.read(5) & 0x20, 0, "ready for more");
    }

    #[test]
    fn a_restored_port_has_its_registers_and_what_was_not_read() {
        let (mut port, _rx) = port();
        port.write(7, 0x5a);
        port.write(3, 3);
        port.input(b"ab");
        let saved = port.save();
        let restore = |saved: &SavedDevice| {
            let line = EventFd::new(libc::EFD_NONBLOCK).unwrap();
            SerialPort::restored(line, Box::new(io::sink()), saved)
        };
        let mut again = restore(&saved).unwrap();
        assert_eq!(again.save(), saved);
        assert_eq!((again.read(7), again.read(3)), (0x5a, 3));
        assert_eq!((again.read(0), again.read(0)), (b'a', b'b'));
        for len in [0, 8, 9 + 65] {
            let mut wrong = saved.clone();
            wrong.bytes.resize(len, 0);
            assert!(restore(&wrong).is_err(), "{len} bytes");
        }
        let version = 2;
        assert!(restore(&SavedDevice { version, ..saved }).is_err());
    }

    /// A port whose line the test reads.
    fn wired() -> (SerialPort, EventFd) {
        let line = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        let port = SerialPort::new(line.try_clone().unwrap(), Box::new(io::sink()));
        (port, line)
    }

    #[test]
    fn the_cause_of_an_interrupt_is_one_and_what_was_received_goes_first() {
        let (mut port, line) = wired();
        port.write(1, 3);
        port.input(b"ab");
        assert_eq!(line.read().unwrap(), 2);
        // Reading it clears no cause except an empty transmitter, which it reports.
        assert_eq!((port.read(2), port.read(2)), (0xc4, 0xc4));
        assert_eq!(port.read(0), b'a');
        assert_eq!(line.read().unwrap(), 1, "there is more");
        assert_eq!(port.read(2), 0xc4);
        assert_eq!(port.read(0), b'b');
        assert_eq!((port.read(2), port.read(2)), (0xc2, 0xc1));
        let _ = line.read();
        for _ in 0..2 {
            port.write(0, b'x');
        }
        assert_eq!(line.read().unwrap(), 1);
        assert_eq!((port.read(2), port.read(2)), (0xc2, 0xc1));
    }

    #[test]
    fn a_cause_that_is_not_enabled_waits_until_it_is() {
        let (mut port, line) = wired();
        port.input(b"a");
        port.write(0, b'x');
        assert!(line.read().is_err());
        assert_eq!(port.read(2), 0xc1);
        // As Linux masks interrupts around a message.
        for _ in 0..2 {
            port.write(1, 5);
            assert_eq!((port.read(1), port.read(2)), (5, 0xc4));
            assert_eq!(line.read().unwrap(), 1);
            port.write(1, 5);
            assert!(line.read().is_err(), "nothing is new");
            port.write(1, 0);
            assert_eq!(port.read(2), 0xc1);
        }
        // The divisor is at the offsets of data and interrupt enable.
        port.write(3, 0x83);
        port.write(0, 1);
        port.write(1, 0x0f);
        assert_eq!((port.read(0), port.read(1)), (1, 0x0f));
        assert_eq!(port.read(2), 0xc1);
        port.write(3, 3);
        assert_eq!((port.read(0), port.read(1)), (b'a', 0));
        // As Linux checks for a transmitter that does not report twice that it is empty.
        for _ in 0..2 {
            port.write(1, 2);
            assert_eq!((port.read(2), port.read(2)), (0xc2, 0xc1));
            port.write(1, 0);
        }
    }

    #[test]
    fn a_guest_that_clears_the_receive_fifo_reads_nothing_of_it() {
        let (mut port, line) = wired();
        let (told, times) = mpsc::channel();
        port.on_drained(move || told.send(()).unwrap());
        port.write(1, 1);
        port.write(3, 0x83);
        port.input(&[7; 64]);
        port.write(2, 5);
        assert_eq!(port.read(5) & 1, 1, "the other one was cleared");
        port.write(2, 7);
        assert_eq!(
            (port.read(5) & 1, port.read(2), port.read(3)),
            (0, 0xc1, 0x83)
        );
        port.take_drained().unwrap()();
        assert!(times.try_recv().is_ok(), "there is room");
        port.write(3, 3);
        let _ = line.read();
        assert_eq!(port.input(&[8; 100]), 64);
        assert_eq!((line.read().unwrap(), port.read(0)), (1, 8));
    }

    #[test]
    fn a_restored_port_interrupts_for_what_is_pending() {
        let (mut port, _line) = wired();
        port.write(1, 3);
        port.input(b"a");
        let saved = port.save();
        let line = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        let ours = line.try_clone().unwrap();
        let mut again = SerialPort::restored(line, Box::new(io::sink()), &saved).unwrap();
        assert_eq!(again.save(), saved);
        assert!(ours.read().is_ok());
        assert_eq!((again.read(2), again.read(0)), (0xc4, b'a'));
        assert_eq!((again.read(2), again.read(2)), (0xc2, 0xc1));
    }

    #[test]
    fn the_divisor_takes_the_place_of_data_and_enabled_interrupts_and_changes_neither() {
        let (mut port, rx) = port();
        port.write(1, 3);
        port.input(b"a");
        port.write(3, 0x83);
        for (register, value) in [(0, 0x0c), (1, 0x55)] {
            port.write(register, value);
            assert_eq!(port.read(register), value);
        }
        port.write(3, 3);
        assert_eq!((port.read(1), port.read(0)), (3, b'a'));
        assert!(rx.try_recv().is_err(), "nothing was sent");
    }

    #[test]
    fn a_flood_of_input_is_taken_as_far_as_there_is_room() {
        let (mut port, _rx) = port();
        assert_eq!(port.input(&[7; 100]), 64);
        assert_eq!(port.input(&[7; 100]), 0);
        assert_eq!(port.read(0), 7);
        assert_eq!(port.input(&[8; 100]), 1);
    }

    #[test]
    fn who_waits_for_room_is_told_when_all_is_read() {
        let (mut port, _rx) = port();
        let (told, times) = mpsc::channel();
        port.on_drained(move || told.send(()).unwrap());
        port.input(b"ab");
        port.read(0);
        assert!(port.take_drained().is_none());
        port.read(0);
        port.take_drained().unwrap()();
        assert!(times.try_recv().is_ok());
        assert!(port.take_drained().is_none(), "once");
    }

    #[test]
    fn a_writer_that_fails_does_not_stop_the_guest() {
        let (mut port, rx) = port();
        drop(rx);
        port.write(0, b'x');
        assert_ne!(port.read(5) & 0x20, 0);
    }
}
