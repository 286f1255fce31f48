//! Subresources of a VirtualMachineInstance.
//!
//! What a request does is decided by [`decide`], a function of the instance and the request. Then
//! it is passed on to the instance's node, whose answer is the answer.

mod decide;

use hyper::{Request, body::Incoming};
use kube::{
    Client,
    api::{DynamicObject, Patch, PatchParams},
};
use podvisor_cluster_types::{
    vm::VmStatus,
    vmi::{VmiSpec, VmiStatus},
};
use serde_json::json;

use super::{
    State, Target, objects,
    subresources::VMI,
    vm::{self, volumes},
};
use crate::{
    https::{self, Answer},
    node_client::{Call, Path},
    status::Failure,
};
use decide::{Instance, decide};

/// Carries out a request for a subresource of an instance, or of a VM by its instance.
pub(super) async fn answer(
    request: Request<Incoming>,
    state: &State,
    target: &Target<'_>,
) -> Result<Answer, Failure> {
    let found = read(&state.client, target).await?;
    if target.verb == "update" && target.subresource == "evacuate" && target.rest == ["cancel"] {
        return cancel_evacuation(&state.client, target).await;
    }
    let query = request.uri().query().map(str::to_owned);
    let (request, body) = if is_upgrade(&request) {
        (Some(request), Default::default())
    } else {
        match https::read_body(request.into_body()).await {
            Ok(body) => (None, body),
            Err(answer) => return Ok(answer),
        }
    };
    if target.verb == "update" && matches!(target.subresource, "addvolume" | "removevolume") {
        return change_volumes(&state.client, target, found, &body).await;
    }
    let snapshot = match target.subresource {
        "unpause" if found.has_owner => snapshot_of(&state.client, target).await?,
        _ => None,
    };
    let instance = Instance {
        snapshot: snapshot.as_deref(),
        spec: &found.spec,
        status: &found.status,
    };
    let Some(call) = decide(target, query.as_deref(), &body, &instance)? else {
        return Ok(https::accepted());
    };
    let node = found.status.node_name.as_deref().unwrap_or_default();
    let path = Path {
        namespace: target.namespace,
        name: target.name,
        uid: &found.uid,
        rest: &call.path(),
    };
    match (call, request) {
        (Call::Stream(_), Some(request)) => state.nodes.stream(node, &path, request).await,
        (Call::Stream(_), None) => Err(Failure::bad_request(
            "this is a stream: connect by a WebSocket with subprotocol plain.kubevirt.io",
        )),
        (Call::Get(_), None) => state.nodes.get(node, &path).await,
        (Call::Put(_, body), None) => state.nodes.put(node, &path, body).await,
        (Call::Get(_) | Call::Put(..), Some(_)) => Err(Failure::bad_request("this is no stream")),
    }
}

/// Adds a volume to an instance that runs, or removes one.
async fn change_volumes(
    client: &Client,
    target: &Target<'_>,
    mut found: Found,
    body: &[u8],
) -> Result<Answer, Failure> {
    if !target.rest.is_empty() {
        return Err(Failure::not_found("subresource", target.subresource));
    }
    let request = volumes::Request::read(target.subresource == "addvolume", body)?;
    let params = PatchParams {
        dry_run: request.is_dry_run(),
        ..Default::default()
    };
    for _ in 0..vm::ATTEMPTS {
        if found.status.phase.as_deref() != Some("Running") {
            return Err(Failure::conflict("VMI is not running"));
        }
        let spec = found.object.data.get("spec").cloned().unwrap_or_default();
        let patch = volumes::of_instance(&request, &spec)?;
        if vm::patch_at(client, &found.object, patch, &params).await? {
            return Ok(https::accepted());
        }
        found = read(client, target).await?;
    }
    Err(vm::busy())
}

/// The snapshot that is taken of the instance's VM.
async fn snapshot_of(client: &Client, target: &Target<'_>) -> Result<Option<String>, Failure> {
    let vms = objects::api(client, target.namespace, "VirtualMachine");
    let vm = vms.get_opt(target.name).await;
    let vm = vm.map_err(|error| Failure::of_api_server(&error))?;
    let status: VmStatus = vm
        .map(|vm| objects::part(&vm, "status"))
        .unwrap_or_default();
    Ok(status.snapshot_in_progress.filter(|name| !name.is_empty()))
}

/// Takes back the wish that the instance leaves its node.
async fn cancel_evacuation(client: &Client, target: &Target<'_>) -> Result<Answer, Failure> {
    let vmis = objects::api(client, target.namespace, "VirtualMachineInstance");
    let patch = Patch::Merge(json!({ "status": { "evacuationNodeName": null } }));
    vmis.patch_status(target.name, &PatchParams::default(), &patch)
        .await
        .map_err(|error| Failure::of_api_server(&error))?;
    Ok(https::accepted())
}

fn is_upgrade(request: &Request<Incoming>) -> bool {
    request.headers().contains_key(http::header::UPGRADE)
}

/// What decides about an instance.
struct Found {
    object: DynamicObject,
    uid: String,
    has_owner: bool,
    spec: VmiSpec,
    status: VmiStatus,
}

async fn read(client: &Client, target: &Target<'_>) -> Result<Found, Failure> {
    let failed = |error: kube::Error| Failure::of_api_server(&error);
    if target.resource != VMI {
        let vms = objects::api(client, target.namespace, "VirtualMachine");
        if vms.get_opt(target.name).await.map_err(failed)?.is_none() {
            return Err(Failure::not_found(
                "virtualmachine.kubevirt.io",
                target.name,
            ));
        }
    }
    let vmis = objects::api(client, target.namespace, "VirtualMachineInstance");
    let object = vmis
        .get_opt(target.name)
        .await
        .map_err(failed)?
        .ok_or_else(|| Failure::not_found("virtualmachineinstance.kubevirt.io", target.name))?;
    let owners = object.metadata.owner_references.iter().flatten();
    Ok(Found {
        uid: object.metadata.uid.clone().unwrap_or_default(),
        has_owner: owners
            .into_iter()
            .any(|owner| owner.kind == "VirtualMachine" && owner.controller == Some(true)),
        spec: objects::part(&object, "spec"),
        status: objects::part(&object, "status"),
        object,
    })
}
