//! Launches a sandbox with a container that counts, says so, and waits to be killed: the sandbox
//! goes on. `tests/guest_sandbox.rs` starts and kills it.
//!
//! ```text
//! outlived PODVISOR DIR IMAGE.erofs DIGEST LOG
//! ```

use std::fs::File;
use std::path::{Path, PathBuf};

use podvisor_cri::machine::Assets;
use podvisor_cri::sandbox::{
    ContainerOptions, CreateContainer, DEFAULT_CGROUP_PARENT, GuestNetwork, JailMode, LaunchConfig,
    SandboxClient, SupplementalGroups, container_spec,
};

const SCRIPT: &str = "trap 'exit 5' USR1; n=0; while :; do echo $n; n=$((n+1)); sleep 0.1; done";

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, podvisor, dir, image, digest, log] = arguments.as_slice() else {
        return Err("see the documentation of this example".into());
    };
    let assets = Assets::of_this_process();
    let config = LaunchConfig {
        id: "outlived".into(),
        hostname: "pod".into(),
        dir: PathBuf::from(dir),
        kernel: assets.kernel()?,
        initramfs: assets.initramfs()?,
        vcpus: 1,
        max_vcpus: 1,
        memory: 256 << 20,
        growth: 0,
        image_slots: 1,
        nics: Vec::new(),
        shared_dir: None,
        console: None,
        events: None,
        sysctls: Default::default(),
        jail: JailMode::Enforced,
        pci: false,
        templates: None,
        snapshot: None,
        cgroup_parent: Some(DEFAULT_CGROUP_PARENT.into()),
    };
    let sandbox =
        SandboxClient::launch_program(Path::new(podvisor), config, GuestNetwork::default()).await?;
    let options = ContainerOptions {
        command: ["sh", "-c", SCRIPT].map(str::to_owned).to_vec(),
        env: vec!["PATH=/bin".to_owned()],
        ..ContainerOptions::default()
    };
    let log = File::options().create(true).append(true).open(log)?;
    let container = CreateContainer {
        id: "counter".into(),
        image: File::open(image)?.into(),
        image_digest: digest.clone(),
        volumes: Vec::new(),
        readonly_rootfs: false,
        spec: container_spec("counter", "pod", None, &options)?.spec,
        user: String::new(),
        supplemental_groups: SupplementalGroups::Default,
        log: Some(log.into()),
        tty: false,
        stdin: false,
        stdin_once: false,
        restart: podvisor_cri::sandbox::RestartPolicy::Never,
        etc_hosts: Vec::new(),
        etc_resolv_conf: Vec::new(),
        etc_hostname: Vec::new(),
    };
    sandbox.create_container(container).await?;
    sandbox.start_container("counter").await?;
    println!("launched {}", sandbox.pid());
    std::future::pending().await
}
