//! Subresources of a VirtualMachine: start, stop, restart, migrate; its volumes, and dumps of its
//! memory.
//!
//! What a request does to the object is decided by [`decide`], a function of the VM, its VMI and
//! the request; this file reads the objects and carries the decision out. A VM that changed in
//! between is a conflict, not an error of ours.

mod decide;
mod dump;
pub(super) mod volumes;

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::{
    Api, Client,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
    core::{ApiResource, DynamicObject, GroupVersionKind},
};
use podvisor_cluster_types::{
    migration::MigrationSpec,
    vm::{VmSpec, VmStatus},
    vmi::VmiStatus,
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    Target,
    objects::{api, part},
};
use crate::{
    https::{self, Answer},
    status::Failure,
};
use decide::{Change, Machine, Verb, decide};

/// How often what changes all the time is read and written again.
pub(super) const ATTEMPTS: u32 = 8;

/// Label of a VM's pods: the unique id of the VMI.
const CREATED_BY: &str = "kubevirt.io/created-by";

/// Options of all requests.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct RequestOptions {
    paused: bool,
    grace_period: Option<i64>,
    grace_period_seconds: Option<i64>,
    dry_run: Vec<String>,
    added_node_selector: std::collections::BTreeMap<String, String>,
}

impl RequestOptions {
    fn read(body: &[u8]) -> Result<Self, Failure> {
        if body.iter().all(u8::is_ascii_whitespace) {
            return Ok(Self::default());
        }
        let options: Self = serde_json::from_slice(body)
            .map_err(|error| Failure::bad_request(format!("the options are invalid: {error}")))?;
        if options.dry_run.iter().any(|word| word != "All") {
            return Err(Failure::bad_request("dryRun must be All or missing"));
        }
        Ok(options)
    }

    fn is_dry_run(&self) -> bool {
        !self.dry_run.is_empty()
    }
}

/// Carries out a PUT to a subresource of a VM.
pub(super) async fn update(
    client: &Client,
    target: &Target<'_>,
    body: &[u8],
) -> Result<Answer, Failure> {
    match target.subresource {
        "addvolume" | "removevolume" => return change_volumes(client, target, body).await,
        "memorydump" | "removememorydump" => return change_dump(client, target, body).await,
        _ => {}
    }
    let verb = Verb::parse(target.subresource)
        .ok_or_else(|| Failure::not_found("subresource", target.subresource))?;
    let options = RequestOptions::read(body)?;
    let failed = |error: kube::Error| Failure::of_api_server(&error);
    let (vm, vmi) = find(client, target).await?;
    let (spec, status): (VmSpec, VmStatus) = (part(&vm, "spec"), part(&vm, "status"));
    let machine = Machine {
        spec: &spec,
        status: &status,
        vmi: vmi.as_ref().map(|vmi| {
            let status: VmiStatus = part(vmi, "status");
            (
                vmi.metadata.uid.clone().unwrap_or_default(),
                status.phase.unwrap_or_default(),
            )
        }),
    };
    for change in decide(verb, &machine, &options)? {
        carry_out(client, target, &vm, change, &options)
            .await
            .map_err(failed)?;
    }
    Ok(https::accepted())
}

/// The VM, and its VMI.
async fn find(
    client: &Client,
    target: &Target<'_>,
) -> Result<(DynamicObject, Option<DynamicObject>), Failure> {
    let failed = |error: kube::Error| Failure::of_api_server(&error);
    let vm = api(client, target.namespace, "VirtualMachine")
        .get_opt(target.name)
        .await
        .map_err(failed)?
        .ok_or_else(|| Failure::not_found("virtualmachine.kubevirt.io", target.name))?;
    let vmi = api(client, target.namespace, "VirtualMachineInstance")
        .get_opt(target.name)
        .await
        .map_err(failed)?;
    Ok((vm, vmi))
}

