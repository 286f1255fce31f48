//! podvisor as the image benchmark starts it: a guest with an image as a disk or as memory, with
//! the serial console on stdout.
//!
//! `image-podvisor blk|pmem KERNEL INITRAMFS MEMORY COMMAND-LINE IMAGE`
use std::error::Error;

use podvisor_vmm::{BlockDevice, Initramfs, Kernel, PmemDevice, Transport, Vm};

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let mut next = |what: &str| args.next().ok_or_else(|| format!("{what} is missing"));
    let way = next("blk or pmem")?;
    let builder = Vm::builder()
        .transport(Transport::Pci)
        .kernel(Kernel::open(next("KERNEL")?)?)
        .initramfs(Initramfs::open(next("INITRAMFS")?)?)
        .memory(next("MEMORY")?.parse()?)
        .cmdline(next("COMMAND-LINE")?)
        .serial(std::io::stdout());
    let image = next("IMAGE")?;
    let vm = match way.as_str() {
        "blk" => builder.block(BlockDevice::open(image)?.read_only()),
        "pmem" => builder.pmem(PmemDevice::open(image)?),
        other => return Err(format!("an image is no {other:?}").into()),
    }
    .build()?;
    vm.start()?;
    vm.wait()?;
    Ok(())
}
