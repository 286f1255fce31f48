//! `podvisor check`: reports whether `podvisor run` works here with its default settings, what is
//! missing, and the remedies.
//!
//! The library checks KVM and the host; podvisor additionally needs its guest's files and a jail.

use std::io;
use std::path::{Path, PathBuf};

use clap::Args;
use podvisor_vmm::check::{self, Item, Status};
use serde::Serialize;

use super::FormatArgs;
use super::advice;
use super::table::Table;
use crate::cri::place_without_mapped_users;
use crate::machine::{AssetError, Assets, GuestFiles};
use crate::sandbox::{jail, try_device_group};

#[derive(Debug, Args)]
pub(super) struct CheckArgs {
    /// Check only the host: not the guest's files, nor what the jail of its machines needs
    #[arg(long)]
    host: bool,

    #[command(flatten)]
    shown: FormatArgs,
}

/// The result of one check.
#[derive(Debug, Serialize)]
struct Row {
    name: &'static str,
    status: Status,
    found: String,
    /// `None` if it passed.
    remedy: Option<String>,
    /// Whether guests cannot run without it.
    required: bool,
}

impl Row {
    fn prevents_guests(&self) -> bool {
        self.required && matches!(self.status, Status::Missing | Status::Broken)
    }
}

impl From<Item> for Row {
    fn from(item: Item) -> Self {
        Self {
            name: item.name,
            status: item.status,
            found: item.found,
            remedy: item.remedy,
            required: item.required,
        }
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct View {
    guests_can_run: bool,
    verdict: String,
    items: Vec<Row>,
}

/// Checks the host; `root` is podvisor's persistent directory.
pub(super) fn run(args: &CheckArgs, root: &Path) -> anyhow::Result<u8> {
    let mut items: Vec<Row> = check::run().items.into_iter().map(Row::from).collect();
    if !args.host {
        let assets = Assets::of_this_process();
        items.push(guest_files(&assets));
        items.extend(retpolines(&assets));
        items.extend(landlock());
        match jail::can_change_identity() {
            true => {
                items.extend(device_group(try_device_group()));
                items.extend(place_without_mapped_users(root).map(mapped_users));
            }
            false => items.push(user_namespaces(jail::try_user_namespaces())),
        }
    }
    let view = View::of(items);
    if args.shown.is_json() {
        super::print_json(&view)?;
    } else {
        super::print(&view.to_text())?;
    }
    Ok(if view.guests_can_run {
        0
    } else {
        super::FAILURE
    })
}

/// Checks the kernel and the initramfs.
fn guest_files(assets: &Assets) -> Row {
    let row = |status, found, remedy| Row {
        name: "guest files",
        status,
        found,
        remedy,
        required: true,
    };
    let missing = |error: AssetError| {
        let remedy = advice::for_missing_file(&error);
        row(Status::Missing, error.to_string(), Some(remedy))
    };
    let (kernel, initramfs) = match (assets.kernel(), assets.initramfs()) {
        (Ok(kernel), Ok(initramfs)) => (kernel, initramfs),
        (Err(error), _) | (_, Err(error)) => return missing(error),
    };
    match GuestFiles::open(&kernel, &initramfs) {
        Ok(_) => {
            let found = format!("{} and {}", kernel.display(), initramfs.display());
            row(Status::Ok, found, None)
        }
        Err(error) => {
            let found = super::message(&error.into());
            let remedy = "install the package again, or run `cargo xtask guest` again".to_owned();
            row(Status::Broken, found, Some(remedy))
        }
    }
}

/// Returns the effect of a kernel without retpolines on this CPU; `None` if it needs none.
fn retpolines(assets: &Assets) -> Option<Row> {
    assets.lacks_retpolines().then(|| Row {
        name: "guest kernel for this CPU",
        status: Status::Warning,
        found: "containers of one pod could read each other's memory: this CPU needs retpolines or return thunks, which the guest's kernel lacks".to_owned(),
        remedy: Some("put vmlinux-retpoline in the directory of vmlinux: the package has it, and `cargo xtask kernel --retpoline` builds it".to_owned()),
        required: false,
    })
}

/// Returns what the jail lacks on a kernel without Landlock; `None` if there is Landlock.
fn landlock() -> Option<Row> {
    (!jail::has_landlock()).then(|| Row {
        name: "Landlock",
        status: Status::Warning,
        found: "the jail of machines that share directories, as all pods do, has a layer less: \
                whoever breaks out of a guest may open all that is mounted in them"
            .to_owned(),
        remedy: Some(
            "run a kernel with CONFIG_SECURITY_LANDLOCK (5.13 or later), and name landlock in \
             `lsm=` of its command line where that is set"
                .to_owned(),
        ),
        required: false,
    })
}

/// Returns what the jail lacks where a control group cannot deny devices, by what came of a try;
/// `None` if it can.
fn device_group(tried: io::Result<()>) -> Option<Row> {
    let error = tried.err()?;
    Some(Row {
        name: "device control groups",
        status: Status::Warning,
        found: format!(
            "refused: whoever breaks out of a guest may open device nodes that the host mounts \
             later below a shared directory: {error}"
        ),
        remedy: Some(
            "run a kernel with CONFIG_CGROUP_BPF; in a container, give it CAP_BPF and \
             CAP_NET_ADMIN, and a seccomp profile that allows bpf"
                .to_owned(),
        ),
        required: false,
    })
}

/// What the jail of machines with volumes lacks where users cannot be mapped: in a place, for the
/// kernel's reason.
fn mapped_users((place, error): (PathBuf, io::Error)) -> Row {
    Row {
        name: "mapped users",
        status: Status::Warning,
        found: format!(
            "refused on {}: whoever breaks out of a pod with volumes is root on the host, with \
             six capabilities: {error}",
            place.display()
        ),
        remedy: Some(
            "run Linux 6.3 or later, with volumes on file systems that map users, such as ext4, \
             xfs, btrfs and tmpfs"
                .to_owned(),
        ),
        required: false,
    }
}

/// Whether the machines of a user other than root can have a jail, by what came of a try.
fn user_namespaces(tried: io::Result<()>) -> Row {
    let row = |status, found, remedy| Row {
        name: "user namespaces",
        status,
        found,
        remedy,
        required: true,
    };
    match tried {
        Ok(()) => row(Status::Ok, "the jail has its own".to_owned(), None),
        Err(error) => row(
            Status::Missing,
            format!("refused: machines of this user run with --no-jail alone: {error}"),
            Some(jail::user_namespaces_remedy()),
        ),
    }
}

fn word(status: Status) -> &'static str {
    match status {
        Status::Ok => "ok",
        Status::Warning => "warning",
        Status::Missing => "missing",
        Status::Broken => "broken",
        _ => "unknown",
    }
}

impl View {
    /// Judges by all items.
    fn of(items: Vec<Row>) -> Self {
        let mut faults = items.iter().filter(|item| item.prevents_guests());
        let verdict = match (faults.next(), faults.count()) {
            (None, _) => "guests can run here".to_owned(),
            (Some(first), more) => {
                let more = match more {
                    0 => String::new(),
                    more => format!(" (and {more} more)"),
                };
                let Row { name, found, .. } = first;
                format!("guests cannot run here: {name}: {found}{more}")
            }
        };
        Self {
            guests_can_run: !items.iter().any(Row::prevents_guests),
            verdict,
            items,
        }
    }

