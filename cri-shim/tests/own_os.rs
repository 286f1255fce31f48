//! Sandboxes whose guest has an operating system of its own, before they have a machine: this needs
//! no guest.

mod support;

use std::fs;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use podvisor_cri::sandbox::{
    CreateContainer, Exec, JailMode, LaunchConfig, RefusalKind, SandboxClient, SandboxExit,
    StdioFds, SupplementalGroups, exit_record, oci,
};
use support::pod::{Pod, launch};

/// The configuration of a sandbox without a machine. Jails need root.
fn config(pod: &Pod) -> LaunchConfig {
    LaunchConfig {
        jail: match rustix::process::geteuid().is_root() {
            true => JailMode::Enforced,
            false => JailMode::Disabled,
        },
        cgroup_parent: None,
        ..LaunchConfig::of_own_os("test", pod.dir())
    }
}

#[tokio::test]
async fn a_sandbox_without_a_machine_is_found_again_and_ends_when_asked() {
    let pod = Pod::default();
    let sandbox = launch(config(&pod)).await.unwrap();
    drop(sandbox);
    let sandbox = SandboxClient::connect(&pod.dir()).await.unwrap();
    assert_eq!(sandbox.list().await.unwrap(), []);
    let begin = Instant::now();
    sandbox.shutdown(Duration::from_secs(60)).await.unwrap();
    // Nothing runs that would have to be waited for.
    assert!(begin.elapsed() < Duration::from_secs(30), "{begin:?}");
    assert_eq!(sandbox.ended().await, SandboxExit::PoweredOff);
    let record = exit_record(&pod.dir()).unwrap();
    assert_eq!(record.exit, SandboxExit::PoweredOff);
}

#[tokio::test]
async fn what_needs_an_agent_is_refused_by_what_was_asked() {
    let pod = Pod::default();
    let sandbox = launch(config(&pod)).await.unwrap();
    let image: OwnedFd = fs::File::open("/dev/null").unwrap().into();
    let container = CreateContainer::new("c", image, "sha256:0", Default::default());
    let create = sandbox.create_container(container).await.unwrap_err();
    let exec = Exec {
        exec_id: "e".to_owned(),
        process: oci::Process::default(),
        user: String::new(),
        supplemental_groups: SupplementalGroups::Default,
        tty: None,
        stdio: StdioFds::default(),
    };
    let exec = sandbox.exec("c", exec).await.unwrap_err();
    let grow = sandbox
        .grow(1 << 28, 0, 0, Duration::ZERO)
        .await
        .unwrap_err();
    for (error, named) in [
        (create, "create a container"),
        (exec, "run a program"),
        (grow, "change the guest's memory"),
    ] {
        assert_eq!(error.kind(), Some(RefusalKind::NoAgent), "{error}");
        let said = error.to_string();
        assert!(said.contains(named) && said.contains("agent"), "{said}");
    }
    // It goes on.
    assert_eq!(sandbox.list().await.unwrap(), []);
    sandbox.shutdown(Duration::ZERO).await.unwrap();
}
