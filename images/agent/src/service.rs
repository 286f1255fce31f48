//! The RPC service: checks requests, and has them carried out.
//!
//! A call that the host cancels by closing its connection is dropped at its next wait; work that
//! must not stop half-way runs to its end anyway (see [`Containers`]).

use async_trait::async_trait;
use podvisor_agent_protocol::api::{self, Agent};
use podvisor_agent_protocol::{AgentError, ErrorKind, REQUEST_METADATA};
use ttrpc::asynchronous::TtrpcContext;

use crate::container::Containers;
use crate::container::process::launch::terminal_size;
use crate::forward::Forwarder;
use crate::guest::{Guest, GuestError, clock, cpu, memory, pci};
use crate::power;
use crate::reaper::Reaper;
use crate::stdio::StreamRegistry;

/// Answers the host's requests.
#[derive(Debug)]
pub struct Service {
    guest: Guest,
    containers: Containers,
    forwarder: Forwarder,
}

impl Service {
    /// Creates a service without containers.
    #[must_use]
    pub fn new(reaper: Reaper, hub: StreamRegistry) -> Self {
        Self {
            guest: Guest::default(),
            forwarder: Forwarder::new(hub.clone()),
            containers: Containers::new(reaper, hub),
        }
    }
}

fn invalid(message: &str) -> ttrpc::Error {
    AgentError::new(ErrorKind::InvalidArgument, message).into()
}

/// Answers a request. A failed one is logged, with the request number of the host's log.
fn reply<T>(context: &TtrpcContext, result: Result<T, impl Into<AgentError>>) -> ttrpc::Result<T> {
    result.map_err(|error| {
        let error = error.into();
        let numbers = context.metadata.get(REQUEST_METADATA);
        let request = numbers
            .and_then(|numbers| numbers.first())
            .map(String::as_str);
        let kind = error.kind;
        tracing::info!(?kind, request, message = error.message, "request failed");
        error.into()
    })
}

fn signal_number(signal: u32) -> ttrpc::Result<u8> {
    match u8::try_from(signal) {
        Ok(signal @ 1..=64) => Ok(signal),
        _ => Err(invalid("a signal's number is 1 to 64")),
    }
}

#[async_trait]
impl Agent for Service {
    async fn configure(
        &self,
        context: &TtrpcContext,
        request: api::ConfigureRequest,
    ) -> ttrpc::Result<api::ConfigureResponse> {
        reply(context, self.guest.configure(&request).await)?;
        Ok(api::ConfigureResponse::new())
    }

    async fn create_container(
        &self,
        context: &TtrpcContext,
        request: api::CreateContainerRequest,
    ) -> ttrpc::Result<api::CreateContainerResponse> {
        let created = reply(context, self.containers.create(request).await)?;
        Ok(api::CreateContainerResponse {
            pid: created.pid,
            uid: created.user.uid(),
            gid: created.user.gid(),
            additional_gids: created.user.additional_gids().clone().unwrap_or_default(),
            ..Default::default()
        })
    }

    async fn start_container(
        &self,
        context: &TtrpcContext,
        request: api::StartContainerRequest,
    ) -> ttrpc::Result<api::StartContainerResponse> {
        let started = reply(context, self.containers.start(&request.container_id))?;
        Ok(api::StartContainerResponse {
            started_at_ns: started.at_ns,
            pid: started.pid,
            ..Default::default()
        })
    }

    async fn restart_container(
        &self,
        context: &TtrpcContext,
        request: api::RestartContainerRequest,
    ) -> ttrpc::Result<api::RestartContainerResponse> {
        let pid = reply(context, self.containers.restart(request).await)?;
        Ok(api::RestartContainerResponse {
            pid,
            ..Default::default()
        })
    }

    async fn exec_process(
        &self,
        context: &TtrpcContext,
        request: api::ExecProcessRequest,
    ) -> ttrpc::Result<api::ExecProcessResponse> {
        let pid = reply(context, self.containers.exec(request).await)?;
        Ok(api::ExecProcessResponse {
            pid,
            ..Default::default()
        })
    }

    async fn signal_process(
        &self,
        context: &TtrpcContext,
        request: api::SignalProcessRequest,
    ) -> ttrpc::Result<api::SignalProcessResponse> {
        let signal = signal_number(request.signal)?;
        let (id, exec_id) = (&request.container_id, &request.exec_id);
        reply(
            context,
            match (request.all, exec_id.is_empty()) {
                (true, true) => self.containers.signal_all(id, signal),
                (true, false) => {
                    return Err(invalid("`all` is for containers: leave exec_id empty"));
                }
                (false, _) => self.containers.signal(id, exec_id, signal),
            },
        )?;
        Ok(api::SignalProcessResponse::new())
    }

    async fn wait_process(
        &self,
        context: &TtrpcContext,
        request: api::WaitProcessRequest,
    ) -> ttrpc::Result<api::WaitProcessResponse> {
        let ended = reply(
            context,
            self.containers
                .wait(&request.container_id, &request.exec_id)
                .await,
        )?;
        Ok(ended.into())
    }

    async fn resize_terminal(
        &self,
        context: &TtrpcContext,
        request: api::ResizeTerminalRequest,
    ) -> ttrpc::Result<api::ResizeTerminalResponse> {
        let size = terminal_size(request.columns, request.rows)
            .ok_or_else(|| invalid("a terminal has 1 to 65535 columns and rows"))?;
        reply(
            context,
            self.containers
                .resize(&request.container_id, &request.exec_id, size),
        )?;
        Ok(api::ResizeTerminalResponse::new())
    }

