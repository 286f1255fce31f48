//! The pod's network, by the Container Network Interface.
//!
//! Configuration lists come from a directory (`config`); `chain` runs their plugins, one at a
//! time for each pod, even after the process that ran them was killed (`input`), and stores their
//! results on the disk (`cache`); `netns` is the network namespace that they work in. The
//! result is an [`Attachment`]: for each interface that the plugins created, a tap joined to it
//! (`join`) or connected with it by translation (`masquerade`), and the addresses, routes and static neighbours for the guest's own card. Plugins
//! and their output are not trusted: they are limited in time and size, and results are checked
//! (`result`) before they are used.
//!
//! `status` asks the node's plugins whether they are ready for pods, if they support it. The
//! caller chooses the network: the node's, another one of the directory by its name, or podvisor's
//! own ([`nat`]). `dhcp` prepares the servers of guests that ask for their addresses by themselves.
//! `guest` converts all this for a sandbox, and [`resolver`] writes files of
//! `/etc`. Nothing here depends on the Container
//! Runtime Interface or the command line.

mod cache;
mod chain;
mod config;
mod counters;
mod dhcp;
mod error;
mod guest;
mod input;
mod join;
mod masquerade;
pub mod nat;
mod netns;
mod plugin;
mod prefix;
pub mod resolver;
mod result;
mod status;

#[cfg(test)]
mod tests;

use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use podvisor_host::blocking::in_place;
use podvisor_host::turns::Turns;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tracing::{debug, warn};

pub use config::List;
pub use counters::{Direction, InterfaceCounters};
pub use dhcp::{DhcpServer, GuestNames};
pub use error::CniError;
pub use join::Attachment;
#[cfg(test)]
use join::Route;
pub use masquerade::{CardForm, ForwardedPorts, PortProtocol};
pub use prefix::Prefix;
pub use result::{Dns, Endpoint};

use crate::tap;
use cache::{Cache, Cached};
use chain::Chain;
use config::Configurations;
use result::CniResult;
use status::Status;

/// The name of the pod's first interface in its network namespace and in the guest.
pub const INTERFACE: &str = "eth0";

/// The default time limit of one plugin.
const PLUGIN_TIMEOUT: Duration = Duration::from_secs(60);

/// The directories of CNI, and its time limit.
#[derive(Debug, Clone)]
pub struct CniOptions {
    /// The directory of configuration lists.
    pub config_dir: PathBuf,
    /// The directories of plugins, searched in this order.
    pub plugin_dirs: Vec<PathBuf>,
    /// The directory of plugins' results, for undoing them; it must outlive a restart of the
    /// daemon.
    pub cache_dir: PathBuf,
    /// The directory of network namespaces.
    pub netns_dir: PathBuf,
    /// The directory where new ones are made instead, with `NETNS_PREFIX`, for plugins that leave
    /// their work to an agent in a container: such agents see this directory of the host alone.
    pub public_netns_dir: Option<PathBuf>,
    /// The time limit of one plugin.
    pub plugin_timeout: Duration,
}

/// The directory in which other runtimes have the network namespaces of pods.
pub const PUBLIC_NETNS_DIR: &str = "/var/run/netns";

/// What the names of a node's own network namespaces begin with in a directory that it shares.
const NETNS_PREFIX: &str = "podvisor-";

/// Where plugins are looked for: by hand, and of the packages of Debian, Fedora and Alpine.
pub const PLUGIN_DIRS: [&str; 3] = ["/opt/cni/bin", "/usr/lib/cni", "/usr/libexec/cni"];

impl CniOptions {
    /// Uses the usual directories of plugins and their configuration, with state below `root` and
    /// namespaces below `state`.
    pub fn new(root: &Path, state: &Path) -> Self {
        Self {
            config_dir: "/etc/cni/net.d".into(),
            plugin_dirs: PLUGIN_DIRS.map(PathBuf::from).to_vec(),
            cache_dir: root.join("cni"),
            netns_dir: state.join("netns"),
            public_netns_dir: None,
            plugin_timeout: PLUGIN_TIMEOUT,
        }
    }
}

/// The pod that gets a network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodIdentity {
    /// Id of its sandbox: CNI's container id.
    pub id: String,
    /// Name in Kubernetes.
    pub name: String,
    /// Namespace in Kubernetes.
    pub namespace: String,
    /// Uid in Kubernetes.
    pub uid: String,
}

