//! podvisor as the benchmark of whole systems starts it: a machine like those of VM pods, whose
//! serial port is stdin and stdout.
//!
//! * `vm-podvisor boot KERNEL INITRAMFS MEMORY COMMAND-LINE DISK [SNAPSHOT]`; with a directory, the
//!   end of stdin takes a snapshot, after which the line `saved` is written
//! * `vm-podvisor clone SNAPSHOT DISK`
use std::error::Error;
use std::io::Read;
use std::sync::mpsc;
use std::thread;

use podvisor_vmm::{
    BlockDevice, Initramfs, Kernel, PortsDevice, Snapshot, Transport, Vm, VmBuilder, VsockDevice,
};

/// The port of QEMU's guest agent.
const AGENT: &str = "org.qemu.guest_agent.0";

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let mut next = |what: &str| args.next().ok_or_else(|| format!("{what} is missing"));
    let vm = match next("boot or clone")?.as_str() {
        "boot" => {
            let builder = Vm::builder()
                .transport(Transport::Pci)
                .kernel(Kernel::open(next("KERNEL")?)?)
                .initramfs(Initramfs::open(next("INITRAMFS")?)?)
                .memory(next("MEMORY")?.parse()?)
                .cmdline(next("COMMAND-LINE")?)
                .power_button()
                .generation_id();
            devices(builder, &next("DISK")?)?.build()?
        }
        _ => {
            let snapshot = Snapshot::open(next("SNAPSHOT")?)?;
            devices(snapshot.builder(), &next("DISK")?)?.build()?
        }
    };
    vm.start()?;
    // As a pod's process does: an agent without another end looks for one all the time.
    let _agent = vm.ports()?.connect(AGENT)?;
    type_into(&vm)?;
    if let Ok(dir) = next("SNAPSHOT") {
        vm.pause()?;
        vm.snapshot(dir)?;
        println!("saved");
        return Ok(());
    }
    loop {
        // Keeps the VM alive until the process is killed.
        let _alive = &vm;
        thread::park();
    }
}

/// The devices of a VM pod without a network, whose disk has the serial number of its root.
fn devices<S>(builder: VmBuilder<S>, disk: &str) -> Result<VmBuilder<S>, Box<dyn Error>> {
    Ok(builder
        .block(BlockDevice::open(disk)?.serial("root"))
        .vsock(VsockDevice::in_process(3)?)
        .rng()
        .balloon()
        .ports(PortsDevice::new([AGENT])?)
        .serial(std::io::stdout()))
}

/// Passes stdin to the guest's serial port until its end.
fn type_into(vm: &Vm) -> Result<(), Box<dyn Error>> {
    let (drained, is_drained) = mpsc::channel();
    vm.on_serial_drained(move || {
        // Nobody types any more.
        let _ = drained.send(());
    });
    let mut buffer = [0; 64];
    loop {
        let count = std::io::stdin().read(&mut buffer)?;
        if count == 0 {
            return Ok(());
        }
        let mut rest = buffer.get(..count).unwrap_or_default();
        while !rest.is_empty() {
            let taken = vm.serial_input(rest).unwrap_or(rest.len());
            rest = rest.get(taken..).unwrap_or_default();
            if !rest.is_empty() {
                is_drained.recv()?;
            }
        }
    }
}
