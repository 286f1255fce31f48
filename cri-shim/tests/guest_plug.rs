//! The agent finds devices that are plugged into its guest, and releases them.

use std::io::Read as _;
use std::path::PathBuf;
use std::sync::mpsc;
use std::time::Duration;

use podvisor_agent_protocol::api::{
    AgentClient, ConfigureRequest, RemoveDevicesRequest, ScanDevicesRequest, Share,
};
use podvisor_agent_protocol::{READY_PORT, RPC_PORT};
use podvisor_vmm::{FsDevice, Initramfs, Kernel, RngDevice, Transport, Vm, VsockDevice};
use ttrpc::asynchronous::Client;
use ttrpc::asynchronous::transport::Socket;
use ttrpc::context;

/// Timeout for everything, including on an emulated host.
const PATIENCE: Duration = Duration::from_secs(120);

fn guest_file(name: &str) -> PathBuf {
    let dir = std::env::var_os("PODVISOR_GUEST_DIR").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../target/guest")),
        PathBuf::from,
    );
    dir.join(name)
}

#[tokio::test]
async fn guest_agent_scans_for_devices_and_lets_go_of_them() {
    let (ready, is_ready) = mpsc::channel();
    let mut vsock = VsockDevice::in_process(3).unwrap();
    vsock.listen(READY_PORT, move |stream| drop(ready.send(stream)));
    let vm = Vm::builder()
        .kernel(Kernel::open(guest_file("vmlinux")).unwrap())
        .initramfs(Initramfs::open(guest_file("initramfs.cpio")).unwrap())
        .cmdline("quiet panic=-1 reboot=k 8250.nr_uarts=0")
        .transport(Transport::Pci)
        .vsock(vsock)
        .build()
        .unwrap();
    vm.start().unwrap();
    let mut line = is_ready.recv_timeout(PATIENCE).expect("the agent is there");
    line.read_to_end(&mut Vec::new()).unwrap();

    let stream = vm.vsock().unwrap().connect(RPC_PORT).unwrap();
    stream.set_nonblocking(true).unwrap();
    let stream = tokio::net::UnixStream::from_std(stream).unwrap();
    let agent = AgentClient::new(Client::new(Socket::new(stream)));
    let deadline = || context::with_duration(PATIENCE);
    // A share can be mounted once its device is plugged in and the guest has scanned for it.
    let dir = tempfile::tempdir().unwrap();
    let mut configure = ConfigureRequest::new();
    configure.shares = vec![Share {
        tag: "plugged".to_owned(),
        path: "/run/podvisor/plugged".to_owned(),
        ..Default::default()
    }];
    vm.plug(FsDevice::open("plugged", dir.path()).unwrap())
        .unwrap();
    assert!(agent.configure(deadline(), &configure).await.is_err());
    let scan = ScanDevicesRequest::new();
    agent.scan_devices(deadline(), &scan).await.unwrap();
    agent.configure(deadline(), &configure).await.unwrap();

    for _ in 0..2 {
        let plugged = vm.plug(RngDevice::new()).unwrap();
        assert_eq!(plugged.address.to_string(), "0000:00:03.0");
        agent.scan_devices(deadline(), &scan).await.unwrap();
        let remove = RemoveDevicesRequest {
            addresses: vec![plugged.address.to_string()],
            ..Default::default()
        };
        agent.remove_devices(deadline(), &remove).await.unwrap();
        vm.unplug(&plugged.name).unwrap();
        // There is nothing left to release or to find.
        agent.remove_devices(deadline(), &remove).await.unwrap();
        agent.scan_devices(deadline(), &scan).await.unwrap();
    }
    vm.stop().unwrap();
}
