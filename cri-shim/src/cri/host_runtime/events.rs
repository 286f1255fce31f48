//! Events of the other runtime's containers, for the listeners of the node's.

use std::sync::Arc;
use std::time::Duration;

use podvisor_cri_messages::{GetEventsRequest, RuntimeServiceClient};
use tokio::time::sleep;
use tonic::{Code, Status};
use tracing::info;

use super::client::HostRuntime;
use crate::cri::node::Node;

/// How long to wait before a stream that ended is asked for again.
const RETRY: Duration = Duration::from_secs(2);

/// The same for a runtime that has no events, such as containerd 1.6: it may be replaced.
const RETRY_UNSUPPORTED: Duration = Duration::from_secs(60);

/// Passes events on for ever. When the runtime's stream ends, those of all listeners do: they list
/// again, and are refused until there is another stream.
pub(in crate::cri) async fn forward(host: Arc<HostRuntime>, node: Arc<Node>) {
    let mut last = None;
    loop {
        host.set_events_fault(None);
        let ended = forward_stream(&host, &node).await;
        let fault = match ended {
            Err(error) if error.code() == Code::Unimplemented => error,
            Err(error) => away(error.message()),
            Ok(()) => away("the stream ended"),
        };
        let code = fault.code();
        if last != Some(code) {
            info!(%fault, "no events of containers from the host's runtime");
        }
        last = Some(code);
        host.set_events_fault(Some(fault));
        node.events.close();
        sleep(match code {
            Code::Unimplemented => RETRY_UNSUPPORTED,
            _ => RETRY,
        })
        .await;
    }
}

fn away(reason: &str) -> Status {
    Status::unavailable(format!("no events come from the host's runtime: {reason}"))
}

async fn forward_stream(host: &HostRuntime, node: &Node) -> Result<(), Status> {
    let mut client = RuntimeServiceClient::new(host.channel());
    let events = client.get_container_events(GetEventsRequest {}).await?;
    let mut events = events.into_inner();
    while let Some(event) = events.message().await? {
        node.events.send(|| event);
    }
    Ok(())
}
