//! Creates a pod sandbox: its record, its directory, then its network and virtual machine at the
//! same time. If one of them fails, all are undone.

use std::collections::BTreeMap;
use std::sync::Arc;

use podvisor_cri_messages::{ContainerEventType, PodSandboxConfig, Protocol, RunPodSandboxRequest};
use serde_json::{Value, json};
use tracing::{info, warn};

use crate::blocking::in_place;
use crate::cni::{self, Capabilities, PodIdentity};
use crate::cri::config::{GuestSettings, HANDLER};
use crate::cri::error::{CriError, ObjectKind, Result};
use crate::cri::limits::{PodBounds, cgroup, parse_quantity};
use crate::cri::node::{GuestResources, Node, Pod, now, private_dir};
use crate::cri::state::{GuestSize, PodPhase, PodRecord};
use crate::cri::{resolver, spec, vm, volumes};
use crate::launch;
use crate::machine::Transport;
use crate::sandbox::{GuestKind, LaunchConfig, MachineLimits, random_id};

impl Node {
    /// RunPodSandbox.
    pub(in crate::cri) async fn run_pod(
        self: &Arc<Self>,
        request: RunPodSandboxRequest,
    ) -> Result<String> {
        let config = request.config.clone().unwrap_or_default();
        check(&config)?;
        let guest = self.guest(&request.runtime_handler)?;
        if vm::is_vm(&request.runtime_handler, &config.annotations)? {
            self.check_vm_pod(&config)?;
        } else if !guest.kernel.exists() {
            let handler = match request.runtime_handler.as_str() {
                "" => HANDLER,
                name => name,
            };
            return Err(CriError::NoKernel {
                handler: handler.to_owned(),
                kernel: guest.kernel.clone(),
            });
        }
        let id = random_id().map_err(CriError::host("make up an id"))?;
        let record = PodRecord {
            id: id.clone(),
            config,
            handler: request.runtime_handler.clone(),
            created_at: now(),
            phase: PodPhase::Creating,
            addresses: Vec::new(),
            size: GuestSize::default(),
            memory_volumes: Some(Vec::new()),
            fills_volumes: true,
            extra: 0,
            network: None,
        };
        let name = crate::cri::node::pod_name(&record);
        let node = Arc::clone(self);
        let work = || async move { node.make_pod(record).await };
        match self.pod_flights.join(&name, request, work).await {
            Some(made) => made,
            None => Err(CriError::NameTaken {
                kind: ObjectKind::Pod,
                name,
                id: "another request".to_owned(),
            }),
        }
    }

    pub(in crate::cri) fn guest(&self, handler: &str) -> Result<&GuestSettings> {
        self.config.guest(handler).ok_or_else(|| {
            let known: Vec<&str> = self.config.handler_names().skip(1).collect();
            let reason = format!("{handler:?} is unknown; there are: {}", known.join(", "));
            CriError::invalid("runtime_handler", reason)
        })
    }

    async fn make_pod(self: Arc<Self>, record: PodRecord) -> Result<String> {
        let pod = Pod::new(record);
        let _turn = pod.turn.lock().await;
        if let Some(other) = self.pod_of_name(&pod)
            && other.phase() == PodPhase::Creating
        {
            // It is from an earlier daemon, and is being undone.
            drop(other.turn.lock().await);
        }
        self.add_new_pod(&pod)?;
        let made = match pod.write(&self.database) {
            Ok(()) => self.try_make_pod(&pod).await,
            Err(error) => Err(error.into()),
        };
        match made {
            Ok(()) => {
                info!(pod = pod.id, "the pod sandbox is ready");
                Ok(pod.id.clone())
            }
            Err(error) => {
                warn!(pod = pod.id, %error, "failed to create the pod sandbox");
                self.undo_pod(&pod).await;
                Err(error)
            }
        }
    }

