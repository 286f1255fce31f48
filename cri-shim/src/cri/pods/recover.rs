//! Recovery after a restart of the daemon: pods that still run, pods whose machine is gone, and
//! pods that were partly created or removed when the previous daemon was killed.

use std::collections::{BTreeSet, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OwnedMutexGuard;
use tokio::task::JoinSet;
use tracing::{debug, error, info, warn};

use super::kill::{kill_machine, kill_sandbox};
use super::stop::shut_down;
use crate::blocking::in_place;
use crate::cri::backoff::Backoff;
use crate::cri::error::{CriError, Result};
use crate::cri::node::{Container, Node, Pod};
use crate::cri::state::{ContainerPhase, ContainerRecord, PodPhase, PodRecord, Record, StateError};
use crate::cri::volumes;
use crate::machine::causes;
use crate::sandbox::{
    ContainerInfo, ContainerState, SandboxClient, SandboxError, SandboxExit, exit_record,
};
use crate::stall_timeout::timeout;

/// How long a pod's process may take to answer on a node that has just booted.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);

/// How long a single attempt may take.
pub(super) const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(20);

/// How long the node waits for all of its pods before it serves: those that take longer go on.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(20);

impl Node {
    /// Restores pods and containers from the database. Steps that depend on CNI plugins and guests
    /// run in tasks: removing what belongs to no pod, or to a partly created or removed one.
    pub(crate) async fn recover(self: &Arc<Self>) -> Result<()> {
        // Both, before anything is ended: one of another version leaves all pods as they are.
        let pods = self.database.all::<PodRecord>()?;
        let containers = self.database.all::<ContainerRecord>()?;
        let mut unkilled = BTreeSet::new();
        for (id, error) in pods.damaged {
            // It must not run once there is no such pod. The rest is removed with what belongs
            // to no pod.
            match kill_sandbox(&self.dir(&id)).await {
                Ok(()) => self.drop_damaged::<PodRecord>(&id, error),
                Err(fault) => {
                    error!(
                        id,
                        error = causes(&error),
                        fault = causes(&fault),
                        "the machine of a pod whose record is damaged cannot be killed; the next \
                         start retries"
                    );
                    unkilled.insert(id);
                }
            }
        }
        for record in pods.records {
            self.add_pod(&Pod::found(record))?;
        }
        for (id, error) in containers.damaged {
            self.drop_damaged::<ContainerRecord>(&id, error);
        }
        for record in containers.records {
            match self.pod(&record.pod) {
                Ok(pod) => {
                    for name in &record.volumes {
                        pod.mounted.lock().add(name, &record.id);
                    }
                    self.add_container(&Container::new(record, pod))?;
                }
                // The next daemon tries again: a full disk must not prevent the start.
                Err(_) => {
                    if let Err(error) = self.database.remove::<ContainerRecord>(&record.id) {
                        let id = record.id;
                        warn!(container = id, %error, "a container without a pod stays recorded");
                    }
                }
            }
        }
        let mut recovering = JoinSet::new();
        for pod in self.pods() {
            let node = Arc::clone(self);
            // Calls that change the pod wait for the turn.
            let turn = Arc::clone(&pod.turn).lock_owned().await;
            recovering.spawn(async move {
                let _settling = RecoveryGuard(&pod);
                node.recover_pod(&pod, turn).await;
            });
        }
        let all = async { while recovering.join_next().await.is_some() {} };
        if timeout(RECOVERY_TIMEOUT, all).await.is_err() {
            warn!(pods = recovering.len(), "pods are still being recovered");
            recovering.detach_all();
        }
        self.check_networks();
        self.clean(&unkilled);
        Ok(())
    }

    /// Forgets a pod or container of which nothing is known but its id.
    fn drop_damaged<R: Record>(&self, id: &str, damaged: StateError) {
        error!(
            id,
            error = causes(&damaged),
            "removing a pod or container whose record is damaged"
        );
        if let Err(error) = self.database.remove::<R>(id) {
            warn!(id, %error, "failed to remove a damaged record; the next start retries");
        }
    }

    async fn recover_pod(self: &Arc<Self>, pod: &Arc<Pod>, turn: OwnedMutexGuard<()>) {
        let dir = self.dir(&pod.id);
        let connected = reach(|limit| SandboxClient::connect_within(&dir, limit));
        let found = match connected.await {
            Ok(client) => Ok(client),
            Err(error) => Err(end_machine(pod, &dir, error).await),
        };
        match (pod.phase(), found) {
            (PodPhase::Ready, Ok(client)) => {
                match reach(|limit| list_within(&client, limit)).await {
                    Ok(there) => self.take_over(pod, client, there).await,
                    Err(error) => {
                        let exit = end_machine(pod, &dir, error).await;
                        self.note_end(pod, &exit);
                    }
                }
            }
            (PodPhase::Ready, Err(exit)) => self.note_end(pod, &exit),
            (PodPhase::Stopped { .. }, Ok(client)) => {
                pod.set_client(Some(client.clone()));
                let (node, pod) = (Arc::clone(self), Arc::clone(pod));
                tokio::spawn(async move {
                    let _turn = turn;
                    if let Err(error) = shut_down(&client).await {
                        // StopPodSandbox tries again.
                        warn!(
                            pod = pod.id,
                            %error,
                            "failed to shut down the machine of a stopped pod"
                        );
                        return;
                    }
                    pod.set_client(None);
                    if let Err(error) = node.release_volumes(&pod) {
                        warn!(
                            pod = pod.id,
                            %error,
                            "failed to unmount the pod's volumes; will retry"
                        );
                    }
                });
            }
            // The pod's end is recorded before that of its containers.
            (PodPhase::Stopped { .. }, Err(_)) => self.mark_containers_lost(pod),
            (PodPhase::Creating | PodPhase::Removing, found) => {
                info!(pod = pod.id, "cleaning up a partly created or removed pod");
                pod.set_client(found.ok());
                for container in self.containers_of(&pod.id) {
                    if let Err(error) = self.forget_container(&container) {
                        warn!(
                            container = container.id,
                            %error,
                            "failed to delete the container's record"
                        );
                    }
                }
                let (node, pod) = (Arc::clone(self), Arc::clone(pod));
                // Calls that want to use its name wait for the turn.
                tokio::spawn(async move {
                    let _turn = turn;
                    node.undo_pod(&pod).await;
                });
            }
        }
    }

    /// Takes over a running pod, with its sandbox's information on its containers.
    async fn take_over(
        self: &Arc<Self>,
        pod: &Arc<Pod>,
        client: SandboxClient,
        there: Vec<ContainerInfo>,
    ) {
        pod.set_client(Some(client.clone()));
        self.watch_pod(pod, client.clone());
        let (mut half, mut starting) = (Vec::new(), Vec::new());
        for container in self.containers_of(&pod.id) {
            let found = there.iter().find(|info| info.id == container.id);
            match (container.phase(), found) {
                (ContainerPhase::Creating | ContainerPhase::Removing, _) => half.push(container),
                // A start was in progress: the sandbox knows whether it succeeded.
                (ContainerPhase::Created, Some(info)) if info.state != ContainerState::Created => {
                    self.take_over_started(&container, info, client.clone());
                }
                // It does not know that yet.
                (ContainerPhase::Created, Some(info)) if info.is_starting => {
                    let turn = Arc::clone(&container.turn).lock_owned().await;
                    starting.push((container, turn));
                }
                (ContainerPhase::Running { .. }, _) => {
                    self.ask_migration(&container, &client).await;
                    self.watch_container(&container, client.clone());
                }
                (ContainerPhase::Exited(_), Some(_)) => {
                    self.ask_migration(&container, &client).await;
                    self.watch_migrations(&container, client.clone());
                }
                (ContainerPhase::Created | ContainerPhase::Exited(_), _) => {}
            }
        }
        // An older daemon may have left out something.
        self.set_importance(pod);
        self.watch_pressure(pod);
        let released = self
            .shared_directory(pod, &client)
            .and_then(|shared| in_place(|| volumes::release_strangers(&shared, &pod.mounted)));
        if let Err(error) = released {
            warn!(pod = pod.id, %error, "failed to unmount unused volumes; will retry");
        }
        info!(pod = pod.id, "recovered the running pod sandbox");
        // The following steps may take long in the guest, and no caller waits for them.
        pod.set_settled();
        for (container, turn) in starting {
            self.await_start(container, turn, client.clone());
        }
        for container in half {
            if let Err(error) = self.remove_container_now(&container).await {
                let id = &container.id;
                warn!(
                    container = id,
                    %error,
                    "failed to remove a partly created or removed container; will retry"
                );
            }
        }
        for info in there {
            if self.container(&info.id).is_err()
                && let Err(error) = client.delete_container(&info.id).await
            {
                warn!(
                    container = info.id,
                    %error,
                    "failed to delete an unknown container in the guest"
                );
            }
        }
    }

    /// Has the plugins check the networks of running pods, one after the other; only for the log.
    fn check_networks(self: &Arc<Self>) {
        let mut pods = self.pods();
        pods.retain(|pod| pod.phase() == PodPhase::Ready);
        let node = Arc::clone(self);
        tokio::spawn(async move {
            for pod in pods {
                let _network = pod.network.lock().await;
                // A stopped pod has no network any more.
                if pod.phase() != PodPhase::Ready {
                    continue;
                }
                let checked = node.cni.check(&pod.id, pod.is_to_end()).await;
                if let Err(error) = checked
                    && pod.phase() == PodPhase::Ready
                    && !pod.is_ending()
                {
                    warn!(pod = pod.id, %error, "CNI CHECK failed for the pod's network");
                }
            }
        });
    }

    /// Removes networks and directories that belong to no pod, except those of `unkilled`, whose
    /// machines may still run.
    fn clean(self: &Arc<Self>, unkilled: &BTreeSet<String>) {
        // What they use is in use, too, as long as machines of no pod are not known.
        let Some(mut dirs) = listed("sandboxes", self.dirs()) else {
            return;
        };
        let pods = self.pods().into_iter().map(|pod| self.dir(&pod.id));
        let unkilled_dirs = unkilled.iter().map(|id| self.dir(id));
        let known: HashSet<_> = pods.chain(unkilled_dirs).collect();
        dirs.retain(|dir| !known.contains(dir));
        let is_of_no_pod = |id: &String| self.pod(id).is_err() && !unkilled.contains(id);
        let networks = self.cni.known().map_err(CriError::from);
        let mut networks = listed("networks", networks).unwrap_or_default();
        networks.retain(is_of_no_pod);
        let with_volumes = listed("volumes of images", self.pods_with_image_volumes());
        let mut with_volumes = with_volumes.unwrap_or_default();
        with_volumes.retain(is_of_no_pod);
        let node = Arc::clone(self);
        // Pods that are created meanwhile have other ids.
        tokio::spawn(async move {
            for dir in dirs {
                info!(dir = %dir.display(), "removing a sandbox that no pod has");
                if let Err(error) = remove_sandbox(&dir).await {
                    warn!(
                        dir = %dir.display(),
                        %error,
                        "failed to remove the sandbox; the next start retries"
                    );
                }
            }
            for id in with_volumes {
                info!(pod = id, "removing volumes of images that no pod has");
                if let Err(error) = node.remove_all_image_volumes(&id).await {
                    warn!(pod = id, %error, "failed to remove the volumes; the next start retries");
                }
            }
            for id in networks {
                info!(pod = id, "removing a network that no pod has");
                if let Err(error) = node.cni.detach(&id).await {
                    warn!(pod = id, %error, "failed to remove the network; the next start retries");
                }
            }
        });
    }
}

/// Returns what was found to clean up; `None` if it cannot be read, which must not prevent the
/// start.
fn listed<T>(what: &'static str, found: Result<Vec<T>>) -> Option<Vec<T>> {
    found
        .inspect_err(|error| {
            error!(
                what,
                error = causes(error),
                "failed to look for what belongs to no pod; the next start retries"
            );
        })
        .ok()
}

/// A pod that is being recovered. When this is dropped, callers do not wait for it any more.
struct RecoveryGuard<'a>(&'a Pod);