/// Adds a volume to the template of a VM and to its instance, or removes one.
async fn change_volumes(
    client: &Client,
    target: &Target<'_>,
    body: &[u8],
) -> Result<Answer, Failure> {
    let request = volumes::Request::read(target.subresource == "addvolume", body)?;
    for _ in 0..ATTEMPTS {
        if try_change_volumes(client, target, &request).await? {
            return Ok(https::accepted());
        }
    }
    Err(busy())
}

/// That an object was not as it was read, each time.
pub(super) fn busy() -> Failure {
    Failure::conflict("the object has changed each time that it was written: try it again")
}

/// As [`change_volumes`]; `false` if an object has changed meanwhile.
async fn try_change_volumes(
    client: &Client,
    target: &Target<'_>,
    request: &volumes::Request,
) -> Result<bool, Failure> {
    let (vm, vmi) = find(client, target).await?;
    let of_vm = |vmi: &DynamicObject| {
        let status: VmiStatus = part(vmi, "status");
        let has_ended = matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"));
        let owners = vmi.metadata.owner_references.iter().flatten();
        let mut owners = owners.filter(|owner| owner.controller == Some(true));
        !has_ended
            && vmi.metadata.deletion_timestamp.is_none()
            && owners.any(|owner| Some(&owner.uid) == vm.metadata.uid.as_ref())
    };
    let spec = vm.data.get("spec").cloned().unwrap_or_default();
    let patch = volumes::decide(request, &spec, &part(&vm, "status"))?;
    let dry = PatchParams {
        dry_run: true,
        ..Default::default()
    };
    let params = PatchParams {
        dry_run: request.is_dry_run(),
        ..Default::default()
    };
    if let Some(vmi) = vmi.filter(of_vm) {
        let spec = vmi.data.get("spec").cloned().unwrap_or_default();
        if !volumes::is_done(request, &spec) {
            let of_vmi = volumes::of_instance(request, &spec)?;
            // What is wrong with it is said by the path in the VM, and before anything changes.
            if !patch_at(client, &vm, patch.clone(), &dry).await?
                || !patch_at(client, &vmi, of_vmi, &params).await?
            {
                return Ok(false);
            }
        }
    }
    patch_at(client, &vm, patch, &params).await
}

/// Patches an object as it was read, and no other; `false` if it has changed meanwhile.
pub(super) async fn patch_at(
    client: &Client,
    object: &DynamicObject,
    mut patch: Value,
    params: &PatchParams,
) -> Result<bool, Failure> {
    let (meta, types) = (&object.metadata, object.types.as_ref());
    patch["metadata"] = json!({ "resourceVersion": meta.resource_version });
    let namespace = meta.namespace.as_deref().unwrap_or_default();
    let kind = types.map_or("VirtualMachine", |types| types.kind.as_str());
    let name = meta.name.as_deref().unwrap_or_default();
    let patched = api(client, namespace, kind)
        .patch(name, params, &Patch::Merge(patch))
        .await;
    match patched {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
        Err(error) => Err(Failure::of_api_server(&error)),
    }
}

/// Asks for a dump of a VM's memory, or that its claim leaves the VM.
async fn change_dump(client: &Client, target: &Target<'_>, body: &[u8]) -> Result<Answer, Failure> {
    let failed = |error: kube::Error| Failure::of_api_server(&error);
    let request = dump::Request::read(target.subresource == "memorydump", body)?;
    for _ in 0..ATTEMPTS {
        let (vm, vmi) = find(client, target).await?;
        let status: VmStatus = part(&vm, "status");
        let asked = dump::claim(&request, &status)?;
        let claims = Api::<PersistentVolumeClaim>::namespaced(client.clone(), target.namespace);
        let claim = match &asked {
            Some(name) => claims.get_opt(name).await.map_err(failed)?,
            None => None,
        };
        let machine = vmi.as_ref().map(|vmi| dump::Machine {
            spec: part(vmi, "spec"),
            status: part(vmi, "status"),
        });
        let patch = dump::decide(
            &request,
            target.name,
            &status,
            machine.as_ref(),
            claim.as_ref(),
        )?;
        if patch_status_at(client, &vm, patch).await? {
            return Ok(https::accepted());
        }
    }
    Err(busy())
}