/// Values that the runtime passes to plugins with a capability of that name: `portMappings`,
/// `bandwidth`, `ips`, `mac`, `dns`, ….
pub type Capabilities = serde_json::Map<String, Value>;

/// The capability of plugins that forward ports of the host.
const PORT_MAPPINGS: &str = "portMappings";

/// A port of the host that is forwarded to one of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortMapping {
    /// The port of the host.
    pub host_port: u16,
    /// The port of the pod.
    pub pod_port: u16,
    /// `tcp`, `udp` or `sctp`.
    pub protocol: String,
    /// The address of the host; empty for all addresses.
    pub host_ip: String,
}

/// Returns the capability `portMappings`, unless there are none.
pub fn port_mappings(mappings: &[PortMapping]) -> Option<(String, Value)> {
    let mappings = mappings.iter().map(|mapping| {
        json!({
            "hostPort": mapping.host_port,
            "containerPort": mapping.pod_port,
            "protocol": mapping.protocol,
            "hostIP": mapping.host_ip,
        })
    });
    let mappings: Vec<Value> = mappings.collect();
    (!mappings.is_empty()).then(|| (PORT_MAPPINGS.to_owned(), Value::Array(mappings)))
}

/// Returns the configuration list of this name.
pub fn find(options: &CniOptions, name: &str) -> Result<List, CniError> {
    Configurations::new(options.config_dir.clone()).named(name)
}

/// The networks of this node's pods.
#[derive(Debug)]
pub struct Cni {
    configurations: Configurations,
    cache: Cache,
    options: CniOptions,
    /// Turns of pods whose plugins run.
    turns: Turns,
    interfaces: UsualInterfaces,
    status: Status,
}

/// The number of interfaces that a pod of this node is likely to get: that of the last two pods
/// with the same number, so that a single different pod does not affect the next one.
#[derive(Debug)]
struct UsualInterfaces {
    count: AtomicUsize,
    last: AtomicUsize,
}

impl UsualInterfaces {
    fn new() -> Self {
        Self {
            count: AtomicUsize::new(1),
            last: AtomicUsize::new(1),
        }
    }

    fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    fn note(&self, count: usize) {
        if self.last.swap(count, Ordering::Relaxed) == count {
            self.count.store(count, Ordering::Relaxed);
        }
    }
}

/// A pod's prepared network namespace, with taps for interfaces that do not exist yet.
#[derive(Debug)]
pub struct Prepared {
    list: Arc<List>,
    netns: PathBuf,
    taps: Vec<OwnedFd>,
    form: CardForm,
}

impl Prepared {
    /// Chooses how the first card is connected.
    #[must_use]
    pub fn with_form(self, form: CardForm) -> Self {
        Self { form, ..self }
    }

    /// Duplicates the taps, for a machine that starts meanwhile.
    ///
    /// # Errors
    /// The process has no more descriptors.
    pub fn taps(&self) -> Result<Vec<OwnedFd>, CniError> {
        let taps: io::Result<_> = self.taps.iter().map(OwnedFd::try_clone).collect();
        taps.map_err(CniError::io("keep open a tap by", tap::TUN))
    }
}

impl Cni {
    /// Opens the state; configuration is read when it is needed.
    pub fn open(options: CniOptions) -> Result<Self, CniError> {
        Ok(Self {
            configurations: Configurations::new(options.config_dir.clone()),
            cache: Cache::open(&options.cache_dir)?,
            options,
            turns: Turns::default(),
            interfaces: UsualInterfaces::new(),
            status: Status::default(),
        })
    }

    /// Returns the network's name if pods can get a network, or the reason why not.
    pub async fn ready(&self) -> Result<String, Arc<CniError>> {
        let list = in_place(|| self.configurations.current())?;
        let plugin_dirs = &self.options.plugin_dirs;
        for plugin in &list.plugins {
            plugin::find(plugin_dirs, &plugin.kind)?;
        }
        self.status.of(&list, plugin_dirs).await?;
        Ok(list.name.clone())
    }

    /// Returns the path of a pod's network namespace.
    pub fn netns(&self, id: &str) -> PathBuf {
        let own = self.options.netns_dir.join(id);
        match &self.options.public_netns_dir {
            // A daemon without a public directory made it.
            Some(_) if own.exists() => own,
            Some(dir) => dir.join(format!("{NETNS_PREFIX}{id}")),
            None => own,
        }
    }

