//! Privileges, limits and memory mounts of a container: flags of `run` that only change its
//! specification.

use anyhow::Context as _;
use clap::{ArgAction, Args};
use oci_spec::OciSpecError;
use oci_spec::runtime::{
    Capabilities, Capability, Mount, MountBuilder, PosixRlimit, PosixRlimitBuilder,
    PosixRlimitType, Process, Spec, UserBuilder,
};

use super::groups::{self, Group};
use crate::cli::container::debug::unconfine;
use crate::cli::size;
use crate::sandbox::{
    NamedCapability, capabilities, default_seccomp_profile, process_capabilities,
};

/// Directories that stay writable for programs although the root file system is read-only.
const WRITABLE: [(&str, &str); 3] = [("/run", "755"), ("/tmp", "1777"), ("/var/tmp", "1777")];

#[derive(Debug, Args)]
pub(in crate::cli) struct RightsArgs {
    /// Allow what a capability of capabilities(7) allows, or ALL of them
    #[arg(long, value_name = "CAPABILITY")]
    cap_add: Vec<NamedCapability>,

    /// Do not allow it; wins over --cap-add
    #[arg(long, value_name = "CAPABILITY")]
    cap_drop: Vec<NamedCapability>,

    /// Allow all that can be done in the guest: all capabilities, devices and system calls
    #[arg(long)]
    pub(super) privileged: bool,

    /// Limit what the program uses: nofile=1024:4096, a name of setrlimit(2) with what it starts
    /// with and what it may raise it to
    #[arg(long, value_name = "NAME=SOFT[:HARD]", value_parser = parse_ulimit)]
    ulimit: Vec<PosixRlimit>,

    /// Add a supplementary group, by number or by its name in the image's /etc/group
    #[arg(long, value_name = "GROUP", value_parser = groups::parse)]
    pub(super) group_add: Vec<Group>,

    /// Mount a file system in the guest's memory: /run:size=64m,mode=755
    #[arg(long, value_name = "PATH[:OPTIONS]", value_parser = parse_tmpfs)]
    tmpfs: Vec<Tmpfs>,

    /// Size of /dev/shm [default: 64m]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    shm_size: Option<u64>,

    /// Mount the root file system read-only
    #[arg(long)]
    pub(super) read_only: bool,

    /// With --read-only, mount /run, /tmp and /var/tmp in memory
    #[arg(long, value_name = "BOOL", default_value_t = true, action = ArgAction::Set)]
    read_only_tmpfs: bool,
}

fn parse_ulimit(text: &str) -> Result<PosixRlimit, String> {
    let usage = || "write NAME=SOFT or NAME=SOFT:HARD, nofile=1024:4096 say".to_owned();
    let (name, values) = text.split_once('=').ok_or_else(usage)?;
    let (soft, hard) = values.split_once(':').unwrap_or((values, values));
    let value = |text: &str| match text {
        "-1" | "unlimited" => Ok(u64::MAX),
        number => number.parse().map_err(|_| usage()),
    };
    let (soft, hard) = (value(soft)?, value(hard)?);
    if soft > hard {
        return Err("what it starts with is more than what it may raise it to".to_owned());
    }
    let typ = format!("RLIMIT_{}", name.to_ascii_uppercase());
    let typ: PosixRlimitType = (typ.parse())
        .map_err(|_| format!("`{name}` is no limit of setrlimit(2), such as nofile or nproc"))?;
    let limit = PosixRlimitBuilder::default().typ(typ).soft(soft).hard(hard);
    limit.build().map_err(|error| error.to_string())
}

/// A tmpfs in the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Tmpfs {
    path: String,
    options: Vec<String>,
}

impl Tmpfs {
    pub(super) fn path(&self) -> &str {
        &self.path
    }

    fn of(path: &str, options: &[&str]) -> Self {
        Self {
            path: path.to_owned(),
            options: options.iter().map(|option| (*option).to_owned()).collect(),
        }
    }

    fn mount(&self) -> Result<Mount, OciSpecError> {
        MountBuilder::default()
            .destination(&self.path)
            .typ("tmpfs")
            .source("tmpfs")
            .options(self.options.clone())
            .build()
    }
}

