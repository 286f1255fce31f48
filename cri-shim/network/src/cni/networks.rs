//! The networks of a node's pods: the work of attaching a pod, and of undoing it.

use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use podvisor_host::blocking::in_place;
use podvisor_host::turns::Turns;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use serde_json::Value;
use tracing::{debug, warn};

use super::cache::{Cache, Cached};
use super::card::{CardForm, PortProtocol};
use super::chain::Chain;
use super::config::{Configurations, List};
use super::counters::{self, InterfaceCounters};
use super::error::CniError;
use super::join::{self, Attachment};
use super::options::{CniOptions, NETNS_PREFIX};
use super::pod::{Capabilities, INTERFACE, PodIdentity};
use super::result::{CniResult, Dns, Endpoint};
use super::status::Status;
use super::{netns, plugin};
use crate::tap;

/// Returns the configuration list of this name.
pub fn find(options: &CniOptions, name: &str) -> Result<List, CniError> {
    Configurations::new(options.config_dir.clone()).named(name)
}

/// The networks of this node's pods.
#[derive(Debug)]
pub struct Cni {
    configurations: Configurations,
    pub(super) cache: Cache,
    pub(super) options: CniOptions,
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