    /// Returns the directory's network of this name.
    pub fn network(&self, name: &str) -> Result<List, CniError> {
        self.configurations.named(name)
    }

    /// Prepares a network namespace for the pod `id` on the node's network, with as many taps as
    /// pods of this node usually need. [`Self::detach`] undoes it.
    pub fn prepare(&self, id: &str) -> Result<Prepared, CniError> {
        in_place(|| {
            let list = self.configurations.current()?;
            self.prepare_for(list, id, self.interfaces.count())
        })
    }

    /// As [`Self::prepare`], on a network that the caller chooses.
    pub fn prepare_on(&self, list: List, id: &str) -> Result<Prepared, CniError> {
        in_place(|| self.prepare_for(Arc::new(list), id, self.interfaces.count()))
    }

    fn prepare_for(&self, list: Arc<List>, id: &str, taps: usize) -> Result<Prepared, CniError> {
        let netns = self.netns(id);
        netns::create(&netns)?;
        let taps = match taps {
            0 => Ok(Vec::new()),
            count => netns::enter(&netns, || {
                tap::open_taps(count).map_err(CniError::io("make a tap by", tap::TUN))
            }),
        };
        if taps.is_err() {
            // Leftovers are removed together with those of earlier runs.
            let _ = netns::remove(&netns);
        }
        Ok(Prepared {
            list,
            netns,
            taps: taps?,
            form: CardForm::default(),
        })
    }

    /// As [`Self::attach`], to a network that the caller chooses, with the first card of this form.
    pub async fn attach_to(
        &self,
        list: List,
        pod: &PodIdentity,
        capabilities: Capabilities,
        form: CardForm,
    ) -> Result<Attachment, CniError> {
        let prepared = in_place(|| self.prepare_for(Arc::new(list), &pod.id, 0))?;
        let prepared = prepared.with_form(form);
        self.attach(pod, capabilities, prepared).await
    }

    /// Runs the network's plugins in the pod's network namespace and joins a tap to each interface
    /// that they created. If this fails, all of it and of the preparation is undone, except for
    /// open taps.
    pub async fn attach(
        &self,
        pod: &PodIdentity,
        capabilities: Capabilities,
        prepared: Prepared,
    ) -> Result<Attachment, CniError> {
        let attached = self.try_attach(pod, capabilities, prepared).await;
        if let Err(error) = &attached {
            debug!(pod = pod.id, %error, "the pod gets no network");
            if let Err(error) = self.detach(&pod.id).await {
                // The leftovers are in the cache and the namespace's directory: the next attempt to
                // remove the pod finds them there.
                warn!(pod = pod.id, %error, "CNI DEL failed; will retry on removal");
            }
        }
        attached
    }

    async fn try_attach(
        &self,
        pod: &PodIdentity,
        capabilities: Capabilities,
        prepared: Prepared,
    ) -> Result<Attachment, CniError> {
        let Prepared {
            list,
            netns,
            taps,
            form,
        } = prepared;
        let mut cached = Cached::new(pod.clone(), &list, netns.clone(), capabilities);
        cached.check()?;
        let mut so_far = cached.clone();
        let note = |answer: &Value| {
            so_far.result = Some(answer.clone());
            in_place(|| self.cache.note(&so_far))
        };
        let chain = self.chain(&cached)?;
        in_place(|| self.cache.create_dir())?;
        let input = chain.prepare().await?;
        // Written right before the first plugin runs, so that an interrupted ADD can be undone. A
        // pod without a record needs no DEL, which might fail as its ADD did.
        in_place(|| self.cache.put(&cached))?;
        // Boxed, as the future is large: a thread of the runtime has little stack.
        let adding = Box::pin(chain.add(input, note));
        let added = self.turns.begin(adding).await;
        if let Err(error) = &added
            && error.has_not_run()
            && so_far.result.is_none()
        {
            // It was the first plugin. If its record stays, DEL runs, and that failure is logged.
            let _ = in_place(|| self.cache.remove(&pod.id));
        }
        let (raw, result) = added?;
        cached.result = Some(raw);
        let prepared = taps.len();
        let mut attachment = in_place(|| {
            self.cache.put(&cached)?;
            netns::enter(&netns, || join::join(INTERFACE, taps, &form))
        })?;
        attachment.take_result(&result);
        attachment.is_as_prepared = attachment.nics.len() == prepared;
        self.interfaces.note(attachment.nics.len());
        Ok(attachment)
    }

