//! Judges snapshots, restores and copies, and what they forbid of virtual machines.

use podvisor_cluster_types::{
    Cause, Causes, FieldPath,
    clone::CloneSpec,
    snapshot::{RestoreSpec, SnapshotSpec},
    vm::{RunStrategy, VmSpec, VmStatus},
};

use super::{
    Request, Response,
    lookup::{Lookup, part},
};

pub(super) fn create_snapshot(request: &Request) -> Result<Response, Cause> {
    let spec: SnapshotSpec = part(&request.object, "spec")?;
    Ok(Response::of(spec.validate(&FieldPath::new("spec"))))
}

pub(super) fn update_snapshot(request: &Request) -> Result<Response, Cause> {
    let old: SnapshotSpec = part(&request.old_object, "spec")?;
    let new: SnapshotSpec = part(&request.object, "spec")?;
    Ok(Response::of(
        new.validate_update(&old, &FieldPath::new("spec")),
    ))
}

pub(super) async fn create_restore(request: &Request, lookup: &impl Lookup) -> Response {
    let spec: RestoreSpec = match part(&request.object, "spec") {
        Ok(spec) => spec,
        Err(cause) => return Response::Invalid(vec![cause]),
    };
    let path = FieldPath::new("spec");
    let mut causes = spec.validate(&path);
    let target = spec.target.unwrap_or_default();
    if causes.is_empty() {
        match lookup
            .active_restore(&request.namespace, &target.name)
            .await
        {
            Ok(None) => {}
            Ok(Some(other)) => {
                let mut more = Causes::default();
                let message = format_args!("VirtualMachineRestore {other:?} in progress");
                more.invalid(&path.child("target"), message);
                causes.extend(more.into_vec());
            }
            Err(error) => {
                tracing::error!(%error, "failed to look for other restores");
                return Response::Refused {
                    code: 500,
                    reason: "InternalError",
                    message: "other restores cannot be looked for: try again".to_owned(),
                };
            }
        }
    }
    Response::of(causes)
}

pub(super) fn update_restore(request: &Request) -> Result<Response, Cause> {
    let old: RestoreSpec = part(&request.old_object, "spec")?;
    let new: RestoreSpec = part(&request.object, "spec")?;
    Ok(Response::of(
        new.validate_update(&old, &FieldPath::new("spec")),
    ))
}

pub(super) fn create_clone(request: &Request) -> Result<Response, Cause> {
    let spec: CloneSpec = part(&request.object, "spec")?;
    Ok(Response::of(spec.validate(&FieldPath::new("spec"))))
}

pub(super) fn update_clone(request: &Request) -> Result<Response, Cause> {
    let old: CloneSpec = part(&request.old_object, "spec")?;
    let new: CloneSpec = part(&request.object, "spec")?;
    Ok(Response::of(
        new.validate_update(&old, &FieldPath::new("spec")),
    ))
}

/// Causes to refuse a change of a virtual machine that a snapshot or a restore has locked.
pub(super) fn locked(request: &Request, new: &VmSpec) -> Vec<Cause> {
    let status: VmStatus = part(&request.old_object, "status").unwrap_or_default();
    let old: VmSpec = part(&request.old_object, "spec").unwrap_or_default();
    let given = |name: &Option<String>| name.clone().filter(|name| !name.is_empty());
    let snapshot = given(&status.snapshot_in_progress).map(|name| format!("snapshot {name:?}"));
    let restore = given(&status.restore_in_progress).map(|name| format!("restore {name:?}"));
    let mut causes = Causes::default();
    let path = FieldPath::new("spec");
    if let Some(holder) = snapshot.as_ref().or(restore.as_ref())
        && volumes(&old) != volumes(new)
    {
        let message = format_args!("cannot have other disks or volumes until {holder} completes");
        causes.invalid(&path, message);
    }
    let strategies = (old.strategy(), new.strategy());
    if let Some(holder) = &restore
        && strategies.0 != strategies.1
        && strategies.1 != Some(RunStrategy::Halted)
    {
        causes.invalid(
            &path,
            format_args!("cannot be started until {holder} completes"),
        );
    }
    causes.into_vec()
}

/// What of a virtual machine is its disks.
fn volumes(spec: &VmSpec) -> impl PartialEq {
    let template = spec.template.as_ref().map(|template| {
        let devices = &template.spec.domain.devices;
        (template.spec.volumes.clone(), devices.disks.clone())
    });
    (template, spec.data_volume_templates.clone())
}