    async fn delete_container(
        &self,
        context: &TtrpcContext,
        request: api::DeleteContainerRequest,
    ) -> ttrpc::Result<api::DeleteContainerResponse> {
        let released_images = reply(context, self.containers.delete(&request.container_id).await)?;
        Ok(api::DeleteContainerResponse {
            released_images,
            ..Default::default()
        })
    }

    async fn release_container(
        &self,
        context: &TtrpcContext,
        request: api::ReleaseContainerRequest,
    ) -> ttrpc::Result<api::ReleaseContainerResponse> {
        reply(
            context,
            self.containers.release(&request.container_id).await,
        )?;
        Ok(api::ReleaseContainerResponse::new())
    }

    async fn list_containers(
        &self,
        _: &TtrpcContext,
        _: api::ListContainersRequest,
    ) -> ttrpc::Result<api::ListContainersResponse> {
        let containers = self.containers.list();
        Ok(api::ListContainersResponse {
            containers,
            ..Default::default()
        })
    }

    async fn container_stats(
        &self,
        context: &TtrpcContext,
        request: api::ContainerStatsRequest,
    ) -> ttrpc::Result<api::ContainerStatsResponse> {
        let stats = self.containers.stats(&request.container_id, request.brief);
        reply(context, stats)
    }

    async fn update_container_resources(
        &self,
        context: &TtrpcContext,
        request: api::UpdateContainerResourcesRequest,
    ) -> ttrpc::Result<api::UpdateContainerResourcesResponse> {
        let (id, json) = (&request.container_id, &request.resources_json);
        reply(context, self.containers.update(id, json))?;
        Ok(api::UpdateContainerResourcesResponse::new())
    }

    async fn port_forward(
        &self,
        context: &TtrpcContext,
        request: api::PortForwardRequest,
    ) -> ttrpc::Result<api::PortForwardResponse> {
        reply(context, self.forwarder.forward(&request).await)?;
        Ok(api::PortForwardResponse::new())
    }

    async fn read_clock(
        &self,
        context: &TtrpcContext,
        _: api::ReadClockRequest,
    ) -> ttrpc::Result<api::ReadClockResponse> {
        let (unix_time_ns, follows_host) = reply(context, clock::read().map_err(GuestError::from))?;
        Ok(api::ReadClockResponse {
            unix_time_ns,
            follows_host,
            ..Default::default()
        })
    }

    async fn forget_files(
        &self,
        context: &TtrpcContext,
        _: api::ForgetFilesRequest,
    ) -> ttrpc::Result<api::ForgetFilesResponse> {
        reply(context, memory::forget_files().await)?;
        Ok(api::ForgetFilesResponse::new())
    }

    async fn set_clock(
        &self,
        context: &TtrpcContext,
        request: api::SetClockRequest,
    ) -> ttrpc::Result<api::SetClockResponse> {
        let set = match request.unix_time_ns {
            0 => clock::gain(request.gain_ns),
            sent => clock::time(sent).and_then(clock::correct),
        };
        reply(context, set.map_err(GuestError::from))?;
        Ok(api::SetClockResponse::new())
    }

    async fn await_pressure(
        &self,
        context: &TtrpcContext,
        _: api::AwaitPressureRequest,
    ) -> ttrpc::Result<api::AwaitPressureResponse> {
        reply(context, self.containers.pressure().await)?;
        Ok(api::AwaitPressureResponse::new())
    }

    async fn scan_devices(
        &self,
        context: &TtrpcContext,
        _: api::ScanDevicesRequest,
    ) -> ttrpc::Result<api::ScanDevicesResponse> {
        reply(context, pci::scan().map_err(GuestError::from))?;
        Ok(api::ScanDevicesResponse::new())
    }

    async fn remove_devices(
        &self,
        context: &TtrpcContext,
        request: api::RemoveDevicesRequest,
    ) -> ttrpc::Result<api::RemoveDevicesResponse> {
        reply(
            context,
            pci::remove(&request.addresses)
                .await
                .map_err(GuestError::from),
        )?;
        Ok(api::RemoveDevicesResponse::new())
    }

    async fn set_cpus(
        &self,
        context: &TtrpcContext,
        request: api::SetCpusRequest,
    ) -> ttrpc::Result<api::SetCpusResponse> {
        reply(
            context,
            cpu::use_first(request.count).map_err(GuestError::from),
        )?;
        Ok(api::SetCpusResponse::new())
    }

    async fn shutdown(
        &self,
        _: &TtrpcContext,
        _: api::ShutdownRequest,
    ) -> ttrpc::Result<api::ShutdownResponse> {
        let containers = self.containers.clone();
        // In a separate task, so that it also completes if the host hangs up immediately.
        let ended = tokio::spawn(async move { containers.delete_all().await });
        tokio::spawn(async move {
            // A task that ends by a panic has already powered the guest off.
            let _ = ended.await;
            // Let the answer out first. It is sent by another task of this thread, which runs
            // before this one has yielded a few times; the host does not depend on it.
            for _ in 0..YIELDS_BEFORE_POWER_OFF {
                tokio::task::yield_now().await;
            }
            power::off();
        });
        Ok(api::ShutdownResponse::new())
    }
}

/// Number of tasks between an answer and its write to the socket, with room to spare.
const YIELDS_BEFORE_POWER_OFF: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signal_numbers_are_those_of_linux() {
        assert_eq!(signal_number(1).unwrap(), 1);
        assert_eq!(signal_number(64).unwrap(), 64);
        for bad in [0, 65, 265, u32::MAX] {
            assert!(signal_number(bad).is_err());
        }
    }
}
