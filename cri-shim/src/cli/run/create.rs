//! Creates what `run` needs before its program runs: the record, the machine, the container.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, ensure};
use oci_spec::runtime::{LinuxCpuBuilder, LinuxNamespaceType, MountBuilder, Spec};
use podvisor_agent_protocol::{PidNamespace, SHARED_DIR, SHARED_MEMORY};
use podvisor_images::Image;
use rustix::fs::{FlockOperation, flock};
use tracing::debug;

use super::args::{Bus, RunArgs};
use super::groups;
use crate::cli::container::events::Events;
use crate::cli::container::{Attached, Entry, NetworkArgs, NetworkMode, Record, volumes};
use crate::cli::format::SHORT_ID;
use crate::cli::guest::Guest;
use crate::cli::io_limits;
use crate::cli::terminal;
use crate::machine::Transport;
use crate::sandbox::{
    CreateContainer, DEFAULT_CGROUP_PARENT, GuestContainer, GuestKind, IoLimit, JailMode,
    LaunchConfig, Launching, SandboxClient, ShareUsers, SupplementalGroups, container_spec,
    random_id,
};

const SIGTERM: u8 = 15;

/// Where a container is created.
#[derive(Debug)]
pub(super) enum Place {
    /// In its own machine.
    Own {
        guest: Box<Guest>,
        io_limits: Vec<IoLimit>,
        network: NetworkMode,
    },
    /// In the machine of a pod.
    Pod(Box<Entry>),
}

/// Creates the record of the requested container, whose image has the configuration
/// `image_config`.
pub(super) fn record(
    args: &RunArgs,
    place: &Place,
    image: &Image,
    image_config: &[u8],
) -> anyhow::Result<Record> {
    let id = random_id().context("cannot make up an id for the container")?;
    let short: String = id.chars().take(SHORT_ID).collect();
    let hostname = match place {
        Place::Own { .. } => args.hostname.clone().unwrap_or_else(|| short.clone()),
        Place::Pod(pod) => pod.record.hostname.clone(),
    };
    let terminal = args.tty.then(terminal::size_or_usual);
    let options = args.container_options(terminal);
    let config = image.config().config().as_ref();
    let container = container_spec(&id, &hostname, config, &options)?;
    let mut process = container.spec.process().clone().unwrap_or_default();
    let groups = groups::numbers(&args.rights.group_add, image)?;
    args.rights.apply_to_process(&mut process, groups)?;
    let stop_signal = args.stop_signal.map(Ok).or_else(|| {
        let named = config.and_then(|config| config.stop_signal().as_deref())?;
        Some(crate::signal::parse(named))
    });
    let (cpus, cpu_limit, memory, io_limits, network, jailed, pod) = match place {
        Place::Own {
            guest,
            io_limits,
            network,
        } => (
            guest.cpus,
            guest.cpu_limit,
            guest.memory,
            io_limits.clone(),
            network.clone(),
            !args.no_jail,
            None,
        ),
        Place::Pod(pod) => (
            pod.record.cpus,
            None,
            pod.record.memory,
            pod.record.io_limits.clone(),
            pod.record.network.clone(),
            pod.record.jailed,
            Some(pod.record.id.clone()),
        ),
    };
    let now = now();
    Ok(Record {
        name: args.name.clone().unwrap_or(short),
        image: args.image().to_owned(),
        image_id: image.id().to_string(),
        created: now.as_secs(),
        created_nanos: now.subsec_nanos(),
        labels: args.labels(),
        remove: args.rm,
        restart: args.restart,
        cpus,
        cpu_limit,
        memory,
        io_limits,
        interactive: args.interactive,
        // An unknown name is an error in the image.
        stop_signal: stop_signal.and_then(Result::ok).unwrap_or(SIGTERM),
        stop_timeout: args.stop_timeout,
        volumes: args.volumes(),
        network,
        ports: match place {
            Place::Own { .. } => args.network.ports(),
            Place::Pod(_) => Vec::new(),
        },
        jailed,
        health: args.health.check(image_config, &process, &container.user)?,
        user: container.user,
        hostname,
        process,
        id,
        pod,
        is_pod: false,
        vm: None,
    })
}

/// Returns the time since 1970.
pub(in crate::cli) fn now() -> Duration {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.unwrap_or_default()
}

/// Options of a machine that are not in its guest settings or record.
#[derive(Debug, Default)]
pub(in crate::cli) struct MachineOptions {
    /// The requested bus.
    transport: Option<Bus>,
    console: Option<PathBuf>,
    image_slots: u8,
    /// Whether it shares the directory of its record.
    shares: bool,
    /// Whose rights its process has there.
    share_users: ShareUsers,
    /// Parameters of its kernel.
    sysctls: BTreeMap<String, String>,
}

