//! Boots a guest with a disk of the program's own: each sector holds its number, and is computed when
//! it is read.
//!
//! `cargo run --example own_disk -- target/guest/vmlinux initramfs.cpio`
use std::error::Error;
use std::io;

use podvisor_vmm::devices::GuestRam;
use podvisor_vmm::devices::blk::{Operation, Submitted};
use podvisor_vmm::{BlockDevice, Disk, Initramfs, Kernel, MemorySize, Vm};

/// The size of a sector.
const SECTOR: u64 = 512;

#[derive(Debug)]
struct Numbers {
    sectors: u64,
}

impl Numbers {
    /// Returns the `len` bytes from `offset` on.
    fn bytes(offset: u64, len: usize) -> Vec<u8> {
        let all = (offset..).take(len);
        let bytes = all.map(|at| (at / SECTOR).to_le_bytes()[(at % 8) as usize]);
        bytes.collect()
    }
}

impl Disk for Numbers {
    fn len(&self) -> u64 {
        self.sectors * SECTOR
    }

    fn submit(&mut self, _: &GuestRam, _: u16, operation: Operation<'_, '_>) -> Submitted {
        Submitted::Done(match operation {
            Operation::Read { mut offset, slices } => {
                for slice in slices {
                    slice.copy_from(&Self::bytes(offset, slice.len()));
                    offset += slice.len() as u64;
                }
                Ok(())
            }
            _ => Err(io::ErrorKind::Unsupported.into()),
        })
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(kernel), Some(initramfs)) = (args.next(), args.next()) else {
        return Err("usage: own_disk KERNEL INITRAMFS".into());
    };
    let numbers = Numbers { sectors: 1 << 20 };
    let vm = Vm::builder()
        .kernel(Kernel::open(kernel)?)
        .initramfs(Initramfs::open(initramfs)?)
        .cmdline("console=ttyS0 quiet panic=-1 reboot=k")
        .memory(MemorySize::mib(128))
        .block(BlockDevice::new(Box::new(numbers)).read_only())
        .serial(io::stdout())
        .build()?;
    vm.start()?;
    println!("{}", vm.wait()?);
    Ok(())
}