    async fn try_make_pod(self: &Arc<Self>, pod: &Arc<Pod>) -> Result<()> {
        let record = pod.record();
        let config = &record.config;
        let dir = self.dir(&pod.id);
        private_dir(&dir)?;
        let shared = dir.join(volumes::SHARED);
        private_dir(&shared)?;
        let metadata = config.metadata.clone().unwrap_or_default();
        let identity = PodIdentity {
            id: pod.id.clone(),
            name: metadata.name,
            namespace: metadata.namespace,
            uid: metadata.uid,
        };
        let guest = self.guest(&record.handler)?;
        let is_vm = record.is_vm();
        let size = match is_vm {
            true => vm::size(config)?,
            false => {
                let (vcpus, memory) = guest.sizes.of_pod(config, PodBounds::of(config));
                GuestSize {
                    memory,
                    growth: guest.sizes.growth,
                    vcpus,
                    max_vcpus: guest.sizes.most_vcpus(vcpus),
                }
            }
        };
        let (vcpus, memory) = (size.vcpus, size.memory);
        let limits = MachineLimits {
            vcpus,
            memory,
            growth: size.growth,
        };
        let hostname = resolver::hostname(config)?;
        let users = spec::users_of(config)?;
        let has_shares = !is_vm || vm::may_share(&config.annotations)?;
        let share_users = in_place(|| self.share_users(&identity.uid));
        let machine = |nics| LaunchConfig {
            id: pod.id.clone(),
            hostname: hostname.clone(),
            dir: dir.clone(),
            guest: match is_vm {
                true => GuestKind::OwnOs,
                false => GuestKind::Agent,
            },
            kernel: guest.kernel.clone(),
            initramfs: self.config.initramfs.clone(),
            vcpus,
            max_vcpus: size.max_vcpus,
            memory,
            growth: size.growth,
            image_slots: guest.sizes.image_slots,
            nics,
            shared_dir: has_shares.then(|| shared.clone()),
            users,
            share_users,
            console: self.config.console(&pod.id).filter(|_| !is_vm),
            events: None,
            sysctls: sysctls(config),
            jail: self.config.jail,
            required_layers: self.config.required_layers.clone(),
            // With clones, the cost of PCI at boot does not matter.
            transport: match self.config.templates {
                Some(_) => Transport::Pci,
                None => Transport::Mmio,
            },
            psi: true,
            templates: self.config.templates.clone().filter(|_| !is_vm),
            snapshot: None,
            cgroup_parent: Some(cgroup::parent(config, limits)),
            io_limits: Vec::new(),
        };
        let begin = async {
            let form = match is_vm {
                true => vm::card_form(&config.annotations)?,
                false => cni::CardForm::Joined,
            };
            let prepared = self.cni.prepare(&pod.id)?.with_form(form);
            let capabilities = capabilities(config);
            let begun = launch::begin(&self.cni, &identity, capabilities, prepared, machine);
            let mut begun = begun.await?;
            if is_vm {
                vm::set_cards(&config.annotations, &mut begun.network)?;
            }
            // A kubelet would take such a pod for one whose network is gone, and make it anew for
            // ever.
            if begun.addresses.is_empty() {
                return Err(CriError::NoAddress);
            }
            let network = is_vm.then(|| begun.network.clone());
            let client = begun.launching.finish(begun.network).await?;
            Ok::<_, CriError>((client, begun.addresses, network))
        };
        // A rebooted node starts all of its pods at the same time.
        let (client, addresses, network) = self.starts.begin(begin).await?;
        *pod.given.lock().await = GuestResources {
            memory: Some(0),
            vcpus: Some(vcpus),
        };
        pod.set_client(Some(client.clone()));
        pod.update(&self.database, |record| {
            record.addresses = addresses;
            record.size = size;
            record.network = network;
            record.phase = PodPhase::Ready;
        })?;
        self.set_importance(pod);
        self.watch_pod(pod, client);
        self.emit_pod(pod, ContainerEventType::ContainerCreatedEvent);
        self.emit_pod(pod, ContainerEventType::ContainerStartedEvent);
        Ok(())
    }

