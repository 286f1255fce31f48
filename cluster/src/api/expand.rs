//! What a VM is with its instance type and its preference: for a stored VM, and for one that is
//! only given.

use http::StatusCode;
use kube::Client;
use podvisor_cluster_types::{FieldPath, vm::VmSpec};
use serde_json::Value;

use super::{Target, objects};
use crate::{
    https::{self, Answer},
    instancetypes::{self, ExpandError},
    status::Failure,
};

/// The resource to which VMs are given.
pub(super) const RESOURCE: &str = "expand-vm-spec";

/// Expands a stored VM.
pub(super) async fn stored(client: &Client, target: &Target<'_>) -> Result<Answer, Failure> {
    let vm = objects::api(client, target.namespace, "VirtualMachine")
        .get_opt(target.name)
        .await
        .map_err(|error| Failure::of_api_server(&error))?
        .ok_or_else(|| Failure::not_found("virtualmachine.kubevirt.io", target.name))?;
    let vm = serde_json::to_value(&vm)
        .map_err(|error| Failure::internal(format!("the VM cannot be written: {error}")))?;
    expand(client, target.namespace, vm).await
}

/// Expands a VM that somebody gives.
pub(super) async fn given(
    client: &Client,
    namespace: &str,
    body: &[u8],
) -> Result<Answer, Failure> {
    let vm: Value = serde_json::from_slice(body)
        .map_err(|error| Failure::bad_request(format!("the VM is invalid: {error}")))?;
    if vm.get("kind").and_then(Value::as_str) != Some("VirtualMachine") {
        return Err(Failure::bad_request("the body must be a VirtualMachine"));
    }
    expand(client, namespace, vm).await
}

async fn expand(client: &Client, namespace: &str, mut vm: Value) -> Result<Answer, Failure> {
    let spec = vm.get("spec").cloned().unwrap_or_default();
    let spec: VmSpec = serde_json::from_value(spec)
        .map_err(|error| Failure::bad_request(format!("spec is invalid: {error}")))?;
    let (instancetype, preference) = (spec.instancetype.as_ref(), spec.preference.as_ref());
    if instancetype.is_some() || preference.is_some() {
        let failure = |error: ExpandError| match error {
            ExpandError::Request(error) => Failure::of_api_server(&error),
            refused => Failure::bad_request(refused.to_string()),
        };
        let path = FieldPath::new("spec");
        let found = instancetypes::find(client, namespace, instancetype, preference, &path);
        let found = found.await.map_err(failure)?;
        let path = path.child("template.spec");
        if let Some(template) = vm.pointer_mut("/spec/template/spec") {
            found.apply_to(template, &path).map_err(failure)?;
        }
        if let Some(spec) = vm.get_mut("spec").and_then(Value::as_object_mut) {
            spec.remove("instancetype");
            spec.remove("preference");
        }
    }
    Ok(https::json(StatusCode::OK, &vm))
}
