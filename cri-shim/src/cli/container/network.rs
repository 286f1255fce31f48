//! `--network`: the network of a container. Its record names the network before anything is
//! created, and CNI's own record, in the container's directory, how to undo it, for any process
//! that detects the end of its machine.

mod undo;

use std::net::IpAddr;
use std::path::Path;

use anyhow::{Context as _, ensure};
use clap::Args;

use super::network_mode::NetworkMode;
use super::ports::{self, Port, Published};
use super::{Entry, Record, passt};
use crate::cli::notice;
use crate::cli::settings::Settings;
use crate::cni::{
    Capabilities, CardForm, Cni, DhcpServer, Dns, GuestNames, List, PodIdentity, PortMapping, nat,
    port_mappings, resolver,
};
use undo::{RUN, options};
pub(in crate::cli) use undo::{detach, endpoint, netns};

use crate::launch::{self, BeginError};
use crate::sandbox::{GuestNetwork, LaunchConfig, Launching, NicConfig, etc_hosts};

/// The container's namespace, as passed to plugins.
const NAMESPACE: &str = "podvisor";

const WITHOUT: &str = "--network none runs it without a network";

#[derive(Debug, Clone, Default, PartialEq, Eq, Args)]
pub(in crate::cli) struct NetworkArgs {
    /// Network of the guest: none, nat, user, or the name of a CNI network [default: nat for root
    /// where CNI's plugins are installed, user for others where passt is, else none]
    #[arg(long, alias = "net", value_name = "NETWORK", env = "PODVISOR_NETWORK")]
    network: Option<NetworkMode>,

    /// Publish a port of the container on the host; without HOST, on a free one
    #[arg(
        short,
        long,
        value_name = "[[IP:][HOST]:]GUEST[/PROTOCOL]",
        value_parser = ports::parse
    )]
    publish: Vec<Published>,

    /// Name server of the guest [default: the network's, else the host's]
    #[arg(long, value_name = "IP")]
    dns: Vec<IpAddr>,

    /// Domain in which names without a dot are looked for [default: the network's, else the host's]
    #[arg(long, value_name = "DOMAIN", value_parser = parse_word)]
    dns_search: Vec<String>,

    /// Option of resolv.conf(5)
    #[arg(long, value_name = "OPTION", value_parser = parse_word)]
    dns_option: Vec<String>,

    /// A line of /etc/hosts; the address host-gateway is the network's gateway, which is the host
    /// in the networks nat and user
    #[arg(long, value_name = "NAME:IP", value_parser = parse_host)]
    add_host: Vec<(String, HostAddress)>,
}

/// The address in a line of `/etc/hosts`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HostAddress {
    Ip(IpAddr),
    /// The gateway of the guest's default route.
    Gateway,
}

const HOST_GATEWAY: &str = "host-gateway";

/// Parses a word of a line of resolv.conf.
fn parse_word(text: &str) -> Result<String, String> {
    match !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic()) {
        true => Ok(text.to_owned()),
        false => Err("it is a word without blanks".to_owned()),
    }
}

/// Parses `NAME:IP` or `NAME=IP`; an IPv6 address may be in brackets.
fn parse_host(text: &str) -> Result<(String, HostAddress), String> {
    let usage = || format!("write NAME:IP or NAME:{HOST_GATEWAY}");
    let (name, ip) = text.split_once([':', '=']).ok_or_else(usage)?;
    let name = parse_word(name)?;
    if ip == HOST_GATEWAY {
        return Ok((name, HostAddress::Gateway));
    }
    let ip = ip
        .strip_prefix('[')
        .and_then(|ip| ip.strip_suffix(']'))
        .unwrap_or(ip);
    Ok((name, HostAddress::Ip(ip.parse().map_err(|_| usage())?)))
}

/// Network parameters for launching a guest, and the files in `/etc` that depend on them.
#[derive(Debug, Default)]
pub(in crate::cli) struct Attached {
    pub(in crate::cli) nics: Vec<NicConfig>,
    pub(in crate::cli) network: GuestNetwork,
    pub(in crate::cli) etc_hosts: Vec<u8>,
    pub(in crate::cli) etc_resolv_conf: Vec<u8>,
    /// How the guest resolves names.
    pub(in crate::cli) dns: Dns,
}

