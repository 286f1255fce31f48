//! Links of a VM's cards that come and go while it runs.

use podvisor_node_api::messages::SetLinksRequest;
use tonic::Status;
use tracing::info;

use super::control::status;
use super::plug::named;
use crate::cri::node::Node;
use crate::cri::vm;

impl Node {
    /// Takes the link from cards of a VM, and gives all others one.
    pub(super) async fn set_links_of_vm(&self, request: SetLinksRequest) -> Result<(), Status> {
        let (pod, machine) = self.running_vm(&named(request.vm)?).await?;
        let annotations = pod.record().config.annotations;
        let down = vm::interfaces_of(&annotations, request.down)?.map_err(|name| {
            let shown: String = name.chars().take(64).collect();
            Status::invalid_argument(format!("down: the virtual machine has no card {shown:?}"))
        })?;
        let client = pod.client()?;
        let set = client.set_links(&machine.id, down.clone()).await;
        set.map_err(status)?;
        info!(pod = pod.id, machine = machine.id, ?down, "links are set");
        Ok(())
    }
}
