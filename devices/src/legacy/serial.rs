//! COM1: a 16550A by `vm-superio`, whose output goes to any writer.

use std::convert::Infallible;
use std::fmt;
use std::io::Write;
use std::sync::{Arc, OnceLock};

use vm_superio::Trigger;
use vm_superio::serial::{SerialEvents, SerialState};

use crate::virtio::{InterruptLine, RestoreError, SavedDevice};

/// Of the saved state.
const VERSION: u32 = 1;

/// First I/O port of COM1.
pub const PORT: u16 = 0x3f8;
/// Number of ports.
pub const PORTS: u16 = 8;
/// The interrupt line of COM1.
pub const IRQ: u32 = 4;

#[derive(Debug)]
struct Line(Box<dyn InterruptLine>);

impl Trigger for Line {
    type E = Infallible;

    fn trigger(&self) -> Result<(), Infallible> {
        self.0.raise();
        Ok(())
    }
}

/// Who is told that the guest has read all input.
#[derive(Default)]
struct Drained(OnceLock<Box<dyn Fn() + Send + Sync>>);

impl SerialEvents for Drained {
    fn buffer_read(&self) {}
    fn out_byte(&self) {}
    fn tx_lost_byte(&self) {}

    fn in_buffer_empty(&self) {
        if let Some(tell) = self.0.get() {
            tell();
        }
    }
}

/// The serial port. Accesses come from vCPU threads; the writer is called on those, byte by
/// byte: one that blocks holds up the guest, and one that fails loses the byte.
pub struct SerialPort {
    uart: vm_superio::Serial<Line, Arc<Drained>, Box<dyn Write + Send>>,
    drained: Arc<Drained>,
}

impl fmt::Debug for SerialPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SerialPort").finish_non_exhaustive()
    }
}

impl SerialPort {
    /// A port that interrupts by `line` and writes what the guest sends to `out`.
    #[must_use]
    pub fn new(line: impl InterruptLine + 'static, out: Box<dyn Write + Send>) -> Self {
        let drained = Arc::<Drained>::default();
        let line = Line(Box::new(line));
        Self {
            uart: vm_superio::Serial::with_events(line, Arc::clone(&drained), out),
            drained,
        }
    }

    /// A port in this state, which is not trusted.
    ///
    /// # Errors
    /// When it is none of a serial port.
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
            interrupt_enable,
            interrupt_identification,
            line_control,
            line_status,
            modem_control,
            modem_status,
            scratch,
            in_buffer: in_buffer.to_vec(),
        };
        let drained = Arc::<Drained>::default();
        let (line, events) = (Line(Box::new(line)), Arc::clone(&drained));
        let uart = vm_superio::Serial::from_state(&state, line, events, out)
            .map_err(|_| invalid("more input than the port holds"))?;
        Ok(Self { uart, drained })
    }

    /// The registers and the receive FIFO, for a snapshot.
    #[must_use]
    pub fn save(&self) -> SavedDevice {
        let state = self.uart.state();
        let mut bytes = vec![
            state.baud_divisor_low,
            state.baud_divisor_high,
            state.interrupt_enable,
            state.interrupt_identification,
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

    /// The guest reads register `offset` (0 to 7).
    pub fn read(&mut self, offset: u8) -> u8 {
        self.uart.read(offset)
    }

    /// The guest writes register `offset` (0 to 7).
    pub fn write(&mut self, offset: u8, value: u8) {
        // The guest's driver polls the line status; a byte that the writer refused is gone.
        let _ = self.uart.write(offset, value);
    }

    /// Has `tell` called, on a vCPU's thread, each time that the guest has read all input: there is
    /// room for more. The first call counts, further ones change nothing.
    pub fn on_drained(&self, tell: impl Fn() + Send + Sync + 'static) {
        // That somebody is told already is what was wanted.
        let _ = self.drained.0.set(Box::new(tell));
    }

    /// Puts bytes into the receive FIFO, as far as there is room (64 bytes at most). Returns
    /// how many were taken.
    pub fn input(&mut self, bytes: &[u8]) -> usize {
        let room = self.uart.fifo_capacity().min(bytes.len());
        let bytes = bytes.get(..room).unwrap_or(&[]);
        self.uart.enqueue_raw_bytes(bytes).unwrap_or(0)
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
        assert!(times.try_recv().is_err());
        port.read(0);
        assert!(times.try_recv().is_ok());
    }

    #[test]
    fn a_writer_that_fails_does_not_stop_the_guest() {
        let (mut port, rx) = port();
        drop(rx);
        port.write(0, b'x');
        assert_ne!(port.read(5) & 0x20, 0);
    }
}
