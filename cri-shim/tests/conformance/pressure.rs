//! Pressure stall information of containers and pods, as read by kubelets since 1.34.

use k8s_cri::v1::*;

use crate::client::{ask, raw};
use crate::fixture::RUNTIME;
use crate::pod::{Container, Pod, strings};
use crate::support::until;

#[derive(Clone, PartialEq, prost::Message)]
struct ToldOfContainer {
    #[prost(message, optional, tag = "1")]
    stats: Option<PsiOfContainer>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ToldOfContainers {
    #[prost(message, repeated, tag = "1")]
    stats: Vec<PsiOfContainer>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct PsiOfContainer {
    #[prost(message, optional, tag = "1")]
    attributes: Option<ContainerAttributes>,
    #[prost(message, optional, tag = "2")]
    cpu: Option<PsiOfCpu>,
    #[prost(message, optional, tag = "3")]
    memory: Option<PsiOfMemory>,
    #[prost(message, optional, tag = "6")]
    io: Option<PsiOfIo>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ToldOfPod {
    #[prost(message, optional, tag = "1")]
    stats: Option<StatsOfPod>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ToldOfPods {
    #[prost(message, repeated, tag = "1")]
    stats: Vec<StatsOfPod>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct StatsOfPod {
    #[prost(message, optional, tag = "2")]
    linux: Option<PsiOfPod>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct PsiOfPod {
    #[prost(message, optional, tag = "1")]
    cpu: Option<PsiOfCpu>,
    #[prost(message, optional, tag = "2")]
    memory: Option<PsiOfMemory>,
    #[prost(message, repeated, tag = "5")]
    containers: Vec<PsiOfContainer>,
    #[prost(message, optional, tag = "6")]
    io: Option<PsiOfIo>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct PsiOfCpu {
    #[prost(message, optional, tag = "4")]
    psi: Option<Psi>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct PsiOfMemory {
    #[prost(message, optional, tag = "8")]
    psi: Option<Psi>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct PsiOfIo {
    #[prost(int64, tag = "1")]
    timestamp: i64,
    #[prost(message, optional, tag = "2")]
    psi: Option<Psi>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Psi {
    #[prost(message, optional, tag = "1")]
    full: Option<Data>,
    #[prost(message, optional, tag = "2")]
    some: Option<Data>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Data {
    #[prost(uint64, tag = "1")]
    total: u64,
    #[prost(double, tag = "2")]
    avg10: f64,
    #[prost(double, tag = "3")]
    avg60: f64,
    #[prost(double, tag = "4")]
    avg300: f64,
}

fn of_container(container: &Container) -> PsiOfContainer {
    let request = ContainerStatsRequest {
        container_id: container.id.clone(),
    };
    let path = "/runtime.v1.RuntimeService/ContainerStats";
    let told: ToldOfContainer = raw(path, request).unwrap();
    told.stats.unwrap()
}

fn of_pod(pod: &Pod) -> PsiOfPod {
    let request = PodSandboxStatsRequest {
        pod_sandbox_id: pod.id.clone(),
    };
    let path = "/runtime.v1.RuntimeService/PodSandboxStats";
    let told: ToldOfPod = raw(path, request).unwrap();
    told.stats.unwrap().linux.unwrap()
}

/// Returns the time for which programs have waited for the CPU, in nanoseconds.
fn waited(cpu: Option<PsiOfCpu>) -> u64 {
    cpu.unwrap().psi.unwrap().some.unwrap().total
}

#[track_caller]
fn is_sound(psi: Option<Psi>) {
    let psi = psi.expect("pressure");
    for data in [psi.full.unwrap(), psi.some.unwrap()] {
        for share in [data.avg10, data.avg60, data.avg300] {
            assert!((0.0..=100.0).contains(&share), "{data:?}");
        }
    }
}

fn is_whole(container: PsiOfContainer) {
    is_sound(container.cpu.unwrap().psi);
    is_sound(container.memory.unwrap().psi);
    let io = container.io.unwrap();
    assert!(io.timestamp > 0);
    is_sound(io.psi);
}

#[test]
fn guest_a_container_that_its_cpu_limit_holds_up_is_under_pressure() {
    // Other runtimes do not report these yet.
    if !RUNTIME.is_vm {
        return;
    }
    let pod = Pod::shared();
    let container = pod.start("burning", |config| {
        config.command = strings(&["sh", "-c", "while :; do :; done"]);
        let resources = LinuxContainerResources {
            cpu_period: 100_000,
            cpu_quota: 30_000,
            ..Default::default()
        };
        config.linux.get_or_insert_default().resources = Some(resources);
    });
    let first = waited(of_container(&container).cpu);
    until("pressure of a container that waits", || {
        waited(of_container(&container).cpu) > first
    });
    // The kernel's own value is in microseconds.
    let counted = || -> u64 {
        let text = container.sh("cat /sys/fs/cgroup/cpu.pressure");
        let some = text.lines().find(|line| line.starts_with("some ")).unwrap();
        let (_, total) = some.split_once("total=").unwrap();
        total.trim().parse().unwrap()
    };
    let before = counted() * 1000;
    let told = waited(of_container(&container).cpu);
    let after = counted() * 1000;
    assert!((before..=after).contains(&told), "{before} {told} {after}");

    is_whole(of_container(&container));
    let request = ListContainerStatsRequest {
        filter: Some(ContainerStatsFilter {
            id: container.id.clone(),
            ..Default::default()
        }),
    };
    let path = "/runtime.v1.RuntimeService/ListContainerStats";
    let listed: ToldOfContainers = raw(path, request).unwrap();
    let [listed] = <[_; 1]>::try_from(listed.stats).unwrap();
    is_whole(listed);

    let first = waited(of_pod(pod).cpu);
    until("pressure of a pod whose container waits", || {
        waited(of_pod(pod).cpu) > first
    });
    let request = ListPodSandboxStatsRequest {
        filter: Some(PodSandboxStatsFilter {
            id: pod.id.clone(),
            ..Default::default()
        }),
    };
    let path = "/runtime.v1.RuntimeService/ListPodSandboxStats";
    let listed: ToldOfPods = raw(path, request).unwrap();
    let [listed] = <[_; 1]>::try_from(listed.stats).unwrap();
    let listed = listed.linux.unwrap();
    is_sound(listed.cpu.unwrap().psi);
    is_sound(listed.memory.unwrap().psi);
    is_sound(listed.io.unwrap().psi);
    let of_it = listed.containers.into_iter().find(|listed| {
        let attributes = listed.attributes.as_ref();
        attributes.is_some_and(|attributes| attributes.id == container.id)
    });
    is_whole(of_it.unwrap());

    until("a second of pressure among the metrics", || {
        let pods = ask!(list_pod_sandbox_metrics(ListPodSandboxMetricsRequest {}));
        let pods = pods.unwrap().pod_metrics.into_iter();
        let mut metrics = pods
            .flat_map(|pod| pod.container_metrics)
            .filter(|metrics| metrics.container_id == container.id)
            .flat_map(|metrics| metrics.metrics);
        let name = "container_pressure_cpu_waiting_seconds_total";
        let metric = metrics.find(|metric| metric.name == name).expect(name);
        metric.value.unwrap().value >= 1
    });
    container.stop(0);
    container.remove();
}
