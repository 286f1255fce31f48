//! Judges objects: every cause to refuse one, at once.

use podvisor_cluster_types::{
    Cause, Causes, FieldPath,
    datavolume::{DataSourceSpec, DataVolumeSpec},
    export::ExportSpec,
    kubevirt::KubeVirtSpec,
    migration::{self, MigrationPolicySpec, MigrationSpec, SELECTOR_LABEL},
    replica_set::ReplicaSetSpec,
    vm::VmSpec,
    vmi::{
        RESERVED_LABELS, VmiSpec, validate_meta, validate_spec_update, validate_system_spec_update,
    },
};
use serde_json::Value;

use super::{Policy, Request, Response, copies, evict, lookup::Lookup, lookup::part, snapshots};
use crate::instancetypes::{self, ExpandError};

/// The answer of the validating webhook.
pub async fn validate(request: &Request, policy: &Policy, lookup: &impl Lookup) -> Response {
    if request.kind.kind == "Eviction" {
        return evict::evict(request, lookup).await;
    }
    // A finalizer must come off whatever else is wrong, and a status has its own guard.
    if request.is_going() || request.sub_resource.is_some() {
        return Response::allowed();
    }
    let result = match (request.kind.kind.as_str(), request.operation.as_str()) {
        ("VirtualMachineInstance", "CREATE") => create_vmi(request, policy),
        ("VirtualMachineInstance", "UPDATE") => update_vmi(request, policy),
        ("VirtualMachine", "CREATE" | "UPDATE") => {
            let judged = vm(request, policy);
            match &judged {
                Ok(Response::Allowed(_)) => {
                    let refused = match expanded_vm(request, policy, lookup).await {
                        Some(refused) => Some(refused),
                        None => foreign_templates(request, policy, lookup).await,
                    };
                    refused.map_or(judged, Ok)
                }
                _ => judged,
            }
        }
        ("VirtualMachineInstanceReplicaSet", "CREATE" | "UPDATE") => replica_set(request, policy),
        ("VirtualMachineInstanceMigration", "CREATE") => {
            return create_migration(request, policy, lookup).await;
        }
        ("VirtualMachineInstanceMigration", "UPDATE") => update_migration(request),
        ("MigrationPolicy", "CREATE" | "UPDATE") => migration_policy(request),
        ("KubeVirt", "CREATE" | "UPDATE") => kubevirt(request, policy),
        ("VirtualMachineRestore", "CREATE") => {
            return snapshots::create_restore(request, lookup).await;
        }
        ("VirtualMachineRestore", "UPDATE") => snapshots::update_restore(request),
        ("VirtualMachineSnapshot", "CREATE") => snapshots::create_snapshot(request),
        ("VirtualMachineSnapshot", "UPDATE") => snapshots::update_snapshot(request),
        ("VirtualMachineClone", "CREATE") => snapshots::create_clone(request),
        ("VirtualMachineClone", "UPDATE") => snapshots::update_clone(request),
        ("VirtualMachineExport", "CREATE") => create_export(request),
        ("VirtualMachineExport", "UPDATE") => update_export(request),
        ("DataSource", "CREATE" | "UPDATE") => data_source(request),
        ("DataVolume", "CREATE") => create_volume(request),
        ("DataVolume", "UPDATE") => update_volume(request),
        _ => Ok(Response::allowed()),
    };
    result.unwrap_or_else(|cause| Response::Invalid(vec![cause]))
}

fn create_vmi(request: &Request, policy: &Policy) -> Result<Response, Cause> {
    let spec: VmiSpec = part(&request.object, "spec")?;
    let path = FieldPath::new("spec");
    let mut causes = Causes::default();
    if !policy.is_system(&request.user_info) {
        validate_meta(&request.meta(), &FieldPath::new("metadata"), &mut causes);
    }
    let mut causes = causes.into_vec();
    causes.extend(spec.validate(&policy.config.rules, &path));
    if causes.is_empty() {
        return Ok(Response::Allowed(spec.warnings(&path)));
    }
    Ok(Response::Invalid(causes))
}

