//! Metrics of pods, as a kubelet's `/metrics/cadvisor` has them.

use prost::{Enumeration, Message};

use crate::UInt64Value;

/// How the values of a metric follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum MetricType {
    /// They only grow.
    Counter = 0,
    /// They grow and shrink.
    Gauge = 1,
}

/// Request of
/// [`RuntimeService::list_metric_descriptors`](crate::RuntimeService::list_metric_descriptors).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct ListMetricDescriptorsRequest {}

/// Answer of
/// [`RuntimeService::list_metric_descriptors`](crate::RuntimeService::list_metric_descriptors).
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct ListMetricDescriptorsResponse {
    /// All metrics.
    #[prost(message, repeated, tag = "1")]
    pub descriptors: Vec<MetricDescriptor>,
}

/// What a metric means.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct MetricDescriptor {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// What it means, for people.
    #[prost(string, tag = "2")]
    pub help: String,
    /// Names of its labels.
    #[prost(string, repeated, tag = "3")]
    pub label_keys: Vec<String>,
}

/// Request of
/// [`RuntimeService::list_pod_sandbox_metrics`](crate::RuntimeService::list_pod_sandbox_metrics).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct ListPodSandboxMetricsRequest {}

/// Answer of
/// [`RuntimeService::list_pod_sandbox_metrics`](crate::RuntimeService::list_pod_sandbox_metrics).
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct ListPodSandboxMetricsResponse {
    /// Metrics of all pods.
    #[prost(message, repeated, tag = "1")]
    pub pod_metrics: Vec<PodSandboxMetrics>,
}

/// Request of
/// [`RuntimeService::stream_pod_sandbox_metrics`](crate::RuntimeService::stream_pod_sandbox_metrics).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct StreamPodSandboxMetricsRequest {}

/// One of the answers of
/// [`RuntimeService::stream_pod_sandbox_metrics`](crate::RuntimeService::stream_pod_sandbox_metrics).
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct StreamPodSandboxMetricsResponse {
    /// Metrics of some of the pods.
    #[prost(message, repeated, tag = "1")]
    pub pod_sandbox_metrics: Vec<PodSandboxMetrics>,
}

/// Metrics of a pod and of its containers.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct PodSandboxMetrics {
    /// The id of the pod.
    #[prost(string, tag = "1")]
    pub pod_sandbox_id: String,
    /// Its metrics.
    #[prost(message, repeated, tag = "2")]
    pub metrics: Vec<Metric>,
    /// Metrics of its containers.
    #[prost(message, repeated, tag = "3")]
    pub container_metrics: Vec<ContainerMetrics>,
}

/// Metrics of a container.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct ContainerMetrics {
    /// The id of the container.
    #[prost(string, tag = "1")]
    pub container_id: String,
    /// Its metrics.
    #[prost(message, repeated, tag = "2")]
    pub metrics: Vec<Metric>,
}

/// A value of a metric.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct Metric {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// When it was measured, in nanoseconds since 1970.
    #[prost(int64, tag = "2")]
    pub timestamp: i64,
    /// How values follow each other.
    #[prost(enumeration = "MetricType", tag = "3")]
    pub metric_type: i32,
    /// Values of its labels, in the order of the descriptor's keys.
    #[prost(string, repeated, tag = "4")]
    pub label_values: Vec<String>,
    /// The value.
    #[prost(message, optional, tag = "5")]
    pub value: Option<UInt64Value>,
}
