//! Live migrations: a VM leaves this node, or comes to it. The pod's process does all of it; the
//! daemon carries the bytes between it and its client, who carries them to the other node.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::sync::Arc;
use std::time::Duration;

use podvisor_node_api::AnswerStream;
use podvisor_node_api::messages::{
    CancelMigrationRequest, Data, MigrationDirection, MigrationState, ReceiveMigrationInput,
    ReceiveMigrationMessage, ResolveMigrationRequest, SendMigrationInput, SendMigrationMessage,
    SendMigrationOpen, VmExit, VmMigration, VmName,
};
use tokio::net::UnixStream;
use tokio::time::timeout;
use tonic::{Status, Streaming};
use tracing::{debug, info};

use super::control::status;
use super::pipe::{bytes_of, joined};
use super::{first, not_open};
use crate::cri::node::{Container, Node};
use crate::cri::state::ContainerExit;
use crate::sandbox::{self, MigrationInfo, SandboxClient, SendMachine};

/// How long a sandbox may take to say how far its machine has moved.
const ASK_TIMEOUT: Duration = Duration::from_secs(5);

/// Answers a client that sends a VM to another node.
pub(super) async fn send(
    node: &Arc<Node>,
    mut input: Streaming<SendMigrationInput>,
) -> Result<AnswerStream<Data>, Status> {
    let Some(SendMigrationMessage::Open(open)) = first(&mut input).await?.message else {
        return Err(not_open());
    };
    let vm = named(open.vm.clone())?;
    let (pod, container) = node.running_vm(&vm).await?;
    let (ours, theirs) = connection()?;
    let client = pod.client()?;
    let sent = client.send_machine(&container.id, options(open), theirs);
    sent.await.map_err(status)?;
    info!(pod = pod.id, "the machine is sent to another node");
    let input = bytes_of(input, |input: SendMigrationInput| match input.message {
        Some(SendMigrationMessage::Data(data)) => Some(data),
        _ => None,
    });
    Ok(joined(ours, input))
}

/// Answers a client that brings a VM from another node.
pub(super) async fn receive(
    node: &Arc<Node>,
    mut input: Streaming<ReceiveMigrationInput>,
) -> Result<AnswerStream<Data>, Status> {
    let Some(ReceiveMigrationMessage::Open(open)) = first(&mut input).await?.message else {
        return Err(not_open());
    };
    let (pod, container) = node.running_vm(&named(open.vm)?).await?;
    let (ours, theirs) = connection()?;
    let client = pod.client()?;
    let received = client.receive_machine(&container.id, &open.migration, theirs);
    received.await.map_err(status)?;
    info!(pod = pod.id, "the machine comes from another node");
    let input = bytes_of(input, |input: ReceiveMigrationInput| match input.message {
        Some(ReceiveMigrationMessage::Data(data)) => Some(data),
        _ => None,
    });
    Ok(joined(ours, input))
}

impl Node {
    /// Ends a migration that was not given away.
    pub(super) async fn cancel_migration(
        &self,
        request: CancelMigrationRequest,
    ) -> Result<(), Status> {
        let (pod, container) = self.running_vm(&named(request.vm)?).await?;
        let client = pod.client()?;
        let cancelled = client.cancel_migration(&container.id, &request.migration);
        cancelled.await.map_err(status)
    }

    /// Decides about a VM that was given away, and whose other side is silent.
    pub(super) async fn resolve_migration(
        &self,
        request: ResolveMigrationRequest,
    ) -> Result<(), Status> {
        let (pod, container) = self.running_vm(&named(request.vm)?).await?;
        let client = pod.client()?;
        let (id, migration, run) = (&container.id, &request.migration, request.run);
        let resolved = client.resolve_migration(id, migration, run).await;
        resolved.map_err(status)?;
        info!(pod = pod.id, run, "a migration in doubt is resolved");
        Ok(())
    }

