//! podvisor as the network benchmark starts it: a guest with one network card on the requested
//! transport, over an open tap, with the serial console on stdout.
//!
//! `net-podvisor mmio|pci KERNEL INITRAMFS MEMORY COMMAND-LINE MAC DESCRIPTOR`
#![allow(unsafe_code)] // the tap's descriptor by its number

use std::error::Error;
use std::os::fd::{FromRawFd, OwnedFd};

use podvisor_vmm::{Initramfs, Kernel, NetDevice, Transport, Vm};

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
        .cmdline(next("COMMAND-LINE")?);
    let mac = next("MAC")?.parse()?;
    // SAFETY: the harness left the tap open under this number for this program, which takes it only
    // here.
    let tap = unsafe { OwnedFd::from_raw_fd(next("DESCRIPTOR")?.parse()?) };
    let vm = vm
        .net(NetDevice::tap(tap)?.mac(mac))
        .serial(std::io::stdout())
        .build()?;
    vm.start()?;
    vm.wait()?;
    Ok(())
}
