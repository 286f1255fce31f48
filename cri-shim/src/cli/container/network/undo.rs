//! What CNI's plugins have created for a container: whether it is there, and its removal.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use rustix::fs::{FlockOperation, flock};

use crate::cli::container::network_mode::NetworkMode;
use crate::cli::container::record::{cni_records as records, is_attached};
use crate::cli::container::{Entry, Record, passt};
use crate::cli::settings::CniSettings;
use crate::cni::{Cni, CniError, CniOptions, Endpoint};

/// Parent of the directory of network namespaces, where `ip netns` looks for them.
pub(super) const RUN: &str = "/run";

/// Returns CNI's directories: those of the daemon, except the record, which is for this container
/// only.
pub(super) fn options(dir: &Path, settings: CniSettings) -> CniOptions {
    let mut options = CniOptions::new(dir, Path::new(RUN));
    options.cache_dir = records(dir);
    options.config_dir = settings.config_dir.unwrap_or(options.config_dir);
    options.plugin_dirs = settings.plugin_dirs.unwrap_or(options.plugin_dirs);
    options
}

/// Removes a container's network, even if it is incomplete. To be repeated until it succeeds; it is
/// not an error if there is none.
pub(in crate::cli) async fn detach(dir: &Path, record: &Record) -> anyhow::Result<()> {
    let records = records(dir);
    let Ok(lock) = File::open(&records) else {
        return Ok(());
    };
    let undone = async {
        // Of two processes that detect the machine's end, the second finds nothing.
        let wait = move || flock(&lock, FlockOperation::LockExclusive).map(|()| lock);
        let _lock = tokio::task::spawn_blocking(wait).await??;
        if !records.exists() {
            return Ok(());
        }
        let options = options(dir, CniSettings::read()?);
        Cni::open(options)?.detach(&record.id).await?;
        fs::remove_dir_all(&records)?;
        anyhow::Ok(())
    };
    undone.await.with_context(|| {
        let name = &record.name;
        format!("cannot take down the network of container {name}; the next command tries again")
    })
}

/// Returns the network configuration of a running container; `None` once the network is removed.
pub(in crate::cli) fn endpoint(entry: &Entry) -> Option<Endpoint> {
    let by_cni = || -> Result<_, CniError> {
        let options = CniOptions::new(&entry.dir, Path::new(RUN));
        Cni::open(options)?.endpoint(&entry.record.id)
    };
    match entry.record.network {
        NetworkMode::None => None,
        NetworkMode::User => Some(passt::endpoint()),
        // It is just being created or removed.
        _ if is_attached(&entry.dir) => by_cni().ok().flatten(),
        _ => None,
    }
}

/// Returns a container's network namespace.
pub(in crate::cli) fn netns(entry: &Entry) -> Option<PathBuf> {
    let options = CniOptions::new(&entry.dir, Path::new(RUN));
    let netns = options.netns_dir.join(&entry.record.id);
    is_attached(&entry.dir).then_some(netns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_was_never_made_is_taken_away_at_once() {
        let dir = tempfile::tempdir().unwrap();
        detach(dir.path(), &crate::cli::container::record::sample("a", "x"))
            .await
            .unwrap();
        assert!(!is_attached(dir.path()));
    }
}
