//! One program in one container of one machine, from beginning to end: what most users of the
//! library want first.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::agent::{AgentContainer, GuestConfig, etc_hosts};
use super::error::SandboxError;
use super::spec::{ContainerOptions, ContainerSpec, container_spec};
use super::stdio::{AttachedStreams, StreamSet, Streams};
use super::types::{
    CreateContainer, GuestNetwork, JailMode, LaunchConfig, ProcessExit, RestartPolicy, StdioFds,
    SupplementalGroups,
};
use super::{Sandbox, SandboxClient, SandboxConfig, random_id};
use crate::machine::{Assets, Boot, Disk, GuestFiles, MachineConfig, Transport};

/// What the container and its host are called.
pub(super) const NAME: &str = "podvisor";

/// A program to be run in a container in a virtual machine of its own.
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use podvisor_cri::sandbox::{ContainerRun, StdioFds};
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
    /// A run in the root file system `image`, an EROFS file, with one vCPU and 256 MiB. The guest's
    /// kernel and initramfs are those that [`Assets`] finds.
    pub fn new(image: impl Into<PathBuf>) -> Self {
        Self {
            image: image.into(),
            options: ContainerOptions::default(),
            vcpus: 1,
            memory: 256 << 20,
        }
    }

    /// The program and its arguments.
    #[must_use]
    pub fn command(mut self, command: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.options.command = command.into_iter().map(Into::into).collect();
        self
    }

    /// A variable of its environment, as `NAME=VALUE`.
    #[must_use]
    pub fn env(mut self, variable: impl Into<String>) -> Self {
        self.options.env.push(variable.into());
        self
    }

    /// Virtual CPUs.
    #[must_use]
    pub fn vcpus(mut self, count: u8) -> Self {
        self.vcpus = count;
        self
    }

    /// Memory of the guest in bytes.
    #[must_use]
    pub fn memory(mut self, bytes: u64) -> Self {
        self.memory = bytes;
        self
    }

    /// Runs it in this process, whose threads the machine's are. There is no jail; dropped, the
    /// machine is gone.
    ///
    /// # Errors
    /// [`SandboxError`]; nothing is left of the machine then.
    pub async fn in_process(&self, stdio: StdioFds) -> Result<ProcessExit, SandboxError> {
        let assets = Assets::of_this_process();
        let files = GuestFiles::open(&kernel(&assets)?, &initramfs(&assets)?)?;
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
                console: None,
            },
        };
        let spec = self.spec()?;
        let sandbox = Sandbox::start(config).await?;
        let exit = run_once(&sandbox, spec, stdio).await?;
        sandbox.shutdown().await;
        Ok(exit)
    }

    /// Runs it in a process of its own that is jailed: `podvisor` is the path of that program.
    /// The machine goes on when this future is dropped, until the program has ended.
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
        let dir = PrivateDir::create()?;
        let launched = SandboxClient::launch_program(
            podvisor,
            LaunchConfig {
                id: NAME.to_owned(),
                hostname: NAME.to_owned(),
                dir: dir.0.clone(),
                kernel: kernel(&assets)?,
                initramfs: initramfs(&assets)?,
                vcpus: self.vcpus,
                max_vcpus: self.vcpus,
                memory: self.memory,
                growth: 0,
                image_slots: 1,
                nics: Vec::new(),
                shared_dir: None,
                console: None,
                events: None,
                sysctls: Default::default(),
                pci: false,
                jail: JailMode::Enforced,
                templates: None,
                snapshot: None,
                cgroup_parent: None,
            },
            GuestNetwork::default(),
        );
        let sandbox = launched.await?;
        let work = async {
            let container = CreateContainer {
                id: NAME.to_owned(),
                image: image.into(),
                // Nobody else gives this machine images: any name will do.
                image_digest: "0".repeat(64),
                volumes: Vec::new(),
                readonly_rootfs: false,
                spec,
                user,
                supplemental_groups: SupplementalGroups::Default,
                log: None,
                tty: false,
                stdin: stdio.stdin.is_some(),
                stdin_once: true,
                restart: RestartPolicy::Never,
                etc_hosts: etc_hosts(NAME).into_bytes(),
                etc_resolv_conf: Vec::new(),
                etc_hostname: Vec::new(),
            };
            sandbox.create_container(container).await?;
            sandbox.end_with(NAME).await?;
            let (streams, theirs) = AttachedStreams::new(StreamSet::of(&stdio))?;
            sandbox.attach_whole(NAME, theirs).await?;
            let outputs = streams.serve(stdio)?;
            sandbox.start_container(NAME).await?;
            let exit = sandbox.wait(NAME, None).await?;
            outputs.finish().await?;
            Ok(exit)
        };
        let exit = work.await;
        match &exit {
            Ok(_) => drop(sandbox.ended().await),
            Err(_) => sandbox.shutdown(Duration::ZERO).await?,
        }
        exit
    }

    fn spec(&self) -> Result<ContainerSpec, SandboxError> {
        container_spec(NAME, NAME, None, &self.options)
            .map_err(|error| SandboxError::Config(error.to_string()))
    }
}

/// Runs a container in the image on the disk [`NAME`] from beginning to end.
pub(super) async fn run_once(
    sandbox: &Sandbox,
    ContainerSpec { spec, user }: ContainerSpec,
    stdio: StdioFds,
) -> Result<ProcessExit, SandboxError> {
    let agent = sandbox.agent();
    let work = async {
        let streams = Streams::new(StreamSet::of(&stdio), None)?;
        let container = AgentContainer {
            id: NAME.to_owned(),
            image_serial: NAME.to_owned(),
            readonly_rootfs: false,
            spec,
            user,
            supplemental_groups: SupplementalGroups::Default,
            stdio: streams.request(),
            etc_hosts: etc_hosts(NAME).into_bytes(),
            etc_resolv_conf: Vec::new(),
            etc_hostname: Vec::new(),
        };
        agent.create(container).await?;
        let outputs = streams.attach(agent.mux(), stdio).await?;
        agent.start(NAME).await?;
        let exit = agent.wait(NAME, "").await?;
        outputs.finish().await?;
        Ok::<ProcessExit, SandboxError>(exit.into())
    };
    sandbox.unless_ended(work).await
}

fn kernel(assets: &Assets) -> Result<PathBuf, SandboxError> {
    let found = assets.kernel();
    found.map_err(|error| SandboxError::Config(error.to_string()))
}

fn initramfs(assets: &Assets) -> Result<PathBuf, SandboxError> {
    let found = assets.initramfs();
    found.map_err(|error| SandboxError::Config(error.to_string()))
}

fn open(path: &Path) -> Result<File, SandboxError> {
    File::open(path).map_err(|source| SandboxError::File {
        action: "open",
        path: path.to_owned(),
        source,
    })
}

impl StdioFds {
    /// This process's own standard streams.
    ///
    /// # Errors
    /// There are no more descriptors.
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

/// A directory for one run.
#[derive(Debug)]
struct PrivateDir(PathBuf);

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
        Ok(Self(path))
    }
}

impl Drop for PrivateDir {
    fn drop(&mut self) {
        // Nothing of it is of use to anybody.
        let _ = fs::remove_dir_all(&self.0);
    }
}
