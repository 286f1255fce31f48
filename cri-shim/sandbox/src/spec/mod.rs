//! The OCI runtime specification of a container, from its image's configuration and the user's
//! options, with the rules of `docker run` for entrypoint, command, environment, working directory
//! and user.
//!
//! The agent fills in `root.path` and the numbers of `process.user`, as it sees the image's files.
//! Network, IPC and UTS namespaces are the virtual machine's own: it is the pod.

mod capabilities;
mod process;
mod seccomp;

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::path::PathBuf;

use oci_spec::OciSpecError;
use oci_spec::image;
use oci_spec::runtime::{
    BoxBuilder as ConsoleSizeBuilder, Capabilities, Linux, LinuxBuilder, LinuxDeviceCgroup,
    LinuxDeviceCgroupBuilder, LinuxDeviceType, LinuxNamespaceBuilder, LinuxNamespaceType,
    LinuxResourcesBuilder, Mount, MountBuilder, ProcessBuilder, RootBuilder, Spec, SpecBuilder,
};

use super::types::TerminalSize;

pub use capabilities::{NamedCapability, all_capabilities, capabilities, process_capabilities};
pub use process::{
    default_environment, default_rlimits, from_root, further_process, image_entrypoint,
    set_variable,
};
pub use seccomp::default_profile as default_seccomp_profile;

/// Version of the OCI runtime specification that is used with the agent.
pub const SPEC_VERSION: &str = "1.0.2";

/// The reason why no specification can be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpecError {
    /// Neither the user nor the image names a command.
    #[error("the image names no command to run; give one after the image's name")]
    NoCommand,
    /// The working directory is not absolute.
    #[error("the working directory `{0}` is not absolute; begin it with `/`")]
    RelativeWorkdir(String),
    /// An environment variable has no name.
    #[error("`{0}` sets an environment variable without a name; write NAME=VALUE")]
    NamelessVariable(String),
    /// A string that no process can be given.
    #[error("{what} holds a NUL byte, which no process can be given")]
    Nul {
        /// The name of the string.
        what: &'static str,
    },
    /// The parts of the specification are inconsistent.
    #[error("cannot build the container's runtime specification")]
    Build(#[source] oci_spec::OciSpecError),
}

/// How the program's root filesystem may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RootAccess {
    /// Writes go to a layer in memory that ends with the container.
    #[default]
    Writable,
    /// Writes are refused.
    ReadOnly,
}

/// The user's options, in addition to the image's configuration.
#[derive(Debug, Clone, Default)]
pub struct ContainerOptions {
    /// Replaces the image's entrypoint (and drops its command); an empty string removes it.
    pub entrypoint: Option<String>,
    /// Replaces the image's command unless empty.
    pub command: Vec<String>,
    /// Variables to set (`NAME=VALUE`) or to remove (`NAME`).
    pub env: Vec<String>,
    /// Replaces the image's working directory.
    pub workdir: Option<String>,
    /// Replaces the image's user: `user[:group]`.
    pub user: Option<String>,
    /// The program gets a terminal of this size.
    pub terminal: Option<TerminalSize>,
    /// Whether the root filesystem is writable.
    pub root: RootAccess,
}

impl ContainerOptions {
    /// Checks for options that are invalid with any image.
    ///
    /// # Errors
    /// [`SpecError`], as for [`container_spec`].
    pub fn check(&self) -> Result<(), SpecError> {
        let is_nameless = |entry: &&String| entry.is_empty() || entry.starts_with('=');
        if let Some(entry) = self.env.iter().find(is_nameless) {
            return Err(SpecError::NamelessVariable(entry.clone()));
        }
        match &self.workdir {
            Some(workdir) if !workdir.starts_with('/') => {
                Err(SpecError::RelativeWorkdir(workdir.clone()))
            }
            _ => Ok(()),
        }
    }
}

/// A container ready to be sent to the agent.
#[derive(Debug, Clone)]
pub struct ContainerSpec {
    /// The runtime specification, without the parts that only the guest can fill in.
    pub spec: Spec,
    /// `user[:group]` for the agent to look up; empty for root.
    pub user: String,
}