impl NetworkArgs {
    pub(in crate::cli) fn ports(&self) -> Vec<Port> {
        let published = self.publish.iter();
        published.flat_map(|ports| &ports.0).copied().collect()
    }

    /// Returns whether lines of /etc/hosts are asked for.
    pub(in crate::cli) fn names_hosts(&self) -> bool {
        !self.add_host.is_empty()
    }

    /// Returns the network for a container; problems are reported before anything is created.
    /// `has_card` says whether a snapshot's machine has a network card; `None` without a snapshot.
    pub(in crate::cli) fn choose(&self, has_card: Option<bool>) -> anyhow::Result<NetworkMode> {
        let ports = self.ports();
        ports::check_distinct(&ports)?;
        let mode = match (&self.network, has_card) {
            (Some(mode), _) => self.check(mode).map(|()| mode.clone())?,
            (None, Some(false)) => NetworkMode::None,
            (None, _) => self.usual()?,
        };
        match has_card {
            Some(false) => ensure!(
                mode == NetworkMode::None,
                "--network {mode}: the snapshot's machine has no network card; make one by `podvisor snapshot --network`"
            ),
            Some(true) => ensure!(
                matches!(mode, NetworkMode::Nat | NetworkMode::Cni(_)),
                "--network {mode}: the snapshot's machine has a card for nat or a CNI network; give it such a network, or use a snapshot without"
            ),
            None => {}
        }
        if mode == NetworkMode::None {
            ensure!(
                ports.is_empty() && !self.asks_for_names(),
                "--publish and --dns are of use with a network; give --network nat or user"
            );
        }
        Ok(mode)
    }

    /// Returns whether the flags configure name resolution.
    fn asks_for_names(&self) -> bool {
        !(self.dns.is_empty() && self.dns_search.is_empty() && self.dns_option.is_empty())
    }

    /// Returns the default network: one that this host and user can create.
    fn usual(&self) -> anyhow::Result<NetworkMode> {
        let is_wanted = !self.publish.is_empty() || self.asks_for_names();
        let mode = match is_root() {
            true => NetworkMode::Nat,
            false => NetworkMode::User,
        };
        let possible = self.check(&mode).and_then(|()| match mode {
            NetworkMode::User => passt::check_host(),
            _ => Ok(()),
        });
        match possible {
            Ok(()) => Ok(mode),
            Err(error) if is_wanted => Err(error),
            Err(error) => {
                notice(&format!("no network: {error:#}"));
                Ok(NetworkMode::None)
            }
        }
    }

    /// Checks whether this host and user can create such a network.
    fn check(&self, mode: &NetworkMode) -> anyhow::Result<()> {
        match mode {
            NetworkMode::None => return Ok(()),
            NetworkMode::User => {
                let found = passt::find();
                return found
                    .map(drop)
                    .map_err(|error| anyhow::anyhow!("{error} ({WITHOUT})"));
            }
            NetworkMode::Nat | NetworkMode::Cni(_) => ensure!(
                is_root(),
                "--network {mode} takes root, who may make interfaces; --network user does not"
            ),
        }
        let options = options(Path::new(RUN), Settings::read(None)?.cni);
        let ports = self.ports();
        let list = match mode {
            NetworkMode::None | NetworkMode::User => return Ok(()),
            NetworkMode::Nat => {
                let list = nat::list(!ports.is_empty());
                let missing = nat::check(&options, &list);
                missing.map_err(|error| {
                    anyhow::anyhow!(
                        "{error}; install the packages containernetworking-plugins (Alpine: \
                         cni-plugins) and iptables ({WITHOUT})"
                    )
                })?;
                list
            }
            NetworkMode::Cni(name) => crate::cni::find(&options, name).with_context(|| {
                format!("--network {name} is unknown: podvisor's own are none, nat and user")
            })?,
        };
        ensure!(
            ports.is_empty() || list.takes("portMappings"),
            "--publish: the network {} has no plugin that publishes ports; add portmap to it",
            list.name
        );
        ensure!(
            ports.iter().all(|port| port.host().is_ipv4()) || *mode != NetworkMode::Nat,
            "--publish: the network nat has IPv4 alone; leave out the address of IPv6"
        );
        Ok(())
    }

