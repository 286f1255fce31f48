//! What a request does to a VM, or why it does not.

use std::collections::BTreeMap;

use podvisor_cluster_types::vm::{RunStrategy, StateChangeRequest, VmSpec, VmStatus};

use super::RequestOptions;
use crate::status::Failure;

/// What is asked of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verb {
    Start,
    Stop,
    Restart,
    Migrate,
}

impl Verb {
    pub(super) fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "start" => Self::Start,
            "stop" => Self::Stop,
            "restart" => Self::Restart,
            "migrate" => Self::Migrate,
            _ => return None,
        })
    }
}

/// A VM, and its VMI by unique id and phase.
pub(super) struct Machine<'a> {
    pub(super) spec: &'a VmSpec,
    pub(super) status: &'a VmStatus,
    pub(super) vmi: Option<(String, String)>,
}

/// One step of a request.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Change {
    /// Sets the run strategy.
    Strategy(RunStrategy),
    /// Sets the older field of the same meaning, where the VM uses that.
    Running(bool),
    /// Asks the controller.
    Requests(Vec<StateChangeRequest>),
    /// Shortens the grace period of the running VMI.
    GracePeriod(i64),
    /// Kills the pods of this VMI.
    KillPods(String),
    /// Creates a migration.
    Migrate,
}

impl Machine<'_> {
    fn strategy(&self) -> RunStrategy {
        self.spec.strategy().unwrap_or(RunStrategy::Halted)
    }

    fn set(&self, strategy: RunStrategy) -> Change {
        if self.spec.running.is_some() {
            Change::Running(strategy == RunStrategy::Always)
        } else {
            Change::Strategy(strategy)
        }
    }

    /// The VMI's unique id, if it is not final.
    fn running(&self) -> Option<&str> {
        let (uid, phase) = self.vmi.as_ref()?;
        (!is_final(phase)).then_some(uid.as_str())
    }

    fn has_condition(&self, kind: &str) -> bool {
        self.status
            .conditions
            .iter()
            .any(|c| c.kind == kind && c.status == "True")
    }
}

fn is_final(phase: &str) -> bool {
    matches!(phase, "Succeeded" | "Failed")
}

fn request(action: &str, uid: Option<&str>, paused: bool) -> StateChangeRequest {
    let data = paused.then(|| ("paused".to_owned(), "true".to_owned()));
    StateChangeRequest {
        action: action.to_owned(),
        data: BTreeMap::from_iter(data),
        uid: uid.map(str::to_owned),
    }
}

/// What the request does.
pub(super) fn decide(
    verb: Verb,
    machine: &Machine<'_>,
    options: &RequestOptions,
) -> Result<Vec<Change>, Failure> {
    match verb {
        Verb::Start => start(machine, options),
        Verb::Stop => stop(machine, options),
        Verb::Restart => restart(machine, options),
        Verb::Migrate => match machine.running() {
            Some(_) => Ok(vec![Change::Migrate]),
            None => Err(Failure::conflict("VM is not running")),
        },
    }
}

fn start(machine: &Machine<'_>, options: &RequestOptions) -> Result<Vec<Change>, Failure> {
    if machine.running().is_some() {
        return Err(Failure::conflict("VM is already running"));
    }
    if machine.has_condition("ManualRecoveryRequired") {
        return Err(Failure::conflict("VM recovery required"));
    }
    if machine.status.restore_in_progress.is_some() {
        return Err(Failure::conflict("Cannot start VM until restore completes"));
    }
    let strategy = machine.strategy();
    let mut requests = Vec::new();
    if let Some((uid, phase)) = &machine.vmi {
        if strategy == RunStrategy::RerunOnFailure && phase == "Failed" {
            return Err(Failure::conflict(
                "RerunOnFailure starts a VM again that has failed",
            ));
        }
        requests.push(request("Stop", Some(uid), false));
    }
    requests.push(request("Start", None, options.paused));
    match strategy {
        RunStrategy::Always | RunStrategy::Once => {
            let name = strategy.name();
            Err(Failure::conflict(format!(
                "{name} does not support manual start requests"
            )))
        }
        // Asked to begin paused, the controller starts it and sets the strategy.
        RunStrategy::Halted if options.paused => check_pending(machine, requests),
        RunStrategy::Halted => Ok(vec![machine.set(RunStrategy::Always)]),
        _ => check_pending(machine, requests),
    }
}