fn update_vmi(request: &Request, policy: &Policy) -> Result<Response, Cause> {
    let old: VmiSpec = part(&request.old_object, "spec")?;
    let new: VmiSpec = part(&request.object, "spec")?;
    let path = FieldPath::new("spec");
    if policy.is_system(&request.user_info) {
        let mut causes = validate_system_spec_update(&old, &new, &path);
        let disks = |spec: &VmiSpec| spec.domain.devices.disks.clone();
        if old.volumes != new.volumes || disks(&old) != disks(&new) {
            // What is plugged in comes from a user.
            causes.extend(new.validate(&policy.config.rules, &path));
        }
        return Ok(Response::of(causes));
    }
    let mut causes = Causes::default();
    let (old_labels, labels) = (request.old_meta().labels, request.meta().labels);
    for label in RESERVED_LABELS
        .iter()
        .filter(|label| old_labels.get(**label) != labels.get(**label))
    {
        causes.forbidden(
            &FieldPath::new("metadata.labels"),
            format_args!("must not change {label}, which only the system sets"),
        );
    }
    let mut causes = causes.into_vec();
    causes.extend(validate_spec_update(&old, &new, &path));
    Ok(Response::of(causes))
}

fn vm(request: &Request, policy: &Policy) -> Result<Response, Cause> {
    // An object that was right under older rules can still be labelled.
    if request.operation == "UPDATE" && request.object.get("spec") == request.old_object.get("spec")
    {
        return Ok(Response::allowed());
    }
    let spec: VmSpec = part(&request.object, "spec")?;
    let path = FieldPath::new("spec");
    let mut causes = spec.validate(&policy.config.defaults, &policy.config.rules, &path);
    causes.extend(spec.unusable_sources(&request.namespace, &path));
    if !policy.is_system(&request.user_info) {
        causes.extend(snapshots::locked(request, &spec));
    }
    if !causes.is_empty() {
        return Ok(Response::Invalid(causes));
    }
    let path = path.child("template.spec");
    Ok(Response::Allowed(
        spec.template
            .map_or_else(Vec::new, |t| t.spec.warnings(&path)),
    ))
}

/// Judges a VM with its instance type and its preference; `None` where it has neither, or nothing
/// is wrong.
async fn expanded_vm(request: &Request, policy: &Policy, lookup: &impl Lookup) -> Option<Response> {
    if request.object.get("spec") == request.old_object.get("spec") {
        return None;
    }
    let spec: VmSpec = part(&request.object, "spec").ok()?;
    let (instancetype, preference) = (spec.instancetype.as_ref(), spec.preference.as_ref());
    if instancetype.is_none() && preference.is_none() {
        return None;
    }
    let path = FieldPath::new("spec");
    let namespace = &request.namespace;
    let found = instancetypes::find(lookup, namespace, instancetype, preference, &path).await;
    let path = path.child("template.spec");
    let causes = match found {
        Ok(found) => {
            let mut spec = spec.template?.spec;
            let mut causes = found.apply(&mut spec, &path);
            if causes.is_empty() {
                spec.apply_defaults(&policy.config.defaults);
                causes = spec.validate(&policy.config.rules, &path);
            }
            causes
        }
        Err(ExpandError::Refused(causes)) => causes,
        Err(ExpandError::Request(error)) => {
            tracing::error!(%error, "failed to look up the instance type of a VM");
            return Some(Response::Refused {
                code: 500,
                reason: "InternalError",
                message: "the instance type cannot be looked up: try again".to_owned(),
            });
        }
    };
    (!causes.is_empty()).then_some(Response::Invalid(causes))
}

/// Judges what a VM's templates copy from other namespaces; `None` if nothing is wrong. A VM that
/// is restored may have its disks already; where one is missing, its DataVolume is judged.
async fn foreign_templates(
    request: &Request,
    policy: &Policy,
    lookup: &impl Lookup,
) -> Option<Response> {
    let is_same = request.object.get("spec") == request.old_object.get("spec");
    if is_same || policy.is_system(&request.user_info) {
        return None;
    }
    let spec: VmSpec = part(&request.object, "spec").ok()?;
    match copies::templates(request, &spec, lookup).await {
        Ok(causes) => (!causes.is_empty()).then_some(Response::Invalid(causes)),
        Err(refused) => Some(refused),
    }
}

fn replica_set(request: &Request, policy: &Policy) -> Result<Response, Cause> {
    let spec: ReplicaSetSpec = part(&request.object, "spec")?;
    let path = FieldPath::new("spec");
    Ok(Response::of(spec.validate(
        &policy.config.defaults,
        &policy.config.rules,
        &path,
    )))
}

fn kubevirt(request: &Request, policy: &Policy) -> Result<Response, Cause> {
    if request.namespace != policy.namespace {
        let mut causes = Causes::default();
        causes.forbidden(
            &FieldPath::new("metadata.namespace"),
            format_args!(
                "must be {}: the cluster is configured in its components' namespace alone",
                policy.namespace
            ),
        );
        return Ok(Response::Invalid(causes.into_vec()));
    }
    let spec: KubeVirtSpec = part(&request.object, "spec")?;
    let given = request.object.get("spec").unwrap_or(&Value::Null);
    Ok(Response::of(spec.validate(given, &FieldPath::new("spec"))))
}

