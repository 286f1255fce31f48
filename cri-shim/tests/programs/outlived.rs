//! Launches a sandbox with a container that counts, reports it, and waits to be killed: the sandbox
//! continues. `tests/guest_sandbox.rs` starts and kills it.
//!
//! ```text
//! outlived PODVISOR DIR IMAGE.erofs DIGEST LOG
//! ```

use std::fs::File;
use std::path::Path;

use podvisor_cri::machine::Assets;
use podvisor_cri::sandbox::{
    ContainerOptions, CreateContainer, GuestNetwork, LaunchConfig, SandboxClient, container_spec,
};

const SCRIPT: &str = "trap 'exit 5' USR1; n=0; while :; do echo $n; n=$((n+1)); sleep 0.1; done";

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, podvisor, dir, image, digest, log] = arguments.as_slice() else {
        return Err("see the documentation of this program".into());
    };
    let assets = Assets::of_this_process();
    let config = LaunchConfig {
        hostname: "pod".into(),
        ..LaunchConfig::new("outlived", dir, assets.kernel()?, assets.initramfs()?)
    };
    let sandbox =
        SandboxClient::launch_program(Path::new(podvisor), config, GuestNetwork::default()).await?;
    let options = ContainerOptions {
        command: ["sh", "-c", SCRIPT].map(str::to_owned).to_vec(),
        env: vec!["PATH=/bin".to_owned()],
        ..ContainerOptions::default()
    };
    let log = File::options().create(true).append(true).open(log)?;
    let spec = container_spec("counter", "pod", None, &options)?.spec;
    let container = CreateContainer {
        log: Some(log.into()),
        ..CreateContainer::new("counter", File::open(image)?, digest, spec)
    };
    sandbox.create_container(container).await?;
    sandbox.start_container("counter").await?;
    println!("launched {}", sandbox.pid());
    std::future::pending().await
}