impl MachineOptions {
    /// Returns the options of a machine for several containers.
    pub(in crate::cli) fn of_pod(
        image_slots: u8,
        shares: bool,
        console: Option<PathBuf>,
        sysctls: &[(String, String)],
    ) -> Self {
        Self {
            sysctls: sysctls.iter().cloned().collect(),
            console,
            image_slots,
            shares,
            ..Self::default()
        }
    }
}

/// Creates the network of a record and starts to launch its machine, which has yet to be told of
/// the network.
pub(in crate::cli) async fn begin_machine(
    entry: &Entry,
    guest: &Guest,
    network: &NetworkArgs,
    options: MachineOptions,
) -> anyhow::Result<(Launching, Attached)> {
    let record = &entry.record;
    let config = |nics| LaunchConfig {
        id: record.id.clone(),
        hostname: record.hostname.clone(),
        dir: entry.dir.clone(),
        guest: GuestKind::Agent,
        kernel: guest.kernel.clone(),
        initramfs: guest.initramfs.clone(),
        vcpus: record.cpus,
        max_vcpus: record.cpus,
        memory: record.memory,
        growth: 0,
        image_slots: options.image_slots,
        nics,
        shared_dir: options.shares.then(|| entry.shared()),
        users: None,
        share_users: options.share_users,
        transport: match options.transport {
            Some(Bus::Pci) => Transport::Pci,
            Some(Bus::Mmio) => Transport::Mmio,
            None if guest.templates.is_some() && options.console.is_none() => Transport::Pci,
            None => Transport::Mmio,
        },
        psi: false,
        console: options.console.clone(),
        events: Events::of_container(&entry.dir).open(),
        sysctls: options.sysctls.clone(),
        templates: guest.templates.clone(),
        snapshot: guest.snapshot.clone(),
        jail: match record.jailed {
            true => JailMode::Enforced,
            false => JailMode::Disabled,
        },
        required_layers: Vec::new(),
        cgroup_parent: Some(DEFAULT_CGROUP_PARENT.to_owned()),
        io_limits: record.io_limits.clone(),
    };
    let begun = match guest.snapshot {
        None => network.attach_and_begin(entry, config).await,
        Some(_) => network.attach_then_begin(entry, config).await,
    };
    begun.map_err(io_limits::advised)
}

/// A created container.
#[derive(Debug)]
pub(super) struct PreparedContainer {
    pub(super) client: SandboxClient,
    pub(super) image: ImagePin,
}

/// The image that a container runs from, locked against removal while the machine's process has the
/// file open, too.
#[derive(Debug)]
pub(super) struct ImagePin(File);

impl ImagePin {
    /// Unlocks the image even while the machine's process has the file open: for a machine that has
    /// ended before its process.
    pub(super) fn release(self) {
        if let Err(error) = flock(&self.0, FlockOperation::Unlock) {
            debug!(%error, "the image is free when the machine's process is gone");
        }
    }
}

/// Starts the sandbox, unless the container is for a pod's, and creates the container.
pub(super) async fn launch(
    args: &RunArgs,
    place: &Place,
    image: &Image,
    entry: &Entry,
) -> anyhow::Result<PreparedContainer> {
    let record = &entry.record;
    let (client, attached) = match place {
        Place::Own { guest, .. } => {
            // A snapshot's machine has all of its devices, used or not.
            let shares = guest.shares.unwrap_or(!record.volumes.is_empty());
            if shares {
                volumes::make_shared(&entry.shared(), record.jailed)?;
            }
            let options = MachineOptions {
                transport: args.transport,
                console: args.console.clone(),
                image_slots: IMAGE_SLOTS,
                shares,
                share_users: volumes::share_users(&record.volumes),
                sysctls: args.sysctl.iter().cloned().collect(),
            };
            let begun = begin_machine(entry, guest, &args.network, options).await?;
            let (launching, mut attached) = begun;
            debug!(network = %record.network, "the network is made");
            let network = std::mem::take(&mut attached.network);
            let client = launching.finish(network).await?;
            volumes::mount(&client, &entry.shared(), record)?;
            (client, attached)
        }
        Place::Pod(pod) => {
            ensure!(
                record.volumes.is_empty() || pod.shared().exists(),
                "--volume: the pod {} shares no directories; make one by `podvisor pod create --volumes`",
                pod.record.name
            );
            let client = SandboxClient::connect(&pod.dir).await?;
            volumes::mount(&client, &pod.shared(), record)?;
            let mut attached = etc_files(pod);
            args.network.add_hosts(&mut attached)?;
            (client, attached)
        }
    };
    // Open and locked, it cannot be removed while the guest uses it.
    let rootfs = image.open_rootfs()?;
    let pin = ImagePin(rootfs.try_clone().context("cannot keep the image open")?);
    let container = CreateContainer {
        config: GuestContainer {
            id: record.id.clone(),
            readonly_rootfs: args.rights.read_only,
            spec: spec(args, image, record)?,
            user: record.user.clone(),
            supplemental_groups: SupplementalGroups::Default,
            guest_devices: args.rights.privileged,
            etc_hosts: attached.etc_hosts,
            etc_resolv_conf: attached.etc_resolv_conf,
            etc_hostname: format!("{}\n", record.hostname).into_bytes(),
        },
        image: rootfs.into(),
        image_digest: image.id().to_string(),
        volumes: Vec::new(),
        log: Some(entry.open_log()?.into()),
        tty: args.tty,
        stdin: args.interactive,
        // Clients may attach repeatedly to one that is detached, or that a user leaves.
        stdin_once: !args.detach && !args.tty,
        restart: record.restart.policy(),
        devices: Vec::new(),
    };
    client.create_container(container).await?;
    if let Some(max_bytes) = args.log_max_size {
        let other = entry.open_other_log()?.into();
        client.limit_log(&record.id, other, max_bytes).await?;
    }
    if let Some(check) = &record.health {
        client.check_health(&record.id, check.clone()).await?;
    }
    if record.pod.is_none() {
        client.end_with(&record.id).await?;
    }
    Ok(PreparedContainer { client, image: pin })
}