impl Drop for RecoveryGuard<'_> {
    fn drop(&mut self) {
        self.0.set_settled();
    }
}

/// Retries until there is an answer, the other side is gone, or the timeout has expired: a process
/// may not answer because the node is short of descriptors, or busy, as it is when all pods are
/// recovered. Errors of this host do not count.
async fn reach<T, F>(mut ask: impl FnMut(Duration) -> F) -> Result<T, SandboxError>
where
    F: Future<Output = Result<T, SandboxError>>,
{
    let mut backoff = Backoff::default();
    let mut waited = Duration::ZERO;
    loop {
        let error = match ask(ATTEMPT_TIMEOUT).await {
            Ok(answer) => return Ok(answer),
            Err(error) => error,
        };
        if matches!(error, SandboxError::Unresponsive { .. }) {
            waited += ATTEMPT_TIMEOUT;
        }
        // These answers are final.
        let is_final = error.is_gone() || matches!(error, SandboxError::Version { .. });
        if is_final || waited >= RESPONSE_TIMEOUT {
            return Err(error);
        }
        debug!(%error, "retrying to connect to the sandbox");
        waited += backoff.wait().await;
    }
}

pub(super) async fn list_within(
    client: &SandboxClient,
    limit: Duration,
) -> Result<Vec<ContainerInfo>, SandboxError> {
    match timeout(limit, client.list()).await {
        Ok(listed) => listed,
        Err(_) => Err(SandboxError::Unresponsive {
            dir: client.dir().to_owned(),
            pid: Some(client.pid()),
            waited: limit,
        }),
    }
}