    /// Asks how far a machine has moved that an earlier daemon knew.
    pub(in crate::cri) async fn ask_migration(
        &self,
        container: &Container,
        client: &SandboxClient,
    ) {
        if container.with_record(|record| record.vm.is_none()) {
            return;
        }
        match timeout(ASK_TIMEOUT, client.migration(&container.id)).await {
            Ok(Ok(Some(info))) => self.vms.note_migration(&container.id, info),
            Ok(Ok(None)) => {}
            Ok(Err(error)) => debug!(container = container.id, %error, "no news of migrations"),
            Err(_) => debug!(container = container.id, "no answer about migrations"),
        }
    }

    /// Notes each change of a machine's migrations, until its process has ended.
    pub(in crate::cri) fn watch_migrations(
        self: &Arc<Self>,
        container: &Arc<Container>,
        client: SandboxClient,
    ) {
        if !container.with_record(|record| record.vm.is_some()) {
            return;
        }
        let (node, container) = (Arc::clone(self), Arc::clone(container));
        tokio::spawn(async move {
            let mut seen = 0;
            loop {
                match client.migration_after(&container.id, seen).await {
                    Ok(info) => {
                        seen = info.version;
                        node.vms.note_migration(&container.id, info);
                        node.vms.changed();
                    }
                    Err(error) => {
                        debug!(container = container.id, %error, "no more news of migrations");
                        return;
                    }
                }
            }
        });
    }
}

fn named(vm: Option<VmName>) -> Result<VmName, Status> {
    vm.ok_or_else(|| Status::invalid_argument("vm: the request names no virtual machine"))
}

/// Reads the options of a request: 0 means the default.
fn options(open: SendMigrationOpen) -> SendMachine {
    let mut send = SendMachine::new(open.migration);
    if open.downtime_ms > 0 {
        send.downtime = Duration::from_millis(open.downtime_ms.into());
    }
    if open.max_rounds > 0 {
        send.max_rounds = open.max_rounds;
    }
    send.force = open.force;
    send.throttle = open.auto_converge;
    send.bandwidth = Some(open.bandwidth_bytes_per_second).filter(|bytes| *bytes > 0);
    if open.progress_timeout_s > 0 {
        send.progress_timeout = Duration::from_secs(open.progress_timeout_s.into());
    }
    let limit = Some(open.completion_timeout_s).filter(|seconds| *seconds > 0);
    send.completion_timeout = limit.map(|seconds| Duration::from_secs(seconds.into()));
    send
}

/// Makes a stream: the daemon's end, and that of a pod's process.
fn connection() -> Result<(UnixStream, OwnedFd), Status> {
    let made = StdUnixStream::pair().and_then(|(ours, theirs)| {
        ours.set_nonblocking(true)?;
        Ok((UnixStream::from_std(ours)?, OwnedFd::from(theirs)))
    });
    made.map_err(|error| Status::internal(format!("failed to make a stream: {error}")))
}

/// What is reported of a migration that was not over when its process ended: the last that was
/// heard of it may not be the last that happened.
const UNTOLD: &str = "the pod's process has ended without saying what became of it";

/// A migration as it is reported; `exit` is how its machine ended, if it did.
pub(super) fn shown(info: &MigrationInfo, exit: Option<&VmExit>) -> VmMigration {
    let mut shown = as_told(info);
    if let Some(exit) = exit.filter(|_| !info.state.is_final()) {
        let has_left = info.direction == sandbox::MigrationDirection::Out;
        if has_left && exit.reason == ContainerExit::MOVED {
            shown.state = MigrationState::Done.into();
        } else {
            shown.state = MigrationState::Unknown.into();
            UNTOLD.clone_into(&mut shown.reason);
        }
    }
    shown
}

