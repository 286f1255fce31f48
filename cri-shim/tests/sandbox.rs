//! Sandboxes that fail to start: this needs no guest.

mod support;

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use podvisor_cri::machine::Transport;
use podvisor_cri::sandbox::{
    CreateContainer, ImageVolume, JailMode, Launching, RefusalKind, SandboxClient, SandboxError,
};
use support::Root;
use support::guest_files::{elf, guest_dir};
use support::pod::{Pod, eventually, launch};

/// Returns a configuration whose guest files look valid.
fn config(root: &Root, pod: &Pod) -> podvisor_cri::sandbox::LaunchConfig {
    podvisor_cri::sandbox::LaunchConfig {
        id: "test".into(),
        hostname: "pod".into(),
        dir: pod.dir(),
        guest: Default::default(),
        kernel: elf(root).into(),
        initramfs: Path::new(&guest_dir(root)).join("initramfs.cpio"),
        vcpus: 1,
        max_vcpus: 1,
        memory: 64 << 20,
        growth: 0,
        image_slots: 0,
        nics: Vec::new(),
        shared_dir: None,
        users: None,
        share_users: Default::default(),
        console: None,
        events: None,
        sysctls: Default::default(),
        jail: Default::default(),
        required_layers: Vec::new(),
        transport: Transport::Mmio,
        psi: false,
        templates: None,
        snapshot: None,
        cgroup_parent: None,
        io_limits: Vec::new(),
    }
}

#[tokio::test]
async fn a_kernel_that_is_none_fails_the_launch_with_the_reason() {
    let (root, pod) = (Root::default(), Pod::default());
    let mut config = config(&root, &pod);
    config.kernel = "/etc/passwd".into();
    match launch(config).await {
        Err(SandboxError::Launch(why)) => assert!(why.contains("kernel"), "{why}"),
        other => panic!("{other:?}"),
    }
    match SandboxClient::connect(&pod.dir()).await {
        Err(SandboxError::Gone { exit: None, .. }) => {}
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_file_that_is_not_there_is_named() {
    let (root, pod) = (Root::default(), Pod::default());
    let mut config = config(&root, &pod);
    config.initramfs = "/no/such/initramfs".into();
    match launch(config).await {
        Err(SandboxError::File { path, .. }) => assert_eq!(path, Path::new("/no/such/initramfs")),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn ids_and_directories_that_cannot_be_used_are_refused() {
    let (root, pod) = (Root::default(), Pod::default());
    for (id, dir) in [
        ("../x", pod.dir()),
        ("", pod.dir()),
        ("x", Path::new("relative").to_owned()),
        ("x", Path::new("/").join("x".repeat(100))),
    ] {
        let mut config = config(&root, &pod);
        (config.id, config.dir) = (id.to_owned(), dir);
        let refused = launch(config).await;
        assert!(
            matches!(refused, Err(SandboxError::Id(_) | SandboxError::Dir { .. })),
            "{refused:?}"
        );
    }
}

#[tokio::test]
async fn a_program_that_is_not_podvisor_fails_the_launch() {
    let (root, pod) = (Root::default(), Pod::default());
    let program = Path::new("/bin/true");
    match SandboxClient::launch_program(program, config(&root, &pod), Default::default()).await {
        Err(SandboxError::Launch(why)) => assert!(why.contains("it said nothing"), "{why}"),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_process_that_never_says_that_its_guest_is_up_is_killed() {
    let (root, pod) = (Root::default(), Pod::default());
    // It prints a lot, but not the expected line.
    let program = Path::new("/usr/bin/yes");
    let mut config = config(&root, &pod);
    config.jail = JailMode::Disabled;
    let launching = Launching::begin_program(program, config).await.unwrap();
    // From here on, timeouts expire immediately.
    tokio::time::pause();
    let failed = launching.finish(Default::default()).await;
    tokio::time::resume();
    let Err(SandboxError::Unresponsive { pid: Some(pid), .. }) = failed else {
        panic!("{failed:?}");
    };
    let process = format!("/proc/{pid}/cmdline");
    eventually("the end of the process", || {
        fs::read(&process).map_or(true, |line| line.is_empty())
    })
    .await;
}

#[tokio::test]
async fn a_directory_without_a_sandbox_is_told() {
    let pod = Pod::default();
    match SandboxClient::connect(&pod.dir()).await {
        Err(SandboxError::Gone { dir, exit: None }) => assert_eq!(dir, pod.dir()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn who_types_the_process_of_a_sandbox_is_told_what_it_is() {
    let root = Root::default();
    let ran = root.output(&["sandbox", "x"]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.stderr.contains("podvisor:"), "{ran:?}");
}

/// Starts a machine's process that only greets.
fn mute(dir: &Path) -> Child {
    let test = std::env::current_exe().unwrap();
    let target = test.parent().and_then(Path::parent).unwrap();
    let mut mute = Command::new(target.join("examples/mute"))
        .arg(dir.join("control.sock"))
        .arg(r#"{"number":0,"answer":{"Ok":{"Hello":{"version":2}}}}"#)
        .stdout(Stdio::piped())
        .spawn()
        .expect("the example `mute` is built with the tests");
    let mut reader = BufReader::new(mute.stdout.take().unwrap());
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    assert_eq!(line, "listening\n");
    // It continues to write there.
    mute.stdout = Some(reader.into_inner());
    mute
}

#[tokio::test]
async fn a_request_with_too_many_files_is_refused_and_others_are_not_hurt() {
    let dir = tempfile::tempdir().unwrap();
    let mut mute = mute(dir.path());
    let client = SandboxClient::connect(dir.path()).await.unwrap();
    let open = || fs::File::open("/dev/null").unwrap();
    let container = |volumes: usize| {
        let mut container = CreateContainer::new("c", open(), "sha256:0", Default::default());
        container
            .volumes
            .extend((0..volumes).map(|number| ImageVolume {
                image: open().into(),
                digest: format!("sha256:{number}"),
            }));
        container
    };
    let refused = client.create_container(container(64)).await.unwrap_err();
    assert_eq!(refused.kind(), Some(RefusalKind::InvalidArgument));
    assert!(refused.to_string().contains("65 files"), "{refused}");
    // The connection is up: this request is sent, and the process does not answer.
    let create = client.create_container(container(63));
    assert!(
        tokio::time::timeout(Duration::from_millis(100), create)
            .await
            .is_err()
    );
    mute.kill().unwrap();
    mute.wait().unwrap();
    client.ended().await;
}

#[tokio::test]
async fn a_machine_that_says_who_it_is_and_nothing_else_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let mut mute = mute(dir.path());
    let client = SandboxClient::connect(dir.path()).await.unwrap();
    // From here on, timeouts expire immediately.
    tokio::time::pause();
    match client.list().await {
        Err(SandboxError::Unresponsive { pid, .. }) => assert_eq!(pid, Some(mute.id())),
        other => panic!("{other:?}"),
    }
    // Whether this is noticed in time depends on the clock, which runs ahead here.
    let _ = client.shutdown(Duration::from_secs(1)).await;
    assert_eq!(mute.wait().unwrap().signal(), Some(9));
    tokio::time::resume();
    client.ended().await;
    client.shutdown(Duration::ZERO).await.unwrap();
}
