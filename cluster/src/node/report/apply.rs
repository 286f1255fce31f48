//! Writes the status of the instance that a VM is of, and of no other of its name.
//!
//! Server-side apply to a status does not compare unique ids, but versions. So the version is asked
//! for first: by a patch that tests the unique id and changes nothing, as a node may not read
//! instances. The version of each answer serves for the next write.

use kube::{
    Api, Client,
    api::{DynamicObject, Patch, PatchParams},
    core::{ApiResource, GroupVersionKind},
};
use podvisor_node_api::messages::VmName;
use serde_json::{Value, json};

/// The manager of the fields that are written.
const MANAGER: &str = "podvisor-node";

/// How often a write is tried at once when others write, too.
const ATTEMPTS: u32 = 5;

/// Why a status was not written.
#[derive(Debug, thiserror::Error)]
pub(super) enum ApplyError {
    /// The API server does not take it.
    #[error("the API server refused the status")]
    Api(#[from] kube::Error),
    /// The VM is of an instance that is no more.
    #[error("another instance has the name")]
    Other,
    /// Somebody else writes all the time.
    #[error("the instance changed {ATTEMPTS} times while its status was written")]
    Busy,
}

fn code(error: &kube::Error) -> Option<u16> {
    match error {
        kube::Error::Api(status) => Some(status.code),
        _ => None,
    }
}

/// Writes a status by server-side apply; `version` is one in which the instance was the VM's.
///
/// # Errors
///
/// See [`ApplyError`].
pub(super) async fn status(
    client: Client,
    vm: &VmName,
    version: &mut Option<String>,
    status: &Value,
) -> Result<DynamicObject, ApplyError> {
    let gvk = GroupVersionKind::gvk("kubevirt.io", "v1", "VirtualMachineInstance");
    let resource = ApiResource::from_gvk(&gvk);
    let api: Api<DynamicObject> = Api::namespaced_with(client, &vm.namespace, &resource);
    let params = PatchParams::apply(MANAGER).force();
    for _ in 0..ATTEMPTS {
        let base = match version.take() {
            Some(version) => version,
            None => look(&api, vm).await?,
        };
        let patch = json!({
            "apiVersion": "kubevirt.io/v1",
            "kind": "VirtualMachineInstance",
            "metadata": { "name": vm.name, "resourceVersion": base },
            "status": status,
        });
        match api
            .patch_status(&vm.name, &params, &Patch::Apply(patch))
            .await
        {
            Ok(object) => {
                version.clone_from(&object.metadata.resource_version);
                return Ok(object);
            }
            // Somebody else wrote meanwhile, or it is another instance.
            Err(error) if code(&error) == Some(409) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(ApplyError::Busy)
}

/// Returns the version of the VM's instance.
async fn look(api: &Api<DynamicObject>, vm: &VmName) -> Result<String, ApplyError> {
    let test = json!([{ "op": "test", "path": "/metadata/uid", "value": vm.uid }]);
    let patch = serde_json::from_value(test).map_err(kube::Error::SerdeError)?;
    let looked = api
        .patch_status(&vm.name, &PatchParams::default(), &Patch::Json::<()>(patch))
        .await;
    match looked {
        Ok(object) => Ok(object.metadata.resource_version.unwrap_or_default()),
        Err(error) if code(&error) == Some(422) => Err(ApplyError::Other),
        Err(error) => Err(error.into()),
    }
}
