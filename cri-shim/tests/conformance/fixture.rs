//! The tested runtime: started here with its own network and registry, or an existing one.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Signal, set_parent_process_death_signal};
use serde_json::json;

use crate::support::PATIENCE;
use crate::support::containerd::containerd;
use crate::support::image::Image;
use crate::support::registry::Registry;

/// The runtime of all tests.
pub(crate) static RUNTIME: LazyLock<Runtime> = LazyLock::new(Runtime::start);

pub(crate) struct Runtime {
    pub(crate) socket: PathBuf,
    /// Whether it runs virtual machines; some checks only apply to containers that share a kernel
    /// with the host.
    pub(crate) is_vm: bool,
    registry: Registry,
    /// Logs of pods and volumes.
    dir: PathBuf,
}

/// Number of different images: more than one pod may use at the same time.
pub(crate) const MANY_IMAGES: usize = 12;

/// The subnet of the pods, which nothing else in a test host uses.
const SUBNET: &str = "10.213.7.0/24";
const SUBNET_V6: &str = "fd21:3700::/64";

/// A neighbour entry of each pod, and its hardware address.
pub(crate) const NEIGHBOUR: [&str; 2] = ["169.254.7.1", "02:00:00:00:07:01"];

impl Runtime {
    fn start() -> Self {
        let dir = tempfile::Builder::new()
            .prefix("cri-")
            .tempdir_in("/run")
            .unwrap()
            .keep();
        let user = json!({ "Env": ["PATH=/bin", "FROM=image"], "User": "1000:50",
            "WorkingDir": "/srv", "Cmd": ["sleep", "1000000"] });
        let plain = json!({ "Env": ["PATH=/bin"], "Cmd": ["sleep", "1000000"] });
        let entry = json!({ "Env": ["PATH=/bin"], "Entrypoint": ["sleep"],
            "Cmd": ["1000000"] });
        let named = json!({ "Env": ["PATH=/bin"], "User": "app:staff", "Cmd": ["true"] });
        let same = Image::busybox(json!({ "Env": ["PATH=/bin", "SAME=yes"], "Cmd": ["true"] }));
        let many = (0..MANY_IMAGES).map(|number| {
            let number = number.to_string();
            let image = Image::busybox(json!({ "Env": ["PATH=/bin"], "Cmd": ["echo", number] }));
            (format!("test/many-{number}"), image)
        });
        let many: Vec<_> = many.collect();
        let volumes = json!({ "/data": {}, "/srv/made/here/": {} });
        let declares = json!({ "Env": ["PATH=/bin"], "Volumes": volumes });
        let mut images = vec![
            ("test/volumes", Image::with_data(declares)),
            ("test/links", Image::with_links_to_nothing(plain.clone())),
            ("test/plain", Image::busybox(plain)),
            ("test/user", Image::busybox(user)),
            ("test/pause", Image::busybox(entry)),
            ("test/named", Image::busybox(named)),
            ("test/same-a", same.clone()),
            ("test/same-b", same.clone()),
            ("test/same-c", same),
        ];
        images.extend(
            many.iter()
                .map(|(name, image)| (name.as_str(), image.clone())),
        );
        let registry = Registry::serve(&images);
        let cni = dir.join("cni");
        fs::create_dir_all(&cni).unwrap();
        fs::write(cni.join("10-pods.conflist"), network()).unwrap();
        let plugins = plugins();

        let against = std::env::var("PODVISOR_CONFORMANCE_AGAINST").unwrap_or_default();
        let (socket, is_vm) = match against.as_str() {
            "" | "podvisor" => (podvisor(&dir, &cni, &plugins, &[]), true),
            "containerd" | "containerd-behind-podvisor" => {
                let pause = registry.name("test/pause");
                let its_dir = dir.join("containerd");
                fs::create_dir(&its_dir).unwrap();
                let (command, socket) = containerd(&its_dir, &cni, &plugins, &pause);
                serve(command, &its_dir, &socket);
                let behind = format!("--host-runtime={}", socket.display());
                let socket = match against.as_str() {
                    "containerd" => socket,
                    _ => podvisor(&dir, &cni, &plugins, &[&behind, "--default-handler=host"]),
                };
                (socket, false)
            }
            path => (PathBuf::from(path), true),
        };
        Self {
            socket,
            is_vm,
            registry,
            dir,
        }
    }

    /// Returns the name of an image in its registry.
    pub(crate) fn image(&self, repository: &str) -> String {
        self.registry.name(&format!("test/{repository}"))
    }

