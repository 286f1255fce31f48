//! RuntimeService.

use crate::service::service;
use crate::{
    AttachRequest, AttachResponse, CheckpointContainerRequest, CheckpointContainerResponse,
    CheckpointPodRequest, CheckpointPodResponse, ContainerEventResponse, ContainerStatsRequest,
    ContainerStatsResponse, ContainerStatusRequest, ContainerStatusResponse,
    CreateContainerRequest, CreateContainerResponse, ExecRequest, ExecResponse, ExecSyncRequest,
    ExecSyncResponse, GetEventsRequest, ListContainerStatsRequest, ListContainerStatsResponse,
    ListContainersRequest, ListContainersResponse, ListMetricDescriptorsRequest,
    ListMetricDescriptorsResponse, ListPodSandboxMetricsRequest, ListPodSandboxMetricsResponse,
    ListPodSandboxRequest, ListPodSandboxResponse, ListPodSandboxStatsRequest,
    ListPodSandboxStatsResponse, PodSandboxStatsRequest, PodSandboxStatsResponse,
    PodSandboxStatusRequest, PodSandboxStatusResponse, PortForwardRequest, PortForwardResponse,
    RemoveContainerRequest, RemoveContainerResponse, RemovePodSandboxRequest,
    RemovePodSandboxResponse, ReopenContainerLogRequest, ReopenContainerLogResponse,
    RestorePodRequest, RestorePodResponse, RunPodSandboxRequest, RunPodSandboxResponse,
    RuntimeConfigRequest, RuntimeConfigResponse, StartContainerRequest, StartContainerResponse,
    StatusRequest, StatusResponse, StopContainerRequest, StopContainerResponse,
    StopPodSandboxRequest, StopPodSandboxResponse, StreamContainerStatsRequest,
    StreamContainerStatsResponse, StreamContainersRequest, StreamContainersResponse,
    StreamPodSandboxMetricsRequest, StreamPodSandboxMetricsResponse, StreamPodSandboxStatsRequest,
    StreamPodSandboxStatsResponse, StreamPodSandboxesRequest, StreamPodSandboxesResponse,
    UpdateContainerResourcesRequest, UpdateContainerResourcesResponse,
    UpdatePodSandboxResourcesRequest, UpdatePodSandboxResourcesResponse,
    UpdateRuntimeConfigRequest, UpdateRuntimeConfigResponse, VersionRequest, VersionResponse,
};

