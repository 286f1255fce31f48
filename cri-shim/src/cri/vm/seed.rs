//! What cloud-init in the guest is told: who it is, its network, its keys and files.

use std::fs::{self, File};
use std::io::Read as _;
use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use podvisor_cloud_init::{
    DeviceLink, Dhcp, GuestFile, GuestMount, GuestSeed, Network, NetworkConfig, NetworkNic,
    NetworkRoute,
};
use podvisor_cri_messages::ContainerConfig;
use podvisor_network::cni::Dns;
use podvisor_network::guest::GuestNetwork;

use super::disks::BlockVolumes;
use super::honour::FileMount;
use crate::cri::error::{CriError, Result};
use crate::cri::resolver;
use crate::cri::state::PodRecord;
use crate::cri::vm_spec::VmSpec;

/// Most bytes of all files together.
const MAX_BYTES: u64 = 16 << 20;

/// Most files.
const MAX_FILES: usize = 1024;

/// Most directories above a file, within its mount.
const MAX_DEPTH: usize = 16;

/// What a guest's seed is made of.
pub(super) struct SeedSource<'a> {
    pub(super) spec: VmSpec,
    pub(super) pod: &'a PodRecord,
    pub(super) container: &'a ContainerConfig,
    pub(super) devices: &'a BlockVolumes,
    pub(super) files: Vec<GuestFile>,
    /// Shared directories.
    pub(super) mounts: Vec<GuestMount>,
    pub(super) dns: Dns,
    /// The guest agent's program, if it is to be installed.
    pub(super) agent: Option<Vec<u8>>,
}

impl SeedSource<'_> {
    /// Puts the seed together.
    pub(super) fn seed(self) -> Result<GuestSeed> {
        let Self {
            spec,
            pod,
            container,
            devices,
            files,
            mounts,
            dns,
            agent,
        } = self;
        let metadata = pod.config.metadata.clone().unwrap_or_default();
        // A root that outlives its pods must not keep an earlier pod's addresses: it asks by DHCP.
        let asks = spec.force_dhcp || devices.root.is_some();
        let network = match (&pod.network, asks) {
            (Some(network), false) => NetworkConfig::Version2(network_of(network, dns)),
            _ => NetworkConfig::None,
        };
        Ok(GuestSeed {
            form: spec.form,
            instance_id: format!("{}.{}", metadata.name, metadata.namespace),
            host_name: match resolver::hostname(&pod.config)? {
                name if name.is_empty() => metadata.name,
                name => name,
            },
            ssh_keys: spec.ssh_keys,
            meta_data: spec.meta_data,
            user_data: spec.user_data,
            network,
            files,
            environment: container
                .envs
                .iter()
                .map(|env| (env.key.clone(), env.text()))
                .collect(),
            devices: devices
                .others
                .iter()
                .map(|device| DeviceLink {
                    path: device.path.clone(),
                    serial: device.disk.serial.clone(),
                })
                .collect(),
            mounts,
            agent,
        })
    }
}

/// The network as cloud-init's documents have it. Addresses and routes are CNI's, which were
/// checked; one that is not readable is left out, and the guest asks for it by DHCP.
fn network_of(network: &GuestNetwork, dns: Dns) -> Network {
    let nics = network.interfaces.iter().map(|interface| NetworkNic {
        name: interface.name.clone(),
        mac: interface.mac,
        mtu: Some(interface.mtu),
        addresses: interface
            .addresses
            .iter()
            .filter_map(|text| prefix(text))
            .collect(),
        routes: network
            .routes
            .iter()
            .filter(|route| route.interface == interface.name)
            .filter_map(|route| {
                Some(NetworkRoute {
                    destination: prefix(&route.destination)?,
                    gateway: match &route.gateway {
                        Some(gateway) => Some(gateway.parse().ok()?),
                        None => None,
                    },
                    metric: route.metric,
                })
            })
            .collect(),
        dhcp: Dhcp::No,
    });
    Network {
        nics: nics.collect(),
        name_servers: dns
            .nameservers
            .iter()
            .filter_map(|text| text.parse().ok())
            .collect(),
        search: dns.search,
    }
}

