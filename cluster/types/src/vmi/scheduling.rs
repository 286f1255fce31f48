//! Names, strategies, and what is passed on to the pod.

use super::{VmiSpec, firmware};
use crate::{
    Causes, FieldPath,
    cause::shown,
    names::{is_dns_label, is_dns_subdomain},
};

/// The words of `evictionStrategy`.
pub const EVICTION_STRATEGIES: [&str; 4] =
    ["None", "LiveMigrate", "LiveMigrateIfPossible", "External"];

pub(super) fn validate_names(spec: &VmiSpec, path: &FieldPath, causes: &mut Causes) {
    if let Some(name) = spec.hostname.as_deref().filter(|name| !name.is_empty())
        && !is_dns_label(name)
    {
        let message = format!("is {}, but must be a DNS label", shown(name));
        causes.invalid(&path.child("hostname"), message);
    }
    if let Some(name) = spec.subdomain.as_deref().filter(|name| !name.is_empty())
        && !is_dns_subdomain(name)
    {
        let message = format!("is {}, but must be a DNS subdomain", shown(name));
        causes.invalid(&path.child("subdomain"), message);
    }
    firmware::validate_architecture(spec, path, causes);
}

pub(super) fn validate_strategies(spec: &VmiSpec, path: &FieldPath, causes: &mut Causes) {
    if let Some(strategy) = &spec.eviction_strategy {
        causes.one_of(
            &path.child("evictionStrategy"),
            strategy,
            &EVICTION_STRATEGIES,
        );
    }
    if let Some(strategy) = &spec.start_strategy {
        let path = path.child("startStrategy");
        causes.one_of(&path, strategy, &["Paused"]);
        if spec.liveness_probe.is_some() {
            causes.invalid(
                &path,
                "must not be Paused with a livenessProbe, which would fail",
            );
        }
    }
    if spec
        .termination_grace_period_seconds
        .is_some_and(|seconds| seconds < 0)
    {
        causes.invalid(
            &path.child("terminationGracePeriodSeconds"),
            "must not be negative",
        );
    }
    let Some(account) = spec
        .service_account_name
        .as_deref()
        .filter(|name| !name.is_empty())
    else {
        return;
    };
    let path = path.child("serviceAccountName");
    if !is_dns_subdomain(account) {
        let message = format!("is {}, but must be a DNS subdomain", shown(account));
        causes.invalid(&path, message);
    }
    let volumes = spec
        .volumes
        .iter()
        .filter_map(|volume| volume.service_account.as_ref());
    let mut names = volumes.filter_map(|volume| volume.service_account_name.as_deref());
    if names.any(|name| name != account) {
        causes.invalid(&path, "must be the account of the serviceAccount volume");
    }
}
