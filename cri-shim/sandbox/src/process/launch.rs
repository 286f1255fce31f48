//! Creates the sandbox that a launcher describes: its open files, its machine and the jail, until
//! the guest is configured.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixListener as StdUnixListener;
use std::sync::Arc;

use podvisor_agent_protocol::SHARED_DIR;
use podvisor_vmm::LinkState;
use tokio::net::UnixListener;
use tracing::info;

use super::super::agent::{GuestConfig, Share};
use super::super::error::SandboxError;
use super::super::events::EventLog;
use super::super::in_process::{BuiltSandbox, SandboxConfig};
use super::super::jail::{self, CallFilter, KvmCalls, MissingLayer};
use super::super::template::Template;
use super::super::types::{GuestKind, GuestNetwork, JailLayer, JailMode, ShareUsers};
use super::super::wire::{FrameError, FrameReader, LAUNCH_VERSION, LaunchHeader};
use super::ProcessError;
use super::containers::Containers;
use super::guest::Guest;
use super::own_os::{OwnOs, Resources, Usage};
use crate::machine::{
    Boot, EarlyVm, GuestFiles, HostFiles, MachineConfig, Nic, SHARE_TAG, SharedDir, Transport,
    causes,
};

/// Length of the accept queue of the control socket: while the process is stopped, closed
/// connections count, too.
const BACKLOG: i32 = 4096;

/// What a launch begins with.
pub(super) struct Received {
    pub(super) header: LaunchHeader,
    fds: std::vec::IntoIter<OwnedFd>,
    /// Begun before the rest was known.
    early: EarlyVm,
}

/// The open files of a launch.
struct LaunchFiles {
    listener: UnixListener,
    record: File,
    /// What an agent's guest boots.
    guest: Option<GuestFiles>,
    template: Option<Template>,
    devices: DeviceFiles,
    events: Option<EventLog>,
}

/// The host's ends of the machine's devices.
struct DeviceFiles {
    nics: Vec<OwnedFd>,
    share: Option<jail::Share>,
    console: Option<File>,
}

/// A sandbox whose guest is configured, or comes later.
pub(super) struct ConfiguredSandbox {
    pub(super) guest: Guest,
    pub(super) listener: UnixListener,
    pub(super) record: File,
    /// Its disks are not written, so nothing that it wrote outlives it.
    pub(super) leaves_nothing: bool,
    pub(super) is_clone: bool,
    pub(super) missing_layers: Vec<String>,
}

/// Receives the launcher's first frame.
pub(super) async fn receive(
    frames: &mut FrameReader,
    early: EarlyVm,
) -> Result<Received, ProcessError> {
    let frame = frames.next().await;
    let frame = frame.and_then(|frame| frame.ok_or(FrameError::Cut));
    let frame = frame.map_err(ProcessError::NotLaunched)?;
    let header = serde_json::from_slice(&frame.body)
        .map_err(|error| ProcessError::NotLaunched(error.into()))?;
    Ok(Received {
        header,
        fds: frame.fds.into_iter(),
        early,
    })
}

/// Assigns the files that came with a launch.
fn files(
    launch: &LaunchHeader,
    mut fds: std::vec::IntoIter<OwnedFd>,
) -> Result<LaunchFiles, SandboxError> {
    if launch.version != LAUNCH_VERSION {
        return Err(SandboxError::Version {
            dir: launch.dir.clone(),
            theirs: launch.version,
            ours: LAUNCH_VERSION,
        });
    }
    let control = |source: FrameError| SandboxError::Control {
        dir: launch.dir.clone(),
        source,
    };
    let mut next = || fds.next().ok_or_else(|| control(FrameError::MissingFd));
    let listener = listen(next()?).map_err(|error| control(error.into()))?;
    let record = next()?.into();
    let guest = match launch.guest {
        GuestKind::Agent => Some((next()?, next()?)),
        GuestKind::OwnOs => None,
    };
    let guest =
        guest.map(|(kernel, initramfs)| GuestFiles::from_files(kernel.into(), initramfs.into()));
    let template = match launch.has_template {
        true => Some(Template {
            state: next()?,
            memory: next()?,
        }),
        false => None,
    };
    let nics = launch
        .nics
        .iter()
        .map(|_| next())
        .collect::<Result<_, _>>()?;
    let shared_dir = launch.has_shared_dir.then(&mut next).transpose()?;
    let share = shared_dir.map(|dir| match launch.jail {
        JailMode::Enforced => jail::Share::new(dir).map(|share| match launch.share_users {
            ShareUsers::Host => share,
            ShareUsers::Mapped => share.with_mapped_users(),
        }),
        JailMode::Disabled => Ok(jail::Share::as_it_is(dir)),
    });
    let share = share.transpose().map_err(|source| SandboxError::File {
        action: "copy the mounts of what is shared in",
        path: launch.dir.clone(),
        source,
    })?;
    let console = launch.has_console.then(&mut next).transpose()?;
    let events = launch.has_events.then(&mut next).transpose()?;
    Ok(LaunchFiles {
        listener,
        record,
        guest: guest.transpose()?,
        template,
        devices: DeviceFiles {
            nics,
            share,
            console: console.map(File::from),
        },
        events: events.map(|fd| EventLog::new(fd.into())),
    })
}

