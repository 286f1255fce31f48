//! Checks the health of a container while its process runs, by programs that run in it.
//!
//! The checks are those of the sandbox's process, so that they go on whatever becomes of the
//! command that has started the container.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::time::{Instant, sleep, timeout};
use tracing::{debug, info};

use super::super::agent::{Agent, AgentExec, now_ns};
use super::super::events::{Event, EventAction};
use super::super::stdio::{StreamSet, Streams};
use super::super::types::{
    ContainerState, Health, HealthCheck, HealthResult, HealthStatus, SupplementalGroups,
};
use super::container::Container;
use crate::machine::causes;

/// Bytes of a check's output that are kept.
const OUTPUT_MAX: usize = 4096;

/// How long output may still come after the check's end: what it left running may keep it open.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// How often it is looked whether a container that does not run runs again.
const IDLE: Duration = Duration::from_secs(1);

/// Checks a container until it has ended; not while the guest is paused.
pub(super) async fn watch(
    agent: Agent,
    is_paused: impl Fn() -> bool,
    container: Arc<Container>,
    check: HealthCheck,
) {
    let Ok(mut exit) = container.exit(None) else {
        return;
    };
    tokio::select! {
        // Fails if it is deleted.
        _ = exit.wait_for(Option::is_some) => {}
        () = check_for_ever(&agent, is_paused, &container, &check) => {}
    }
}

async fn check_for_ever(
    agent: &Agent,
    is_paused: impl Fn() -> bool,
    container: &Arc<Container>,
    check: &HealthCheck,
) {
    // The process that is checked, by its start.
    let mut checked = None;
    let mut begun = Instant::now();
    let mut number = 0_u64;
    loop {
        let info = container.info();
        let runs = info.state == ContainerState::Running && !is_paused();
        if !runs {
            sleep(IDLE).await;
            continue;
        }
        if checked != Some(info.started_at_ns) {
            checked = Some(info.started_at_ns);
            begun = Instant::now();
            container.set_health(Health::default());
        }
        let health = container.info().health.unwrap_or_default();
        let is_starting = |at: Instant| at.duration_since(begun) < check.start_period;
        let is_new = is_starting(Instant::now()) && health.status == HealthStatus::Starting;
        sleep(match is_new {
            true => check.start_interval.min(check.interval),
            false => check.interval,
        })
        .await;
        let is_same = || {
            let info = container.info();
            info.state == ContainerState::Running && Some(info.started_at_ns) == checked
        };
        if !is_same() || is_paused() {
            continue;
        }
        number += 1;
        let at = Instant::now();
        let result = run(container, agent, check, format!("health-{number}")).await;
        // A check of a process that has ended meanwhile says nothing about the next one.
        if is_same() && !is_paused() {
            note(container, result, check, is_starting(at));
        }
    }
}

/// Notes a result, and tells a change of the status.
fn note(container: &Container, result: HealthResult, check: &HealthCheck, is_starting: bool) {
    let mut health = container.info().health.unwrap_or_default();
    let before = health.status;
    health.add(result, check.retries, is_starting);
    let now = health.status;
    container.set_health(health);
    if now != before {
        info!(
            container = container.id,
            health = now.word(),
            "the container's health"
        );
        let event = Event::now(&container.id, EventAction::HealthStatus);
        container.note(event.with("health_status", now.word()));
    }
}

/// Runs one check.
async fn run(
    container: &Arc<Container>,
    agent: &Agent,
    check: &HealthCheck,
    exec_id: String,
) -> HealthResult {
    let started_at_ns = now_ns();
    let mut output = Vec::new();
    let ran = ran(container, agent, check, &exec_id, &mut output);
    let ended = timeout(check.timeout, ran).await;
    let (exit_code, output) = match ended {
        Ok(Ok(code)) => (code, String::from_utf8_lossy(&output).into_owned()),
        Ok(Err(why)) => (-1, why),
        Err(_) => {
            container.kill_exec(exec_id, agent);
            let limit = check.timeout.as_secs_f64();
            (-1, format!("the health check took longer than {limit} s"))
        }
    };
    HealthResult {
        started_at_ns,
        ended_at_ns: now_ns(),
        exit_code,
        output,
    }
}

/// Runs a check's program to its end, and returns its exit code.
async fn ran(
    container: &Arc<Container>,
    agent: &Agent,
    check: &HealthCheck,
    exec_id: &str,
    output: &mut Vec<u8>,
) -> Result<i32, String> {
    let set = StreamSet {
        stdin: false,
        stdout: true,
        stderr: true,
    };
    let streams = Streams::new(set, None).map_err(|error| causes(&error))?;
    let exec = AgentExec {
        id: container.id.clone(),
        exec_id: exec_id.to_owned(),
        process: check.process.clone(),
        user: check.user.clone(),
        supplemental_groups: SupplementalGroups::Default,
        stdio: streams.request(),
    };
    agent.exec(exec).await.map_err(|error| causes(&error))?;
    let opened = streams.open_outputs(agent.mux()).await;
    let [stdout, stderr] = opened.map_err(|error| {
        container.kill_exec(exec_id.to_owned(), agent);
        causes(&error)
    })?;
    let exit = {
        let mut waited = pin!(agent.wait(&container.id, exec_id));
        let mut reading = pin!(read(stdout, stderr, output));
        let (exit, is_read) = tokio::select! {
            exit = waited.as_mut() => (exit, false),
            () = reading.as_mut() => (waited.await, true),
        };
        if !is_read && timeout(DRAIN_TIMEOUT, reading).await.is_err() {
            debug!(
                exec_id,
                "what a health check has left keeps its output open"
            );
        }
        exit
    };
    exit.map(|exit| exit.status.shell_code().into())
        .map_err(|error| causes(&error))
}

/// Reads both outputs to their ends, and keeps the beginning of what comes.
async fn read(
    mut stdout: impl AsyncRead + Unpin,
    mut stderr: impl AsyncRead + Unpin,
    kept: &mut Vec<u8>,
) {
    let (mut out, mut err) = ([0; 1024], [0; 1024]);
    let (mut has_out, mut has_err) = (true, true);
    while has_out || has_err {
        let (count, bytes) = tokio::select! {
            count = stdout.read(&mut out), if has_out => {
                let count = count.unwrap_or(0);
                has_out = count > 0;
                (count, &out)
            }
            count = stderr.read(&mut err), if has_err => {
                let count = count.unwrap_or(0);
                has_err = count > 0;
                (count, &err)
            }
        };
        let room = OUTPUT_MAX.saturating_sub(kept.len()).min(count);
        kept.extend_from_slice(bytes.get(..room).unwrap_or_default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_the_beginning_of_a_checks_output_is_kept() {
        let long = vec![b'x'; 3 * OUTPUT_MAX];
        let mut kept = Vec::new();
        read(&b"error"[..], &long[..], &mut kept).await;
        assert_eq!(kept.len(), OUTPUT_MAX);
        let mut kept = Vec::new();
        read(&b"a"[..], &b""[..], &mut kept).await;
        assert_eq!(kept, b"a");
    }
}