    fn to_text(&self) -> String {
        let mut table = Table::new(["CHECK", "STATUS", "FOUND"]);
        for item in &self.items {
            let status = word(item.status).to_owned();
            table.row([item.name.to_owned(), status, item.found.clone()]);
        }
        let mut text = table.render();
        let remedies = self.remedies();
        if !remedies.is_empty() {
            text.push_str("\nWhat to do:\n");
        }
        for (remedy, names) in remedies {
            text.push_str(&format!("{}: {remedy}\n", names.join(", ")));
        }
        text.push_str(&format!("\n{}\n", self.verdict));
        text
    }

    /// Returns each remedy with the names of all checks that it fixes, in the order of the table.
    fn remedies(&self) -> Vec<(&str, Vec<&str>)> {
        let mut remedies: Vec<(&str, Vec<&str>)> = Vec::new();
        for item in &self.items {
            let Some(remedy) = item.remedy.as_deref() else {
                continue;
            };
            match remedies.iter_mut().find(|(known, _)| *known == remedy) {
                Some((_, names)) => names.push(item.name),
                None => remedies.push((remedy, vec![item.name])),
            }
        }
        remedies
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &'static str, status: Status, remedy: Option<&str>) -> Row {
        Row {
            name,
            status,
            found: "this".to_owned(),
            remedy: remedy.map(str::to_owned),
            required: true,
        }
    }

