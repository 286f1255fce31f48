//! Freezing a guest's file systems, by the subresources of its instance.

use std::time::Duration;

use kube::Client;
use serde_json::{Value, json};

use crate::controller::error::code;
use crate::objects::VirtualMachineInstance;
use crate::served::{GROUP, VERSIONS};

/// Freezes the guest, for so long at most.
///
/// # Errors
///
/// It says why not. That it is frozen already is no error.
pub(super) async fn freeze(
    client: &Client,
    vmi: &VirtualMachineInstance,
    limit: Duration,
) -> Result<(), String> {
    let limit = format!("{}s", limit.as_secs());
    let body = json!({"unfreezeTimeout": limit}).to_string();
    let Err(error) = put(client, vmi, "freeze", body).await else {
        return Ok(());
    };
    // Agents do not freeze what is frozen, as by a controller that was killed afterwards.
    let request = http::Request::get(path(vmi, "guestosinfo")).body(Vec::new());
    let request = request.map_err(|error| error.to_string())?;
    match client.request::<Value>(request).await {
        Ok(info) if info["fsFreezeStatus"] == "frozen" => Ok(()),
        _ => Err(error.to_string()),
    }
}

/// Thaws the guest.
///
/// # Errors
///
/// It says why not. That it does not run any more is no error.
pub(super) async fn thaw(client: &Client, vmi: &VirtualMachineInstance) -> Result<(), String> {
    match put(client, vmi, "unfreeze", String::new()).await {
        Err(error) if !matches!(code(&error), Some(404 | 409)) => Err(error.to_string()),
        _ => Ok(()),
    }
}

async fn put(
    client: &Client,
    vmi: &VirtualMachineInstance,
    subresource: &str,
    body: String,
) -> Result<(), kube::Error> {
    let request = http::Request::put(path(vmi, subresource))
        .header(http::header::CONTENT_TYPE, "application/json")
        .body(body.into_bytes())
        .map_err(kube::Error::HttpError)?;
    client.request_text(request).await.map(drop)
}

fn path(vmi: &VirtualMachineInstance, subresource: &str) -> String {
    let namespace = vmi.metadata.namespace.as_deref().unwrap_or_default();
    let name = vmi.metadata.name.as_deref().unwrap_or_default();
    format!(
        "/apis/{GROUP}/{}/namespaces/{namespace}/virtualmachineinstances/{name}/{subresource}",
        VERSIONS[0]
    )
}
