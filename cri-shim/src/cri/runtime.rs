//! RuntimeService: dispatches each call to the node. Calls without a method here are not served.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use podvisor_cri_messages::*;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::config::HANDLER;
use super::error::CriError;
use super::flights::to_the_end;
use super::metrics;
use super::node::Node;
use crate::blocking::in_place;
use crate::streaming::{self, Streaming};

/// The version of the API that is served.
const API_VERSION: &str = "v1";

/// The service.
#[derive(Debug, Clone)]
pub(super) struct Runtime {
    node: Arc<Node>,
    streaming: Arc<Streaming>,
}

impl Runtime {
    pub(super) fn new(node: Arc<Node>, streaming: Arc<Streaming>) -> Self {
        Self { node, streaming }
    }
}

/// Returns the answer to Status.
pub(super) async fn node_status(node: &Node, is_verbose: bool) -> StatusResponse {
    let config = &node.config;
    let mut info = HashMap::new();
    if is_verbose {
        let details = serde_json::json!({
            "root": config.root,
            "state": config.state,
            "kernel": config.guest.kernel,
            "handlers": config.handler_names().skip(1).collect::<Vec<_>>(),
            "initramfs": config.initramfs,
            "cniConfigDir": config.cni.config_dir,
            "cniBinDirs": config.cni.plugin_dirs,
            "cdiSpecDirs": config.cdi_spec_dirs,
        });
        info.insert("config".to_owned(), details.to_string());
        let jail = serde_json::json!({
            "noMappedUsers": in_place(|| node.no_mapped_users()),
            "podsMissingLayers": node.missing_layers(),
        });
        info.insert("jail".to_owned(), jail.to_string());
    }
    let features = RuntimeHandlerFeatures {
        recursive_read_only_mounts: true,
        user_namespaces: true,
    };
    let handler = |name: &str| RuntimeHandler {
        name: name.to_owned(),
        features: Some(features),
    };
    let runtime = node.runtime_fault();
    let network = node.network_fault().await;
    let conditions = vec![
        condition("RuntimeReady", "GuestNotAvailable", runtime),
        condition("NetworkReady", "NetworkPluginNotReady", network),
        // For administrators: a kubelet looks at the first two alone.
        condition("PodsInCgroups", "OverheadTooSmall", node.cgroup_fault()),
    ];
    StatusResponse {
        status: Some(RuntimeStatus { conditions }),
        info,
        runtime_handlers: config.usable_handlers().map(handler).collect(),
        features: Some(RuntimeFeatures {
            supplemental_groups_policy: true,
            user_namespaces_host_network: false,
            mount_options: true,
        }),
    }
}

/// Returns a condition, which is met if there is no fault.
pub(super) fn condition(kind: &str, reason: &str, fault: Option<String>) -> RuntimeCondition {
    RuntimeCondition {
        r#type: kind.to_owned(),
        status: fault.is_none(),
        reason: if fault.is_some() {
            reason.to_owned()
        } else {
            String::new()
        },
        message: fault.unwrap_or_default(),
    }
}

type Answer<T> = Result<Response<T>, Status>;

impl RuntimeService for Runtime {
    async fn version(&self, _request: Request<VersionRequest>) -> Answer<VersionResponse> {
        Ok(Response::new(VersionResponse {
            // The kubelet's own API version, as other runtimes answer.
            version: "0.1.0".to_owned(),
            runtime_name: HANDLER.to_owned(),
            runtime_version: env!("CARGO_PKG_VERSION").to_owned(),
            runtime_api_version: API_VERSION.to_owned(),
        }))
    }

    async fn status(&self, request: Request<StatusRequest>) -> Answer<StatusResponse> {
        let verbose = request.into_inner().verbose;
        Ok(Response::new(node_status(&self.node, verbose).await))
    }

    async fn runtime_config(
        &self,
        _request: Request<RuntimeConfigRequest>,
    ) -> Answer<RuntimeConfigResponse> {
        // The same test as `sd_booted` of libsystemd.
        let driver = match Path::new("/run/systemd/system").is_dir() {
            true => CgroupDriver::Systemd,
            false => CgroupDriver::Cgroupfs,
        };
        Ok(Response::new(RuntimeConfigResponse {
            linux: Some(LinuxRuntimeConfiguration {
                cgroup_driver: driver.into(),
            }),
        }))
    }

