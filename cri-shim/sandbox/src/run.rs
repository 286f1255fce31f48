//! Runs one program in one container of one machine, from start to end: what most users of the
//! library want first.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use oci_spec::runtime::Spec;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tracing::debug;

use super::agent::GuestConfig;
use super::client::SandboxClient;
use super::error::SandboxError;
use super::in_process::{Sandbox, SandboxConfig};
use super::random::random_id;
use super::sole_container::{NAME, for_terminal, guest_container, run_once};
use super::spec::{ContainerOptions, ContainerSpec, RootAccess, container_spec};
use super::stdio::{AttachedStreams, StreamSet};
use super::types::{
    CreateContainer, GuestNetwork, LaunchConfig, ProcessExit, StdioFds, TerminalSize,
};
use crate::machine::{Assets, Boot, Disk, GuestFiles, MachineConfig, Transport};

/// A program to be run in a container in a virtual machine of its own.
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use podvisor_sandbox::{ContainerRun, StdioFds};
///
/// let uname = ContainerRun::new("rootfs.erofs").command(["uname", "-a"]);
/// let exit = uname.in_process(StdioFds::of_this_process()?).await?;
/// assert_eq!(exit.code, 0);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct ContainerRun {
    image: PathBuf,
    options: ContainerOptions,
    vcpus: u8,
    memory: u64,
}

impl ContainerRun {
    /// Creates a run in the root file system `image`, an EROFS file, with one vCPU and 256 MiB. The
    /// guest's kernel and initramfs are those that [`Assets`] finds.
    pub fn new(image: impl Into<PathBuf>) -> Self {
        Self {
            image: image.into(),
            options: ContainerOptions::default(),
            vcpus: 1,
            memory: 256 << 20,
        }
    }

    /// Sets the program and its arguments.
    #[must_use]
    pub fn command(mut self, command: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.options.command = command.into_iter().map(Into::into).collect();
        self
    }

    /// Adds an environment variable, as `NAME=VALUE`.
    #[must_use]
    pub fn env(mut self, variable: impl Into<String>) -> Self {
        self.options.env.push(variable.into());
        self
    }

    /// Sets the directory that it starts in, an absolute path; `/` by default.
    #[must_use]
    pub fn workdir(mut self, directory: impl Into<String>) -> Self {
        self.options.workdir = Some(directory.into());
        self
    }

    /// Sets the user that it runs as, `user[:group]` in names of the image or numbers; root by
    /// default.
    #[must_use]
    pub fn user(mut self, user: impl Into<String>) -> Self {
        self.options.user = Some(user.into());
        self
    }

    /// Makes the image's files read-only.
    #[must_use]
    pub fn read_only(mut self) -> Self {
        self.options.root = RootAccess::ReadOnly;
        self
    }

    /// Gives it a terminal of this size, whose output is its stdout. The mode of this process's own
    /// terminal is left to the caller.
    #[must_use]
    pub fn terminal(mut self, size: TerminalSize) -> Self {
        self.options.terminal = Some(size);
        self
    }

    /// Sets the number of virtual CPUs.
    #[must_use]
    pub fn vcpus(mut self, count: u8) -> Self {
        self.vcpus = count;
        self
    }

    /// Sets the guest's memory in bytes.
    #[must_use]
    pub fn memory(mut self, bytes: u64) -> Self {
        self.memory = bytes;
        self
    }

    /// Runs it in this process, which has the machine's threads. There is no jail; if the future is
    /// dropped, the machine is killed as a [`Sandbox`] is. If the program has an input, the thread
    /// that reads it stays until that read ends: a read of a terminal may never end.
    ///
    /// # Errors
    /// [`SandboxError`]; nothing is left of the machine then.
    pub async fn in_process(&self, stdio: StdioFds) -> Result<ProcessExit, SandboxError> {
        let assets = Assets::of_this_process();
        let files = GuestFiles::open(&assets.kernel()?, &assets.initramfs()?)?;
        let config = SandboxConfig {
            guest: GuestConfig {
                hostname: NAME.to_owned(),
                ..GuestConfig::default()
            },
            machine: MachineConfig {
                boot: Boot::Cold(files),
                cpus: self.vcpus,
                max_cpus: self.vcpus,
                memory: self.memory,
                growth: 0,
                disks: vec![Disk {
                    file: open(&self.image)?,
                    serial: NAME.to_owned(),
                }],
                spare_disks: 0,
                nics: Vec::new(),
                share: None,
                transport: Transport::Mmio,
                psi: false,
                console: None,
                early: None,
            },
        };
        let spec = self.spec()?;
        let sandbox = Sandbox::start(config).await?;
        let exit = run_once(&sandbox, spec, stdio, &self.options).await?;
        sandbox.shutdown().await;
        Ok(exit)
    }

