//! Boots a guest whose root file system is a disk image, and prints the disk's counters.
//!
//! `cargo run --example disk -- target/guest/vmlinux root.erofs /bin/ls -l /`
use std::error::Error;

use podvisor_vmm::{BlockDevice, Kernel, MemorySize, Vm};

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [kernel, disk, init, init_args @ ..] = args.as_slice() else {
        return Err("usage: disk KERNEL IMAGE INIT [ARG…]".into());
    };
    // The kernel detects the file system by itself; the part after `--` is init's arguments.
    let cmdline = format!(
        "console=ttyS0 quiet panic=-1 reboot=k root=/dev/vda ro init={init} -- {}",
        init_args.join(" ")
    );
    let vm = Vm::builder()
        .kernel(Kernel::open(kernel)?)
        .cmdline(cmdline)
        .memory(MemorySize::mib(256))
        .device_as("root", BlockDevice::open(disk)?.read_only())
        .serial(std::io::stdout())
        .build()?;
    vm.start()?;
    println!("{}", vm.wait()?);
    for device in vm.counters() {
        for counter in device.counters {
            println!("{}.{} {}", device.device, counter.name, counter.value);
        }
    }
    Ok(())
}
