//! A Debian as it is made for clouds (`cargo xtask cloud` makes it, and runs this): systemd,
//! cloud-init, an SSH server and QEMU's guest agent, in a VM pod and at the terminal. Its path is
//! in `PODVISOR_TEST_CLOUD`. In an emulated host it takes many minutes, so that no other command
//! runs it.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use podvisor_cri::sandbox::SandboxClient;
use podvisor_cri_messages::*;
use support::Root;
use support::cri::{Daemon, PodClient};
use support::pod::log_text;

/// The bridge of the pod.
const BRIDGE: &str = "br-cloud";

/// How long a step of such a system may take in an emulated host.
const LONG: Duration = Duration::from_secs(1500);

fn image() -> PathBuf {
    let path = std::env::var_os("PODVISOR_TEST_CLOUD")
        .expect("PODVISOR_TEST_CLOUD names no disk: run `cargo xtask cloud`");
    PathBuf::from(path)
}

/// Waits until `look` returns something; fails with what `shown` returns.
fn awaits<T>(what: &str, shown: impl Fn() -> String, mut look: impl FnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    loop {
        if let Some(found) = look() {
            println!("{what}: {} s", begin.elapsed().as_secs());
            return found;
        }
        assert!(begin.elapsed() < LONG, "{what} never came:\n{}", shown());
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// A pair of keys of SSH.
struct Key(tempfile::TempDir);

impl Key {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let made = Command::new("ssh-keygen")
            .args(["-q", "-t", "ed25519", "-N", "", "-f"])
            .arg(dir.path().join("key"))
            .status()
            .unwrap();
        assert!(made.success());
        Self(dir)
    }

    fn public(&self) -> String {
        fs::read_to_string(self.0.path().join("key.pub")).unwrap()
    }

    /// Runs a command in the guest; its output, if it succeeds.
    fn ssh(&self, user: &str, address: &str, command: &str) -> Option<String> {
        let ran = Command::new("ssh")
            .arg("-i")
            .arg(self.0.path().join("key"))
            .args(["-o", "StrictHostKeyChecking=no", "-o", "BatchMode=yes"])
            .args([
                "-o",
                "UserKnownHostsFile=/dev/null",
                "-o",
                "ConnectTimeout=30",
            ])
            .args(["-l", user, address, command])
            .output()
            .unwrap();
        let output = String::from_utf8_lossy(&ran.stdout).into_owned();
        ran.status.success().then_some(output)
    }
}

/// Imports the disk as the one file of an image.
fn import(daemon: &Daemon, name: &str) {
    let tree = daemon.path("tree");
    fs::create_dir_all(tree.join("disk")).unwrap();
    fs::copy(image(), tree.join("disk/disk.raw")).unwrap();
    let (root, path) = (daemon.path("root"), tree.display().to_string());
    let root = root.display().to_string();
    let imported = Root::default().output(&["--root", &root, "import", "-q", &path, name]);
    assert_eq!(imported.code, Some(0), "{imported:?}");
    fs::remove_dir_all(&tree).unwrap();
}

fn pod_config(daemon: &Daemon, key: &Key) -> PodSandboxConfig {
    // Keys of one kind, and no locales: others take minutes in an emulated host.
    let user_data = "write_files: [{path: /etc/from-seed, content: from the seed}]\n\
                     users: [default, {name: me, shell: /bin/bash}]\n\
                     ssh_genkeytypes: [ed25519]\nlocale: false\n";
    let annotations = [
        ("VirtletSSHKeys", key.public()),
        ("VirtletRootVolumeSize", "3Gi".to_owned()),
        ("VirtletCloudInitUserData", user_data.to_owned()),
    ];
    PodSandboxConfig {
        metadata: Some(PodSandboxMetadata {
            name: "cloud".to_owned(),
            uid: "uid-cloud".to_owned(),
            namespace: "default".to_owned(),
            attempt: 0,
        }),
        hostname: "cloud".to_owned(),
        log_directory: daemon.path("logs").to_str().unwrap().to_owned(),
        annotations: annotations
            .into_iter()
            .map(|(key, value)| (key.to_owned(), value))
            .collect(),
        linux: Some(LinuxPodSandboxConfig {
            resources: Some(LinuxContainerResources {
                memory_limit_in_bytes: 1 << 30,
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..PodSandboxConfig::default()
    }
}

fn container() -> ContainerConfig {
    ContainerConfig {
        metadata: Some(ContainerMetadata {
            name: "vm".to_owned(),
            attempt: 0,
        }),
        image: Some(ImageSpec {
            image: "cloud".to_owned(),
            ..ImageSpec::default()
        }),
        log_path: "vm.log".to_owned(),
        stdin: true,
        tty: true,
        ..ContainerConfig::default()
    }
}

async fn sandbox(daemon: &Daemon, pod: &str) -> SandboxClient {
    let dir: String = pod.chars().take(24).collect();
    let dir = daemon.path("run/sb").join(dir);
    SandboxClient::connect(&dir).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cloud_image_is_configured_reached_rebooted_and_stopped_as_a_pod() {
    let (daemon, key) = (Daemon::new(&[], None), Key::new());
    daemon.add_network(BRIDGE, &["10.95.0.0/24"]);
    import(&daemon, "cloud");
    let mut runtime = daemon.runtime().await;
    let request = RunPodSandboxRequest {
        config: Some(pod_config(&daemon, &key)),
        runtime_handler: "podvisor-vm".to_owned(),
    };
    let pod = runtime.run_pod_sandbox(request).await.unwrap();
    let pod = pod.into_inner().pod_sandbox_id;
    let mut client = PodClient::new(runtime, pod.clone());
    let request = client.create_request(container(), None);
    let vm = client.create(request).await;
    client.start(&vm).await.unwrap();
    let log = || log_text(&daemon.path("logs/vm.log"));
    let says = |what: &str| {
        awaits(what, log, || log().contains(what).then_some(()));
    };
    says("Debian GNU/Linux\" (grub.cfg");
    says("Reached target");
    says("finished at");
    assert!(log().contains("DataSourceNoCloud"), "{}", log());

    // cloud-init has given it its name, user, key and file, and the address that the pod has.
    let status = PodSandboxStatusRequest {
        pod_sandbox_id: pod.clone(),
        verbose: false,
    };
    let status = client.runtime.pod_sandbox_status(status).await.unwrap();
    let address = status.into_inner().status.unwrap().network.unwrap().ip;
    let look = "hostname; id -un; cat /etc/from-seed; echo; id -u me; \
                df -m --output=size / | tail -1";
    let shown = awaits("ssh", log, || key.ssh("debian", &address, look));
    let lines: Vec<&str> = shown.lines().map(str::trim).collect();
    assert_eq!(lines[..3], ["cloud", "debian", "from the seed"], "{shown}");
    let root: u64 = lines[4].parse().unwrap();
    assert!(root > 2500, "the root file system did not grow: {shown}");

    // The agent's package has started it.
    let exec = client.exec(&vm, "cat /etc/debian_version", 300).await;
    assert!(exec.unwrap().stdout.starts_with(b"12."));
    let info = sandbox(&daemon, &pod).await.guest_info(&vm).await.unwrap();
    assert_eq!(
        (info.host_name.as_str(), info.os.id.as_str()),
        ("cloud", "debian")
    );
    sandbox(&daemon, &pod)
        .await
        .set_guest_time(&vm)
        .await
        .unwrap();

    // A reboot stays in the container.
    let boot_id = "cat /proc/sys/kernel/random/boot_id";
    let before = key.ssh("debian", &address, boot_id).unwrap();
    sandbox(&daemon, &pod)
        .await
        .reboot_guest(&vm)
        .await
        .unwrap();
    let after = awaits("the second boot", log, || {
        key.ssh("debian", &address, boot_id)
            .filter(|after| *after != before)
    });
    assert_ne!(after, before);
    for how in [
        "starting the kernel that was kept of the image",
        "podvisor-loader: starting the kernel",
    ] {
        assert_eq!(log().matches(how).count(), 1, "{how}");
    }

    // The power button is enough.
    let stop = "sudo systemctl stop qemu-guest-agent";
    key.ssh("debian", &address, stop).unwrap();
    let request = StopContainerRequest {
        container_id: vm.clone(),
        timeout: i64::try_from(LONG.as_secs()).unwrap(),
    };
    client.runtime.stop_container(request).await.unwrap();
    let ended = client.status(&vm).await;
    assert_eq!(
        (ended.exit_code, ended.reason.as_str()),
        (0, "Completed"),
        "{}",
        log()
    );
    assert!(
        log().contains("Power down") || log().contains("Powering off"),
        "{}",
        log()
    );
}

#[test]
fn a_cloud_image_is_logged_in_to_at_the_terminal() {
    let root = Root::default();
    let podvisor = |arguments: &[&str]| root.output(arguments);
    let image = image();
    let image = Path::new(&image).to_str().unwrap();
    let run = podvisor(&["vm", "run", "-d", "--name", "web", "-m", "1G", image]);
    assert_eq!(run.code, Some(0), "{run:?}");
    let logs = || podvisor(&["vm", "logs", "web"]).stdout;
    let by_ssh = |command: &str| {
        let ran = podvisor(&["vm", "ssh", "web", "-o", "ConnectTimeout=30", command]);
        (ran.code == Some(0)).then_some(ran.stdout)
    };
    let user = awaits("ssh", logs, || by_ssh("id -un; sudo id -un"));
    assert_eq!(user, "podvisor\nroot\n");
    // Logged in without a password.
    awaits("the console's login", logs, || {
        logs().contains("podvisor@web").then_some(())
    });
    let exec = awaits("the agent", logs, || {
        let ran = podvisor(&["vm", "exec", "web", "cat", "/etc/hostname"]);
        (ran.code == Some(0)).then_some(ran.stdout)
    });
    assert_eq!(exec, "web\n");
    let seen = podvisor(&["vm", "inspect", "web"]).stdout;
    assert!(seen.contains("Debian GNU/Linux"), "{seen}");
    let boot_id = "cat /proc/sys/kernel/random/boot_id";
    let before = by_ssh(boot_id).unwrap();
    podvisor(&["vm", "reboot", "web"]).printed("web\n");
    awaits("the second boot", logs, || {
        by_ssh(boot_id).filter(|after| *after != before)
    });
    podvisor(&["vm", "stop", "-t", "600", "web"]).printed("web\n");
    assert!(
        logs().contains("Power down") || logs().contains("Powering off"),
        "{}",
        logs()
    );
    podvisor(&["vm", "rm", "web"]).printed("web\n");
}