/// Reads an address with the length of its prefix.
fn prefix(text: &str) -> Option<(IpAddr, u8)> {
    let (address, length) = text.split_once('/')?;
    Some((address.parse().ok()?, length.parse().ok()?))
}

/// Reads the files of mounts. It blocks.
pub(super) fn read_files(mounts: &[FileMount]) -> Result<Vec<GuestFile>> {
    let mut reader = FileReader {
        files: Vec::new(),
        left: MAX_BYTES,
    };
    for mount in mounts {
        reader.read(Path::new(&mount.from), &mount.to, 0)?;
    }
    Ok(reader.files)
}

struct FileReader {
    files: Vec<GuestFile>,
    left: u64,
}

impl FileReader {
    /// Reads a file, or the files below a directory. Links are followed: a kubelet's volumes
    /// consist of them.
    fn read(&mut self, from: &Path, to: &str, depth: usize) -> Result<()> {
        let failed = || CriError::io("read the file for the guest", from);
        let metadata = fs::metadata(from).map_err(failed())?;
        if metadata.is_dir() {
            if depth >= MAX_DEPTH {
                return Err(too_much(to, "directories in each other"));
            }
            let mut names = Vec::new();
            for entry in fs::read_dir(from).map_err(failed())? {
                names.push(entry.map_err(failed())?.file_name());
                if names.len() > MAX_FILES {
                    return Err(too_much(to, "files"));
                }
            }
            names.sort();
            for name in names {
                let Some(name) = name.to_str() else { continue };
                // The kubelet's own directories of versions.
                if !name.starts_with("..") {
                    let below = format!("{}/{name}", to.trim_end_matches('/'));
                    self.read(&from.join(name), &below, depth + 1)?;
                }
            }
            return Ok(());
        }
        if !metadata.is_file() {
            return Ok(());
        }
        if self.files.len() >= MAX_FILES {
            return Err(too_much(to, "files"));
        }
        let mut content = Vec::new();
        let file = File::open(from).map_err(failed())?;
        let count = file
            .take(self.left + 1)
            .read_to_end(&mut content)
            .map_err(failed())?;
        self.left = self
            .left
            .checked_sub(count as u64)
            .ok_or_else(|| too_much(to, "bytes"))?;
        self.files.push(GuestFile {
            path: to.to_owned(),
            content,
            mode: metadata.permissions().mode() & 0o777,
        });
        Ok(())
    }
}

