//! Pressure stall information of containers and pods, as read by kubelets since 1.34.

use podvisor_cri_messages::*;

use crate::client::ask;
use crate::fixture::RUNTIME;
use crate::pod::{Container, Pod, strings};
use crate::support::until;

fn of_container(container: &Container) -> ContainerStats {
    let request = ContainerStatsRequest {
        container_id: container.id.clone(),
    };
    let told = ask!(container_stats(request)).unwrap();
    told.stats.unwrap()
}

fn of_pod(pod: &Pod) -> LinuxPodSandboxStats {
    let request = PodSandboxStatsRequest {
        pod_sandbox_id: pod.id.clone(),
    };
    let told = ask!(pod_sandbox_stats(request)).unwrap();
    told.stats.unwrap().linux.unwrap()
}

/// Returns the time for which programs have waited for the CPU, in nanoseconds.
fn waited(cpu: Option<CpuUsage>) -> u64 {
    cpu.unwrap().psi.unwrap().some.unwrap().total
}

#[track_caller]
fn is_sound(psi: Option<PsiStats>) {
    let psi = psi.expect("pressure");
    for data in [psi.full.unwrap(), psi.some.unwrap()] {
        for share in [data.avg10, data.avg60, data.avg300] {
            assert!((0.0..=100.0).contains(&share), "{data:?}");
        }
    }
}

fn is_whole(container: ContainerStats) {
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
    let listed = ask!(list_container_stats(request)).unwrap();
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
    let listed = ask!(list_pod_sandbox_stats(request)).unwrap();
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
