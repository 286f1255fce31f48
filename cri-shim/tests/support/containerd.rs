//! Debian's containerd, with directories of its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns the command of a containerd that has its state in `dir`, and its socket. `pause` is its
/// pods' image.
pub(crate) fn containerd(
    dir: &Path,
    cni: &Path,
    plugins: &Path,
    pause: &str,
) -> (Command, PathBuf) {
    let socket = dir.join("containerd.sock");
    let config = format!(
        r#"version = 2
root = "{dir}/root"
state = "{dir}/state"
[grpc]
address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{pause}"
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "native"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{plugins}"
conf_dir = "{cni}"
"#,
        dir = dir.display(),
        socket = socket.display(),
        cni = cni.display(),
        plugins = plugins.display()
    );
    let file = dir.join("containerd.toml");
    fs::write(&file, config).unwrap();
    // It looks for its shim and for runc there, too.
    let programs = std::env::var_os("PODVISOR_TEST_PROGRAMS").expect(
        "PODVISOR_TEST_PROGRAMS names no directory: `cargo xtask test --only guest` downloads the \
         programs",
    );
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new(Path::new(&programs).join("containerd"));
    command.env("PATH", format!("{}:{path}", Path::new(&programs).display()));
    command.arg("--config").arg(file);
    (command, socket)
}