fn too_much(path: &str, what: &str) -> CriError {
    let shown: String = path.chars().take(256).collect();
    let reason = format!(
        "{shown:?}: too many {what} for a virtual machine: at most {MAX_FILES} files of {} MiB \
         together, in {MAX_DEPTH} directories",
        MAX_BYTES >> 20
    );
    CriError::invalid("config.mounts", reason)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use podvisor_cri_messages::{KeyValue, PodSandboxMetadata};
    use podvisor_network::guest::{Interface, Route};

    use super::*;
    use crate::cri::state::NodeFile;
    use crate::cri::state::pod_record;
    use crate::cri::state::{DiskContent, DiskRecord};
    use crate::cri::vm::disks::BlockVolume;

    #[test]
    fn a_seed_names_the_pod_its_network_its_environment_and_its_disks() {
        let mut pod = pod_record("p");
        pod.config.metadata = Some(PodSandboxMetadata {
            name: "vm".to_owned(),
            namespace: "default".to_owned(),
            ..Default::default()
        });
        pod.network = Some(GuestNetwork {
            interfaces: vec![Interface {
                name: "eth0".to_owned(),
                mac: [2, 0, 0, 0, 0, 1],
                mtu: 1400,
                addresses: vec!["10.1.0.5/24".to_owned()],
                no_arp: false,
                is_down: false,
            }],
            routes: vec![Route {
                destination: "0.0.0.0/0".to_owned(),
                gateway: Some("10.1.0.1".to_owned()),
                interface: "eth0".to_owned(),
                ..Default::default()
            }],
            neighbours: Vec::new(),
        });
        let container = ContainerConfig {
            envs: vec![KeyValue::new("A", "1")],
            ..Default::default()
        };
        let data = BlockVolume {
            path: "/dev/data".to_owned(),
            disk: DiskRecord {
                serial: "device0".to_owned(),
                is_read_only: false,
                is_local: false,
                content: DiskContent::Node(NodeFile::Device("/dev/x".into())),
            },
        };
        let devices = BlockVolumes {
            root: None,
            others: vec![data],
        };
        let source = |spec, devices| SeedSource {
            spec,
            pod: &pod,
            container: &container,
            devices,
            files: Vec::new(),
            mounts: Vec::new(),
            dns: Dns::default(),
            agent: None,
        };
        let seed = source(VmSpec::default(), &devices).seed().unwrap();
        assert_eq!(
            (seed.instance_id.as_str(), seed.host_name.as_str()),
            ("vm.default", "web")
        );
        assert_eq!(seed.environment, [("A".to_owned(), "1".to_owned())]);
        let link = &seed.devices[0];
        assert_eq!(
            (link.path.as_str(), link.serial.as_str()),
            ("/dev/data", "device0")
        );
        let NetworkConfig::Version2(network) = &seed.network else {
            panic!("{:?}", seed.network);
        };
        let nic = &network.nics[0];
        assert_eq!(nic.addresses, [("10.1.0.5".parse().unwrap(), 24)]);
        assert_eq!(nic.routes[0].gateway, Some("10.1.0.1".parse().unwrap()));
        seed.volume().unwrap();
        let forced = VmSpec {
            force_dhcp: true,
            ..VmSpec::default()
        };
        let forced = source(forced, &devices).seed().unwrap();
        assert_eq!(forced.network, NetworkConfig::None);
        let persistent = BlockVolumes {
            root: Some(NodeFile::Device("/dev/root-volume".into())),
            ..BlockVolumes::default()
        };
        let persistent = source(VmSpec::default(), &persistent).seed().unwrap();
        assert_eq!(persistent.network, NetworkConfig::None);
    }

    #[test]
    fn files_of_a_kubelets_volume_are_read_through_its_links() {
        let dir = tempfile::tempdir().unwrap();
        let version = dir.path().join("..2026_01");
        fs::create_dir_all(version.join("sub")).unwrap();
        fs::write(version.join("key"), "one").unwrap();
        fs::write(version.join("sub/other"), "two").unwrap();
        symlink("..2026_01", dir.path().join("..data")).unwrap();
        for name in ["key", "sub"] {
            symlink(format!("..data/{name}"), dir.path().join(name)).unwrap();
        }
        let mount = FileMount {
            from: dir.path().to_str().unwrap().to_owned(),
            to: "/etc/x/".to_owned(),
        };
        let files = read_files(&[mount]).unwrap();
        let read: Vec<_> = files
            .iter()
            .map(|file| (file.path.as_str(), file.content.as_slice()))
            .collect();
        assert_eq!(
            read,
            [("/etc/x/key", &b"one"[..]), ("/etc/x/sub/other", b"two")]
        );
    }

    #[test]
    fn a_loop_of_directories_and_too_much_are_errors() {
        let dir = tempfile::tempdir().unwrap();
        symlink(dir.path(), dir.path().join("again")).unwrap();
        let mount = |path: &Path| FileMount {
            from: path.to_str().unwrap().to_owned(),
            to: "/x".to_owned(),
        };
        let error = read_files(&[mount(dir.path())]).unwrap_err().to_string();
        assert!(error.contains("directories in each other"), "{error}");
        let large = dir.path().join("large");
        File::create(&large)
            .unwrap()
            .set_len(MAX_BYTES + 1)
            .unwrap();
        let error = read_files(&[mount(&large)]).unwrap_err().to_string();
        assert!(error.contains("16 MiB"), "{error}");
    }
}