/// Makes the specification of container `id` on a host named `hostname`.
///
/// # Errors
/// [`SpecError`]: the request of the user or the image is invalid.
pub fn container_spec(
    id: &str,
    hostname: &str,
    image: Option<&image::Config>,
    options: &ContainerOptions,
) -> Result<ContainerSpec, SpecError> {
    options.check()?;
    let args = command_line(image, options)?;
    let env = environment(hostname, image, options);
    let cwd = working_directory(image, options);
    let user = options
        .user
        .clone()
        .or_else(|| image.and_then(|config| config.user().clone()))
        .unwrap_or_default();
    check_nul("the command", args.iter())?;
    check_nul("the environment", env.iter())?;
    check_nul("the working directory", [&cwd])?;
    check_nul("the user", [&user])?;

    let (allowed, ambient) = (capabilities(&[], &[]), Capabilities::new());
    let mut process = ProcessBuilder::default()
        .terminal(options.terminal.is_some())
        .args(args)
        .env(env)
        .cwd(cwd)
        .no_new_privileges(false)
        .capabilities(process_capabilities(allowed, ambient).map_err(SpecError::Build)?)
        .rlimits(default_rlimits().map_err(SpecError::Build)?)
        .build()
        .map_err(SpecError::Build)?;
    if let Some(size) = options.terminal {
        let console = ConsoleSizeBuilder::default()
            .height(size.rows)
            .width(size.columns)
            .build()
            .map_err(SpecError::Build)?;
        process.set_console_size(Some(console));
    }

    let mut spec = SpecBuilder::default()
        .version(SPEC_VERSION)
        .process(process)
        .root(
            RootBuilder::default()
                .path("rootfs")
                .readonly(options.root == RootAccess::ReadOnly)
                .build()
                .map_err(SpecError::Build)?,
        )
        .mounts(default_mounts().map_err(SpecError::Build)?)
        .annotations(HashMap::new())
        .linux(linux(id)?)
        .build()
        .map_err(SpecError::Build)?;
    // The builder's default names the host; that is set for the guest as a whole.
    spec.set_hostname(None);
    Ok(ContainerSpec { spec, user })
}

/// Joins entrypoint and command. An entrypoint of the user drops the image's command.
fn command_line(
    image: Option<&image::Config>,
    options: &ContainerOptions,
) -> Result<Vec<String>, SpecError> {
    let (mut args, image_command) = match options.entrypoint.as_deref() {
        None => (
            image.map(image_entrypoint).unwrap_or_default().to_vec(),
            image
                .and_then(|image| image.cmd().clone())
                .unwrap_or_default(),
        ),
        Some("") => (Vec::new(), Vec::new()),
        Some(entrypoint) => (vec![entrypoint.to_owned()], Vec::new()),
    };
    if options.command.is_empty() {
        args.extend(image_command);
    } else {
        args.extend(options.command.iter().cloned());
    }
    match args.first() {
        Some(program) if !program.is_empty() => Ok(args),
        _ => Err(SpecError::NoCommand),
    }
}

/// Returns the defaults, then the image's variables, then the user's; a later value of a variable
/// replaces the earlier one in its place.
fn environment(
    hostname: &str,
    image: Option<&image::Config>,
    options: &ContainerOptions,
) -> Vec<String> {
    let mut env = default_environment(hostname, options.terminal.is_some(), image);
    for entry in &options.env {
        set_variable(&mut env, entry);
    }
    env
}

fn working_directory(image: Option<&image::Config>, options: &ContainerOptions) -> String {
    if let Some(workdir) = &options.workdir {
        return workdir.clone();
    }
    let of_image = image.and_then(|config| config.working_dir().clone());
    from_root(&of_image.unwrap_or_default())
}

fn check_nul<'a>(
    what: &'static str,
    strings: impl IntoIterator<Item = &'a String>,
) -> Result<(), SpecError> {
    if strings.into_iter().any(|s| s.contains('\0')) {
        return Err(SpecError::Nul { what });
    }
    Ok(())
}

/// Kernel interfaces that expose the whole machine, or have been ways out of a container.
const MASKED_PATHS: &[&str] = &[
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
];

/// Kernel interfaces that may be read but not written.
const READONLY_PATHS: &[&str] = &[
    "/proc/bus",
    "/proc/fs",
    "/proc/irq",
    "/proc/sys",
    "/proc/sysrq-trigger",
];

