//! podvisor as the migration benchmark starts it: a guest with one device on the requested
//! transport, whose serial console is on stdout, that moves to another process over a unix socket.
//!
//! * `migrate-podvisor mmio|pci KERNEL INITRAMFS MEMORY COMMAND-LINE source CONTROL` boots it
//! * the same with `target CONTROL` waits for it to arrive
//!
//! The harness writes a line to the descriptor CONTROL: `receive PATH` to a target, which answers
//! `listening`, and `send PATH MILLISECONDS` with the allowed downtime to a source, which answers
//! `sent BYTES MICROSECONDS` when the guest runs at its target: the bytes of the whole stream, and
//! the downtime as this side knows it.
#![allow(unsafe_code)] // the control connection by its number

use std::error::Error;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::ops::ControlFlow;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use podvisor_vmm::{
    IncomingMigration, Initramfs, Kernel, KvmDevice, MemorySize, MigrationLimits, MigrationOptions,
    Transport, Vm,
};

/// More than the guest of any run has.
const MOST_MEMORY: u64 = 64;

/// A connection that counts what is written to it.
struct Counted {
    stream: UnixStream,
    sent: u64,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.read(buffer)
    }
}

impl Write for Counted {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.stream.write(bytes)?;
        self.sent += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Control(BufReader<UnixStream>);

impl Control {
    fn of(descriptor: i32) -> Self {
        // SAFETY: the harness left the socket open under this number for this program, which takes
        // it only here.
        let socket = unsafe { OwnedFd::from_raw_fd(descriptor) };
        Self(BufReader::new(socket.into()))
    }

    /// Returns the words of the next line; none at the end.
    fn words(&mut self) -> io::Result<Vec<String>> {
        let mut line = String::new();
        self.0.read_line(&mut line)?;
        Ok(line.split_whitespace().map(str::to_owned).collect())
    }

    fn say(&mut self, line: &str) -> io::Result<()> {
        writeln!(self.0.get_mut(), "{line}")
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let mut next = |what: &str| args.next().ok_or_else(|| format!("{what} is missing"));
    let transport = match next("mmio or pci")?.as_str() {
        "mmio" => Transport::Mmio,
        "pci" => Transport::Pci,
        other => return Err(format!("no transport is called {other:?}").into()),
    };
    let [kernel, initramfs, memory, cmdline] =
        ["KERNEL", "INITRAMFS", "MEMORY", "COMMAND-LINE"].map(&mut next);
    let side = next("source or target")?;
    let mut control = Control::of(next("CONTROL")?.parse()?);
    // Each byte of the guest's at once.
    let console = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    let _vm = if side == "target" {
        receive(&mut control, console)?
    } else {
        let vm = Vm::builder()
            .transport(transport)
            .kernel(Kernel::open(kernel?)?)
            .initramfs(Initramfs::open(initramfs?)?)
            .memory(memory?.parse()?)
            .cmdline(cmdline?)
            .rng()
            .serial(console)
            .build()?;
        vm.start()?;
        send(&mut control, &vm)?;
        vm
    };
    // Until the harness has looked at this process.
    control.words()?;
    Ok(())
}

fn receive(control: &mut Control, console: File) -> Result<Vm, Box<dyn Error>> {
    let words = control.words()?;
    let ["receive", path] = &*words.iter().map(String::as_str).collect::<Vec<_>>() else {
        return Err(format!("{words:?} is no order of a target").into());
    };
    let listener = UnixListener::bind(path)?;
    control.say("listening")?;
    let (connection, _) = listener.accept()?;
    let limits = MigrationLimits::memory(MemorySize::gib(MOST_MEMORY));
    let arrived = IncomingMigration::open(connection, limits)?.receive(&KvmDevice::open()?)?;
    let vm = arrived.builder().rng().serial(console).build()?;
    arrived.start(&vm)?;
    Ok(vm)
}

fn send(control: &mut Control, vm: &Vm) -> Result<(), Box<dyn Error>> {
    let words = control.words()?;
    let ["send", path, downtime] = &*words.iter().map(String::as_str).collect::<Vec<_>>() else {
        return Err(format!("{words:?} is no order of a source").into());
    };
    let options = MigrationOptions {
        downtime: Duration::from_millis(downtime.parse()?),
        ..MigrationOptions::default()
    };
    let mut connection = Counted {
        stream: UnixStream::connect(path)?,
        sent: 0,
    };
    let report = vm.migrate(&mut connection, &options, |_| ControlFlow::Continue(()))?;
    let (sent, downtime) = (connection.sent, report.downtime.as_micros());
    control.say(&format!("sent {sent} {downtime}"))?;
    Ok(())
}