fn stop(machine: &Machine<'_>, options: &RequestOptions) -> Result<Vec<Change>, Failure> {
    if options.grace_period.is_some_and(|seconds| seconds < 0) {
        return Err(Failure::bad_request(
            "gracePeriod has to be greater or equal to 0",
        ));
    }
    let mut changes: Vec<Change> = options
        .grace_period
        .map(Change::GracePeriod)
        .into_iter()
        .collect();
    let not_running = || Failure::conflict("VM is not running");
    let strategy = machine.strategy();
    if strategy == RunStrategy::Halted {
        // It stops already: only sooner is possible.
        return match (machine.running(), changes.is_empty()) {
            (Some(_), false) => Ok(changes),
            _ => Err(not_running()),
        };
    }
    let Some(uid) = machine.running() else {
        return match strategy {
            RunStrategy::Always | RunStrategy::Once => Ok(vec![machine.set(RunStrategy::Halted)]),
            _ => Err(not_running()),
        };
    };
    match strategy {
        RunStrategy::Manual | RunStrategy::RerunOnFailure => {
            changes.extend(check_pending(
                machine,
                vec![request("Stop", Some(uid), false)],
            )?);
        }
        _ => changes.push(machine.set(RunStrategy::Halted)),
    }
    Ok(changes)
}

fn restart(machine: &Machine<'_>, options: &RequestOptions) -> Result<Vec<Change>, Failure> {
    match options.grace_period_seconds {
        Some(seconds) if seconds < 0 => {
            return Err(Failure::bad_request(
                "gracePeriodSeconds has to be greater or equal to 0",
            ));
        }
        Some(seconds) if seconds > 0 => {
            return Err(Failure::bad_request(
                "only gracePeriodSeconds=0 is possible: the VM is killed at once",
            ));
        }
        _ => {}
    }
    if machine.strategy() == RunStrategy::Halted {
        return Err(Failure::conflict(
            "Halted does not support manual restart requests",
        ));
    }
    let Some(uid) = machine.running() else {
        return Err(Failure::conflict("VM is not running"));
    };
    let requests = vec![
        request("Stop", Some(uid), false),
        request("Start", None, false),
    ];
    let mut changes = check_pending(machine, requests)?;
    if options.grace_period_seconds == Some(0) {
        changes.push(Change::KillPods(uid.to_owned()));
    }
    Ok(changes)
}