    /// Undoes what is left of a pod whose creation failed; if that fails, too, it stays known as a
    /// stopped pod, for the kubelet to remove.
    pub(super) async fn undo_pod(self: &Arc<Self>, pod: &Arc<Pod>) {
        let undone = match self.tear_down(pod).await {
            Ok(()) => self.forget_pod(pod),
            Err(error) => Err(error),
        };
        if let Err(error) = undone {
            warn!(pod = pod.id, %error, "failed to clean up the pod; will retry on removal");
            let reason = Some("it could not be made, nor removed".to_owned());
            self.note_pod(pod, |record| {
                if record.phase == PodPhase::Creating {
                    record.phase = PodPhase::stopped(reason);
                }
            });
        }
    }
}

/// Validates a request before anything is created.
fn check(config: &PodSandboxConfig) -> Result<()> {
    let metadata = config.metadata.as_ref();
    let metadata = metadata.ok_or_else(|| CriError::invalid("config.metadata", "it is missing"))?;
    for (field, value) in [
        ("config.metadata.name", &metadata.name),
        ("config.metadata.namespace", &metadata.namespace),
        ("config.metadata.uid", &metadata.uid),
    ] {
        if value.is_empty() {
            return Err(CriError::invalid(field, "it is empty"));
        }
    }
    if !config.log_directory.is_empty() && !config.log_directory.starts_with('/') {
        return Err(CriError::invalid(
            "config.log_directory",
            "it is not an absolute path",
        ));
    }
    for direction in DIRECTIONS {
        let text = config.annotations.get(&bandwidth_annotation(direction));
        if let Some(text) = text.filter(|text| parse_quantity(text).is_none()) {
            let text: String = text.chars().take(64).collect();
            let reason = format!("{text:?} is no bandwidth; write bits per second, such as 10M");
            return Err(CriError::invalid("config.annotations", reason));
        }
    }
    resolver::hostname(config)?;
    resolver::resolv_conf(config.dns_config.as_ref(), &crate::cni::Dns::default())?;
    spec::check_sandbox(config)?;
    for mapping in &config.port_mappings {
        let is_port = |port: i32| u16::try_from(port).is_ok();
        if !is_port(mapping.container_port) || !is_port(mapping.host_port) {
            return Err(CriError::invalid(
                "config.port_mappings",
                "a port is from 0 to 65535",
            ));
        }
        if Protocol::try_from(mapping.protocol).is_err() {
            return Err(CriError::invalid(
                "config.port_mappings.protocol",
                "it is unknown",
            ));
        }
    }
    Ok(())
}

/// Directions of a pod's traffic that can be limited.
const DIRECTIONS: [&str; 2] = ["ingress", "egress"];

/// The capability of plugins that read a pod's annotations.
const POD_ANNOTATIONS: &str = "io.kubernetes.cri.pod-annotations";

fn bandwidth_annotation(direction: &str) -> String {
    format!("kubernetes.io/{direction}-bandwidth")
}

