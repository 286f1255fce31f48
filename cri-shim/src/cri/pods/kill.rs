//! Kills the machines of a previous daemon: by their sockets, and by their control groups.

use std::path::Path;
use std::time::Duration;

use tracing::warn;

use crate::blocking::in_place;
use crate::cri::error::{CriError, Result};
use crate::cri::limits::cgroup;
use crate::cri::node::Pod;
use crate::sandbox::{DEFAULT_CGROUP_PARENT, SandboxClient, end_group, end_group_of};

/// How long what runs in a machine's control group may take to end when it is killed.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// Kills a machine by its socket and, as that may be missing, by its control group: its directory
/// may have been removed, or be that of another `state`. `is_recorded`: its process has recorded
/// its end.
pub(super) async fn kill_machine(pod: &Pod, dir: &Path, is_recorded: bool) -> Result<()> {
    SandboxClient::kill(dir).await?;
    let of_kubelet = pod.with_record(|record| cgroup::of_pod(&record.config));
    for parent in of_kubelet
        .as_deref()
        .into_iter()
        .chain([Path::new(DEFAULT_CGROUP_PARENT)])
    {
        let ended = in_place(|| end_group(parent, &pod.id, KILL_TIMEOUT));
        let has_run = ended.map_err(CriError::io("end the pod's machine in", parent))?;
        if has_run && is_recorded {
            warn!(
                pod = pod.id,
                "the pod's process had recorded the machine's end, still ran and was killed"
            );
        } else if has_run {
            warn!(
                pod = pod.id,
                "the pod's machine ran without its socket and was killed; change `state` only when \
                 no pod runs"
            );
        }
    }
    Ok(())
}

/// As [`kill_machine`], for a sandbox of which only its directory is known.
pub(super) async fn kill_sandbox(dir: &Path) -> Result<()> {
    SandboxClient::kill(dir).await?;
    let ended = in_place(|| end_group_of(dir, KILL_TIMEOUT));
    if ended.map_err(CriError::io("end the machine of", dir))? {
        warn!(dir = %dir.display(), "a machine ran without its socket and was killed");
    }
    Ok(())
}