/// Images that a machine of one container may have at the same time.
const IMAGE_SLOTS: u8 = 1;

fn spec(args: &RunArgs, image: &Image, record: &Record) -> anyhow::Result<Spec> {
    let options = args.container_options(None);
    let config = image.config().config().as_ref();
    let mut spec = container_spec(&record.id, &record.hostname, config, &options)?.spec;
    args.rights.apply_to_spec(&mut spec, args.mounted_tmpfs())?;
    spec.set_process(Some(record.process.clone()));
    if let Some(thousandths) = record.cpu_limit {
        limit_cpu(&mut spec, thousandths)?;
    }
    let mut mounts = spec.mounts().clone().unwrap_or_default();
    if record.pod.is_some() {
        // POSIX shared memory is shared by the pod.
        let shm = MountBuilder::default()
            .destination(SHARED_MEMORY)
            .typ("bind")
            .source(SHARED_MEMORY)
            .options(["rbind", "nosuid", "noexec", "nodev"].map(str::to_owned))
            .build()?;
        mounts.retain(|mount| mount.destination() != shm.destination());
        mounts.push(shm);
    }
    for (number, volume) in record.volumes.iter().enumerate() {
        let share = Path::new(SHARED_DIR);
        let (source, options) = volumes::guest_mount(share, record, number, volume)?;
        let mount = MountBuilder::default()
            .destination(&volume.destination)
            .typ("bind")
            .source(source)
            .options(options)
            .build()?;
        mounts.push(mount);
    }
    // A mount within another one is made after it, whichever was named first.
    mounts.sort_by_key(|mount| mount.destination().components().count());
    spec.set_mounts(Some(mounts));
    if (args.pid.is_some() || args.init)
        && let Some(namespaces) = spec
            .linux_mut()
            .as_mut()
            .and_then(|linux| linux.namespaces_mut().as_mut())
    {
        for namespace in namespaces {
            if namespace.typ() == LinuxNamespaceType::Pid {
                namespace.set_path(Some(PidNamespace::Shared.to_string().into()));
            }
        }
    }
    Ok(spec)
}

/// Limits a container to thousandths of a CPU.
fn limit_cpu(spec: &mut Spec, thousandths: u32) -> anyhow::Result<()> {
    /// In microseconds, as engines have it.
    const PERIOD: u64 = 100_000;
    let quota = i64::from(thousandths) * 100;
    let cpu = LinuxCpuBuilder::default().quota(quota).period(PERIOD);
    let cpu = cpu.build().context("cannot limit the CPU time")?;
    let mut linux = spec.linux().clone().unwrap_or_default();
    let mut resources = linux.resources().clone().unwrap_or_default();
    resources.set_cpu(Some(cpu));
    linux.set_resources(Some(resources));
    spec.set_linux(Some(linux));
    Ok(())
}

/// Files in a pod's directory, for its containers.
const HOSTS: &str = "hosts";
const RESOLV_CONF: &str = "resolv.conf";

/// Stores the contents of the files in `/etc` that depend on a pod's network.
pub(in crate::cli) fn keep_etc_files(pod: &Entry, attached: &Attached) -> anyhow::Result<()> {
    for (name, contents) in [
        (HOSTS, &attached.etc_hosts),
        (RESOLV_CONF, &attached.etc_resolv_conf),
    ] {
        let path = pod.dir.join(name);
        fs::write(&path, contents).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn etc_files(pod: &Entry) -> Attached {
    Attached {
        etc_hosts: fs::read(pod.dir.join(HOSTS)).unwrap_or_default(),
        etc_resolv_conf: fs::read(pod.dir.join(RESOLV_CONF)).unwrap_or_default(),
        ..Attached::default()
    }
}
