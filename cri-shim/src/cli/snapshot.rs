//! `podvisor snapshot`: boots a machine and snapshots it, for `podvisor run --from-snapshot`.

use std::path::{Path, PathBuf};
use std::process;

use anyhow::Context as _;
use clap::Args;

use super::guest::GuestArgs;
use super::signals::{Signals, exit_code_of};
use crate::machine::{NicKind, Snapshot, Transport};
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
    guest.check_whole_cpus()?;
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
        // Its cost is at boot, which clones do not have.
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
                // The thread that writes it ends with the process before it could remove it.
                Snapshot::remove_partial(&dir, Some(process::id()));
                Ok(exit_code_of(signal))
            }
        }
    });
    runtime.shutdown_background();
    code
}

/// Reports errors that would otherwise only appear after the boot.
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