fn as_told(info: &MigrationInfo) -> VmMigration {
    let direction = match info.direction {
        sandbox::MigrationDirection::Out => MigrationDirection::Out,
        sandbox::MigrationDirection::In => MigrationDirection::In,
        _ => MigrationDirection::Unknown,
    };
    let time = |nanos: u64| i64::try_from(nanos).unwrap_or(i64::MAX);
    VmMigration {
        migration: info.migration.clone(),
        direction: direction.into(),
        state: state(info.state).into(),
        reason: info.reason.clone(),
        bytes_total: info.bytes_total,
        bytes_left: info.bytes_left,
        round: info.round,
        downtime_ns: info.downtime_ns,
        started_at_ns: time(info.started_at_ns),
        ended_at_ns: time(info.ended_at_ns),
    }
}

fn state(state: sandbox::MigrationState) -> MigrationState {
    match state {
        sandbox::MigrationState::Waiting => MigrationState::Waiting,
        sandbox::MigrationState::Sending => MigrationState::Sending,
        sandbox::MigrationState::Receiving => MigrationState::Receiving,
        sandbox::MigrationState::HandingOver => MigrationState::HandingOver,
        sandbox::MigrationState::InDoubt => MigrationState::InDoubt,
        sandbox::MigrationState::Done => MigrationState::Done,
        sandbox::MigrationState::Failed => MigrationState::Failed,
        sandbox::MigrationState::Cancelled => MigrationState::Cancelled,
        _ => MigrationState::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_was_killed_does_not_say_what_became_of_its_migration() {
        let info = |direction, state| MigrationInfo {
            version: 1,
            migration: "m".to_owned(),
            direction,
            state,
            reason: String::new(),
            bytes_total: 0,
            bytes_left: 0,
            round: 0,
            downtime_ns: 0,
            started_at_ns: 1,
            ended_at_ns: 0,
        };
        let exit = |reason: &str| VmExit {
            reason: reason.to_owned(),
            ..VmExit::default()
        };
        let (out, into) = (
            sandbox::MigrationDirection::Out,
            sandbox::MigrationDirection::In,
        );
        let sending = info(out, sandbox::MigrationState::Sending);
        assert_eq!(shown(&sending, None).state(), MigrationState::Sending);
        let killed = shown(&sending, Some(&exit("SandboxGone")));
        assert_eq!(killed.state(), MigrationState::Unknown);
        assert!(!killed.reason.is_empty());
        // Its exit was heard of first.
        assert_eq!(
            shown(&sending, Some(&exit(ContainerExit::MOVED))).state(),
            MigrationState::Done
        );
        let here = info(into, sandbox::MigrationState::HandingOver);
        let killed = shown(&here, Some(&exit("SandboxGone")));
        assert_eq!(killed.state(), MigrationState::Unknown);
        let done = info(into, sandbox::MigrationState::Done);
        let ended = shown(&done, Some(&exit("Completed")));
        assert_eq!(ended.state(), MigrationState::Done);
    }

    #[test]
    fn what_a_client_leaves_out_is_the_nodes_own() {
        let open = |change: fn(&mut SendMigrationOpen)| {
            let mut open = SendMigrationOpen {
                migration: "m".to_owned(),
                ..SendMigrationOpen::default()
            };
            change(&mut open);
            options(open)
        };
        assert_eq!(open(|_| ()), SendMachine::new("m"));
        let all = open(|open| {
            open.downtime_ms = 900;
            open.max_rounds = 7;
            open.force = true;
            open.auto_converge = true;
            open.bandwidth_bytes_per_second = 1 << 20;
            open.progress_timeout_s = 150;
            open.completion_timeout_s = 3600;
        });
        let wanted = SendMachine {
            migration: "m".to_owned(),
            downtime: Duration::from_millis(900),
            max_rounds: 7,
            force: true,
            throttle: true,
            bandwidth: Some(1 << 20),
            progress_timeout: Duration::from_secs(150),
            completion_timeout: Some(Duration::from_secs(3600)),
        };
        assert_eq!(all, wanted);
    }
}
