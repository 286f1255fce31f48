//! Requests to the agent and its answers, converted between our types and the protocol's.

use std::collections::BTreeMap;

use oci_spec::runtime::Process;
use podvisor_agent_protocol::{ExitStatus, api};

use crate::psi::{Psi, PsiData, PsiStats};
use crate::types::{
    ContainerStats, GuestContainer, GuestNetwork, GuestStats, Interface, Neighbour, ProcessExit,
    Route, SupplementalGroups,
};

/// The configuration of a guest.
#[derive(Debug, Clone, Default)]
pub struct GuestConfig {
    /// Its host name.
    pub hostname: String,
    /// Its interfaces and routes.
    pub network: GuestNetwork,
    /// Directories of the host to mount.
    pub shares: Vec<Share>,
    /// Sysctls by their dotted names.
    pub sysctls: BTreeMap<String, String>,
}

/// A directory of the host that the guest mounts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Share {
    /// The virtio-fs device's tag.
    pub tag: String,
    /// The mount point in the guest.
    pub path: String,
}

impl Share {
    pub(super) fn request(&self) -> api::Share {
        api::Share {
            tag: self.tag.clone(),
            path: self.path.clone(),
            ..Default::default()
        }
    }
}

/// A container in the form of a request to the agent.
#[derive(Debug)]
pub struct AgentContainer {
    /// What goes to the guest as it is.
    pub config: GuestContainer,
    /// The serial number of the disk that its image is on.
    pub image_serial: String,
    /// Its streams; see [`Streams::request`](crate::Streams::request).
    pub stdio: api::Stdio,
    /// Devices in addition to those that every container has.
    pub devices: Vec<api::Device>,
}

/// An additional process in the form of a request to the agent.
#[derive(Debug)]
pub(crate) struct AgentExec {
    pub(crate) id: String,
    pub(crate) exec_id: String,
    pub(crate) process: Process,
    pub(crate) user: String,
    pub(crate) supplemental_groups: SupplementalGroups,
    pub(crate) stdio: api::Stdio,
}

/// How a process ended; a signal is distinguished from an exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AgentExit {
    /// Its exit code or the signal that killed it.
    pub status: ExitStatus,
    /// Nanoseconds since 1970-01-01 UTC by the guest's clock.
    pub exited_at_ns: u64,
    /// The guest had no memory left for it.
    pub oom_killed: bool,
}

impl From<AgentExit> for ProcessExit {
    fn from(exit: AgentExit) -> Self {
        Self {
            code: exit.status.shell_code().into(),
            exited_at_ns: exit.exited_at_ns,
            oom_killed: exit.oom_killed,
            of_machine: false,
        }
    }
}

fn mac_text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// Converts an interface; `present_mac` is its card's address until it gets its own.
pub(super) fn interface(interface: &Interface, present_mac: Option<[u8; 6]>) -> api::Interface {
    api::Interface {
        mac: mac_text(interface.mac),
        present_mac: present_mac.map(mac_text).unwrap_or_default(),
        name: interface.name.clone(),
        addresses: interface.addresses.clone(),
        mtu: interface.mtu.into(),
        no_arp: interface.no_arp,
        ..Default::default()
    }
}

pub(super) fn route(route: &Route) -> api::Route {
    api::Route {
        destination: route.destination.clone(),
        gateway: route.gateway.clone().unwrap_or_default(),
        interface: route.interface.clone(),
        mtu: route.mtu.unwrap_or_default(),
        metric: route.metric.unwrap_or_default(),
        source: route.source.clone().unwrap_or_default(),
        ..Default::default()
    }
}

pub(super) fn neighbour(neighbour: &Neighbour) -> api::Neighbour {
    api::Neighbour {
        address: neighbour.address.clone(),
        mac: mac_text(neighbour.mac),
        interface: neighbour.interface.clone(),
        ..Default::default()
    }
}

pub(super) fn groups(groups: SupplementalGroups) -> api::SupplementalGroups {
    match groups {
        SupplementalGroups::Default => api::SupplementalGroups::SUPPLEMENTAL_GROUPS_UNSPECIFIED,
        SupplementalGroups::Merge => api::SupplementalGroups::SUPPLEMENTAL_GROUPS_MERGE,
        SupplementalGroups::Strict => api::SupplementalGroups::SUPPLEMENTAL_GROUPS_STRICT,
    }
}

