//! What cloud-init in the guest is told: the VM's name, its network, the keys of its users. Guests
//! without cloud-init ignore the disk.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::net::IpAddr;
use std::path::Path;

use anyhow::{Context as _, ensure};
use podvisor_cloud_init::{
    Form, GuestSeed, Network, NetworkConfig, NetworkNic, NetworkRoute, UserData, check_ignition,
};
use serde_json::json;

use super::ssh::USER;
use super::volumes;
use crate::cli::advice;
use crate::cli::container::{Attached, Record, VmRecord};
use crate::machine::{Assets, DiskContents, DiskMove, MachineDisk};
use crate::sandbox::GuestNetwork;

/// The disk, in the VM's directory.
pub(super) const FILE: &str = "seed.img";

/// The serial number of the disk.
const SERIAL: &str = "cidata";

/// The user's own configuration, in the VM's directory.
pub(super) const USER_DATA: &str = "user-data";

/// A configuration of Ignition in place of that, in the VM's directory.
pub(super) const IGNITION: &str = "ignition.json";

/// What the user gave to configure the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Given {
    /// Nothing.
    Nothing,
    /// User-data of any kind.
    UserData(Vec<u8>),
    /// A configuration of Ignition.
    Ignition(Vec<u8>),
}

impl Given {
    /// Keeps it in the VM's directory.
    pub(super) fn keep(&self, dir: &Path) -> anyhow::Result<()> {
        let (name, bytes) = match self {
            Self::Nothing => return Ok(()),
            Self::UserData(bytes) => (USER_DATA, bytes),
            Self::Ignition(bytes) => (IGNITION, bytes),
        };
        let path = dir.join(name);
        std::fs::write(&path, bytes).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Reads what was kept.
    fn kept(dir: &Path) -> anyhow::Result<Self> {
        let read = |name: &str| match std::fs::read(dir.join(name)) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            read => read
                .map(Some)
                .with_context(|| format!("cannot read the VM's {name}")),
        };
        if let Some(bytes) = read(IGNITION)? {
            return Ok(Self::Ignition(bytes));
        }
        Ok(read(USER_DATA)?.map_or(Self::Nothing, Self::UserData))
    }
}

/// Longest user-data, in bytes.
pub(super) const MAX_USER_DATA: u64 = 1 << 20;

/// How a configuration begins that others can be merged with.
const CLOUD_CONFIG: &[u8] = b"#cloud-config";

/// What logs the console in: agetty's words are those of systemd's unit.
const AUTOLOGIN: &str = "/etc/systemd/system/serial-getty@ttyS0.service.d/podvisor.conf";

/// Creates the disk.
pub(super) fn create(
    dir: &Path,
    record: &Record,
    attached: &Attached,
) -> anyhow::Result<MachineDisk> {
    let path = dir.join(FILE);
    let assets = Assets::of_this_process();
    let volume = seed(record, attached, Given::kept(dir)?, &assets)?.volume()?;
    let write = || -> anyhow::Result<File> {
        let mut file = BufWriter::new(File::create(&path)?);
        volume.write(&mut file)?;
        file.flush()?;
        Ok(File::open(&path)?)
    };
    let file = write().with_context(|| format!("failed to write {}", path.display()))?;
    Ok(MachineDisk {
        moves: DiskMove::Same(SERIAL.to_owned()),
        contents: DiskContents::Raw {
            file,
            is_read_only: true,
        },
        serial: SERIAL.to_owned(),
    })
}

/// Opens the disk of a VM that goes on from its memory, which knows what is on it.
pub(super) fn open(dir: &Path) -> anyhow::Result<MachineDisk> {
    let path = dir.join(FILE);
    let file = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
    Ok(MachineDisk {
        moves: DiskMove::Same(SERIAL.to_owned()),
        contents: DiskContents::Raw {
            file,
            is_read_only: true,
        },
        serial: SERIAL.to_owned(),
    })
}

/// Checks what a user gave before anything is created.
pub(super) fn check(record: &Record, given: &Given) -> anyhow::Result<()> {
    if let Given::Ignition(bytes) = given {
        check_ignition(bytes).context("--ignition")?;
        ensure!(
            volumes::mounts(record).is_empty(),
            "-v DIR:/PATH is mounted by cloud-init, which an image with Ignition has not: give -v \
             DIR:TAG, and mount it by a unit of the configuration"
        );
    }
    let assets = Assets::of_this_process();
    let volume = seed(record, &Attached::default(), given.clone(), &assets)?.volume();
    volume.context("--user-data or --ssh-key is not usable")?;
    Ok(())
}

