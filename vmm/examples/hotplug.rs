//! Boots a guest with its devices on PCI, and plugs a disk into it when it has printed a line; the
//! guest is told by a line of its console, and rescans its bus.
//!
//! `cargo run --example hotplug -- target/guest/vmlinux initramfs.cpio IMAGE`
use std::error::Error;
use std::io::{self, Write};
use std::sync::mpsc::{Sender, channel};

use podvisor_vmm::{BlockDevice, Initramfs, Kernel, MemorySize, Transport, Vm};

/// Shows what a guest writes, and tells of each end of a line.
struct Console(Sender<()>);

impl Write for Console {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        io::stdout().write_all(bytes)?;
        if bytes.contains(&b'\n') {
            // Nobody listens after the first line.
            let _ = self.0.send(());
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
    let (lines, line) = channel();
    let vm = Vm::builder()
        .kernel(Kernel::open(kernel)?)
        .initramfs(Initramfs::open(initramfs)?)
        .cmdline("console=ttyS0 quiet panic=-1 reboot=k")
        .memory(MemorySize::mib(128))
        .transport(Transport::Pci)
        .serial(Console(lines))
        .build()?;
    vm.start()?;
    line.recv()?;
    let disk = vm.plug(BlockDevice::open(image)?.read_only())?;
    println!("plugged {} at {}", disk.name, disk.address);
    // One line fits into the serial port at once.
    vm.serial_input(b"rescan\n");
    println!("{}", vm.wait()?);
    Ok(())
}
