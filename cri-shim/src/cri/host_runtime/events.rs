//! Events of the other runtime's containers, for the listeners of the node's.

use std::sync::Arc;
use std::time::Duration;

use k8s_cri::v1::GetEventsRequest;
use k8s_cri::v1::runtime_service_client::RuntimeServiceClient;
use tokio::time::sleep;
use tonic::{Code, Status};
use tracing::{debug, info};

use super::client::HostRuntime;
use crate::cri::node::Node;

/// How long to wait before a stream that ended is asked for again.
const RETRY: Duration = Duration::from_secs(2);

/// Passes events on for ever. A runtime without them (containerd 1.6) is not asked again.
pub(in crate::cri) async fn forward(host: Arc<HostRuntime>, node: Arc<Node>) {
    loop {
        match forward_stream(&host, &node).await {
            Err(error) if error.code() == Code::Unimplemented => {
                info!("the host's runtime has no events of containers");
                return;
            }
            Err(error) => debug!(%error, "no events from the host's runtime"),
            Ok(()) => {}
        }
        sleep(RETRY).await;
    }
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
