//! podvisor as the boot benchmark starts it: a program that links the library and only boots, with
//! the serial console on stdout.
//!
//! `boot-podvisor KERNEL INITRAMFS MEMORY COMMAND-LINE`
use std::error::Error;

use podvisor_vmm::{Initramfs, Kernel, Vm};

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let mut next = |what: &str| args.next().ok_or_else(|| format!("{what} is missing"));
    let vm = Vm::builder()
        .kernel(Kernel::open(next("KERNEL")?)?)
        .initramfs(Initramfs::open(next("INITRAMFS")?)?)
        .memory(next("MEMORY")?.parse()?)
        .cmdline(next("COMMAND-LINE")?)
        .serial(std::io::stdout())
        .build()?;
    vm.start()?;
    vm.wait()?;
    Ok(())
}