    #[test]
    fn remedies_follow_the_table_and_the_verdict_ends_it() {
        let mut view = View::of(vec![
            row("a", Status::Ok, None),
            row("b", Status::Broken, Some("mend it")),
            row("c", Status::Warning, Some("take another")),
            row("d", Status::Broken, Some("mend it")),
        ]);
        assert!(!view.guests_can_run);
        assert_eq!(
            view.to_text(),
            "CHECK   STATUS    FOUND\n\
             a       ok        this\n\
             b       broken    this\n\
             c       warning   this\n\
             d       broken    this\n\
             \n\
             What to do:\n\
             b, d: mend it\n\
             c: take another\n\
             \n\
             guests cannot run here: b: this (and 1 more)\n"
        );
        view.items.truncate(1);
        assert!(!view.to_text().contains("What to do"));
    }

    #[test]
    fn what_run_needs_and_does_not_find_prevents_guests_and_has_a_remedy() {
        let directory = tempfile::tempdir().unwrap();
        let assets = Assets::in_directory(directory.path());
        let no_files = guest_files(&assets);
        for name in ["vmlinux", "initramfs.cpio"] {
            std::fs::write(directory.path().join(name), "nonsense").unwrap();
        }
        let bad_files = guest_files(&assets);
        let refused = user_namespaces(Err(io::ErrorKind::PermissionDenied.into()));
        for (item, status, found, remedy) in [
            (
                no_files,
                Status::Missing,
                "no guest kernel",
                "cargo xtask guest",
            ),
            (bad_files, Status::Broken, "vmlinux", "cargo xtask guest"),
            (refused, Status::Missing, "--no-jail", ""),
        ] {
            assert_eq!(item.status, status, "{item:?}");
            assert!(item.remedy.as_ref().unwrap().contains(remedy), "{item:?}");
            let view = View::of(vec![row("kvm", Status::Ok, None), item]);
            assert!(!view.guests_can_run, "{view:?}");
            assert!(view.verdict.contains(found), "{view:?}");
        }
    }

    #[test]
    fn what_is_optional_does_not_keep_guests_from_running() {
        let optional = Row {
            required: false,
            ..row("tun", Status::Missing, Some("modprobe tun"))
        };
        let warning = row("memory", Status::Warning, Some("take less"));
        assert!(device_group(Ok(())).is_none());
        let devices = device_group(Err(io::ErrorKind::PermissionDenied.into())).unwrap();
        assert!(
            devices
                .remedy
                .as_ref()
                .unwrap()
                .contains("CONFIG_CGROUP_BPF")
        );
        let mapped = mapped_users(("/run".into(), io::ErrorKind::InvalidInput.into()));
        assert!(mapped.found.starts_with("refused on /run: "), "{mapped:?}");
        assert!(mapped.remedy.as_ref().unwrap().contains("6.3"));
        let view = View::of(vec![
            optional,
            warning,
            devices,
            mapped,
            user_namespaces(Ok(())),
        ]);
        assert_eq!(
            (view.guests_can_run, &*view.verdict),
            (true, "guests can run here")
        );
    }
}