pub(super) fn stats(answer: &api::ContainerStatsResponse) -> ContainerStats {
    let (cpu, memory) = (&answer.cpu, &answer.memory);
    let (pids, io, writable) = (&answer.pids, &answer.io, &answer.writable);
    ContainerStats {
        timestamp_ns: answer.timestamp_ns,
        cpu_usage_us: cpu.usage_us,
        cpu_user_us: cpu.user_us,
        cpu_system_us: cpu.system_us,
        cpu_throttled_us: cpu.throttled_us,
        cpu_periods: cpu.periods,
        cpu_throttled_periods: cpu.throttled_periods,
        memory_usage_bytes: memory.usage_bytes,
        memory_working_set_bytes: memory.working_set_bytes,
        memory_limit_bytes: memory.limit_bytes,
        memory_anon_bytes: memory.anon_bytes,
        memory_file_bytes: memory.file_bytes,
        memory_mapped_file_bytes: memory.mapped_file_bytes,
        memory_kernel_bytes: memory.kernel_bytes,
        memory_peak_bytes: memory.peak_bytes,
        memory_limit_hits: memory.limit_hits,
        page_faults: memory.page_faults,
        major_page_faults: memory.major_page_faults,
        oom_kills: memory.oom_kills,
        pids_current: pids.current,
        pids_limit: pids.limit,
        processes: pids.processes,
        descriptors: pids.descriptors,
        descriptor_limit: pids.descriptor_limit,
        sockets: pids.sockets,
        tasks_running: pids.running,
        tasks_sleeping: pids.sleeping,
        tasks_stopped: pids.stopped,
        tasks_uninterruptible: pids.uninterruptible,
        io_read_bytes: io.read_bytes,
        io_write_bytes: io.write_bytes,
        io_read_operations: io.read_operations,
        io_write_operations: io.write_operations,
        writable_bytes: writable.bytes,
        writable_used_bytes: writable.bytes.saturating_sub(writable.free_bytes),
        writable_inodes: writable.inodes,
        writable_used_inodes: writable.inodes.saturating_sub(writable.free_inodes),
        psi: psi(&answer.psi),
        guest_psi: psi(&answer.guest_psi),
        guest: guest(answer),
    }
}

fn guest(answer: &api::ContainerStatsResponse) -> Option<GuestStats> {
    let (cpu, memory) = (answer.guest_cpu.as_ref()?, answer.guest_memory.as_ref()?);
    Some(GuestStats {
        cpu_usage_us: cpu.usage_us,
        memory_usage_bytes: memory.usage_bytes,
        memory_working_set_bytes: memory.working_set_bytes,
        memory_anon_bytes: memory.anon_bytes,
        page_faults: memory.page_faults,
        major_page_faults: memory.major_page_faults,
    })
}

fn psi(psi: &api::Psi) -> Psi {
    let data = |data: &api::PsiData| PsiData {
        total_us: data.total_us,
        avg10: data.avg10.into(),
        avg60: data.avg60.into(),
        avg300: data.avg300.into(),
    };
    let stats = |stats: &api::PsiStats| PsiStats {
        some: data(&stats.some),
        full: data(&stats.full),
    };
    Psi {
        cpu: psi.cpu.as_ref().map(stats),
        memory: psi.memory.as_ref().map(stats),
        io: psi.io.as_ref().map(stats),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pressure_that_the_guest_does_not_tell_is_none_and_shares_are_bounded() {
        let mut answer = api::ContainerStatsResponse::new();
        assert_eq!(stats(&answer).psi, Psi::default());
        assert_eq!(stats(&answer).guest, None);
        let io = answer
            .psi
            .mut_or_insert_default()
            .io
            .mut_or_insert_default();
        let some = io.some.mut_or_insert_default();
        (some.total_us, some.avg10, some.avg60) = (u64::MAX, u32::MAX, 50);
        let stats = stats(&answer);
        assert_eq!((stats.psi.cpu, stats.guest_psi), (None, Psi::default()));
        let io = stats.psi.io.unwrap();
        assert_eq!((io.some.total_us, io.some.avg60), (u64::MAX, 50.into()));
        assert_eq!(io.some.avg10, 10_000.into());
        assert_eq!(io.full, PsiData::default());
    }
}