    /// Returns the runtime's persistent directory.
    pub(crate) fn root(&self) -> PathBuf {
        self.dir.join("root")
    }

    /// Creates a new directory on the host.
    pub(crate) fn directory(&self, name: &str) -> PathBuf {
        let dir = tempfile::Builder::new()
            .prefix(name)
            .tempdir_in(&self.dir)
            .unwrap()
            .keep();
        // Users of any id have access to volumes.
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(&dir, mode).unwrap();
        dir
    }
}

fn network() -> String {
    let list = json!({
        "cniVersion": "1.0.0",
        "name": "pods",
        "plugins": [
            {
                "type": "bridge",
                "bridge": "conform0",
                "isGateway": true,
                "ipMasq": true,
                "hairpinMode": true,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{ "subnet": SUBNET }], [{ "subnet": SUBNET_V6 }]],
                    "routes": [{ "dst": "0.0.0.0/0" }, { "dst": "::/0" }],
                },
            },
            { "type": "portmap", "capabilities": { "portMappings": true } },
        ],
    });
    serde_json::to_string_pretty(&list).unwrap()
}

/// Returns Debian's plugins, with a `bridge` that also adds a neighbour, which no result reports.
fn plugins() -> PathBuf {
    const DEBIANS: &str = "/usr/lib/cni";
    // Programs in /run are not executable everywhere.
    let dir = tempfile::tempdir().unwrap().keep();
    for plugin in fs::read_dir(DEBIANS).unwrap().flatten() {
        if plugin.file_name() != "bridge" {
            std::os::unix::fs::symlink(plugin.path(), dir.join(plugin.file_name())).unwrap();
        }
    }
    let [address, mac] = NEIGHBOUR;
    let script = format!(
        "#!/bin/sh\n\
         {DEBIANS}/bridge || exit\n\
         [ $CNI_COMMAND = ADD ] || exit 0\n\
         exec nsenter --net=$CNI_NETNS \
         ip neighbour add {address} lladdr {mac} dev $CNI_IFNAME nud permanent\n"
    );
    let plugin = dir.join("bridge");
    fs::write(&plugin, script).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(plugin, mode).unwrap();
    dir
}

fn podvisor(dir: &Path, cni: &Path, plugins: &Path, flags: &[&str]) -> PathBuf {
    let socket = dir.join("podvisor.sock");
    let mut command = Command::new(env!("CARGO_BIN_EXE_podvisor"));
    command
        .arg("--root")
        .arg(dir.join("root"))
        .arg("serve")
        .arg("--listen")
        .arg(format!("unix://{}", socket.display()))
        .arg("--state")
        .arg(dir.join("state"))
        .arg("--cni-conf-dir")
        .arg(cni)
        .arg("--cni-bin-dir")
        .arg(plugins)
        .args(flags)
        .env("PODVISOR_BOOT_TIMEOUT", "900");
    // For debugging: the daemon's log, and the output of guests' kernels.
    if let Some(logs) = std::env::var_os("PODVISOR_CONFORMANCE_LOGS") {
        command.args(["--log-level", "debug", "--console-dir"]);
        command.arg(logs);
    }
    serve(command, dir, &socket);
    socket
}

/// Starts a runtime that ends with this program, and waits until it listens.
fn serve(mut command: Command, dir: &Path, socket: &Path) {
    let log = File::create(dir.join("runtime.log")).unwrap();
    command
        .stdin(Stdio::null())
        .stdout(log.try_clone().unwrap())
        .stderr(log);
    let (started, is_started) = mpsc::channel();
    // The signal is sent when the thread that started the child ends: this one never does.
    thread::spawn(move || {
        use std::os::unix::process::CommandExt as _;
        // Safe in a child: one system call.
        #[allow(unsafe_code)]
        // SAFETY: prctl(2) is async-signal-safe and touches no memory of the parent.
        unsafe {
            command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::TERM))?));
        }
        let child = command.spawn();
        started.send(child.is_ok()).unwrap();
        let status = child.unwrap().wait();
        panic!("the runtime ended: {status:?}");
    });
    assert!(is_started.recv().unwrap(), "the runtime could not be run");
    let begin = Instant::now();
    while std::os::unix::net::UnixStream::connect(socket).is_err() {
        let log = || fs::read_to_string(dir.join("runtime.log")).unwrap_or_default();
        assert!(
            begin.elapsed() < PATIENCE,
            "the runtime does not listen: {}",
            log()
        );
        thread::sleep(Duration::from_millis(50));
    }
}