/// Listens here and not in the launcher, so that peers see this process's pid.
fn listen(socket: OwnedFd) -> io::Result<UnixListener> {
    rustix::net::listen(socket.as_fd(), BACKLOG)?;
    UnixListener::from_std(StdUnixListener::from(socket))
}

/// Starts the machine, as a clone if there is a template that suits this host, and configures its
/// guest once its network is known.
pub(super) async fn boot(
    received: Received,
    network: impl Future<Output = Result<GuestNetwork, SandboxError>>,
) -> Result<ConfiguredSandbox, SandboxError> {
    let Received {
        header: launch,
        fds,
        early,
    } = received;
    let LaunchFiles {
        listener,
        record,
        guest,
        template,
        devices,
        events,
    } = files(&launch, fds)?;
    let Some(guest) = guest else {
        // Its machine has other needs.
        drop(early);
        let host = HostFiles::open(devices.share.is_some());
        let usage = Usage::open();
        let missing_layers = close_jail(&launch, &devices, KvmCalls::CreateVms)?;
        let share = devices.share.as_ref();
        let share = share.map(|share| share.as_fd().try_clone_to_owned());
        let share = share.transpose().map_err(|source| SandboxError::File {
            action: "keep open what is shared in",
            path: launch.dir.clone(),
            source,
        })?;
        let system = OwnOs::new(Resources {
            host,
            nics: launch.nics.into_iter().zip(devices.nics).collect(),
            network: network.await?,
            share,
            memory: launch.memory,
            growth: launch.growth,
            usage,
            events,
        });
        info!("the sandbox is ready for a machine");
        return Ok(ConfiguredSandbox {
            guest: Guest::OwnOs(Arc::new(system)),
            listener,
            record,
            leaves_nothing: false,
            is_clone: false,
            missing_layers,
        });
    };
    let (built, is_clone) = build(&launch, &devices, template, guest, early)?;
    let kvm_calls = match built.may_grow_cpus() {
        true => KvmCalls::AddVcpus,
        false => KvmCalls::Run,
    };
    let missing_layers = close_jail(&launch, &devices, kvm_calls)?;
    let started = built.start_with(network).await;
    let sandbox = started.map_err(|error| match is_clone && error.is_of_no_guest() {
        true => SandboxError::Clone(Box::new(error)),
        false => error,
    })?;
    info!(is_clone, "the sandbox is ready");
    let containers = Containers::new(Arc::new(sandbox), launch.image_slots, events);
    Ok(ConfiguredSandbox {
        guest: Guest::Agent(Arc::new(containers)),
        listener,
        record,
        leaves_nothing: !launch.has_shared_dir && !launch.has_console,
        is_clone,
        missing_layers,
    })
}

/// Builds the machine; returns also whether it is a clone.
fn build(
    launch: &LaunchHeader,
    devices: &DeviceFiles,
    template: Option<Template>,
    cold: GuestFiles,
    early: EarlyVm,
) -> Result<(BuiltSandbox, bool), SandboxError> {
    let mut early = Some(early);
    let mut build = |boot| {
        let mut config = config(launch, devices, boot).map_err(|source| SandboxError::File {
            action: "keep open the files of",
            path: launch.dir.clone(),
            source,
        })?;
        config.machine.early = early.take();
        BuiltSandbox::new(config)
    };
    let clone = template.map(|template| {
        let snapshot = template.open()?;
        build(match launch.must_clone {
            true => Boot::Warm(snapshot),
            false => Boot::Template(snapshot),
        })
    });
    let clone = match clone.transpose() {
        Err(error) if !launch.must_clone => {
            let why = causes(&error);
            info!(why, "no clone of the template: the guest boots");
            None
        }
        clone => clone?,
    };
    match clone {
        Some(clone) => Ok((clone, true)),
        None => Ok((build(Boot::Cold(cold))?, false)),
    }
}

