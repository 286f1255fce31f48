//! Boots a kernel and an initramfs, and shows what the guest writes to its serial console.
//!
//! `cargo run --example hello -- target/guest/vmlinux initramfs.cpio`
use std::error::Error;

use podvisor_vmm::{Initramfs, Kernel, MemorySize, Vm};

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(kernel), Some(initramfs)) = (args.next(), args.next()) else {
        return Err("usage: hello KERNEL INITRAMFS".into());
    };
    let vm = Vm::builder()
        .kernel(Kernel::open(kernel)?)
        .initramfs(Initramfs::open(initramfs)?)
        .cmdline("console=ttyS0 quiet panic=-1 reboot=k")
        .memory(MemorySize::mib(128))
        .serial(std::io::stdout())
        .build()?;
    vm.start()?;
    println!("{}", vm.wait()?);
    Ok(())
}
