//! A container whose image is in its guest's memory: that machine has no disk.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

use podvisor_agent_protocol::api::{
    AgentClient, CreateContainerRequest, DeleteContainerRequest, StartContainerRequest,
    WaitProcessRequest,
};
use podvisor_agent_protocol::{READY_PORT, RPC_PORT};
use podvisor_vmm::{Initramfs, Kernel, PmemDevice, Transport, Vm, VsockDevice};
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

/// Creates an EROFS image of this machine's busybox.
fn image(dir: &Path) -> PathBuf {
    let tree = dir.join("tree");
    for name in ["bin", "dev", "proc", "sys"] {
        std::fs::create_dir_all(tree.join(name)).unwrap();
    }
    std::fs::copy("/bin/busybox", tree.join("bin/busybox")).expect("Debian's busybox-static");
    let image = dir.join("image");
    let made = Command::new("mkfs.erofs")
        .args([&image, &tree])
        .output()
        .expect("mkfs.erofs: run `cargo xtask setup`");
    assert!(made.status.success(), "{made:?}");
    image
}

#[tokio::test]
async fn guest_container_runs_from_an_image_that_is_memory() {
    let dir = tempfile::tempdir().unwrap();
    let (ready, is_ready) = mpsc::channel();
    let mut vsock = VsockDevice::in_process(3).unwrap();
    vsock.listen(READY_PORT, move |stream| drop(ready.send(stream)));
    let vm = Vm::builder()
        .kernel(Kernel::open(guest_file("vmlinux")).unwrap())
        .initramfs(Initramfs::open(guest_file("initramfs.cpio")).unwrap())
        .cmdline("quiet panic=-1 reboot=k 8250.nr_uarts=0")
        .transport(Transport::Pci)
        .vsock(vsock)
        .pmem(PmemDevice::open(image(dir.path())).unwrap())
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

    let start = vm.pmem("pmem0").unwrap().region().unwrap().start;
    let serial = format!("pmem@{start:x}");
    let script = "/bin/busybox touch /written && /bin/busybox rm /bin/busybox; exit 7";
    let spec = serde_json::json!({
        "ociVersion": "1.2.0",
        "process": {
            "args": ["/bin/busybox", "sh", "-c", script],
            "cwd": "/",
            "user": {"uid": 0, "gid": 0},
        },
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["mode=755"]},
        ],
        "linux": {"namespaces": [{"type": "mount"}, {"type": "pid"}]},
    });
    let container_id = "container".to_owned();
    // The image serves one container after the other; their writes are separate.
    for _ in 0..2 {
        let create = CreateContainerRequest {
            container_id: container_id.clone(),
            image_serial: serial.clone(),
            spec_json: serde_json::to_vec(&spec).unwrap(),
            ..Default::default()
        };
        agent.create_container(deadline(), &create).await.unwrap();
        let start = StartContainerRequest {
            container_id: container_id.clone(),
            ..Default::default()
        };
        agent.start_container(deadline(), &start).await.unwrap();
        let wait = WaitProcessRequest {
            container_id: container_id.clone(),
            ..Default::default()
        };
        let ended = agent.wait_process(deadline(), &wait).await.unwrap();
        assert_eq!(ended.exit_code(), 7, "{ended:?}");
        let delete = DeleteContainerRequest {
            container_id: container_id.clone(),
            ..Default::default()
        };
        let deleted = agent.delete_container(deadline(), &delete).await.unwrap();
        assert_eq!(deleted.released_images, [serial.as_str()]);
    }
    let counters = vm.counters();
    assert!(counters.iter().all(|of| !of.device.starts_with("blk")));
    vm.stop().unwrap();
}