fn linux(id: &str) -> Result<Linux, SpecError> {
    let strings = |list: &[&str]| list.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>();
    let namespaces = [
        LinuxNamespaceType::Pid,
        LinuxNamespaceType::Mount,
        LinuxNamespaceType::Cgroup,
    ]
    .into_iter()
    .map(|typ| LinuxNamespaceBuilder::default().typ(typ).build())
    .collect::<Result<Vec<_>, _>>()
    .map_err(SpecError::Build)?;
    LinuxBuilder::default()
        .cgroups_path(PathBuf::from(format!("/podvisor/{id}")))
        .namespaces(namespaces)
        .resources(
            LinuxResourcesBuilder::default()
                .devices(device_rules().map_err(SpecError::Build)?)
                .build()
                .map_err(SpecError::Build)?,
        )
        .masked_paths(strings(MASKED_PATHS))
        .readonly_paths(strings(READONLY_PATHS))
        .seccomp(seccomp::default_profile(capabilities::DEFAULT).map_err(SpecError::Build)?)
        .build()
        .map_err(SpecError::Build)
}

/// Allows only creating device nodes, and the use of these character devices: (major, minor), where
/// no minor means all.
pub fn device_rules() -> Result<Vec<LinuxDeviceCgroup>, OciSpecError> {
    const USABLE: &[(i64, Option<i64>)] = &[
        (1, Some(3)), // null
        (1, Some(5)), // zero
        (1, Some(7)), // full
        (1, Some(8)), // random
        (1, Some(9)), // urandom
        (5, Some(0)), // tty
        (5, Some(1)), // console
        (5, Some(2)), // ptmx
        (136, None),  // pts
    ];
    let mut rules = vec![
        LinuxDeviceCgroupBuilder::default()
            .allow(false)
            .typ(LinuxDeviceType::A)
            .access("rwm")
            .build()?,
    ];
    for typ in [LinuxDeviceType::C, LinuxDeviceType::B] {
        rules.push(
            LinuxDeviceCgroupBuilder::default()
                .allow(true)
                .typ(typ)
                .access("m")
                .build()?,
        );
    }
    for (major, minor) in USABLE {
        let mut rule = LinuxDeviceCgroupBuilder::default()
            .allow(true)
            .typ(LinuxDeviceType::C)
            .access("rwm")
            .major(*major);
        if let Some(minor) = minor {
            rule = rule.minor(*minor);
        }
        rules.push(rule.build()?);
    }
    Ok(rules)
}

/// Destination, type, source and options of the filesystems that every Linux program expects.
const MOUNTS: &[(&str, &str, &str, &[&str])] = &[
    ("/proc", "proc", "proc", &["nosuid", "noexec", "nodev"]),
    (
        "/dev",
        "tmpfs",
        "tmpfs",
        &["nosuid", "strictatime", "mode=755", "size=65536k"],
    ),
    (
        "/dev/pts",
        "devpts",
        "devpts",
        &[
            "nosuid",
            "noexec",
            "newinstance",
            "ptmxmode=0666",
            "mode=0620",
            "gid=5",
        ],
    ),
    (
        "/dev/shm",
        "tmpfs",
        "shm",
        &["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"],
    ),
    (
        "/dev/mqueue",
        "mqueue",
        "mqueue",
        &["nosuid", "noexec", "nodev"],
    ),
    (
        "/sys",
        "sysfs",
        "sysfs",
        &["nosuid", "noexec", "nodev", "ro"],
    ),
    (
        "/sys/fs/cgroup",
        "cgroup",
        "cgroup",
        &["nosuid", "noexec", "nodev", "relatime", "ro"],
    ),
];

/// The filesystems that every Linux program expects.
pub fn default_mounts() -> Result<Vec<Mount>, OciSpecError> {
    MOUNTS
        .iter()
        .map(|(destination, typ, source, options)| {
            MountBuilder::default()
                .destination(*destination)
                .typ(*typ)
                .source(*source)
                .options(options.iter().map(|o| (*o).to_owned()).collect::<Vec<_>>())
                .build()
        })
        .collect()
}