/// Returns the capabilities for CNI's plugins.
fn capabilities(config: &PodSandboxConfig) -> Capabilities {
    let mut capabilities = Capabilities::new();
    let mappings = config.port_mappings.iter();
    let mappings = mappings.filter_map(|mapping| {
        let protocol = Protocol::try_from(mapping.protocol).unwrap_or(Protocol::Tcp);
        // Numbers out of range were rejected by `check`.
        let port = |port| u16::try_from(port).ok();
        Some(cni::PortMapping {
            host_port: port(mapping.host_port).filter(|port| *port > 0)?,
            pod_port: port(mapping.container_port)?,
            protocol: format!("{protocol:?}").to_ascii_lowercase(),
            host_ip: mapping.host_ip.clone(),
        })
    });
    capabilities.extend(cni::port_mappings(&mappings.collect::<Vec<_>>()));
    if let Some(dns) = &config.dns_config {
        let dns = json!({
            "servers": dns.servers, "searches": dns.searches, "options": dns.options,
        });
        capabilities.insert("dns".to_owned(), dns);
    }
    let mut bandwidth = serde_json::Map::new();
    for direction in DIRECTIONS {
        let annotation = bandwidth_annotation(direction);
        // Invalid rates were rejected by `check`.
        let text = config.annotations.get(&annotation);
        if let Some(rate) = text.and_then(|text| parse_quantity(text)) {
            bandwidth.insert(format!("{direction}Rate"), rate.into());
            bandwidth.insert(
                format!("{direction}Burst"),
                u64::from(i32::MAX.unsigned_abs()).into(),
            );
        }
    }
    if !bandwidth.is_empty() {
        capabilities.insert("bandwidth".to_owned(), Value::Object(bandwidth));
    }
    // Two that are not CNI's conventions, but those of other runtimes.
    capabilities.insert(POD_ANNOTATIONS.to_owned(), json!(config.annotations));
    let linux = config.linux.as_ref();
    if let Some(linux) = linux.filter(|linux| !linux.cgroup_parent.is_empty()) {
        capabilities.insert("cgroupPath".to_owned(), json!(linux.cgroup_parent));
    }
    capabilities
}

fn sysctls(config: &PodSandboxConfig) -> BTreeMap<String, String> {
    let linux = config.linux.as_ref();
    let sysctls = linux.map(|linux| linux.sysctls.clone()).unwrap_or_default();
    sysctls.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use podvisor_cri_messages::{
        DnsConfig, LinuxPodSandboxConfig, PodSandboxMetadata, PortMapping,
    };

    use super::*;

    fn config() -> PodSandboxConfig {
        PodSandboxConfig {
            metadata: Some(PodSandboxMetadata {
                name: "web".to_owned(),
                uid: "u".to_owned(),
                namespace: "default".to_owned(),
                attempt: 0,
            }),
            ..PodSandboxConfig::default()
        }
    }

    #[test]
    fn requests_without_a_name_are_refused() {
        check(&config()).unwrap();
        assert!(check(&PodSandboxConfig::default()).is_err());
        let mut nameless = config();
        nameless.metadata.as_mut().unwrap().name.clear();
        assert!(check(&nameless).is_err());
        let mut relative = config();
        relative.log_directory = "logs".to_owned();
        assert!(check(&relative).is_err());
        let mut no_rate = config();
        no_rate
            .annotations
            .insert(bandwidth_annotation("ingress"), "fast".to_owned());
        assert!(check(&no_rate).is_err());
    }

    #[test]
    fn plugins_get_host_ports_bandwidth_and_name_servers() {
        let mut config = config();
        config.port_mappings = vec![
            PortMapping {
                container_port: 80,
                host_port: 8080,
                ..PortMapping::default()
            },
            PortMapping {
                container_port: 81,
                ..PortMapping::default()
            },
        ];
        config.dns_config = Some(DnsConfig {
            servers: vec!["1.1.1.1".to_owned()],
            ..DnsConfig::default()
        });
        let annotation = "kubernetes.io/egress-bandwidth".to_owned();
        config.annotations.insert(annotation, "10M".to_owned());
        config.linux = Some(LinuxPodSandboxConfig {
            cgroup_parent: "/kubepods/pod1".to_owned(),
            ..LinuxPodSandboxConfig::default()
        });
        let capabilities = capabilities(&config);
        assert_eq!(
            Value::Object(capabilities),
            json!({
                "portMappings": [{
                    "hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": "",
                }],
                "dns": {"servers": ["1.1.1.1"], "searches": [], "options": []},
                "bandwidth": {"egressRate": 10_000_000, "egressBurst": i32::MAX},
                "io.kubernetes.cri.pod-annotations": {"kubernetes.io/egress-bandwidth": "10M"},
                "cgroupPath": "/kubepods/pod1",
            })
        );
    }
}
