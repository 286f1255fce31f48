//! The sandbox's virtual machine: every call to the library is in this file.

use std::fmt;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use podvisor_vmm::{
    BlockDevice, BlockDeviceError, BootError, BuildError, Exit, Initramfs, Kernel, MemorySize, Vm,
    VsockDevice, VsockError,
};
use tokio::sync::watch;
use tracing::debug;

/// The guest's vsock address, the lowest that a guest may have; guests of different
/// machines do not see each other.
const GUEST_CID: u64 = 3;

/// What every guest is told: be quiet, end instead of waiting when the kernel panics, and look
/// neither for a PCI bus nor for a serial port, which it has not.
const COMMAND_LINE: &str =
    "quiet panic=-1 reboot=k pci=off 8250.nr_uarts=0 spec_rstack_overflow=off";

/// What a guest is told that somebody watches.
const COMMAND_LINE_WATCHED: &str = "console=ttyS0 panic=-1 reboot=k pci=off";

/// What a guest with one CPU is told besides: to leave its atomic instructions as they are.
/// Patching them for one CPU costs more at boot than a pod ever gains by it.
const ONE_CPU: &str = " noreplace-smp";

/// Why there is no virtual machine.
#[derive(Debug, thiserror::Error)]
pub(crate) enum VmError {
    /// The kernel or the initramfs.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// The container's image.
    #[error(transparent)]
    Disk(#[from] BlockDeviceError),
    /// The way to the guest's agent.
    #[error(transparent)]
    Vsock(#[from] VsockError),
    /// The file for the guest's console.
    #[error("cannot write the guest's console to {}", .path.display())]
    Console {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The configuration is wrong, or KVM refused.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// It did not start.
    #[error(transparent)]
    Start(#[from] podvisor_vmm::VmError),
    /// The host gives no thread.
    #[error("cannot start a thread to wait for the guest")]
    Thread(#[source] io::Error),
}

/// What a guest boots.
#[derive(Debug)]
pub(crate) struct GuestFiles {
    kernel: Kernel,
    initramfs: Initramfs,
}

impl GuestFiles {
    /// Opens an ELF vmlinux or bzImage, and the agent's initramfs.
    pub(crate) fn open(kernel: &Path, initramfs: &Path) -> Result<Self, VmError> {
        Ok(Self {
            kernel: Kernel::open(kernel)?,
            initramfs: Initramfs::open(initramfs)?,
        })
    }
}

/// A read-only disk.
#[derive(Debug, Clone)]
pub(crate) struct Disk {
    /// The file behind it.
    pub(crate) path: PathBuf,
    /// How the guest finds it; at most 20 bytes.
    pub(crate) serial: String,
}

/// What a virtual machine is made of.
#[derive(Debug)]
pub(crate) struct MachineConfig {
    /// What it boots.
    pub(crate) files: GuestFiles,
    /// Virtual CPUs.
    pub(crate) cpus: u8,
    /// Bytes of memory.
    pub(crate) memory: u64,
    /// The container's image.
    pub(crate) image: Disk,
    /// Where the guest's serial console goes; nowhere makes the boot faster.
    pub(crate) console: Option<PathBuf>,
}

/// A running virtual machine; dropped, it is switched off.
#[derive(Debug)]
pub(super) struct Machine {
    vm: Arc<Vm>,
    ending: watch::Receiver<Option<Ending>>,
}

/// How a virtual machine ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The guest powered itself off.
    PoweredOff,
    /// The guest asked for a reset, as a kernel does that panicked.
    Reset,
    /// A fault that the guest could not handle.
    TripleFault,
    /// It was switched off from outside.
    SwitchedOff,
    /// The library or the host failed; what it said.
    Failed(String),
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PoweredOff => f.write_str("powered itself off"),
            Self::Reset => f.write_str("reset itself, as after a kernel panic"),
            Self::TripleFault => f.write_str("ended by a triple fault"),
            Self::SwitchedOff => f.write_str("was switched off"),
            Self::Failed(why) => f.write_str(why),
        }
    }
}

impl Machine {
    /// Builds and starts a machine whose vsock ports are reached through the socket `mux`.
    pub(super) fn boot(config: MachineConfig, mux: &Path) -> Result<Self, VmError> {
        let mut builder = Vm::builder()
            .kernel(config.files.kernel)
            .initramfs(config.files.initramfs)
            .vcpus(config.cpus)
            .memory(MemorySize::bytes(config.memory))
            .block(
                BlockDevice::open(&config.image.path)?
                    .read_only()
                    .serial(&config.image.serial),
            )
            .vsock(VsockDevice::unix_mux(GUEST_CID, mux)?)
            .rng();
        let for_cpus = if config.cpus == 1 { ONE_CPU } else { "" };
        builder = match config.console {
            None => builder.cmdline(format!("{COMMAND_LINE}{for_cpus}")),
            Some(path) => {
                let file = File::create(&path);
                let file = file.map_err(|source| VmError::Console { path, source })?;
                let command_line = format!("{COMMAND_LINE_WATCHED}{for_cpus}");
                builder.cmdline(command_line).serial(file)
            }
        };
        let vm = Arc::new(builder.build()?);
        vm.start()?;

        let (sender, ending) = watch::channel(None);
        let waited = Arc::clone(&vm);
        let wait = move || {
            let ending = match waited.wait() {
                Ok(exit) => Ending::from(exit),
                Err(error) => Ending::Failed(causes(&error)),
            };
            debug!(%ending, "the guest has ended");
            // Nobody listens when the machine has been dropped.
            let _ = sender.send(Some(ending));
        };
        thread::Builder::new()
            .name("vm-wait".to_owned())
            .spawn(wait)
            .map_err(VmError::Thread)?;
        Ok(Self { vm, ending })
    }

    /// Waits until the machine ends.
    pub(super) async fn ended(&self) -> Ending {
        let mut ending = self.ending.clone();
        let known = ending.wait_for(Option::is_some).await;
        match known.as_deref() {
            Ok(Some(ending)) => ending.clone(),
            _ => Ending::Failed("the thread that waited for it is gone".to_owned()),
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Refused when it has stopped already.
        if let Err(error) = self.vm.stop() {
            debug!(%error, "the machine was not running");
        }
    }
}

impl From<Exit> for Ending {
    fn from(exit: Exit) -> Self {
        match exit {
            Exit::Shutdown => Self::PoweredOff,
            Exit::Reset => Self::Reset,
            Exit::TripleFault { .. } => Self::TripleFault,
            _ => Self::SwitchedOff,
        }
    }
}

fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text = format!("{text}: {cause}");
        next = cause.source();
    }
    text
}