pub(super) fn parse_tmpfs(text: &str) -> Result<Tmpfs, String> {
    let (path, words) = text.split_once(':').unwrap_or((text, ""));
    let is_path = path.starts_with('/') && path != "/" && !path.split('/').any(|part| part == "..");
    if !is_path {
        return Err("write an absolute path in the container".to_owned());
    }
    // As in docker, unless the options say otherwise.
    let mut tmpfs = Tmpfs::of(path, &["noexec", "nosuid", "nodev"]);
    for word in words.split(',').filter(|word| !word.is_empty()) {
        let mut option = word.to_owned();
        let opposite = match word {
            "exec" => Some("noexec"),
            "suid" => Some("nosuid"),
            "dev" => Some("nodev"),
            "noexec" | "nosuid" | "nodev" | "ro" | "rw" => None,
            _ => {
                let (name, value) = word.split_once('=').unwrap_or((word, ""));
                let is_valid = match name {
                    // The kernel knows fewer units.
                    "size" => size::parse(value)
                        .map(|bytes| option = format!("size={bytes}"))
                        .is_ok(),
                    "mode" => u32::from_str_radix(value, 8).is_ok_and(|mode| mode <= 0o7777),
                    "uid" | "gid" | "nr_inodes" => value.parse::<u32>().is_ok(),
                    _ => false,
                };
                if !is_valid {
                    return Err(format!(
                        "`{word}` is none of size=SIZE, mode=OCTAL, uid=, gid=, nr_inodes=NUMBER, \
                         ro, exec, suid and dev"
                    ));
                }
                None
            }
        };
        match opposite {
            Some(opposite) => tmpfs.options.retain(|option| option != opposite),
            None => tmpfs.options.push(option),
        }
    }
    Ok(tmpfs)
}

impl RightsArgs {
    /// Returns the capabilities of the container's root.
    fn capabilities(&self) -> Capabilities {
        let mut added = self.cap_add.clone();
        if self.privileged {
            added.push(NamedCapability::All);
        }
        capabilities(&added, &self.cap_drop)
    }

    /// Sets the privileges, limits and supplementary groups of a process.
    pub(super) fn apply_to_process(
        &self,
        process: &mut Process,
        groups: Vec<u32>,
    ) -> anyhow::Result<()> {
        let held = process_capabilities(self.capabilities(), Capabilities::new());
        process.set_capabilities(Some(held.context("cannot set capabilities")?));
        let mut limits = process.rlimits().clone().unwrap_or_default();
        for limit in &self.ulimit {
            limits.retain(|other| other.typ() != limit.typ());
            limits.push(*limit);
        }
        process.set_rlimits(Some(limits));
        if !groups.is_empty() {
            let user = UserBuilder::default().uid(0_u32).gid(0_u32);
            let user = user.additional_gids(groups).build();
            process.set_user(user.context("cannot set groups")?);
        }
        Ok(())
    }