/// Makes sure that a machine that cannot be reached is gone, and returns how it ended: it cannot be
/// a pod any more, and must not run when it is reported as ended.
async fn end_machine(pod: &Pod, dir: &Path, error: SandboxError) -> SandboxExit {
    let recorded = match error {
        // What a process has recorded is no proof that it is gone: a guest may have taken it over.
        SandboxError::Gone {
            exit: Some(exit), ..
        } => Some(exit),
        // No process listens, or the connection was lost: see below.
        SandboxError::Gone { exit: None, .. } => {
            info!(pod = pod.id, %error, "no sandbox process");
            None
        }
        error => {
            warn!(pod = pod.id, %error, "the pod's machine is killed");
            None
        }
    };
    let mut backoff = Backoff::default();
    while let Err(error) = kill_machine(pod, dir, recorded.is_some()).await {
        warn!(pod = pod.id, %error, "the pod's machine cannot be killed yet");
        // Until then the pod keeps its state, and callers do not wait for it.
        pod.set_settled();
        backoff.wait().await;
    }
    let recorded = recorded.or_else(|| exit_record(dir).map(|record| record.exit));
    recorded.unwrap_or(SandboxExit::Died)
}

async fn remove_sandbox(dir: &Path) -> Result<()> {
    if let Ok(client) = SandboxClient::connect_within(dir, RESPONSE_TIMEOUT).await {
        shut_down(&client).await?;
    }
    kill_sandbox(dir).await?;
    volumes::remove_dir(dir).await
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io;
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    use super::*;
    use crate::cri::node::TestNode;

    /// Makes what there is of a pod: its directory, network and volumes of images.
    fn make_parts(node: &Node, id: &str) -> [PathBuf; 3] {
        let netns = node.config.cni.netns_dir.join(id);
        let volumes = node.config.root.join("volumes").join(id);
        let dir = node.dir(id);
        fs::create_dir_all(netns.parent().unwrap()).unwrap();
        fs::write(&netns, "").unwrap();
        fs::create_dir_all(volumes.join("container")).unwrap();
        fs::create_dir(&dir).unwrap();
        [dir, netns, volumes]
    }

    async fn until(is_done: impl Fn() -> bool) {
        let wait = async {
            while !is_done() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), wait)
            .await
            .unwrap();
    }

    #[tokio::test]
    async fn a_damaged_pod_that_cannot_be_killed_stays_for_the_next_start() {
        let node = TestNode::new();
        let id = "damaged".to_owned();
        node.database.put_bytes::<PodRecord>(&id, b"{");
        let damaged = make_parts(&node, &id);
        let stray = make_parts(&node, "stray");
        // As where this process is short of descriptors: nobody knows whether one listens.
        let socket = node.dir(&id).join("control.sock");
        symlink("control.sock", &socket).unwrap();
        SandboxClient::kill(&node.dir(&id)).await.unwrap_err();
        let recorded = || node.database.all::<PodRecord>().unwrap().damaged.len();

        node.recover().await.unwrap();
        until(|| stray.iter().all(|part| !part.exists())).await;
        assert!(damaged.iter().all(|part| part.exists()));
        assert_eq!(recorded(), 1);

        fs::remove_file(socket).unwrap();
        node.recover().await.unwrap();
        until(|| damaged.iter().all(|part| !part.exists())).await;
        assert_eq!(recorded(), 0);
    }

    #[tokio::test]
    async fn the_pod_of_another_version_is_left_to_it() {
        let node = TestNode::new();
        let bytes = br#"{"version": 1, "id": "pod"}"#;
        node.database.put_bytes::<PodRecord>("pod", bytes);
        let [dir, netns, volumes] = make_parts(&node, "pod");
        let error = causes(&node.recover().await.unwrap_err());
        assert!(error.contains("another version wrote it"), "{error}");
        assert!(dir.exists() && netns.exists() && volumes.exists());
    }

    #[tokio::test]
    async fn a_directory_that_cannot_be_read_keeps_no_daemon_from_starting() {
        let node = TestNode::new();
        let [dir, netns, volumes] = make_parts(&node, "stray");
        let all = volumes.parent().unwrap();
        fs::remove_dir_all(all).unwrap();
        fs::write(all, "").unwrap();
        node.pods_with_image_volumes().unwrap_err();
        node.recover().await.unwrap();
        until(|| !dir.exists() && !netns.exists()).await;
    }

    fn short_of_descriptors() -> SandboxError {
        SandboxError::File {
            action: "connect to",
            path: "/x".into(),
            source: io::Error::from_raw_os_error(libc::EMFILE),
        }
    }

    fn silent() -> SandboxError {
        SandboxError::Unresponsive {
            dir: "/x".into(),
            pid: None,
            waited: ATTEMPT_TIMEOUT,
        }
    }

    fn gone() -> SandboxError {
        SandboxError::Gone {
            dir: "/x".into(),
            exit: None,
        }
    }

    /// Gives these answers one after the other, and returns how many were asked for.
    async fn ask(answers: Vec<Result<u8, SandboxError>>) -> (Result<u8, SandboxError>, usize) {
        let all = answers.len();
        let mut answers = answers.into_iter();
        let answer = reach(|_| {
            let answer = answers.next().unwrap_or_else(|| Err(silent()));
            async move {
                if matches!(answer, Err(SandboxError::Unresponsive { .. })) {
                    tokio::time::sleep(ATTEMPT_TIMEOUT).await;
                }
                answer
            }
        });
        let answer = answer.await;
        (answer, all - answers.len())
    }

    #[tokio::test(start_paused = true)]
    async fn a_sandbox_that_does_not_answer_at_once_is_asked_again() {
        let answers = vec![Err(short_of_descriptors()), Err(silent()), Ok(7)];
        let (answer, asked) = ask(answers).await;
        assert_eq!((answer.unwrap(), asked), (7, 3));
    }

    #[tokio::test(start_paused = true)]
    async fn a_sandbox_that_is_gone_is_not_asked_again() {
        let (answer, asked) = ask(vec![Err(gone()), Ok(7)]).await;
        assert!(answer.unwrap_err().is_gone());
        assert_eq!(asked, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_sandbox_that_never_answers_is_not_asked_for_ever_and_not_taken_for_gone() {
        for answer in [silent, short_of_descriptors] {
            let answers = (0..1000).map(|_| Err(answer())).collect();
            let (answer, asked) = ask(answers).await;
            assert!(!answer.unwrap_err().is_gone());
            assert!((3..1000).contains(&asked), "{asked}");
        }
    }
}
