//! Statistics of containers and pods with pressure stall information (Kubernetes 1.34).
//!
//! The messages are complete: elements of a list cannot be merged from two encodings, as other
//! answers are.

use std::pin::Pin;
use std::sync::Arc;

use k8s_cri::v1::{
    ContainerAttributes, ContainerStatsRequest, FilesystemUsage, ListContainerStatsRequest,
    ListPodSandboxStatsRequest, NetworkUsage, PodSandboxAttributes, PodSandboxStatsRequest,
    ProcessUsage, SwapUsage, UInt64Value,
};
use prost::Message;
use tonic::Status;
use tonic::server::UnaryService;

use crate::cri::node::Node;
use crate::sandbox;

#[derive(Clone, PartialEq, Message)]
pub(in crate::cri) struct ContainerStats {
    #[prost(message, optional, tag = "1")]
    pub(in crate::cri) attributes: Option<ContainerAttributes>,
    #[prost(message, optional, tag = "2")]
    pub(in crate::cri) cpu: Option<CpuUsage>,
    #[prost(message, optional, tag = "3")]
    pub(in crate::cri) memory: Option<MemoryUsage>,
    #[prost(message, optional, tag = "4")]
    pub(in crate::cri) writable_layer: Option<FilesystemUsage>,
    #[prost(message, optional, tag = "5")]
    pub(in crate::cri) swap: Option<SwapUsage>,
    #[prost(message, optional, tag = "6")]
    pub(in crate::cri) io: Option<IoUsage>,
}

#[derive(Clone, PartialEq, Message)]
pub(in crate::cri) struct PodSandboxStats {
    #[prost(message, optional, tag = "1")]
    pub(in crate::cri) attributes: Option<PodSandboxAttributes>,
    #[prost(message, optional, tag = "2")]
    pub(in crate::cri) linux: Option<LinuxPodSandboxStats>,
}

