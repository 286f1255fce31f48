//! podvisor as the block benchmark starts it: a guest with one disk on the requested transport,
//! with the serial console on stdout.
//!
//! `blk-podvisor mmio|pci KERNEL INITRAMFS MEMORY COMMAND-LINE DISK`
use std::error::Error;

use podvisor_vmm::{BlockDevice, Initramfs, Kernel, Transport, Vm};

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let mut next = |what: &str| args.next().ok_or_else(|| format!("{what} is missing"));
    let transport = match next("mmio or pci")?.as_str() {
        "mmio" => Transport::Mmio,
        "pci" => Transport::Pci,
        other => return Err(format!("no transport is called {other:?}").into()),
    };
    let vm = Vm::builder()
        .transport(transport)
        .kernel(Kernel::open(next("KERNEL")?)?)
        .initramfs(Initramfs::open(next("INITRAMFS")?)?)
        .memory(next("MEMORY")?.parse()?)
        .cmdline(next("COMMAND-LINE")?)
        .block(BlockDevice::open(next("DISK")?)?.read_only())
        .serial(std::io::stdout())
        .build()?;
    vm.start()?;
    vm.wait()?;
    Ok(())
}
