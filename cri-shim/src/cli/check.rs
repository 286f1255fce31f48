//! `podvisor check`: reports whether this machine can run guests, what is missing, and the
//! remedies.
//!
//! The library checks KVM and the host; podvisor additionally needs its guest's files.

use clap::Args;
use podvisor_vmm::check::{self, Item, Status};
use serde::Serialize;

use super::FormatArgs;
use super::advice;
use super::table::Table;
use crate::machine::{AssetError, Assets, GuestFiles};
use crate::sandbox::jail;

#[derive(Debug, Args)]
pub(super) struct CheckArgs {
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

pub(super) fn run(args: &CheckArgs) -> anyhow::Result<u8> {
    let report = check::run();
    let guests_can_run = report.can_run_guests();
    let verdict = report.verdict();
    let mut items: Vec<Row> = report.items.into_iter().map(Row::from).collect();
    let assets = Assets::of_this_process();
    items.push(guest_files(&assets));
    items.extend(retpolines(&assets));
    items.extend(landlock());
    items.extend(user_namespaces());
    let view = View {
        guests_can_run,
        verdict,
        items,
    };
    if args.shown.is_json() {
        super::print_json(&view)?;
    } else {
        super::print(&view.to_text())?;
    }
    Ok(if guests_can_run { 0 } else { super::FAILURE })
}

/// Checks the kernel and the initramfs. They are not required of the host: they can be built.
fn guest_files(assets: &Assets) -> Row {
    let row = |status, found, remedy| Row {
        name: "guest files",
        status,
        found,
        remedy,
        required: false,
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
            let remedy = "build them again with `cargo xtask guest`".to_owned();
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

/// Whether this user's machines can have a jail, which takes user namespaces of all but root.
fn user_namespaces() -> Option<Row> {
    let row = |status, found, remedy| Row {
        name: "user namespaces",
        status,
        found,
        remedy,
        required: false,
    };
    if jail::can_change_identity() {
        return None;
    }
    Some(match jail::try_user_namespaces() {
        Ok(()) => row(Status::Ok, "the jail has its own".to_owned(), None),
        Err(error) => row(
            Status::Missing,
            format!("refused: machines of this user run with --no-jail alone: {error}"),
            Some(jail::user_namespaces_remedy()),
        ),
    })
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
        let mut view = View {
            guests_can_run: false,
            verdict: "guests cannot run here".to_owned(),
            items: vec![
                row("a", Status::Ok, None),
                row("b", Status::Broken, Some("mend it")),
                row("c", Status::Warning, Some("take another")),
                row("d", Status::Broken, Some("mend it")),
            ],
        };
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
             guests cannot run here\n"
        );
        view.items.truncate(1);
        assert!(!view.to_text().contains("What to do"));
    }

    #[test]
    fn missing_guest_files_have_a_remedy_and_do_not_blame_the_machine() {
        let directory = tempfile::tempdir().unwrap();
        let row = guest_files(&Assets::in_directory(directory.path()));
        assert_eq!(row.status, Status::Missing);
        assert!(row.remedy.unwrap().contains("cargo xtask guest"));
        assert!(!row.required);
    }
}
