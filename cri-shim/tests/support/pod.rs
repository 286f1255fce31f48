//! Sandboxes and images for the tests of the library.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use oci_spec::runtime::Process;
use podvisor_cri::machine::{Assets, Transport};
use podvisor_cri::sandbox::{
    ContainerOptions, CreateContainer, Exec, GuestNetwork, JailMode, LaunchConfig, SandboxClient,
    SandboxError, StdioFds, SupplementalGroups, TerminalSize, container_spec,
};
use podvisor_images::{Image, ImportSource, PullOptions, Store};
use tempfile::TempDir;

use super::PATIENCE;

/// A directory with a sandbox's directory, logs, and a store with images.
pub(crate) struct Pod {
    pub(crate) directory: TempDir,
    store: Store,
}

impl Default for Pod {
    fn default() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(directory.path().join("store")).unwrap();
        let pod = Self { directory, store };
        fs::DirBuilder::new().mode(0o700).create(pod.dir()).unwrap();
        pod
    }
}

impl Pod {
    /// Returns the sandbox's directory.
    pub(crate) fn dir(&self) -> PathBuf {
        self.directory.path().join("pod")
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Creates an image of busybox and a file `/name` that contains its name.
    pub(crate) fn image(&self, name: &str) -> Image {
        let root = self.path(&format!("root-{name}"));
        busybox(&root);
        fs::write(root.join("name"), format!("{name}\n")).unwrap();
        let source = ImportSource::Directory(root);
        let options = PullOptions::default();
        self.store.import(source, Some(name), &options).unwrap()
    }

    /// Returns the launch configuration of a sandbox with this many disks for images.
    pub(crate) fn config(&self, image_slots: u8) -> LaunchConfig {
        let assets = Assets::of_this_process();
        LaunchConfig {
            id: "test".into(),
            hostname: "pod".into(),
            dir: self.dir(),
            guest: Default::default(),
            kernel: assets.kernel().unwrap(),
            initramfs: assets.initramfs().unwrap(),
            vcpus: 1,
            max_vcpus: 1,
            memory: 256 << 20,
            growth: 0,
            image_slots,
            nics: Vec::new(),
            shared_dir: None,
            users: None,
            share_users: Default::default(),
            console: None,
            events: None,
            sysctls: Default::default(),
            jail: JailMode::Enforced,
            required_layers: Vec::new(),
            transport: Transport::Mmio,
            psi: false,
            templates: None,
            snapshot: None,
            cgroup_parent: Some("/podvisor-test".into()),
            io_limits: Vec::new(),
        }
    }

    /// Returns a container of `image` that runs a script, with a log of its name.
    pub(crate) fn container(&self, id: &str, image: &Image, script: &str) -> CreateContainer {
        let options = ContainerOptions {
            command: ["sh", "-c", script].map(str::to_owned).to_vec(),
            env: vec!["PATH=/bin".to_owned()],
            ..ContainerOptions::default()
        };
        let spec = container_spec(id, "pod", None, &options).unwrap().spec;
        let rootfs = image.open_rootfs().unwrap();
        let mut container = CreateContainer::new(id, rootfs, image.id().to_string(), spec);
        container.config.etc_hostname = b"pod\n".to_vec();
        container.stdin_once = false;
        container.log = Some(self.open_log(id));
        container
    }

    pub(crate) fn open_log(&self, id: &str) -> OwnedFd {
        let path = self.path(&format!("{id}.log"));
        let file = File::options().create(true).append(true).open(path);
        file.unwrap().into()
    }

    /// Returns a container's log without timestamps.
    pub(crate) fn log(&self, id: &str) -> String {
        log_text(&self.path(&format!("{id}.log")))
    }
}

/// Returns the text of a log without timestamps.
pub(crate) fn log_text(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    let lines = text.split_inclusive('\n');
    lines.map(|line| line.split_once(' ').unwrap().1).collect()
}

/// Installs busybox with all its applets in `root/bin`.
pub(crate) fn busybox(root: &Path) {
    let bin = root.join("bin");
    fs::create_dir_all(&bin).unwrap();
    // In another process: otherwise, a process that this one starts meanwhile could inherit the
    // file open for writing, which prevents its execution.
    let copied = Command::new("cp").arg("/bin/busybox").arg(&bin).status();
    let copied = copied.is_ok_and(|status| status.success());
    assert!(copied, "this test needs Debian's busybox-static");
    let installed = Command::new(bin.join("busybox"))
        .args(["--install", "-s"])
        .arg(&bin)
        .status();
    assert!(installed.unwrap().success());
    for link in fs::read_dir(&bin).unwrap() {
        let link = link.unwrap().path();
        if link.is_symlink() {
            fs::remove_file(&link).unwrap();
            symlink("busybox", &link).unwrap();
        }
    }
}

/// Launches a sandbox with the real binary.
pub(crate) async fn launch(config: LaunchConfig) -> Result<SandboxClient, SandboxError> {
    let program = Path::new(env!("CARGO_BIN_EXE_podvisor"));
    SandboxClient::launch_program(program, config, GuestNetwork::default()).await
}

/// Returns the process of a script, confined like a container's own.
pub(crate) fn process(script: &str) -> Process {
    let options = ContainerOptions {
        command: ["sh", "-c", script].map(str::to_owned).to_vec(),
        env: vec!["PATH=/bin".to_owned()],
        ..ContainerOptions::default()
    };
    let spec = container_spec("exec", "pod", None, &options).unwrap().spec;
    spec.process().clone().unwrap()
}

/// The output and the exit code of an exec.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Runs a process in a container, with `input` on its stdin.
pub(crate) async fn exec(
    sandbox: &SandboxClient,
    id: &str,
    exec_id: &str,
    process: Process,
    input: &[u8],
    tty: Option<TerminalSize>,
) -> Result<Ran, SandboxError> {
    let (stdin, mut feed) = std::io::pipe().unwrap();
    let (mut out, stdout) = std::io::pipe().unwrap();
    let (mut err, stderr) = std::io::pipe().unwrap();
    let exec = Exec {
        exec_id: exec_id.to_owned(),
        process,
        user: String::new(),
        supplemental_groups: SupplementalGroups::Default,
        tty,
        stdio: StdioFds {
            stdin: Some(stdin.into()),
            stdout: Some(stdout.into()),
            stderr: Some(stderr.into()),
        },
    };
    sandbox.exec(id, exec).await?;
    feed.write_all(input).unwrap();
    drop(feed);
    let read = tokio::task::spawn_blocking(move || {
        let (mut stdout, mut stderr) = (String::new(), String::new());
        out.read_to_string(&mut stdout).unwrap();
        err.read_to_string(&mut stderr).unwrap();
        (stdout, stderr)
    });
    let exit = sandbox.wait(id, Some(exec_id)).await?;
    let (stdout, stderr) = read.await.unwrap();
    Ok(Ran {
        code: exit.code,
        stdout,
        stderr,
    })
}

/// Runs a script in a container.
pub(crate) async fn sh(sandbox: &SandboxClient, id: &str, exec_id: &str, script: &str) -> Ran {
    let process = process(script);
    exec(sandbox, id, exec_id, process, b"", None)
        .await
        .unwrap()
}

/// Waits for a condition that another process fulfils.
pub(crate) async fn eventually(what: &str, mut is_true: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_true() {
        assert!(begin.elapsed() < PATIENCE, "{what} never came");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