fn migration_policy(request: &Request) -> Result<Response, Cause> {
    let spec: MigrationPolicySpec = part(&request.object, "spec")?;
    let path = FieldPath::new("spec");
    Ok(Response::of(spec.validate(&path)))
}

async fn create_migration(request: &Request, policy: &Policy, lookup: &impl Lookup) -> Response {
    let spec: MigrationSpec = match part(&request.object, "spec") {
        Ok(spec) => spec,
        Err(cause) => return Response::Invalid(vec![cause]),
    };
    let mut causes = spec.validate(&FieldPath::new("spec"));
    if spec.priority.is_some() && !policy.is_system(&request.user_info) {
        let mut more = Causes::default();
        more.forbidden(
            &FieldPath::new("spec.priority"),
            "is set by the controllers alone",
        );
        causes.extend(more.into_vec());
    }
    if !causes.is_empty() {
        return Response::Invalid(causes);
    }
    let refused = |code, reason, message| Response::Refused {
        code,
        reason,
        message,
    };
    let failed = |error: kube::Error| {
        tracing::error!(%error, "failed to look up what a migration is of");
        refused(
            500,
            "InternalError",
            "the VMI cannot be looked up: try again".to_owned(),
        )
    };
    let (namespace, vmi) = (&request.namespace, &spec.vmi_name);
    match lookup.vmi_status(namespace, vmi).await {
        Err(error) => return failed(error),
        Ok(None) => {
            let message = format!("the VMI \"{namespace}/{vmi}\" does not exist");
            return refused(404, "NotFound", message);
        }
        Ok(Some(status)) => {
            if let Some(message) = migration::refusal(&status) {
                let mut causes = Causes::default();
                causes.invalid(&FieldPath::new("spec.vmiName"), message);
                return Response::Invalid(causes.into_vec());
            }
        }
    }
    match lookup.active_migration(namespace, vmi).await {
        Err(error) => failed(error),
        Ok(None) => Response::allowed(),
        Ok(Some(other)) => refused(
            409,
            "Conflict",
            format!("in-flight migration detected: {namespace}/{other} migrates the VMI {vmi}"),
        ),
    }
}

fn create_volume(request: &Request) -> Result<Response, Cause> {
    let spec: DataVolumeSpec = part(&request.object, "spec")?;
    Ok(Response::of(
        spec.validate_in(&request.namespace, &FieldPath::new("spec")),
    ))
}

fn create_export(request: &Request) -> Result<Response, Cause> {
    let spec: ExportSpec = part(&request.object, "spec")?;
    Ok(Response::of(spec.validate(&FieldPath::new("spec"))))
}

fn update_export(request: &Request) -> Result<Response, Cause> {
    let old: ExportSpec = part(&request.old_object, "spec")?;
    let new: ExportSpec = part(&request.object, "spec")?;
    Ok(Response::of(
        new.validate_update(&old, &FieldPath::new("spec")),
    ))
}

fn data_source(request: &Request) -> Result<Response, Cause> {
    let spec: DataSourceSpec = part(&request.object, "spec")?;
    let path = FieldPath::new("spec");
    Ok(Response::of(spec.validate_in(&request.namespace, &path)))
}

fn update_volume(request: &Request) -> Result<Response, Cause> {
    // What was valid under older rules can still be labelled.
    if request.object.get("spec") == request.old_object.get("spec") {
        return Ok(Response::allowed());
    }
    let old: DataVolumeSpec = part(&request.old_object, "spec")?;
    let new: DataVolumeSpec = part(&request.object, "spec")?;
    Ok(Response::of(
        new.validate_update(&old, &FieldPath::new("spec")),
    ))
}

fn update_migration(request: &Request) -> Result<Response, Cause> {
    let old: MigrationSpec = part(&request.old_object, "spec")?;
    let new: MigrationSpec = part(&request.object, "spec")?;
    let mut causes = new.validate_update(&old, &FieldPath::new("spec"));
    let label =
        |labels: &std::collections::BTreeMap<String, String>| labels.get(SELECTOR_LABEL).cloned();
    if label(&request.meta().labels) != label(&request.old_meta().labels) {
        let mut more = Causes::default();
        more.forbidden(
            &FieldPath::new("metadata.labels"),
            format_args!("must not change {SELECTOR_LABEL}"),
        );
        causes.extend(more.into_vec());
    }
    Ok(Response::of(causes))
}

#[cfg(test)]
#[path = "validate_tests.rs"]
mod tests;