    /// Sets the rest of a specification, with further file systems in memory, before volumes are
    /// added to it.
    pub(super) fn apply_to_spec<'a>(
        &self,
        spec: &mut Spec,
        mounted: impl IntoIterator<Item = &'a Tmpfs>,
    ) -> anyhow::Result<()> {
        if self.privileged {
            unconfine(spec)?;
        } else if let Some(linux) = spec.linux_mut() {
            let held: Vec<Capability> = self.capabilities().into_iter().collect();
            let profile = default_seccomp_profile(&held);
            linux.set_seccomp(Some(profile.context("cannot make the seccomp profile")?));
        }
        let mut mounts = spec.mounts().clone().unwrap_or_default();
        if let Some(size) = self.shm_size {
            for mount in &mut mounts {
                if mount.destination().as_os_str() == "/dev/shm" {
                    let mut options = mount.options().clone().unwrap_or_default();
                    options.retain(|option| !option.starts_with("size="));
                    options.push(format!("size={size}"));
                    mount.set_options(Some(options));
                }
            }
        }
        let mounted: Vec<Tmpfs> = mounted.into_iter().cloned().collect();
        for tmpfs in self.all_tmpfs(mounted) {
            mounts.retain(|mount| mount.destination().as_os_str() != tmpfs.path.as_str());
            mounts.push(
                tmpfs
                    .mount()
                    .context("cannot mount a file system in memory")?,
            );
        }
        spec.set_mounts(Some(mounts));
        Ok(())
    }

    /// Returns the paths of `--tmpfs`.
    pub(super) fn tmpfs_paths(&self) -> impl Iterator<Item = &str> {
        self.tmpfs.iter().map(|tmpfs| tmpfs.path.as_str())
    }

    fn all_tmpfs(&self, mounted: Vec<Tmpfs>) -> Vec<Tmpfs> {
        let own: Vec<_> = self.tmpfs.iter().cloned().chain(mounted).collect();
        let mut all = Vec::new();
        if self.read_only && self.read_only_tmpfs {
            for (path, mode) in WRITABLE {
                let mode = format!("mode={mode}");
                all.push(Tmpfs::of(path, &["nosuid", "nodev", &mode]));
            }
        }
        // The user's own mounts take precedence.
        all.retain(|one| own.iter().all(|own| own.path != one.path));
        all.extend(own);
        all
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::sandbox::{ContainerOptions, all_capabilities, container_spec};

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        rights: RightsArgs,
    }

    fn rights(flags: &[&str]) -> RightsArgs {
        let line = ["run"].iter().chain(flags);
        Line::try_parse_from(line).unwrap().rights
    }

    fn spec(flags: &[&str]) -> Spec {
        let options = ContainerOptions {
            command: vec!["true".to_owned()],
            ..ContainerOptions::default()
        };
        let mut spec = container_spec("a", "h", None, &options).unwrap().spec;
        let rights = rights(flags);
        rights.apply_to_spec(&mut spec, []).unwrap();
        let process = spec.process_mut().as_mut().unwrap();
        let number = |group: &Group| match group {
            Group::Number(number) => *number,
            Group::Name(name) => panic!("{name}"),
        };
        let groups = rights.group_add.iter().map(number).collect();
        rights.apply_to_process(process, groups).unwrap();
        spec
    }

    fn options_of(spec: &Spec, path: &str) -> Option<Vec<String>> {
        let mut mounts = spec.mounts().iter().flatten();
        let mount = mounts.find(|mount| mount.destination().as_os_str() == path)?;
        mount.options().clone()
    }

    #[test]
    fn without_flags_a_specification_stays_as_it_is() {
        let options = ContainerOptions {
            command: vec!["true".to_owned()],
            ..ContainerOptions::default()
        };
        let usual = container_spec("a", "h", None, &options).unwrap().spec;
        assert!(spec(&[]) == usual);
    }

    #[test]
    fn a_privileged_container_has_every_capability_but_those_that_are_dropped() {
        let held = |flags: &[&str]| rights(flags).capabilities();
        assert_eq!(held(&["--privileged"]), all_capabilities());
        let dropped = held(&["--privileged", "--cap-drop", "cap_sys_time"]);
        assert_eq!(dropped.len() + 1, all_capabilities().len());
        assert!(held(&["--cap-drop", "ALL"]).is_empty());
        let typo = Line::try_parse_from(["run", "--cap-add", "NET_ADMINN"]);
        assert!(typo.err().unwrap().to_string().contains("capabilities(7)"));
    }

    #[test]
    fn a_privileged_container_is_confined_by_its_guest_alone() {
        let spec = spec(&["--privileged"]);
        let linux = spec.linux().as_ref().unwrap();
        assert!(linux.seccomp().is_none() && linux.masked_paths().is_none());
        // It still has its own processes.
        assert_eq!(linux.namespaces().as_ref().unwrap().len(), 3);
        let sys = options_of(&spec, "/sys").unwrap();
        assert!(!sys.contains(&"ro".to_owned()), "{sys:?}");
    }

    #[test]
    fn limits_and_groups_are_the_processs() {
        let flags = [
            "--ulimit",
            "nofile=10:20",
            "--ulimit",
            "core=-1",
            "--group-add",
            "7",
        ];
        let spec = spec(&flags);
        let process = spec.process().as_ref().unwrap();
        let limits = process.rlimits().as_ref().unwrap();
        let values: Vec<_> = limits.iter().map(|l| (l.soft(), l.hard())).collect();
        assert_eq!(values, [(10, 20), (u64::MAX, u64::MAX)]);
        assert_eq!(
            process.user().additional_gids().as_deref(),
            Some([7].as_slice())
        );
        for name in ["as", "rttime", "sigpending"] {
            assert!(parse_ulimit(&format!("{name}=1")).is_ok(), "{name}");
        }
        for bad in [
            "nofile",
            "nofile=",
            "nofile =1",
            "nofile=2:1",
            "files=1",
            "nofile=1:2:3",
        ] {
            assert!(parse_ulimit(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn file_systems_in_memory_have_dockers_options() {
        let flags = [
            "--tmpfs",
            "/a",
            "--tmpfs",
            "/b:size=1mb,mode=700,exec",
            "--shm-size",
            "1m",
        ];
        let spec = spec(&flags);
        assert_eq!(
            options_of(&spec, "/a").unwrap(),
            ["noexec", "nosuid", "nodev"]
        );
        let b = ["nosuid", "nodev", "size=1048576", "mode=700"];
        assert_eq!(options_of(&spec, "/b").unwrap(), b);
        let shm = options_of(&spec, "/dev/shm").unwrap();
        assert!(shm.contains(&"size=1048576".to_owned()), "{shm:?}");
        for bad in ["a", "/", "/a/../b", "/a:size=x", "/a:mode=8", "/a:relatime"] {
            assert!(parse_tmpfs(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn read_only_leaves_the_usual_directories_writable() {
        let read_only = spec(&["--read-only", "--tmpfs", "/tmp:size=1m"]);
        assert!(options_of(&read_only, "/run").is_some());
        let tmp = options_of(&read_only, "/tmp").unwrap();
        assert!(tmp.contains(&"size=1048576".to_owned()), "{tmp:?}");
        let flags = ["--read-only", "--read-only-tmpfs", "false"];
        assert_eq!(options_of(&spec(&flags), "/tmp"), None);
    }
}
