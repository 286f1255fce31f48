//! podvisor as the restore benchmark starts it: a guest with our agent, booted or cloned, until the
//! agent has answered its first call over vsock. Then it writes `answered` and waits to be killed.
//!
//! * `agent-podvisor boot mmio|pci KERNEL INITRAMFS MEMORY COMMAND-LINE [SNAPSHOT]`; with a
//!   directory, a snapshot is taken after the answer
//! * `agent-podvisor restore SNAPSHOT`
#[path = "../restore/agent.rs"]
mod agent;

use std::error::Error;
use std::io::Read;
use std::sync::mpsc;
use std::thread;

use podvisor_vmm::{
    BlockDevice, Initramfs, Kernel, Snapshot, Transport, Vm, VmBuilder, VsockDevice,
};

/// Spare slots for the disks of containers.
const SPARE_DISKS: usize = 4;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let mut next = |what: &str| args.next().ok_or_else(|| format!("{what} is missing"));
    let vm = match next("boot or restore")?.as_str() {
        "boot" => {
            let transport = match next("mmio or pci")?.as_str() {
                "pci" => Transport::Pci,
                _ => Transport::Mmio,
            };
            let builder = Vm::builder()
                .transport(transport)
                .kernel(Kernel::open(next("KERNEL")?)?)
                .initramfs(Initramfs::open(next("INITRAMFS")?)?)
                .memory(next("MEMORY")?.parse()?)
                .cmdline(next("COMMAND-LINE")?);
            let (ready, is_ready) = mpsc::channel();
            let mut vsock = VsockDevice::in_process(3)?;
            vsock.listen(agent::READY_PORT, move |stream| {
                // The receiver is gone after the first stream.
                let _ = ready.send(stream);
            });
            let vm = devices(builder, vsock).build()?;
            vm.start()?;
            // The agent's line, up to its end.
            is_ready.recv()?.read_to_end(&mut Vec::new())?;
            agent::call(&mut vm.vsock()?.connect(agent::RPC_PORT)?)?;
            if let Ok(dir) = next("SNAPSHOT") {
                vm.pause()?;
                vm.snapshot(dir)?;
            }
            vm
        }
        _ => {
            let snapshot = Snapshot::open(next("SNAPSHOT")?)?;
            let vm = devices(snapshot.builder(), VsockDevice::in_process(3)?).build()?;
            vm.start()?;
            agent::call(&mut vm.vsock()?.connect(agent::RPC_PORT)?)?;
            vm
        }
    };
    println!("answered");
    loop {
        // Keeps the VM alive until the process is killed.
        let _alive = &vm;
        thread::park();
    }
}

fn devices<S>(mut builder: VmBuilder<S>, vsock: VsockDevice) -> VmBuilder<S> {
    for _ in 0..SPARE_DISKS {
        builder = builder.block(BlockDevice::spare());
    }
    builder.vsock(vsock).rng()
}