fn config(launch: &LaunchHeader, devices: &DeviceFiles, boot: Boot) -> io::Result<SandboxConfig> {
    let share = launch.has_shared_dir.then(|| Share {
        tag: SHARE_TAG.to_owned(),
        path: SHARED_DIR.to_owned(),
    });
    let nics = devices.nics.iter().zip(&launch.nics);
    let nics = nics.map(|(fd, nic)| {
        Ok(Nic {
            kind: nic.kind,
            fd: fd.try_clone()?,
            mac: nic.mac,
            mtu: nic.mtu,
            link: LinkState::Up,
        })
    });
    let shared_dir = devices.share.as_ref().map(|share| {
        Ok::<_, io::Error>(SharedDir {
            dir: share.as_fd().try_clone_to_owned()?,
            users: launch.users,
        })
    });
    Ok(SandboxConfig {
        guest: GuestConfig {
            hostname: launch.hostname.clone(),
            shares: share.into_iter().collect(),
            sysctls: launch.sysctls.clone(),
            ..GuestConfig::default()
        },
        machine: MachineConfig {
            boot,
            cpus: launch.vcpus,
            max_cpus: launch.max_vcpus,
            memory: launch.memory,
            growth: launch.growth,
            disks: Vec::new(),
            spare_disks: launch.image_slots,
            nics: nics.collect::<io::Result<_>>()?,
            share: shared_dir.transpose()?,
            transport: match launch.pci {
                true => Transport::Pci,
                false => Transport::Mmio,
            },
            psi: launch.psi,
            console: devices.console.as_ref().map(File::try_clone).transpose()?,
            early: None,
        },
    })
}

/// Enters the jail if it is enforced; returns the names of the missing layers.
fn close_jail(
    launch: &LaunchHeader,
    devices: &DeviceFiles,
    kvm: KvmCalls,
) -> Result<Vec<String>, SandboxError> {
    let mut missing_layers = Vec::new();
    let mut lacks = Vec::new();
    if launch.jail == JailMode::Enforced {
        let missing = jail::close(devices.share.as_ref(), CallFilter::Enforced { kvm })?;
        missing_layers.extend(missing.iter().map(ToString::to_string));
        lacks.extend(missing.into_iter().map(layer_of));
    }
    if !launch.has_cgroup {
        missing_layers.push(JailLayer::ControlGroup.to_string());
        lacks.push(JailLayer::ControlGroup);
    }
    if !launch.denies_devices {
        missing_layers.push(JailLayer::DeviceGroup.to_string());
        lacks.push(JailLayer::DeviceGroup);
    }
    check_layers(&launch.required_layers, &lacks)?;
    Ok(missing_layers)
}

fn layer_of(missing: MissingLayer) -> JailLayer {
    match missing {
        MissingLayer::UserNamespace => JailLayer::UserNamespace,
        MissingLayer::Landlock | MissingLayer::PartOfLandlock => JailLayer::Landlock,
        MissingLayer::MappedUsers => JailLayer::MappedUsers,
    }
}

/// Returns an error if a required layer is among those that the process lacks.
fn check_layers(required: &[JailLayer], lacks: &[JailLayer]) -> Result<(), SandboxError> {
    match required.iter().find(|layer| lacks.contains(layer)) {
        Some(layer) => Err(SandboxError::MissingLayer { layer: *layer }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_without_a_required_layer_does_not_start() {
        use JailLayer::{ControlGroup, Landlock, UserNamespace};
        check_layers(&[], &[Landlock, ControlGroup]).unwrap();
        check_layers(&[Landlock], &[UserNamespace]).unwrap();
        for missing in [MissingLayer::Landlock, MissingLayer::PartOfLandlock] {
            let error = check_layers(&[ControlGroup, Landlock], &[layer_of(missing)]);
            let error = error.unwrap_err().to_string();
            assert!(
                error.contains("Landlock") && error.contains("lsm="),
                "{error}"
            );
        }
    }
}
