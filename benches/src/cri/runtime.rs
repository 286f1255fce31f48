//! The runtimes: podvisor's daemon and containerd, each with its own directories in memory, the
//! same network and the same image.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::json;

use super::Args;
use crate::boot::Stage;
use crate::pull::Server;
use crate::start::wait_for_templates;

/// The name of the pods' image.
pub(super) const IMAGE: &str = "localhost/bench:latest";

/// Memory of a pod's guest without a limit, in KiB: podvisor's default.
const GUEST_KIB: u64 = 256 << 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Podvisor, with pods that boot.
    Cold,
    /// Podvisor, whose pods are clones.
    Warm,
    /// Containerd with runc.
    Containerd,
}

/// A runtime that serves.
#[derive(Debug)]
pub(super) struct Runtime {
    kind: Kind,
    socket: PathBuf,
    root: PathBuf,
    _server: Server,
}

impl Runtime {
    pub(super) fn start(kind: Kind, args: &Args, image: &Path, stage: &Stage) -> Result<Self> {
        let dir = stage.path().join(match kind {
            Kind::Cold => "cold",
            Kind::Warm => "warm",
            Kind::Containerd => "containerd",
        });
        let networks = dir.join("net.d");
        fs::create_dir_all(&networks)?;
        fs::write(networks.join("10-bench.conflist"), network(kind))?;
        let socket = dir.join("socket");
        let root = dir.join("root");
        let mut command = match kind {
            Kind::Containerd => containerd(&dir, &socket, &networks)?,
            _ => podvisor(kind, args, &root, &socket, &networks),
        };
        if kind != Kind::Containerd {
            load(&args.podvisor, &root, image)?;
        }
        let server = Server::start(&mut command, &dir.join("log"), || {
            UnixStream::connect(&socket).is_ok()
        })?;
        if kind == Kind::Containerd {
            let mut import = Command::new("ctr");
            import.arg("--address").arg(&socket);
            import
                .args(["--namespace", "k8s.io", "images", "import"])
                .arg(image);
            succeed(&mut import)?;
        }
        Ok(Self {
            kind,
            socket,
            root,
            _server: server,
        })
    }

    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    pub(super) fn name(&self) -> &'static str {
        match self.kind {
            Kind::Cold => "podvisor, by booting",
            Kind::Warm => "podvisor, as clones",
            Kind::Containerd => "containerd and runc",
        }
    }

    /// Returns the memory of its guests in KiB, if it has guests.
    pub(super) fn guest_memory(&self) -> Option<u64> {
        (self.kind != Kind::Containerd).then_some(GUEST_KIB)
    }

    /// Waits until background work that its first pod started is done.
    pub(super) fn settled(&self) -> Result<()> {
        match self.kind {
            Kind::Warm => wait_for_templates(&self.root),
            _ => Ok(()),
        }
    }
}

fn podvisor(kind: Kind, args: &Args, root: &Path, socket: &Path, networks: &Path) -> Command {
    let mut command = Command::new(&args.podvisor);
    command.arg("--root").arg(root).arg("serve");
    command
        .arg("--listen")
        .arg(format!("unix://{}", socket.display()));
    command.arg("--state").arg(socket.with_file_name("run"));
    command.arg("--cni-conf-dir").arg(networks);
    command.args(["--boot", if kind == Kind::Warm { "warm" } else { "cold" }]);
    command
        .env("PODVISOR_GUEST_DIR", &args.guest)
        .env("PODVISOR_BOOT_TIMEOUT", "300");
    command
}

fn containerd(dir: &Path, socket: &Path, networks: &Path) -> Result<Command> {
    let config = format!(
        "version = 2\nroot = \"{dir}/root\"\nstate = \"{dir}/run\"\n\
         [grpc]\naddress = \"{socket}\"\n\
         [plugins.\"io.containerd.grpc.v1.cri\"]\nsandbox_image = \"{IMAGE}\"\n\
         [plugins.\"io.containerd.grpc.v1.cri\".containerd]\nsnapshotter = \"native\"\n\
         [plugins.\"io.containerd.grpc.v1.cri\".cni]\n\
         bin_dir = \"/usr/lib/cni\"\nconf_dir = \"{networks}\"\n",
        dir = dir.display(),
        socket = socket.display(),
        networks = networks.display(),
    );
    let file = dir.join("config.toml");
    fs::write(&file, config).with_context(|| format!("{} cannot be written", file.display()))?;
    let mut command = Command::new("containerd");
    command.arg("--config").arg(file);
    Ok(command)
}

/// A separate bridge for each.
fn network(kind: Kind) -> String {
    let number = 1 + kind as u8;
    json!({
        "cniVersion": "1.0.0",
        "name": "bench",
        "plugins": [{
            "type": "bridge",
            "bridge": format!("bench{number}"),
            "isGateway": true,
            "ipam": {
                "type": "host-local",
                "dataDir": format!("/run/podvisor-bench-{number}"),
                "ranges": [[{ "subnet": format!("10.21{number}.0.0/16") }]],
                "routes": [{ "dst": "0.0.0.0/0" }],
            },
        }],
    })
    .to_string()
}

/// Creates an archive with the image of the pods: busybox, which sleeps by default.
pub(super) fn image(podvisor: &Path, busybox: &Path, stage: &Stage) -> Result<PathBuf> {
    let dir = stage.path().join("image");
    let root = dir.join("root");
    for directory in ["bin", "dev", "etc", "proc", "sys", "tmp"] {
        fs::create_dir_all(root.join(directory))?;
    }
    fs::copy(busybox, root.join("bin/busybox"))
        .with_context(|| format!("{} cannot be copied", busybox.display()))?;
    let mut pack = Command::new("tar");
    succeed(
        pack.arg("-C")
            .arg(&root)
            .arg("-cf")
            .arg(dir.join("layer.tar"))
            .arg("."),
    )?;
    let sum = succeed(Command::new("sha256sum").arg(dir.join("layer.tar")))?;
    let digest = sum
        .split_whitespace()
        .next()
        .context("sha256sum says nothing")?;
    let config = json!({
        "architecture": "amd64",
        "os": "linux",
        "config": {
            "Env": ["PATH=/bin"],
            "Entrypoint": ["/bin/busybox"],
            "Cmd": ["sleep", "1000000"],
        },
        "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{digest}")] },
    });
    fs::write(dir.join("config.json"), config.to_string())?;
    let manifest =
        json!([{ "Config": "config.json", "RepoTags": [IMAGE], "Layers": ["layer.tar"] }]);
    fs::write(dir.join("manifest.json"), manifest.to_string())?;
    let archive = dir.join("image.tar");
    let mut pack = Command::new("tar");
    pack.arg("-C").arg(&dir).arg("-cf").arg(&archive);
    succeed(pack.args(["manifest.json", "config.json", "layer.tar"]))?;
    // An image that podvisor rejects is not tried with containerd either.
    load(podvisor, &dir.join("check"), &archive)?;
    Ok(archive)
}

fn load(podvisor: &Path, root: &Path, archive: &Path) -> Result<()> {
    let mut load = Command::new(podvisor);
    load.arg("--root")
        .arg(root)
        .args(["load", "--quiet", "--input"]);
    succeed(load.arg(archive)).map(drop)
}

/// Runs a program; returns its output.
fn succeed(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("{name} cannot be started"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        bail!("{name} failed ({}): {}", output.status, said.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