    /// Creates a container's network. After a failure, or if this is dropped, [`detach`] undoes
    /// what was created.
    pub(in crate::cli) async fn attach(&self, entry: &Entry) -> anyhow::Result<Attached> {
        let record = &entry.record;
        let mut attached = match self.by_cni(entry)? {
            Some(CniNetwork {
                cni,
                list,
                identity,
                capabilities,
            }) => {
                // A VM's memory may go on elsewhere, where the network's addresses are others.
                let form = match (&record.vm, &record.network) {
                    (Some(_), NetworkMode::Nat) => CardForm::Masqueraded(Vec::new()),
                    _ => CardForm::Joined,
                };
                let attached = cni.attach_to(list, &identity, capabilities, form).await;
                let attachment = attached.with_context(|| no_network(record))?;
                let files = self.etc_files(record, &attachment.addresses, &attachment.dns);
                let (nics, network) = attachment.into_guest();
                Attached {
                    nics,
                    network,
                    ..files
                }
            }
            None if record.network == NetworkMode::User => self.attach_by_passt(record).await?,
            None => Attached {
                etc_hosts: etc_hosts(&record.hostname).into_bytes(),
                ..Attached::default()
            },
        };
        self.add_hosts(&mut attached)?;
        Ok(attached)
    }

    /// Prepares the servers by which a VM gets the addresses of its cards, if its network is made
    /// by CNI's plugins; passt has a server of its own.
    pub(in crate::cli) fn dhcp(
        &self,
        entry: &Entry,
        attached: &Attached,
    ) -> anyhow::Result<Vec<DhcpServer>> {
        let Some(CniNetwork { cni, .. }) = self.by_cni(entry)? else {
            return Ok(Vec::new());
        };
        let names = GuestNames {
            host_name: entry.record.hostname.clone(),
            dns: attached.dns.clone(),
        };
        Ok(cni.dhcp(&entry.record.id, &attached.network, &names)?)
    }

    /// Like [`Self::attach`], and starts the machine with the configuration that `config` returns
    /// for the network's cards; if CNI's plugins create the network, both happen at the same time.
    /// The machine has the cards, and has yet to be told of the network.
    pub(in crate::cli) async fn attach_and_begin(
        &self,
        entry: &Entry,
        config: impl Fn(Vec<NicConfig>) -> LaunchConfig,
    ) -> anyhow::Result<(Launching, Attached)> {
        let record = &entry.record;
        let Some(CniNetwork {
            cni,
            list,
            identity,
            capabilities,
        }) = self.by_cni(entry)?
        else {
            return self.attach_then_begin(entry, config).await;
        };
        let prepared = cni.prepare_on(list, &record.id);
        let prepared = prepared.with_context(|| no_network(record))?;
        let begun = launch::begin(&cni, &identity, capabilities, prepared, config).await;
        let begun = begun.map_err(|error| match error {
            BeginError::Network(error) => anyhow::Error::from(error).context(no_network(record)),
            BeginError::Machine(error) => error.into(),
        })?;
        let mut attached = Attached {
            network: begun.network,
            ..self.etc_files(record, &begun.addresses, &begun.dns)
        };
        self.add_hosts(&mut attached)?;
        Ok((begun.launching, attached))
    }

    /// Like [`Self::attach_and_begin`], but one after the other.
    pub(in crate::cli) async fn attach_then_begin(
        &self,
        entry: &Entry,
        config: impl Fn(Vec<NicConfig>) -> LaunchConfig,
    ) -> anyhow::Result<(Launching, Attached)> {
        let mut attached = self.attach(entry).await?;
        let nics = std::mem::take(&mut attached.nics);
        Ok((Launching::begin(config(nics)).await?, attached))
    }