    /// Runs it in a jailed process of its own: `podvisor` is the path of that program. If this
    /// future is dropped, a machine whose program has been started continues until the program
    /// ends, and any other machine is killed.
    ///
    /// # Errors
    /// [`SandboxError`]; nothing is left of the machine then.
    pub async fn jailed(
        &self,
        podvisor: &Path,
        stdio: StdioFds,
    ) -> Result<ProcessExit, SandboxError> {
        let ContainerSpec { spec, user } = self.spec()?;
        let image = open(&self.image)?;
        let assets = Assets::of_this_process();
        let mut dir = PrivateDir::create()?;
        let config = LaunchConfig {
            vcpus: self.vcpus,
            max_vcpus: self.vcpus,
            memory: self.memory,
            cgroup_parent: None,
            io_limits: Vec::new(),
            ..LaunchConfig::new(NAME, &dir.path, assets.kernel()?, assets.initramfs()?)
        };
        let network = GuestNetwork::default();
        let sandbox = SandboxClient::launch_program(podvisor, config, network).await?;
        dir.process = open_process(sandbox.pid());
        let stdio = for_terminal(stdio, self.options.terminal);
        let work = async {
            // This machine gets no other images: any name will do.
            let digest = "0".repeat(64);
            let container = CreateContainer {
                config: guest_container(spec, user, &self.options),
                tty: self.options.terminal.is_some(),
                stdin: stdio.stdin.is_some(),
                ..CreateContainer::new(NAME, image, digest, Spec::default())
            };
            sandbox.create_container(container).await?;
            sandbox.end_with(NAME).await?;
            let (streams, theirs) = AttachedStreams::new(StreamSet::of(&stdio))?;
            sandbox.attach_whole(NAME, theirs).await?;
            let outputs = streams.serve(stdio)?;
            sandbox.start_container(NAME).await?;
            dir.has_started = true;
            let exit = sandbox.wait(NAME, None).await?;
            outputs.finish().await?;
            Ok(exit)
        };
        let exit = work.await;
        match &exit {
            Ok(_) => drop(sandbox.ended().await),
            // The first error is the one that is reported.
            Err(_) => {
                if let Err(error) = sandbox.shutdown(Duration::ZERO).await {
                    debug!(%error, "the machine does not end as it should");
                }
            }
        }
        exit
    }

    fn spec(&self) -> Result<ContainerSpec, SandboxError> {
        Ok(container_spec(NAME, NAME, None, &self.options)?)
    }
}

/// Opens a process; `None` if it has ended.
fn open_process(pid: u32) -> Option<OwnedFd> {
    let pid = Pid::from_raw(pid.try_into().ok()?)?;
    pidfd_open(pid, PidfdFlags::empty()).ok()
}

fn open(path: &Path) -> Result<File, SandboxError> {
    File::open(path).map_err(|source| SandboxError::File {
        action: "open",
        path: path.to_owned(),
        source,
    })
}

impl StdioFds {
    /// Returns this process's own standard streams.
    ///
    /// # Errors
    /// No more descriptors are available.
    pub fn of_this_process() -> io::Result<Self> {
        let own = |fd: std::os::fd::BorrowedFd<'_>| -> io::Result<Option<OwnedFd>> {
            fd.try_clone_to_owned().map(Some)
        };
        Ok(Self {
            stdin: own(io::stdin().as_fd())?,
            stdout: own(io::stdout().as_fd())?,
            stderr: own(io::stderr().as_fd())?,
        })
    }
}

/// A directory for one run, and the process that uses it. When this is dropped, the directory is
/// removed with the process: immediately, with a process that has not started its program and is
/// not known to anyone else, and otherwise when the process ends.
#[derive(Debug)]
struct PrivateDir {
    path: PathBuf,
    process: Option<OwnedFd>,
    has_started: bool,
}

impl PrivateDir {
    fn create() -> Result<Self, SandboxError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| SandboxError::File {
                action: "create",
                path,
                source,
            }
        };
        let all = std::env::temp_dir();
        let id = random_id().map_err(failed(&all))?;
        let path = all.join(format!("podvisor-{}", id.get(..16).unwrap_or_default()));
        let made = DirBuilder::new().mode(0o700).create(&path);
        made.map_err(failed(&path))?;
        Ok(Self {
            path,
            process: None,
            has_started: false,
        })
    }
}

impl Drop for PrivateDir {
    fn drop(&mut self) {
        let path = std::mem::take(&mut self.path);
        // Nothing in it is needed then.
        let remove = move || drop(fs::remove_dir_all(path));
        let Some(process) = self.process.take() else {
            return remove();
        };
        if !self.has_started {
            // Fails if it has ended already.
            let _ = pidfd_send_signal(&process, Signal::KILL);
        }
        if wait(&process, Some(&Timespec::default())) {
            return remove();
        }
        // If the thread cannot be started, the directory stays.
        let _ = thread::Builder::new()
            .name("directory".to_owned())
            .spawn(move || {
                wait(&process, None);
                remove();
            });
    }
}

/// Waits until a process ends; false on timeout.
fn wait(process: &OwnedFd, limit: Option<&Timespec>) -> bool {
    loop {
        let mut ended = [PollFd::new(process, PollFlags::IN)];
        match poll(&mut ended, limit) {
            Err(rustix::io::Errno::INTR) => {}
            done => return !matches!(done, Ok(0)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    /// A directory with a process that runs long enough.
    fn with_process() -> (PrivateDir, Child) {
        let child = Command::new("sleep").arg("9999").spawn().unwrap();
        let mut dir = PrivateDir::create().unwrap();
        dir.process = open_process(child.id());
        (dir, child)
    }

    #[test]
    fn a_machine_that_nobody_knows_of_is_killed() {
        use std::os::unix::process::ExitStatusExt as _;
        let (dir, mut child) = with_process();
        let path = dir.path.clone();
        drop(dir);
        assert_eq!(child.wait().unwrap().signal(), Some(9));
        while path.exists() {}
    }

    #[test]
    fn a_machine_that_runs_its_program_keeps_its_directory_until_it_ends() {
        let (mut dir, mut child) = with_process();
        let path = dir.path.clone();
        dir.has_started = true;
        drop(dir);
        assert!(path.exists() && child.try_wait().unwrap().is_none());
        child.kill().unwrap();
        child.wait().unwrap();
        while path.exists() {}
    }
}