#[derive(Clone, PartialEq, Message)]
pub(in crate::cri) struct LinuxPodSandboxStats {
    #[prost(message, optional, tag = "1")]
    pub(in crate::cri) cpu: Option<CpuUsage>,
    #[prost(message, optional, tag = "2")]
    pub(in crate::cri) memory: Option<MemoryUsage>,
    #[prost(message, optional, tag = "3")]
    pub(in crate::cri) network: Option<NetworkUsage>,
    #[prost(message, optional, tag = "4")]
    pub(in crate::cri) process: Option<ProcessUsage>,
    #[prost(message, repeated, tag = "5")]
    pub(in crate::cri) containers: Vec<ContainerStats>,
    #[prost(message, optional, tag = "6")]
    pub(in crate::cri) io: Option<IoUsage>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(in crate::cri) struct CpuUsage {
    #[prost(int64, tag = "1")]
    pub(in crate::cri) timestamp: i64,
    #[prost(message, optional, tag = "2")]
    pub(in crate::cri) usage_core_nano_seconds: Option<UInt64Value>,
    #[prost(message, optional, tag = "3")]
    pub(in crate::cri) usage_nano_cores: Option<UInt64Value>,
    #[prost(message, optional, tag = "4")]
    pub(in crate::cri) psi: Option<PsiStats>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(in crate::cri) struct MemoryUsage {
    #[prost(int64, tag = "1")]
    pub(in crate::cri) timestamp: i64,
    #[prost(message, optional, tag = "2")]
    pub(in crate::cri) working_set_bytes: Option<UInt64Value>,
    #[prost(message, optional, tag = "3")]
    pub(in crate::cri) available_bytes: Option<UInt64Value>,
    #[prost(message, optional, tag = "4")]
    pub(in crate::cri) usage_bytes: Option<UInt64Value>,
    #[prost(message, optional, tag = "5")]
    pub(in crate::cri) rss_bytes: Option<UInt64Value>,
    #[prost(message, optional, tag = "6")]
    pub(in crate::cri) page_faults: Option<UInt64Value>,
    #[prost(message, optional, tag = "7")]
    pub(in crate::cri) major_page_faults: Option<UInt64Value>,
    #[prost(message, optional, tag = "8")]
    pub(in crate::cri) psi: Option<PsiStats>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(in crate::cri) struct IoUsage {
    #[prost(int64, tag = "1")]
    pub(in crate::cri) timestamp: i64,
    #[prost(message, optional, tag = "2")]
    pub(in crate::cri) psi: Option<PsiStats>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(in crate::cri) struct PsiStats {
    #[prost(message, optional, tag = "1")]
    pub(in crate::cri) full: Option<PsiData>,
    #[prost(message, optional, tag = "2")]
    pub(in crate::cri) some: Option<PsiData>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(in crate::cri) struct PsiData {
    /// In nanoseconds; the kernel reports microseconds.
    #[prost(uint64, tag = "1")]
    pub(in crate::cri) total: u64,
    /// In percent, as are the others.
    #[prost(double, tag = "2")]
    pub(in crate::cri) avg10: f64,
    #[prost(double, tag = "3")]
    pub(in crate::cri) avg60: f64,
    #[prost(double, tag = "4")]
    pub(in crate::cri) avg300: f64,
}

#[derive(Clone, PartialEq, Message)]
pub(in crate::cri) struct ContainerStatsResponse {
    #[prost(message, optional, tag = "1")]
    stats: Option<ContainerStats>,
}

#[derive(Clone, PartialEq, Message)]
pub(in crate::cri) struct ListContainerStatsResponse {
    #[prost(message, repeated, tag = "1")]
    stats: Vec<ContainerStats>,
}

#[derive(Clone, PartialEq, Message)]
pub(in crate::cri) struct PodSandboxStatsResponse {
    #[prost(message, optional, tag = "1")]
    stats: Option<PodSandboxStats>,
}

#[derive(Clone, PartialEq, Message)]
pub(in crate::cri) struct ListPodSandboxStatsResponse {
    #[prost(message, repeated, tag = "1")]
    stats: Vec<PodSandboxStats>,
}

impl From<sandbox::PsiStats> for PsiStats {
    fn from(stats: sandbox::PsiStats) -> Self {
        let data = |data: sandbox::PsiData| PsiData {
            total: data.total_us.saturating_mul(1000),
            avg10: data.avg10.percent(),
            avg60: data.avg60.percent(),
            avg300: data.avg300.percent(),
        };
        Self {
            full: Some(data(stats.full)),
            some: Some(data(stats.some)),
        }
    }
}

/// Handler of the statistics calls.
#[derive(Debug)]
pub(super) struct StatsCall(pub(super) Arc<Node>);

type Answered<M> = Pin<Box<dyn Future<Output = Result<tonic::Response<M>, Status>> + Send>>;

impl UnaryService<ContainerStatsRequest> for StatsCall {
    type Response = ContainerStatsResponse;
    type Future = Answered<Self::Response>;

    fn call(&mut self, request: tonic::Request<ContainerStatsRequest>) -> Self::Future {
        let node = Arc::clone(&self.0);
        Box::pin(async move {
            let stats = Some(
                node.container_stats(&request.get_ref().container_id)
                    .await?,
            );
            Ok(tonic::Response::new(ContainerStatsResponse { stats }))
        })
    }
}

impl UnaryService<ListContainerStatsRequest> for StatsCall {
    type Response = ListContainerStatsResponse;
    type Future = Answered<Self::Response>;

    fn call(&mut self, request: tonic::Request<ListContainerStatsRequest>) -> Self::Future {
        let node = Arc::clone(&self.0);
        Box::pin(async move {
            let stats = node.list_container_stats(request.into_inner().filter).await;
            Ok(tonic::Response::new(ListContainerStatsResponse { stats }))
        })
    }
}

impl UnaryService<PodSandboxStatsRequest> for StatsCall {
    type Response = PodSandboxStatsResponse;
    type Future = Answered<Self::Response>;

    fn call(&mut self, request: tonic::Request<PodSandboxStatsRequest>) -> Self::Future {
        let node = Arc::clone(&self.0);
        Box::pin(async move {
            let stats = Some(node.pod_stats(&request.get_ref().pod_sandbox_id).await?);
            Ok(tonic::Response::new(PodSandboxStatsResponse { stats }))
        })
    }
}

impl UnaryService<ListPodSandboxStatsRequest> for StatsCall {
    type Response = ListPodSandboxStatsResponse;
    type Future = Answered<Self::Response>;

    fn call(&mut self, request: tonic::Request<ListPodSandboxStatsRequest>) -> Self::Future {
        let node = Arc::clone(&self.0);
        Box::pin(async move {
            let stats = node.list_pod_stats(request.into_inner().filter).await;
            Ok(tonic::Response::new(ListPodSandboxStatsResponse { stats }))
        })
    }
}

/// Converts a message to the message crate's type.
pub(in crate::cri) fn known<K: Message + Default>(newer: &impl Message) -> Result<K, Status> {
    let known = K::decode(&*newer.encode_to_vec());
    known.map_err(|error| Status::internal(error.to_string()))
}

#[cfg(test)]
mod tests {
    use k8s_cri::v1;

    use super::*;

    const DATA: PsiData = PsiData {
        total: 300,
        avg10: 0.5,
        avg60: 1.0,
        avg300: 2.0,
    };

    /// `DATA` as encoded by protoc.
    const DATA_BYTES: &[u8] = b"\x08\xac\x02\
        \x11\0\0\0\0\0\0\xe0\x3f\x19\0\0\0\0\0\0\xf0\x3f\x21\0\0\0\0\0\0\0\x40";

    fn stats() -> ContainerStats {
        let number = |value| Some(UInt64Value { value });
        ContainerStats {
            attributes: Some(ContainerAttributes {
                id: "c".to_owned(),
                ..ContainerAttributes::default()
            }),
            cpu: Some(CpuUsage {
                timestamp: 1,
                usage_core_nano_seconds: number(2),
                usage_nano_cores: number(3),
                psi: None,
            }),
            memory: Some(MemoryUsage {
                timestamp: 4,
                working_set_bytes: number(5),
                available_bytes: number(6),
                usage_bytes: number(7),
                rss_bytes: number(8),
                page_faults: number(9),
                major_page_faults: number(10),
                psi: None,
            }),
            writable_layer: Some(FilesystemUsage {
                timestamp: 11,
                ..FilesystemUsage::default()
            }),
            swap: Some(SwapUsage {
                timestamp: 12,
                ..SwapUsage::default()
            }),
            io: None,
        }
    }

    fn pod_stats() -> PodSandboxStats {
        let ContainerStats { cpu, memory, .. } = stats();
        PodSandboxStats {
            attributes: Some(PodSandboxAttributes {
                id: "p".to_owned(),
                ..PodSandboxAttributes::default()
            }),
            linux: Some(LinuxPodSandboxStats {
                cpu,
                memory,
                network: Some(NetworkUsage {
                    timestamp: 13,
                    ..NetworkUsage::default()
                }),
                process: Some(ProcessUsage {
                    timestamp: 14,
                    ..ProcessUsage::default()
                }),
                containers: vec![stats(), stats()],
                io: None,
            }),
        }
    }

    #[test]
    fn what_is_not_newer_is_where_the_crate_of_messages_has_it() {
        let container: v1::ContainerStats = known(&stats()).unwrap();
        assert_eq!(container.encode_to_vec(), stats().encode_to_vec());
        let pod: v1::PodSandboxStats = known(&pod_stats()).unwrap();
        assert_eq!(pod.encode_to_vec(), pod_stats().encode_to_vec());
    }

    #[test]
    fn pressure_is_where_the_api_of_kubernetes_has_it() {
        assert_eq!(DATA.encode_to_vec(), DATA_BYTES);
        let psi = Some(PsiStats {
            full: Some(DATA),
            some: None,
        });
        let field = |tag: u8, message: &[u8]| {
            let length = u8::try_from(message.len()).unwrap();
            [&[tag << 3 | 2, length], message].concat()
        };
        let full = field(1, DATA_BYTES);
        let some = PsiStats {
            full: None,
            some: Some(DATA),
        };
        assert_eq!(some.encode_to_vec(), field(2, DATA_BYTES));
        let timestamp = 0;
        let cpu = CpuUsage {
            psi,
            ..CpuUsage::default()
        };
        assert_eq!(cpu.encode_to_vec(), field(4, &full));
        let memory = MemoryUsage {
            psi,
            ..MemoryUsage::default()
        };
        assert_eq!(memory.encode_to_vec(), field(8, &full));
        let io = Some(IoUsage { timestamp, psi });
        let io_bytes = field(6, &field(2, &full));
        let container = ContainerStats {
            io,
            ..ContainerStats::default()
        };
        assert_eq!(container.encode_to_vec(), io_bytes);
        let linux = LinuxPodSandboxStats {
            io,
            ..LinuxPodSandboxStats::default()
        };
        assert_eq!(linux.encode_to_vec(), io_bytes);
    }
}