    /// Adds the lines of `/etc/hosts` from the flags.
    pub(in crate::cli) fn add_hosts(&self, attached: &mut Attached) -> anyhow::Result<()> {
        for (name, address) in &self.add_host {
            let ip = match address {
                HostAddress::Ip(ip) => ip.to_string(),
                HostAddress::Gateway => gateway(&attached.network).with_context(|| {
                    format!("--add-host {name}:{HOST_GATEWAY}: the network has no gateway")
                })?,
            };
            let line = format!("{ip}\t{name}\n");
            attached.etc_hosts.extend_from_slice(line.as_bytes());
        }
        Ok(())
    }

    /// Returns the parameters for CNI's plugins; `None` if the network does not use them.
    fn by_cni(&self, entry: &Entry) -> anyhow::Result<Option<CniNetwork>> {
        let record = &entry.record;
        let cni = match &record.network {
            NetworkMode::None | NetworkMode::User => return Ok(None),
            NetworkMode::Nat | NetworkMode::Cni(_) => {
                let settings = Settings::read(None)?.cni;
                Cni::open(options(&entry.dir, settings))?
            }
        };
        let list = match &record.network {
            NetworkMode::Cni(name) => cni.network(name)?,
            _ => nat::list(!record.ports.is_empty()),
        };
        ports::check_free(&record.ports)?;
        let identity = PodIdentity {
            id: record.id.clone(),
            name: record.name.clone(),
            namespace: NAMESPACE.to_owned(),
            uid: record.id.clone(),
        };
        let mappings: Vec<_> = record.ports.iter().map(mapping).collect();
        let mut capabilities = Capabilities::new();
        capabilities.extend(port_mappings(&mappings));
        Ok(Some(CniNetwork {
            cni,
            list,
            identity,
            capabilities,
        }))
    }

    /// Returns the files in `/etc` of a container that has these addresses.
    fn etc_files(&self, record: &Record, addresses: &[IpAddr], dns: &Dns) -> Attached {
        let dns = self.dns(dns);
        Attached {
            etc_hosts: resolver::hosts(&record.hostname, addresses),
            etc_resolv_conf: dns.to_resolv_conf().into_bytes(),
            dns,
            ..Attached::default()
        }
    }

    /// The network is removed when passt exits, with the machine.
    async fn attach_by_passt(&self, record: &Record) -> anyhow::Result<Attached> {
        ports::check_free(&record.ports)?;
        let started = passt::start(&record.ports).await;
        let (nics, network) = started.with_context(|| no_network(record))?;
        let dns = Dns {
            nameservers: vec![passt::name_server()],
            ..Dns::of_host()
        };
        Ok(Attached {
            nics,
            network,
            ..self.etc_files(record, &[passt::address()], &dns)
        })
    }

    /// Returns the name servers: those of the flags, else the network's, else the host's.
    fn dns(&self, network: &Dns) -> Dns {
        let mut dns = match (self.dns.is_empty(), network.nameservers.is_empty()) {
            (true, false) => network.clone(),
            (true, true) => Dns::of_host(),
            (false, _) => Dns {
                nameservers: self.dns.iter().map(ToString::to_string).collect(),
                ..Dns::of_host()
            },
        };
        if !self.dns_search.is_empty() {
            dns.search.clone_from(&self.dns_search);
        }
        if !self.dns_option.is_empty() {
            dns.options.clone_from(&self.dns_option);
        }
        dns
    }
}

/// A network that CNI's plugins create, and their parameters.
struct CniNetwork {
    cni: Cni,
    list: List,
    identity: PodIdentity,
    capabilities: Capabilities,
}

/// Returns the gateway of the default route, that of IPv4 if there are two.
fn gateway(network: &GuestNetwork) -> Option<String> {
    let to = |all: &str| {
        let mut routes = network.routes.iter();
        routes.find_map(|route| route.gateway.clone().filter(|_| route.destination == all))
    };
    to("0.0.0.0/0").or_else(|| to("::/0"))
}