    async fn update_runtime_config(
        &self,
        _request: Request<UpdateRuntimeConfigRequest>,
    ) -> Answer<UpdateRuntimeConfigResponse> {
        // The network add-on assigns the pods' addresses and knows the node's CIDR.
        Ok(Response::new(UpdateRuntimeConfigResponse {}))
    }

    async fn run_pod_sandbox(
        &self,
        request: Request<RunPodSandboxRequest>,
    ) -> Answer<RunPodSandboxResponse> {
        let pod_sandbox_id = self.node.run_pod(request.into_inner()).await?;
        Ok(Response::new(RunPodSandboxResponse { pod_sandbox_id }))
    }

    async fn stop_pod_sandbox(
        &self,
        request: Request<StopPodSandboxRequest>,
    ) -> Answer<StopPodSandboxResponse> {
        self.node
            .stop_pod(&request.into_inner().pod_sandbox_id)
            .await?;
        Ok(Response::new(StopPodSandboxResponse {}))
    }

    async fn remove_pod_sandbox(
        &self,
        request: Request<RemovePodSandboxRequest>,
    ) -> Answer<RemovePodSandboxResponse> {
        self.node
            .remove_pod(&request.into_inner().pod_sandbox_id)
            .await?;
        Ok(Response::new(RemovePodSandboxResponse {}))
    }

    async fn pod_sandbox_status(
        &self,
        request: Request<PodSandboxStatusRequest>,
    ) -> Answer<PodSandboxStatusResponse> {
        let request = request.into_inner();
        let status = self
            .node
            .pod_status(&request.pod_sandbox_id, request.verbose)
            .await?;
        Ok(Response::new(status))
    }

    async fn list_pod_sandbox(
        &self,
        request: Request<ListPodSandboxRequest>,
    ) -> Answer<ListPodSandboxResponse> {
        let items = self.node.list_pods(request.into_inner().filter).await;
        Ok(Response::new(ListPodSandboxResponse { items }))
    }

    async fn create_container(
        &self,
        request: Request<CreateContainerRequest>,
    ) -> Answer<CreateContainerResponse> {
        let container_id = self.node.create_container(request.into_inner()).await?;
        Ok(Response::new(CreateContainerResponse { container_id }))
    }

    async fn start_container(
        &self,
        request: Request<StartContainerRequest>,
    ) -> Answer<StartContainerResponse> {
        self.node
            .start_container(&request.into_inner().container_id)
            .await?;
        Ok(Response::new(StartContainerResponse {}))
    }

    async fn stop_container(
        &self,
        request: Request<StopContainerRequest>,
    ) -> Answer<StopContainerResponse> {
        let request = request.into_inner();
        self.node
            .stop_container(&request.container_id, request.timeout)
            .await?;
        Ok(Response::new(StopContainerResponse {}))
    }

    async fn remove_container(
        &self,
        request: Request<RemoveContainerRequest>,
    ) -> Answer<RemoveContainerResponse> {
        self.node
            .remove_container(&request.into_inner().container_id)
            .await?;
        Ok(Response::new(RemoveContainerResponse {}))
    }

    async fn list_containers(
        &self,
        request: Request<ListContainersRequest>,
    ) -> Answer<ListContainersResponse> {
        let filter = request.into_inner().filter;
        let containers = self.node.list_containers(filter).await;
        Ok(Response::new(ListContainersResponse { containers }))
    }

    async fn container_status(
        &self,
        request: Request<ContainerStatusRequest>,
    ) -> Answer<ContainerStatusResponse> {
        let request = request.into_inner();
        let status = self
            .node
            .container_status(&request.container_id, request.verbose)
            .await?;
        Ok(Response::new(status))
    }

    async fn update_container_resources(
        &self,
        request: Request<UpdateContainerResourcesRequest>,
    ) -> Answer<UpdateContainerResourcesResponse> {
        self.node.update_resources(request.into_inner()).await?;
        Ok(Response::new(UpdateContainerResourcesResponse {}))
    }

    async fn reopen_container_log(
        &self,
        request: Request<ReopenContainerLogRequest>,
    ) -> Answer<ReopenContainerLogResponse> {
        self.node
            .reopen_log(&request.into_inner().container_id)
            .await?;
        Ok(Response::new(ReopenContainerLogResponse {}))
    }

    async fn exec_sync(&self, request: Request<ExecSyncRequest>) -> Answer<ExecSyncResponse> {
        Ok(Response::new(
            self.node.exec_sync(request.into_inner()).await?,
        ))
    }

