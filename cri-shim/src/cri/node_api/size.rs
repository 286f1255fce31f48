//! CPUs and memory that come while a VM runs.

use std::time::Duration;

use podvisor_node_api::messages::{ResizeVmAnswer, ResizeVmRequest};
use tonic::Status;
use tracing::info;

use super::control::status;
use super::plug::named;
use crate::cri::node::Node;

/// How long a guest may take to use memory that is plugged in.
const PLUG_TIMEOUT: Duration = Duration::from_secs(10);

/// The unit in which guests get memory.
const MEMORY_STEP: u64 = 2 << 20;

impl Node {
    /// Gives a VM more CPUs or memory.
    pub(super) async fn resize_running_vm(
        &self,
        request: ResizeVmRequest,
    ) -> Result<ResizeVmAnswer, Status> {
        let ResizeVmRequest { vm, vcpus, memory } = request;
        let (pod, machine) = self.running_vm(&named(vm)?).await?;
        let size = pod.record().size;
        let client = pod.client()?;
        if vcpus > 0 {
            let count = u8::try_from(vcpus).map_err(|_| {
                Status::invalid_argument(format!("vcpus: {vcpus} is more than any machine has"))
            })?;
            client.set_vcpus(count).await.map_err(status)?;
            info!(pod = pod.id, machine = machine.id, vcpus, "CPUs are set");
        }
        if memory == 0 {
            return Ok(ResizeVmAnswer::default());
        }
        let more = memory.checked_sub(size.memory).ok_or_else(|| {
            Status::failed_precondition(format!(
                "memory: the virtual machine was made for at least {} bytes, and {memory} are \
                 fewer",
                size.memory
            ))
        })?;
        let more = more.div_ceil(MEMORY_STEP).saturating_mul(MEMORY_STEP);
        if more > size.growth {
            return Err(Status::failed_precondition(format!(
                "memory: the virtual machine was made for at most {} bytes, and {memory} are more",
                size.memory.saturating_add(size.growth)
            )));
        }
        let grown = client
            .grow(size.memory, more, size.growth, PLUG_TIMEOUT)
            .await
            .map_err(status)?;
        info!(
            pod = pod.id,
            machine = machine.id,
            more,
            grown,
            "memory is set"
        );
        Ok(ResizeVmAnswer {
            memory: size.memory.saturating_add(grown),
        })
    }
}