fn seed(
    record: &Record,
    attached: &Attached,
    given: Given,
    assets: &Assets,
) -> anyhow::Result<GuestSeed> {
    let vm = record.vm.clone().unwrap_or_default();
    let agent = match vm.installs_agent {
        true => Some(agent(assets)?),
        false => None,
    };
    let form = match given {
        Given::Ignition(_) => Form::ConfigDrive,
        _ => Form::NoCloud,
    };
    let inline = match given {
        Given::UserData(bytes) if bytes.starts_with(CLOUD_CONFIG) => Ok(Some(
            String::from_utf8(bytes).context("--user-data is not UTF-8")?,
        )),
        Given::UserData(bytes) | Given::Ignition(bytes) => Err(bytes),
        Given::Nothing => Ok(None),
    };
    let user_data = match inline {
        Ok(inline) => UserData::Merged {
            source: own_config(&vm),
            inline,
            overwrite: false,
        },
        // A script, say: nothing can be added to it but the keys of the meta-data.
        Err(bytes) => UserData::Document(bytes),
    };
    Ok(GuestSeed {
        form,
        instance_id: record.id.clone(),
        host_name: record.hostname.clone(),
        ssh_keys: vm.ssh_keys,
        user_data,
        network: match attached.network.interfaces.is_empty() {
            true => NetworkConfig::None,
            false => NetworkConfig::Version2(network(attached)?),
        },
        mounts: volumes::mounts(record),
        agent,
        ..GuestSeed::default()
    })
}

/// Returns the program of the guest agent.
fn agent(assets: &Assets) -> anyhow::Result<Vec<u8>> {
    let path = assets.guest_agent().map_err(advice::missing_file)?;
    std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))
}

/// Returns podvisor's own configuration: a user whom the keys log in, besides the image's, and a
/// console that is logged in by itself.
fn own_config(vm: &VmRecord) -> BTreeMap<String, String> {
    let user = json!({
        "name": USER,
        "gecos": "podvisor",
        "shell": "/bin/bash",
        "sudo": "ALL=(ALL) NOPASSWD:ALL",
        "lock_passwd": true,
        "ssh_authorized_keys": vm.ssh_keys,
    });
    let mut config = vec![("users", json!(["default", user]))];
    if vm.has_autologin {
        let unit = format!(
            "[Service]\nExecStart=\nExecStart=-/sbin/agetty --autologin {USER} --keep-baud \
             115200,57600,38400,9600 - $TERM\n"
        );
        let file = json!({"path": AUTOLOGIN, "content": unit, "permissions": "0644"});
        config.push(("write_files", json!([file])));
        let restart = "systemctl daemon-reload && systemctl restart serial-getty@ttyS0.service";
        let command = format!("! command -v systemctl >/dev/null || {{ {restart}; }}");
        config.push(("runcmd", json!([["sh", "-c", command]])));
    }
    config
        .into_iter()
        // JSON is YAML.
        .map(|(key, value)| (key.to_owned(), value.to_string()))
        .collect()
}

/// Returns the network as cloud-init is told it: the addresses are fixed, so that a guest needs no
/// DHCP.
fn network(attached: &Attached) -> anyhow::Result<Network> {
    let GuestNetwork {
        interfaces, routes, ..
    } = &attached.network;
    let mut nics = Vec::new();
    for interface in interfaces {
        let own = routes
            .iter()
            .filter(|route| route.interface == interface.name);
        let routes = own.map(|route| {
            let gateway = route.gateway.as_deref().map(address).transpose()?;
            Ok(NetworkRoute {
                destination: prefix(&route.destination)?,
                gateway,
                metric: route.metric,
            })
        });
        let addresses = interface.addresses.iter().map(|text| prefix(text));
        nics.push(NetworkNic {
            name: interface.name.clone(),
            mac: interface.mac,
            mtu: Some(interface.mtu),
            addresses: addresses.collect::<anyhow::Result<_>>()?,
            routes: routes.collect::<anyhow::Result<_>>()?,
            dhcp: Default::default(),
        });
    }
    let text = String::from_utf8_lossy(&attached.etc_resolv_conf);
    let words = |keyword: &'static str| {
        let lines = text
            .lines()
            .filter_map(move |line| line.strip_prefix(keyword));
        lines.flat_map(str::split_ascii_whitespace)
    };
    Ok(Network {
        nics,
        name_servers: words("nameserver ")
            .filter_map(|ip| ip.parse().ok())
            .collect(),
        search: words("search ").map(str::to_owned).collect(),
    })
}

fn address(text: &str) -> anyhow::Result<IpAddr> {
    text.parse()
        .with_context(|| format!("the network's address {text:?} is not understood"))
}

fn prefix(text: &str) -> anyhow::Result<(IpAddr, u8)> {
    let usage = || format!("the network's prefix {text:?} is not understood");
    let (ip, length) = text.split_once('/').with_context(usage)?;
    let (ip, length): (IpAddr, u8) = (address(ip)?, length.parse().with_context(usage)?);
    ensure!(length <= if ip.is_ipv4() { 32 } else { 128 }, usage());
    Ok((ip, length))
}

#[cfg(test)]
mod tests {
    use crate::cli::container::sample_record;
    use crate::sandbox::{Interface, Route};

    use super::*;