/// Patches the status of a VM as it was read, and of no other; `false` if it has changed meanwhile.
async fn patch_status_at(
    client: &Client,
    vm: &DynamicObject,
    mut patch: Value,
) -> Result<bool, Failure> {
    let meta = &vm.metadata;
    patch["metadata"] = json!({ "resourceVersion": meta.resource_version });
    let namespace = meta.namespace.as_deref().unwrap_or_default();
    let name = meta.name.as_deref().unwrap_or_default();
    let patched = api(client, namespace, "VirtualMachine")
        .patch_status(name, &PatchParams::default(), &Patch::Merge(patch))
        .await;
    match patched {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
        Err(error) => Err(Failure::of_api_server(&error)),
    }
}

async fn carry_out(
    client: &Client,
    target: &Target<'_>,
    vm: &DynamicObject,
    change: Change,
    options: &RequestOptions,
) -> Result<(), kube::Error> {
    let params = PatchParams {
        dry_run: options.is_dry_run(),
        ..Default::default()
    };
    let vms = api(client, target.namespace, "VirtualMachine");
    // The decision holds for the VM that was read, and for no other.
    let at_version = |mut patch: Value| {
        patch["metadata"] = json!({ "resourceVersion": vm.metadata.resource_version });
        Patch::Merge(patch)
    };
    match change {
        Change::Strategy(strategy) => {
            let spec = json!({ "runStrategy": strategy.name(), "running": null });
            vms.patch(target.name, &params, &at_version(json!({ "spec": spec })))
                .await?;
        }
        Change::Running(running) => {
            let patch = at_version(json!({ "spec": { "running": running } }));
            vms.patch(target.name, &params, &patch).await?;
        }
        Change::Requests(requests) => {
            let patch = at_version(json!({ "status": { "stateChangeRequests": requests } }));
            vms.patch_status(target.name, &params, &patch).await?;
        }
        Change::GracePeriod(seconds) => {
            let patch = json!({ "spec": { "terminationGracePeriodSeconds": seconds } });
            let vmis = api(client, target.namespace, "VirtualMachineInstance");
            vmis.patch(target.name, &params, &Patch::Merge(patch))
                .await?;
        }
        Change::KillPods(uid) => {
            let pods: Api<Pod> = Api::namespaced(client.clone(), target.namespace);
            let list = ListParams::default().labels(&format!("{CREATED_BY}={uid}"));
            let delete = DeleteParams {
                dry_run: options.is_dry_run(),
                ..DeleteParams::default().grace_period(0)
            };
            for pod in pods.list(&list).await? {
                let name = pod.metadata.name.unwrap_or_default();
                match pods.delete(&name, &delete).await {
                    Ok(_) => {}
                    Err(kube::Error::Api(status)) if status.code == 404 => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Change::Migrate => migrate(client, target, options).await?,
    }
    Ok(())
}

async fn migrate(
    client: &Client,
    target: &Target<'_>,
    options: &RequestOptions,
) -> Result<(), kube::Error> {
    let spec = MigrationSpec {
        vmi_name: target.name.to_owned(),
        added_node_selector: options.added_node_selector.clone(),
        ..Default::default()
    };
    let kind = "VirtualMachineInstanceMigration";
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("kubevirt.io", "v1", kind));
    let mut migration = DynamicObject::new("", &resource).data(json!({ "spec": spec }));
    migration.metadata.name = None;
    migration.metadata.generate_name = Some("kubevirt-migrate-vm-".to_owned());
    let params = PostParams {
        dry_run: options.is_dry_run(),
        ..Default::default()
    };
    api(client, target.namespace, kind)
        .create(&params, &migration)
        .await?;
    Ok(())
}
