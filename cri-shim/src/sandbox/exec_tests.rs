//! Further processes in a container, in a real guest.

use std::path::Path;
use std::process::Command;

use podvisor_agent_protocol::{AgentError, ErrorKind, ExitStatus, api};
use podvisor_images::{ImportSource, PullOptions, Store};
use serde_json::{Value, json};
use ttrpc::context::Context;

use super::*;

/// An image of busybox alone, in a store below `folder`.
fn image(folder: &Path) -> podvisor_images::Image {
    let bin = folder.join("root/bin");
    std::fs::create_dir_all(&bin).unwrap();
    std::fs::copy("/bin/busybox", bin.join("busybox"))
        .expect("/bin/busybox is needed: apt-get install busybox-static");
    let installed = Command::new(bin.join("busybox"))
        .args(["--install", "-s"])
        .arg(&bin)
        .status()
        .unwrap();
    assert!(installed.success());
    for link in std::fs::read_dir(&bin).unwrap() {
        let link = link.unwrap().path();
        if link.is_symlink() {
            std::fs::remove_file(&link).unwrap();
            std::os::unix::fs::symlink("busybox", &link).unwrap();
        }
    }
    let store = Store::open(folder.join("store")).unwrap();
    let source = ImportSource::Folder(folder.join("root"));
    store
        .import(source, Some("busybox"), &PullOptions::default())
        .unwrap()
}

/// Runs a script in the container `c` and gives its exit code; `process` overrides what the container's own process has.
async fn exec(
    agent: &Agent,
    container: &Value,
    name: &str,
    script: &str,
    process: Value,
) -> ExitStatus {
    let mut json = container.clone();
    json["args"] = json!(["sh", "-c", script]);
    for (key, value) in process.as_object().unwrap() {
        json[key] = value.clone();
    }
    let request = api::ExecProcessRequest {
        container_id: "c".into(),
        exec_id: name.into(),
        process_json: serde_json::to_vec(&json).unwrap(),
        ..Default::default()
    };
    let client = agent.client();
    client
        .exec_process(Context::default(), &request)
        .await
        .unwrap();
    let wait = api::WaitProcessRequest {
        container_id: "c".into(),
        exec_id: name.into(),
        ..Default::default()
    };
    let ended = client
        .wait_process(Context::default(), &wait)
        .await
        .unwrap();
    ExitStatus::try_from(&ended).unwrap()
}

#[tokio::test]
async fn guest_further_processes_are_confined_as_the_containers_own() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path());
    let assets = Assets::of_this_process();
    let files = GuestFiles::open(&assets.kernel().unwrap(), &assets.initramfs().unwrap()).unwrap();
    let sandbox = Sandbox::start(SandboxConfig {
        id: format!("test-exec-{}", std::process::id()),
        hostname: "h".into(),
        machine: MachineConfig {
            files,
            cpus: 1,
            memory: 256 << 20,
            image: Disk {
                path: image.rootfs().to_owned(),
                serial: "image".into(),
            },
            console: None,
        },
    })
    .await
    .unwrap();
    let agent = sandbox.agent();
    let options = ContainerOptions {
        command: vec!["sleep".into(), "1000".into()],
        env: vec!["PATH=/bin".into()],
        ..ContainerOptions::default()
    };
    let spec = container_spec("c", "h", None, &options).unwrap();
    let container = serde_json::to_value(spec.spec.process()).unwrap();
    let stdio = api::Stdio::default();
    agent.create("c", "image", "h", &spec, stdio).await.unwrap();
    agent.start("c").await.unwrap();

    // What the kernel says of this process and of the container's own.
    let same =
        "same() { test \"$(grep $1: /proc/self/status)\" = \"$(grep $1: /proc/1/status)\"; }\n";
    let has = "has() { test \"$(awk \"/^$1:/{print \\$2}\" /proc/self/status)\" = \"$2\"; }\n";
    let begin = format!("{same}{has}has Seccomp 2 || exit 10\n");
    let alike = format!(
        "{begin}for set in Inh Prm Eff Bnd Amb; do same Cap$set || exit 11; done; same NoNewPrivs"
    );
    let run =
        async |name, script: &str, process| exec(agent, &container, name, script, process).await;
    assert_eq!(run("alike", &alike, json!({})).await, ExitStatus::Code(0));
    let script = format!("{begin}has NoNewPrivs 1");
    let status = run("nnp", &script, json!({"noNewPrivileges": true})).await;
    assert_eq!(status, ExitStatus::Code(0));
    let none =
        json!({"bounding": [], "effective": [], "permitted": [], "inheritable": [], "ambient": []});
    let script = format!(
        "{begin}test $(id -u) = 1000 && has CapEff 0000000000000000 && has CapBnd 0000000000000000"
    );
    let process = json!({"user": {"uid": 1000, "gid": 1000}, "capabilities": none});
    assert_eq!(run("user", &script, process).await, ExitStatus::Code(0));
    // A command that is not there is told apart, filter or not.
    let missing = json!({
        "args": ["no-such-command"], "cwd": "/", "env": ["PATH=/bin"], "user": {"uid": 0, "gid": 0},
    });
    let request = api::ExecProcessRequest {
        container_id: "c".into(),
        exec_id: "missing".into(),
        process_json: serde_json::to_vec(&missing).unwrap(),
        ..Default::default()
    };
    let refused = agent
        .client()
        .exec_process(Context::default(), &request)
        .await;
    let error = AgentError::from(refused.unwrap_err());
    assert_eq!(error.kind, ErrorKind::CommandNotFound);
    sandbox.shutdown().await;
}