    async fn exec(&self, request: Request<ExecRequest>) -> Answer<ExecResponse> {
        let request = request.into_inner();
        let container = self.node.settled_container(&request.container_id).await?;
        container.running()?;
        let exec = streaming::ExecRequest {
            container: container.id.clone(),
            command: request.cmd,
            tty: request.tty,
            stdin: request.stdin,
            stdout: request.stdout,
            stderr: request.stderr,
        };
        let url = self.streaming.exec(exec).map_err(CriError::from)?;
        Ok(Response::new(ExecResponse { url }))
    }

    async fn attach(&self, request: Request<AttachRequest>) -> Answer<AttachResponse> {
        let request = request.into_inner();
        let container = self.node.settled_container(&request.container_id).await?;
        container.running()?;
        let attach = streaming::AttachRequest {
            container: container.id.clone(),
            tty: request.tty,
            stdin: request.stdin,
            stdout: request.stdout,
            stderr: request.stderr,
        };
        let url = self.streaming.attach(attach).map_err(CriError::from)?;
        Ok(Response::new(AttachResponse { url }))
    }

    async fn port_forward(
        &self,
        request: Request<PortForwardRequest>,
    ) -> Answer<PortForwardResponse> {
        let request = request.into_inner();
        let pod = self.node.settled_pod(&request.pod_sandbox_id).await?;
        pod.client()?;
        let ports: Result<Vec<u16>, _> = request.port.iter().map(|&port| port.try_into()).collect();
        let ports = ports.map_err(|_| CriError::invalid("port", "a port is from 0 to 65535"))?;
        let forward = streaming::PortForwardRequest {
            pod: pod.id.clone(),
            ports,
        };
        let url = self
            .streaming
            .port_forward(forward)
            .map_err(CriError::from)?;
        Ok(Response::new(PortForwardResponse { url }))
    }

    async fn container_stats(
        &self,
        request: Request<ContainerStatsRequest>,
    ) -> Answer<ContainerStatsResponse> {
        let stats = self
            .node
            .container_stats(&request.into_inner().container_id)
            .await?;
        Ok(Response::new(ContainerStatsResponse { stats: Some(stats) }))
    }

    async fn list_container_stats(
        &self,
        request: Request<ListContainerStatsRequest>,
    ) -> Answer<ListContainerStatsResponse> {
        let stats = self
            .node
            .list_container_stats(request.into_inner().filter)
            .await;
        Ok(Response::new(ListContainerStatsResponse { stats }))
    }

    async fn pod_sandbox_stats(
        &self,
        request: Request<PodSandboxStatsRequest>,
    ) -> Answer<PodSandboxStatsResponse> {
        let stats = self
            .node
            .pod_stats(&request.into_inner().pod_sandbox_id)
            .await?;
        Ok(Response::new(PodSandboxStatsResponse {
            stats: Some(stats),
        }))
    }

    async fn list_pod_sandbox_stats(
        &self,
        request: Request<ListPodSandboxStatsRequest>,
    ) -> Answer<ListPodSandboxStatsResponse> {
        let stats = self.node.list_pod_stats(request.into_inner().filter).await;
        Ok(Response::new(ListPodSandboxStatsResponse { stats }))
    }

    async fn get_container_events(
        &self,
        _request: Request<GetEventsRequest>,
    ) -> Answer<Messages<ContainerEventResponse>> {
        let events = ReceiverStream::new(self.node.events.listen());
        Ok(Response::new(Box::pin(events)))
    }

    async fn update_pod_sandbox_resources(
        &self,
        request: Request<UpdatePodSandboxResourcesRequest>,
    ) -> Answer<UpdatePodSandboxResourcesResponse> {
        let node = Arc::clone(&self.node);
        let work = async move { node.update_pod_resources(request.into_inner()).await };
        to_the_end(work).await?;
        Ok(Response::new(UpdatePodSandboxResourcesResponse {}))
    }

    async fn list_metric_descriptors(
        &self,
        _request: Request<ListMetricDescriptorsRequest>,
    ) -> Answer<ListMetricDescriptorsResponse> {
        Ok(Response::new(ListMetricDescriptorsResponse {
            descriptors: metrics::descriptors(),
        }))
    }

    async fn list_pod_sandbox_metrics(
        &self,
        _request: Request<ListPodSandboxMetricsRequest>,
    ) -> Answer<ListPodSandboxMetricsResponse> {
        Ok(Response::new(ListPodSandboxMetricsResponse {
            pod_metrics: self.node.list_metrics().await,
        }))
    }
}
