//! Boots a guest with its devices on PCI, and plugs a disk into it when it says `ready`; the
//! guest is told by a line of its console, and rescans its bus.
//!
//! `cargo run --example hotplug -- target/guest/vmlinux initramfs.cpio IMAGE`
use std::error::Error;
use std::io::{self, Write};
use std::sync::mpsc::{Sender, channel};

use podvisor_vmm::{BlockDevice, Initramfs, Kernel, MemorySize, Transport, Vm};

/// Shows what a guest writes, and tells when a line of it is `ready`. A kernel may write lines of
/// its own before.
struct Console {
    line: Vec<u8>,
    ready: Sender<()>,
}

impl Write for Console {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        io::stdout().write_all(bytes)?;
        for byte in bytes {
            if *byte != b'\n' {
                self.line.push(*byte);
            } else if std::mem::take(&mut self.line).trim_ascii() == b"ready" {
                // Nobody listens after the first one.
                let _ = self.ready.send(());
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stdout().flush()
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [kernel, initramfs, image] = args.as_slice() else {
        return Err("usage: hotplug KERNEL INITRAMFS IMAGE".into());
    };
    let (ready, is_ready) = channel();
    let line = Vec::new();
    let vm = Vm::builder()
        .kernel(Kernel::open(kernel)?)
        .initramfs(Initramfs::open(initramfs)?)
        .cmdline("console=ttyS0 quiet panic=-1 reboot=k")
        .memory(MemorySize::mib(128))
        .transport(Transport::Pci)
        .serial(Console { line, ready })
        .build()?;
    vm.start()?;
    is_ready.recv()?;
    let disk = vm.plug_as("data", BlockDevice::open(image)?.read_only())?;
    println!("plugged {} at {}", disk.name, disk.address);
    // One line fits into the serial port at once.
    vm.serial_input(b"rescan\n");
    println!("{}", vm.wait()?);
    Ok(())
}
