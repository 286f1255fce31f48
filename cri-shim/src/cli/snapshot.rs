//! `podvisor snapshot`: a machine that has booted, for `podvisor run --from-snapshot` to begin
//! with.

use std::fs;
use std::path::{Path, PathBuf};
use std::process;

use anyhow::Context as _;
use clap::Args;
use tracing::warn;

use super::guest::GuestArgs;
use super::signals::{Signals, exit_code_of};
use crate::machine::{NicKind, Transport};
use crate::sandbox::{self, Shape};

#[derive(Debug, Args)]
pub(super) struct SnapshotArgs {
    #[command(flatten)]
    guest: GuestArgs,

    /// Let programs that begin with it share directories of the host (`run -v`)
    #[arg(long)]
    volumes: bool,

    /// Give it a network card, for `run --network`
    #[arg(long)]
    network: bool,

    /// New directory for the snapshot
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

pub(super) fn run(args: &SnapshotArgs) -> anyhow::Result<u8> {
    let dir = std::path::absolute(&args.dir)
        .with_context(|| format!("cannot find {}", args.dir.display()))?;
    check_place(&dir)?;
    let guest = args.guest.guest(None)?;
    let shape = Shape {
        kernel: guest.kernel,
        initramfs: guest.initramfs,
        vcpus: guest.cpus,
        max_vcpus: guest.cpus,
        memory: guest.memory,
        growth: 0,
        image_slots: 1,
        nics: args.network.into(),
        nic_kind: NicKind::Tap,
        shares: args.volumes,
        // What it costs a boot, no clone pays.
        transport: Transport::Pci,
        psi: false,
    };
    let runtime = super::runtime()?;
    let code = runtime.block_on(async {
        let mut signals = Signals::new()?;
        tokio::select! {
            made = sandbox::snapshot(&shape, &dir) => {
                made.with_context(|| format!("cannot make the snapshot {}", dir.display()))?;
                Ok(0)
            }
            signal = signals.ending() => {
                remove_partial(&dir);
                Ok(exit_code_of(signal))
            }
        }
    });
    runtime.shutdown_background();
    code
}

/// Removes what this process has written of a snapshot that is not wanted any more: the thread that
/// writes it goes with the process, before it could.
fn remove_partial(dir: &Path) {
    let (Some(above), Some(name)) = (dir.parent(), dir.file_name()) else {
        return;
    };
    let begin = format!(".{}.{}.", name.to_string_lossy(), process::id());
    for entry in fs::read_dir(above).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with(&begin)
            && name.ends_with(".partial")
            && let Err(error) = fs::remove_dir_all(entry.path())
        {
            warn!(%error, path = %entry.path().display(), "half a snapshot stays");
        }
    }
}

/// Says at once what else would be said after the boot.
fn check_place(dir: &Path) -> anyhow::Result<()> {
    anyhow::ensure!(
        dir.symlink_metadata().is_err(),
        "{} exists already; name a new directory",
        dir.display()
    );
    let parent = dir.parent().unwrap_or(Path::new("/"));
    anyhow::ensure!(
        parent.is_dir(),
        "{} is no directory; make it first",
        parent.display()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_a_snapshot_of_this_process_goes_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let own = format!(".s.{}.0.partial", process::id());
        for name in [&own, ".s.1.0.partial", ".t.1.0.partial", "s"] {
            fs::create_dir(dir.path().join(name)).unwrap();
            fs::write(dir.path().join(name).join("memory"), "").unwrap();
        }
        remove_partial(&dir.path().join("s"));
        let entries = fs::read_dir(dir.path()).unwrap().flatten();
        let mut left: Vec<_> = entries.map(|entry| entry.file_name()).collect();
        left.sort();
        assert_eq!(left, [".s.1.0.partial", ".t.1.0.partial", "s"]);
    }
}