    const KEY: &str = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAA me@here";

    fn record() -> Record {
        Record {
            vm: Some(VmRecord {
                ssh_keys: vec![KEY.to_owned()],
                has_autologin: true,
                ..VmRecord::default()
            }),
            ..sample_record("a", "vm1")
        }
    }

    fn nowhere() -> Assets {
        Assets::in_directory(Path::new("/nowhere"))
    }

    /// The documents on a seed's disk.
    fn documents(seed: &GuestSeed) -> BTreeMap<String, String> {
        let volume = seed.volume().unwrap();
        let files = volume.files();
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        files
            .map(|(name, bytes)| (name.to_owned(), text(bytes)))
            .collect()
    }

    #[test]
    fn a_guest_learns_its_name_its_network_and_its_users_keys() {
        let attached = Attached {
            network: GuestNetwork {
                interfaces: vec![Interface {
                    name: "eth0".to_owned(),
                    mac: [2, 0, 0, 0, 0, 1],
                    mtu: 1400,
                    addresses: vec!["10.0.0.2/24".to_owned()],
                    no_arp: false,
                    is_down: false,
                }],
                routes: vec![Route {
                    destination: "0.0.0.0/0".to_owned(),
                    gateway: Some("10.0.0.1".to_owned()),
                    interface: "eth0".to_owned(),
                    ..Route::default()
                }],
                neighbours: Vec::new(),
            },
            etc_resolv_conf: b"nameserver 10.0.0.53\nsearch a.example\n".to_vec(),
            ..Attached::default()
        };
        let documents = documents(&seed(&record(), &attached, Given::Nothing, &nowhere()).unwrap());
        let network = &documents["network-config"];
        for part in ["02:00:00:00:00:01", "10.0.0.2/24", "10.0.0.1", "10.0.0.53"] {
            assert!(network.contains(part), "{network}");
        }
        assert!(documents["meta-data"].contains(KEY));
        let user_data = &documents["user-data"];
        for part in ["podvisor", "NOPASSWD", "--autologin"] {
            assert!(user_data.contains(part), "{user_data}");
        }
    }

    #[test]
    fn a_users_configuration_is_merged_and_a_script_is_passed_as_it_is() {
        let none = Attached::default();
        let seeded = |text: &str| {
            let given = Given::UserData(text.as_bytes().to_vec());
            let seed = seed(&record(), &none, given, &nowhere()).unwrap();
            documents(&seed)
        };
        let user_data = &seeded("#cloud-config\npackages: [htop]\n")["user-data"];
        assert!(
            user_data.contains("htop") && user_data.contains("NOPASSWD"),
            "{user_data}"
        );
        let script = "#!/bin/sh\ntrue\n";
        let documents = seeded(script);
        assert_eq!(documents["user-data"], script);
        assert!(documents["meta-data"].contains(KEY));
        assert!(!documents.contains_key("network-config"));
    }

    #[test]
    fn a_configuration_of_ignition_is_on_a_config_drive_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let text = r#"{"ignition": {"version": "3.4.0"}}"#;
        Given::Ignition(text.into()).keep(dir.path()).unwrap();
        let given = Given::kept(dir.path()).unwrap();
        check(&record(), &given).unwrap();
        let none = Attached::default();
        let documents = documents(&seed(&record(), &none, given, &nowhere()).unwrap());
        assert_eq!(documents["openstack/latest/user_data"], text);
        // Who reads it finds the keys beside it.
        assert!(documents["openstack/latest/meta_data.json"].contains(KEY));
        let said = check(&record(), &Given::Ignition(b"{}".to_vec())).unwrap_err();
        let said = format!("{said:#}");
        assert!(
            said.contains("--ignition") && said.contains("version"),
            "{said}"
        );
    }

    #[test]
    fn an_agent_that_is_asked_for_is_on_the_disk_or_an_error_says_how_to_get_it() {
        let mut record = record();
        if let Some(vm) = &mut record.vm {
            vm.installs_agent = true;
        }
        let seed = |assets: &Assets| {
            let given = Given::UserData(b"#!/bin/sh\ntrue\n".to_vec());
            seed(&record, &Attached::default(), given, assets)
        };
        let said = seed(&nowhere()).unwrap_err().to_string();
        for part in ["podvisor-ga", "/nowhere", "cargo xtask guest", "--agent"] {
            assert!(said.contains(part), "{said}");
        }
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("podvisor-ga"), "a program").unwrap();
        let documents = documents(&seed(&Assets::in_directory(dir.path())).unwrap());
        assert_eq!(documents["podvisor-ga"], "a program");
        assert!(documents["vendor-data"].contains("LABEL=CIDATA"));
    }

    #[test]
    fn user_data_that_is_no_yaml_is_refused() {
        let given = Given::UserData(b"#cloud-config\na: [".to_vec());
        let said = check(&record(), &given).unwrap_err();
        assert!(format!("{said:#}").contains("--user-data"), "{said:#}");
    }
}