    /// Runs CHECK on the pod's network until `end` at most: the network must not be undone at the
    /// same time.
    pub async fn check(&self, id: &str, end: impl Future<Output = ()>) -> Result<(), CniError> {
        match self.cache.get(id)? {
            Some(cached) => self.chain(&cached)?.check(end).await,
            None => Err(CniError::NotAttached { id: id.to_owned() }),
        }
    }

    /// Undoes [`Self::attach`], completely or partly done, even before a crash. Succeeds if there
    /// is nothing to undo; may be repeated until it succeeds.
    pub async fn detach(&self, id: &str) -> Result<(), CniError> {
        if let Some(cached) = in_place(|| self.cache.get(id))? {
            in_place(|| netns::remove_bare(&cached.netns))?;
            let chain = self.chain(&cached)?;
            self.turns.begin(Box::pin(chain.del())).await?;
        }
        in_place(|| {
            netns::remove(&self.netns(id))?;
            self.cache.remove(id)
        })
    }

    /// Returns the traffic counters of a pod's interfaces, the first one first.
    pub fn counters(&self, id: &str) -> Result<Vec<InterfaceCounters>, CniError> {
        let mut counters = in_place(|| counters::read(&self.netns(id)))?;
        counters.sort_by_key(|counters| counters.name != INTERFACE);
        Ok(counters)
    }

    /// Returns a non-blocking socket inside a pod's network namespace, for TCP or UDP to a peer of
    /// this family.
    ///
    /// # Errors
    /// The namespace is gone.
    pub fn socket(
        &self,
        id: &str,
        peer: IpAddr,
        protocol: PortProtocol,
    ) -> Result<OwnedFd, CniError> {
        let family = match peer {
            IpAddr::V4(_) => AddressFamily::INET,
            IpAddr::V6(_) => AddressFamily::INET6,
        };
        let kind = match protocol {
            PortProtocol::Tcp => SocketType::STREAM,
            PortProtocol::Udp => SocketType::DGRAM,
            PortProtocol::Sctp => SocketType::SEQPACKET,
        };
        let path = self.netns(id);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let open = || {
            let opened = rustix::net::socket_with(family, kind, flags, None);
            opened.map_err(|error| CniError::io("open a socket in", &path)(error.into()))
        };
        in_place(|| netns::enter(&path, open))
    }

    /// Returns the ids of pods with state here.
    pub fn known(&self) -> Result<Vec<String>, CniError> {
        let mut ids = self.cache.ids()?;
        ids.extend(netns::list(&self.options.netns_dir)?);
        if let Some(dir) = &self.options.public_netns_dir {
            let names = netns::list(dir)?;
            let own = names
                .iter()
                .filter_map(|name| name.strip_prefix(NETNS_PREFIX));
            ids.extend(own.map(str::to_owned));
        }
        ids.sort();
        ids.dedup();
        Ok(ids)
    }

    /// Returns the name servers that the plugins gave a pod.
    pub fn dns(&self, id: &str) -> Result<Dns, CniError> {
        let result = self.result(id)?;
        Ok(result
            .map(|result| result.dns().clone())
            .unwrap_or_default())
    }

    /// Returns the addresses of a pod's first interface, if it is attached.
    pub fn endpoint(&self, id: &str) -> Result<Option<Endpoint>, CniError> {
        Ok(self.result(id)?.map(|result| result.endpoint(INTERFACE)))
    }

    /// Returns the plugins' result; `None` while the pod is not attached.
    fn result(&self, id: &str) -> Result<Option<CniResult>, CniError> {
        let raw = self.cache.get(id)?.and_then(|cached| cached.result);
        raw.map(|raw| CniResult::parse(&raw, INTERFACE)).transpose()
    }

    fn chain<'a>(&'a self, cached: &'a Cached) -> Result<Chain<'a>, CniError> {
        Chain::new(
            cached,
            self.cache.input(&cached.pod.id),
            &self.options.plugin_dirs,
            self.options.plugin_timeout,
        )
    }
}