/// One request at a time: the controller takes them away when it is done.
fn check_pending(
    machine: &Machine<'_>,
    requests: Vec<StateChangeRequest>,
) -> Result<Vec<Change>, Failure> {
    if !machine.status.state_change_requests.is_empty() {
        return Err(Failure::conflict(
            "unable to complete request: stop/start already underway",
        ));
    }
    Ok(vec![Change::Requests(requests)])
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: Option<&str> = None;

    /// What is decided for a VM of this strategy and this phase of its VMI: the code of the
    /// failure, or the changes.
    fn decided(
        verb: Verb,
        strategy: &str,
        phase: Option<&str>,
        options: &RequestOptions,
    ) -> Result<Vec<Change>, u16> {
        let spec = VmSpec {
            run_strategy: Some(strategy.to_owned()),
            ..Default::default()
        };
        let machine = Machine {
            spec: &spec,
            status: &VmStatus::default(),
            vmi: phase.map(|phase| ("u".to_owned(), phase.to_owned())),
        };
        decide(verb, &machine, options).map_err(|failure| failure.code())
    }

    fn asks(actions: &[&str]) -> Result<Vec<Change>, u16> {
        let uid = |action: &str| (action == "Stop").then_some("u");
        let requests = actions
            .iter()
            .map(|action| request(action, uid(action), false));
        Ok(vec![Change::Requests(requests.collect())])
    }

    #[test]
    fn a_start_depends_on_strategy_and_vmi() {
        let options = RequestOptions::default();
        let always = || Ok(vec![Change::Strategy(RunStrategy::Always)]);
        for (strategy, phase, expected) in [
            ("Halted", NONE, always()),
            ("Halted", Some("Running"), Err(409)),
            ("Always", NONE, Err(409)),
            ("Once", NONE, Err(409)),
            ("Manual", NONE, asks(&["Start"])),
            ("Manual", Some("Running"), Err(409)),
            ("Manual", Some("Scheduling"), Err(409)),
            ("Manual", Some("Succeeded"), asks(&["Stop", "Start"])),
            ("Manual", Some("Failed"), asks(&["Stop", "Start"])),
            ("RerunOnFailure", NONE, asks(&["Start"])),
            (
                "RerunOnFailure",
                Some("Succeeded"),
                asks(&["Stop", "Start"]),
            ),
            ("RerunOnFailure", Some("Failed"), Err(409)),
        ] {
            let found = decided(Verb::Start, strategy, phase, &options);
            assert_eq!(found, expected, "{strategy} {phase:?}");
        }
    }

    #[test]
    fn a_start_may_begin_paused() {
        let options = RequestOptions {
            paused: true,
            ..Default::default()
        };
        for strategy in ["Halted", "Manual"] {
            let changes = decided(Verb::Start, strategy, NONE, &options).unwrap();
            assert_eq!(
                changes,
                [Change::Requests(vec![request("Start", None, true)])]
            );
        }
    }

    #[test]
    fn a_stop_depends_on_strategy_and_vmi() {
        let options = RequestOptions::default();
        let halted = || Ok(vec![Change::Strategy(RunStrategy::Halted)]);
        for (strategy, phase, expected) in [
            ("Always", Some("Running"), halted()),
            ("Always", NONE, halted()),
            ("Once", Some("Running"), halted()),
            ("Manual", Some("Running"), asks(&["Stop"])),
            ("Manual", NONE, Err(409)),
            ("Manual", Some("Succeeded"), Err(409)),
            ("RerunOnFailure", Some("Running"), asks(&["Stop"])),
            ("Halted", NONE, Err(409)),
            ("Halted", Some("Running"), Err(409)),
        ] {
            let found = decided(Verb::Stop, strategy, phase, &options);
            assert_eq!(found, expected, "{strategy} {phase:?}");
        }
    }

    #[test]
    fn a_stop_that_takes_too_long_can_be_shortened() {
        let options = RequestOptions {
            grace_period: Some(0),
            ..Default::default()
        };
        let changes = decided(Verb::Stop, "Halted", Some("Running"), &options);
        assert_eq!(changes, Ok(vec![Change::GracePeriod(0)]));
        let options = RequestOptions {
            grace_period: Some(-1),
            ..Default::default()
        };
        assert_eq!(
            decided(Verb::Stop, "Always", Some("Running"), &options),
            Err(400)
        );
    }

    #[test]
    fn a_restart_takes_a_running_vm() {
        let options = RequestOptions::default();
        let both = || asks(&["Stop", "Start"]);
        for (strategy, phase, expected) in [
            ("Always", Some("Running"), both()),
            ("Manual", Some("Running"), both()),
            ("Always", NONE, Err(409)),
            ("Always", Some("Failed"), Err(409)),
            ("Halted", Some("Running"), Err(409)),
        ] {
            let found = decided(Verb::Restart, strategy, phase, &options);
            assert_eq!(found, expected, "{strategy} {phase:?}");
        }
        for (seconds, expected) in [(-1, Err(400)), (5, Err(400))] {
            let options = RequestOptions {
                grace_period_seconds: Some(seconds),
                ..Default::default()
            };
            assert_eq!(
                decided(Verb::Restart, "Always", Some("Running"), &options),
                expected
            );
        }
        let options = RequestOptions {
            grace_period_seconds: Some(0),
            ..Default::default()
        };
        let changes = decided(Verb::Restart, "Always", Some("Running"), &options).unwrap();
        assert_eq!(changes.last(), Some(&Change::KillPods("u".to_owned())));
    }

    #[test]
    fn one_request_is_under_way_at_a_time() {
        let spec = VmSpec {
            run_strategy: Some("Manual".to_owned()),
            ..Default::default()
        };
        let pending = vec![request("Start", None, false)];
        let status = VmStatus {
            state_change_requests: pending,
            ..Default::default()
        };
        let machine = Machine {
            spec: &spec,
            status: &status,
            vmi: None,
        };
        let failure = decide(Verb::Start, &machine, &RequestOptions::default()).unwrap_err();
        assert_eq!(failure.code(), 409);
    }

    #[test]
    fn a_restore_in_progress_forbids_the_start() {
        let spec = VmSpec {
            running: Some(false),
            ..Default::default()
        };
        let status = VmStatus {
            restore_in_progress: Some("r".to_owned()),
            ..Default::default()
        };
        let machine = Machine {
            spec: &spec,
            status: &status,
            vmi: None,
        };
        let failure = decide(Verb::Start, &machine, &RequestOptions::default()).unwrap_err();
        assert_eq!(failure.code(), 409);
        let machine = Machine {
            spec: &spec,
            status: &VmStatus::default(),
            vmi: None,
        };
        let changes = decide(Verb::Start, &machine, &RequestOptions::default());
        assert_eq!(
            changes,
            Ok(vec![Change::Running(true)]),
            "the older field stays in use"
        );
    }

    #[test]
    fn a_migration_takes_a_running_vm() {
        let options = RequestOptions::default();
        let migrate = Ok(vec![Change::Migrate]);
        assert_eq!(
            decided(Verb::Migrate, "Always", Some("Running"), &options),
            migrate
        );
        assert_eq!(decided(Verb::Migrate, "Always", NONE, &options), Err(409));
        assert_eq!(
            decided(Verb::Migrate, "Always", Some("Failed"), &options),
            Err(409)
        );
    }
}