service! {
    /// Pods and their containers.
    ///
    /// What is not implemented answers that, without a message.
    RuntimeService, RuntimeServiceServer, RuntimeServiceClient, "runtime.v1.RuntimeService";
    /// Tells the runtime's name and version.
    version: "Version", VersionRequest => VersionResponse;
    /// Makes a pod and starts it.
    run_pod_sandbox: "RunPodSandbox", RunPodSandboxRequest => RunPodSandboxResponse;
    /// Stops a pod and its containers, and takes its network back. It may be called again.
    stop_pod_sandbox: "StopPodSandbox", StopPodSandboxRequest => StopPodSandboxResponse;
    /// Removes a pod and its containers. It may be called again.
    remove_pod_sandbox: "RemovePodSandbox", RemovePodSandboxRequest => RemovePodSandboxResponse;
    /// Tells the state of a pod.
    pod_sandbox_status: "PodSandboxStatus", PodSandboxStatusRequest => PodSandboxStatusResponse;
    /// Lists pods.
    list_pod_sandbox: "ListPodSandbox", ListPodSandboxRequest => ListPodSandboxResponse;
    /// Lists pods in several messages.
    stream_pod_sandboxes: "StreamPodSandboxes", StreamPodSandboxesRequest =>
        stream StreamPodSandboxesResponse;
    /// Makes a container in a pod.
    create_container: "CreateContainer", CreateContainerRequest => CreateContainerResponse;
    /// Starts a container.
    start_container: "StartContainer", StartContainerRequest => StartContainerResponse;
    /// Stops a container, and kills it after a time. It may be called again.
    stop_container: "StopContainer", StopContainerRequest => StopContainerResponse;
    /// Removes a container, and kills it if it runs. It may be called again.
    remove_container: "RemoveContainer", RemoveContainerRequest => RemoveContainerResponse;
    /// Lists containers.
    list_containers: "ListContainers", ListContainersRequest => ListContainersResponse;
    /// Lists containers in several messages.
    stream_containers: "StreamContainers", StreamContainersRequest =>
        stream StreamContainersResponse;
    /// Tells the state of a container.
    container_status: "ContainerStatus", ContainerStatusRequest => ContainerStatusResponse;
    /// Changes the limits of a container.
    update_container_resources: "UpdateContainerResources", UpdateContainerResourcesRequest =>
        UpdateContainerResourcesResponse;
    /// Opens the log of a container anew, after it was renamed.
    reopen_container_log: "ReopenContainerLog", ReopenContainerLogRequest =>
        ReopenContainerLogResponse;
    /// Runs a command in a container and tells what it wrote.
    exec_sync: "ExecSync", ExecSyncRequest => ExecSyncResponse;
    /// Prepares a URL for a command in a container.
    exec: "Exec", ExecRequest => ExecResponse;
    /// Prepares a URL for the streams of a container.
    attach: "Attach", AttachRequest => AttachResponse;
    /// Prepares a URL for connections to ports of a pod.
    port_forward: "PortForward", PortForwardRequest => PortForwardResponse;
    /// Tells the statistics of a container.
    container_stats: "ContainerStats", ContainerStatsRequest => ContainerStatsResponse;
    /// Lists statistics of containers.
    list_container_stats: "ListContainerStats", ListContainerStatsRequest =>
        ListContainerStatsResponse;
    /// Lists statistics of containers in several messages.
    stream_container_stats: "StreamContainerStats", StreamContainerStatsRequest =>
        stream StreamContainerStatsResponse;
    /// Tells the statistics of a pod.
    pod_sandbox_stats: "PodSandboxStats", PodSandboxStatsRequest => PodSandboxStatsResponse;
    /// Lists statistics of pods.
    list_pod_sandbox_stats: "ListPodSandboxStats", ListPodSandboxStatsRequest =>
        ListPodSandboxStatsResponse;
    /// Lists statistics of pods in several messages.
    stream_pod_sandbox_stats: "StreamPodSandboxStats", StreamPodSandboxStatsRequest =>
        stream StreamPodSandboxStatsResponse;
    /// Tells the runtime settings of the kubelet.
    update_runtime_config: "UpdateRuntimeConfig", UpdateRuntimeConfigRequest =>
        UpdateRuntimeConfigResponse;
    /// Tells the state of the runtime.
    status: "Status", StatusRequest => StatusResponse;
    /// Saves a container to a file.
    checkpoint_container: "CheckpointContainer", CheckpointContainerRequest =>
        CheckpointContainerResponse;
    /// Saves a pod to a file.
    checkpoint_pod: "CheckpointPod", CheckpointPodRequest => CheckpointPodResponse;
    /// Makes a pod of a file that it was saved to.
    restore_pod: "RestorePod", RestorePodRequest => RestorePodResponse;
    /// Sends events of containers as they happen.
    get_container_events: "GetContainerEvents", GetEventsRequest => stream ContainerEventResponse;
    /// Lists the metrics of pods.
    list_metric_descriptors: "ListMetricDescriptors", ListMetricDescriptorsRequest =>
        ListMetricDescriptorsResponse;
    /// Lists values of the metrics of all pods.
    list_pod_sandbox_metrics: "ListPodSandboxMetrics", ListPodSandboxMetricsRequest =>
        ListPodSandboxMetricsResponse;
    /// Lists values of the metrics of all pods in several messages.
    stream_pod_sandbox_metrics: "StreamPodSandboxMetrics", StreamPodSandboxMetricsRequest =>
        stream StreamPodSandboxMetricsResponse;
    /// Tells how the runtime is set up.
    runtime_config: "RuntimeConfig", RuntimeConfigRequest => RuntimeConfigResponse;
    /// Changes the limits of a pod.
    update_pod_sandbox_resources: "UpdatePodSandboxResources", UpdatePodSandboxResourcesRequest =>
        UpdatePodSandboxResourcesResponse;
}
