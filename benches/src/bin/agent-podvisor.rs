//! podvisor as the restore benchmark starts it: a guest with our agent, booted or cloned, until the
//! agent has answered its first call over vsock. Then it writes `answered` and waits to be killed.
//!
//! * `agent-podvisor boot KERNEL INITRAMFS MEMORY COMMAND-LINE [SNAPSHOT]`; with a directory, a
//!   snapshot is taken after the answer
//! * `agent-podvisor restore SNAPSHOT [CLONES]`
use std::error::Error;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::thread;

use podvisor_vmm::{BlockDevice, Initramfs, Kernel, Snapshot, Vm, VmBuilder, VsockDevice};

/// Where the agent says that it is there, and where it takes calls.
const READY_PORT: u32 = 1024;
const RPC_PORT: u32 = 1025;
/// Slots for the disks of containers.
const SPARE_DISKS: usize = 4;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let mut next = |what: &str| args.next().ok_or_else(|| format!("{what} is missing"));
    let vms = match next("boot or restore")?.as_str() {
        "boot" => {
            let builder = Vm::builder()
                .kernel(Kernel::open(next("KERNEL")?)?)
                .initramfs(Initramfs::open(next("INITRAMFS")?)?)
                .memory(next("MEMORY")?.parse()?)
                .cmdline(next("COMMAND-LINE")?);
            let (ready, is_ready) = mpsc::channel();
            let mut vsock = VsockDevice::in_process(3)?;
            vsock.listen(READY_PORT, move |stream| {
                // Nobody listens when it has come.
                let _ = ready.send(stream);
            });
            let vm = devices(builder, vsock).build()?;
            vm.start()?;
            // The agent's line, up to its end.
            is_ready.recv()?.read_to_end(&mut Vec::new())?;
            call(&vm)?;
            if let Ok(dir) = next("SNAPSHOT") {
                vm.pause()?;
                vm.snapshot(dir)?;
            }
            vec![vm]
        }
        _ => {
            let snapshot = Snapshot::open(next("SNAPSHOT")?)?;
            let clones = next("CLONES").map_or(Ok(1), |count| count.parse())?;
            let mut vms = Vec::new();
            for _ in 0..clones {
                let vm = devices(snapshot.builder(), VsockDevice::in_process(3)?).build()?;
                vm.start()?;
                call(&vm)?;
                vms.push(vm);
            }
            vms
        }
    };
    println!("answered");
    loop {
        // Until it is killed, with its VMs.
        let _alive = &vms;
        thread::park();
    }
}

fn devices(mut builder: VmBuilder, vsock: VsockDevice) -> VmBuilder {
    for _ in 0..SPARE_DISKS {
        builder = builder.block(BlockDevice::spare());
    }
    builder.vsock(vsock).rng()
}

/// Asks the agent for its containers: one message of ttrpc each way.
fn call(vm: &Vm) -> Result<(), Box<dyn Error>> {
    const REQUEST: u8 = 1;
    const RESPONSE: u8 = 2;
    const STREAM: u32 = 1;
    let mut payload = Vec::new();
    for (field, text) in [(1u8, "podvisor.agent.v1.Agent"), (2, "ListContainers")] {
        payload.push(field << 3 | 2);
        payload.push(u8::try_from(text.len())?);
        payload.extend(text.as_bytes());
    }
    let mut stream: UnixStream = vm.vsock()?.connect(RPC_PORT)?;
    let mut message = u32::try_from(payload.len())?.to_be_bytes().to_vec();
    message.extend(STREAM.to_be_bytes());
    message.extend([REQUEST, 0]);
    message.extend(payload);
    stream.write_all(&message)?;
    let mut header = [0; 10];
    stream.read_exact(&mut header)?;
    let [a, b, c, d, _, _, _, _, kind, _] = header;
    let mut answer = vec![0; usize::try_from(u32::from_be_bytes([a, b, c, d]))?];
    stream.read_exact(&mut answer)?;
    if kind != RESPONSE {
        return Err(format!("the agent answered with a message of type {kind}").into());
    }
    Ok(())
}