fn no_network(record: &Record) -> String {
    format!("cannot make the network {} ({WITHOUT})", record.network)
}

fn mapping(port: &Port) -> PortMapping {
    PortMapping {
        host_port: port.host_port,
        pod_port: port.guest_port,
        protocol: port.protocol.to_string(),
        host_ip: port.host_ip.map(|ip| ip.to_string()).unwrap_or_default(),
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[cfg(test)]
mod tests {
    use crate::sandbox::Route;

    use super::*;

    #[test]
    fn a_snapshots_machine_has_a_card_or_has_not() {
        let args = NetworkArgs::default();
        assert_eq!(args.choose(Some(false)).unwrap(), NetworkMode::None);
        let none = NetworkArgs {
            network: Some(NetworkMode::None),
            ..NetworkArgs::default()
        };
        assert_eq!(none.choose(None).unwrap(), NetworkMode::None);
        let error = none.choose(Some(true)).unwrap_err().to_string();
        assert!(error.contains("card"), "{error}");
    }

    #[test]
    fn without_a_network_no_port_is_published() {
        let args = NetworkArgs {
            network: Some(NetworkMode::None),
            publish: vec![ports::parse("80:80").unwrap()],
            ..NetworkArgs::default()
        };
        let error = args.choose(None).unwrap_err().to_string();
        assert!(error.contains("--publish"), "{error}");
    }

    #[test]
    fn the_users_name_servers_go_first() {
        let network = Dns {
            nameservers: vec!["192.0.2.1".to_owned()],
            ..Dns::default()
        };
        let mut args = NetworkArgs::default();
        assert_eq!(args.dns(&network), network);
        args.dns = vec!["192.0.2.2".parse().unwrap()];
        assert_eq!(args.dns(&network).nameservers, ["192.0.2.2"]);
        args.dns_search = vec!["example".to_owned()];
        args.dns_option = vec!["ndots:2".to_owned()];
        let dns = args.dns(&network);
        assert_eq!(
            (dns.search, dns.options),
            (args.dns_search, args.dns_option)
        );
    }

    #[test]
    fn lines_of_the_hosts_file_are_added_to_it() {
        let args = NetworkArgs {
            add_host: ["db:192.0.2.1", "six=[2001:db8::1]", "seven:2001:db8::2"]
                .map(|text| parse_host(text).unwrap())
                .to_vec(),
            ..NetworkArgs::default()
        };
        let mut attached = Attached::default();
        args.add_hosts(&mut attached).unwrap();
        let hosts = "192.0.2.1\tdb\n2001:db8::1\tsix\n2001:db8::2\tseven\n";
        assert_eq!(attached.etc_hosts, hosts.as_bytes());
        for bad in ["db", "db:", "db:x", ":192.0.2.1", "d b:192.0.2.1"] {
            assert!(parse_host(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_name_of_the_host_has_the_gateways_address() {
        let args = NetworkArgs {
            add_host: vec![parse_host("host:host-gateway").unwrap()],
            ..NetworkArgs::default()
        };
        let mut attached = Attached::default();
        let error = args.add_hosts(&mut attached).unwrap_err().to_string();
        assert!(error.contains("host:host-gateway"), "{error}");
        let route = |destination: &str, gateway: Option<&str>| Route {
            destination: destination.to_owned(),
            gateway: gateway.map(str::to_owned),
            interface: "eth0".to_owned(),
            ..Route::default()
        };
        attached.network.routes = vec![
            route("10.0.0.0/8", Some("10.0.0.9")),
            route("::/0", Some("fd00::1")),
            route("0.0.0.0/0", Some("10.0.0.1")),
        ];
        args.add_hosts(&mut attached).unwrap();
        assert_eq!(attached.etc_hosts, b"10.0.0.1\thost\n");
        attached.network.routes.pop();
        args.add_hosts(&mut attached).unwrap();
        assert_eq!(attached.etc_hosts, b"10.0.0.1\thost\nfd00::1\thost\n");
    }
}
