//! The guest of the process: which container's machine runs, and the pod's end.

use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use podvisor_agent_protocol::validate_id;
use tokio::sync::{Mutex as AsyncMutex, watch};
use tracing::{info, warn};

use super::super::super::error::SandboxError;
use super::super::super::events::EventLog;
use super::super::super::types::{
    BootMachine, BootPhase, ContainerInfo, ContainerState, GuestNetwork, IncomingMachine,
    Interface, MigrationDirection, MigrationState, ProcessExit, RefusalKind, SandboxExit, Started,
};
use super::super::super::wire::NicHeader;
use super::super::end::EndOfMachine;
use super::super::entries::{Entries, Entry, not_found};
use super::arrival::Arriving;
use super::boots::Boots;
use super::dhcp::DhcpServers;
use super::refusals::{invalid, must_share_nothing, no_machine};
use super::usage::Usage;
use super::vm::{Beginning, Vm, VmLife};
use crate::machine::{
    HostFiles, MachineError, MachineNic, MachinePlan, MachineShare, MachineSize, OpenShare,
    PluggedIn, causes,
};

/// All that machines are built from and that the process has from its launch.
#[derive(Debug)]
pub(in super::super) struct Resources {
    /// Without it there are no machines, which a request for one reports.
    pub(in super::super) host: Result<HostFiles, MachineError>,
    /// The cards that the launcher passed, each with its description.
    pub(in super::super) nics: Vec<(NicHeader, OwnedFd)>,
    /// The guest's network. Nobody in the guest is told of it: its interfaces' hardware addresses
    /// and sizes are the cards', and whoever answers the guest's DHCP requests knows it.
    pub(in super::super) network: GuestNetwork,
    /// The directory with those that machines share.
    pub(in super::super) share: Option<OwnedFd>,
    /// Memory that the sandbox was launched for, in bytes.
    pub(in super::super) memory: u64,
    /// Bytes that it may have beyond that.
    pub(in super::super) growth: u64,
    pub(in super::super) usage: Usage,
    pub(in super::super) events: Option<EventLog>,
}

/// The guest of a sandbox's process that has no agent.
#[derive(Debug)]
pub(in super::super) struct OwnOs {
    pub(super) host: Result<Arc<HostFiles>, String>,
    pub(in super::super) nics: Vec<(NicHeader, OwnedFd)>,
    pub(in super::super) network: GuestNetwork,
    pub(in super::super) share: Option<OwnedFd>,
    pub(in super::super) memory: u64,
    pub(in super::super) growth: u64,
    pub(in super::super) usage: Usage,
    pub(super) events: Option<Arc<EventLog>>,
    pub(super) entries: Entries,
    /// The machines of containers that were not deleted, the latest last.
    pub(super) vms: Mutex<Vec<Arc<Vm>>>,
    pub(super) dhcp: DhcpServers,
    /// Held while a machine is built, so that there is one at most.
    pub(super) booting: AsyncMutex<()>,
    /// Held while it is paused, resumed or saved.
    pub(super) pausing: AsyncMutex<()>,
    pub(super) is_paused: Arc<AtomicBool>,
    /// The sandbox is to end.
    pub(super) is_ending: AtomicBool,
    pub(super) stopped: watch::Sender<bool>,
    /// How the sandbox ended, once it was asked to and has no machine any more.
    pub(super) ended: watch::Sender<Option<SandboxExit>>,
}

impl OwnOs {
    pub(in super::super) fn new(resources: Resources) -> Self {
        Self {
            host: resources.host.map(Arc::new).map_err(|error| causes(&error)),
            nics: resources.nics,
            network: resources.network,
            share: resources.share,
            memory: resources.memory,
            growth: resources.growth,
            usage: resources.usage,
            events: resources.events.map(Arc::new),
            entries: Entries::default(),
            vms: Mutex::default(),
            dhcp: DhcpServers::default(),
            booting: AsyncMutex::default(),
            pausing: AsyncMutex::default(),
            is_paused: Arc::default(),
            is_ending: AtomicBool::new(false),
            stopped: watch::Sender::new(false),
            ended: watch::Sender::new(None),
        }
    }

    /// Boots a machine, which is a container from then on.
    pub(in super::super) async fn boot(
        this: &Arc<Self>,
        boot: BootMachine,
    ) -> Result<Started, SandboxError> {
        let id = boot.id.clone();
        let incoming = boot.incoming.clone();
        validate_id(&id).map_err(|error| invalid(error.to_string()))?;
        let _turn = this.booting.lock().await;
        this.check(&boot)?;
        this.entries.take(&id)?;
        let made = this.make(boot).await;
        let made = made.and_then(|(vm, started)| {
            let arriving = incoming.map(|incoming| this.awaits(&vm, &incoming));
            Ok((vm, started, arriving.transpose()?))
        });
        let (vm, started, arriving) = match made {
            Ok(made) => made,
            Err(error) => {
                this.entries.set(&id, None);
                return Err(error);
            }
        };
        this.is_paused.store(false, Ordering::Relaxed);
        let container = Arc::clone(&vm.container);
        this.lock().push(Arc::clone(&vm));
        this.entries.set(&id, Some(Entry::Made(container)));
        if this.is_ending.load(Ordering::SeqCst) {
            // The sandbox's end came in between.
            vm.kill();
        }
        let this = Arc::clone(this);
        tokio::spawn(async move {
            let arrival = arriving.as_ref().map(|arriving| arriving.arrive(&vm));
            let end = vm.live(arrival).await;
            info!(container = id, ?end, "the machine has ended");
            vm.report(&end).await;
            if this.is_ending.load(Ordering::SeqCst) {
                this.end(end.of_sandbox());
            }
        });
        Ok(started)
    }

    /// Begins to wait for a machine that comes from elsewhere.
    pub(super) fn awaits(
        &self,
        vm: &Arc<Vm>,
        incoming: &IncomingMachine,
    ) -> Result<Arriving, SandboxError> {
        let (direction, state) = (MigrationDirection::In, MigrationState::Waiting);
        let bytes = vm.memory();
        let begun = vm
            .migrations
            .begin(&incoming.migration, direction, state, bytes)?;
        Ok(Arriving::new(incoming, begun, Arc::clone(&self.is_paused)))
    }

    /// Refuses what is out of bounds, and a second machine.
    pub(super) fn check(&self, boot: &BootMachine) -> Result<(), SandboxError> {
        if boot.memory > self.memory {
            return Err(invalid(format!(
                "a machine of {} bytes in a sandbox for {} bytes",
                boot.memory, self.memory
            )));
        }
        let most = self.memory.saturating_add(self.growth);
        if boot.growth > most - boot.memory
            || boot.grown > boot.growth.min(self.memory - boot.memory)
        {
            return Err(invalid(format!(
                "a machine that has {} of {} more bytes, in a sandbox for {most} bytes",
                boot.grown, boot.growth
            )));
        }
        if boot.disks.len() > BootMachine::MAX_DISKS {
            return Err(invalid(format!(
                "{} disks, but a machine has at most {}",
                boot.disks.len(),
                BootMachine::MAX_DISKS
            )));
        }
        let most = BootMachine::MOST_DISKS;
        let all = boot.disks.len() + boot.plugged.len();
        if all > most {
            return Err(invalid(format!(
                "{all} disks with those that are plugged in, but a machine has at most {most}"
            )));
        }
        let disks = boot.disks.iter().chain(&boot.plugged);
        let serials = disks.map(|disk| &disk.serial);
        for (index, serial) in serials.clone().enumerate() {
            if serials.clone().take(index).any(|other| other == serial) {
                return Err(invalid(format!(
                    "two disks have the serial number {serial:?}"
                )));
            }
        }
        self.check_shares(&boot.shares)?;
        if boot.incoming.is_some() || boot.saved.is_some() {
            must_share_nothing(boot.shares.iter().map(|share| share.tag.as_str()))?;
        }
        let running = self.list().into_iter();
        let mut running = running.filter(|info| info.state != ContainerState::Exited);
        match running.next() {
            Some(info) => Err(SandboxError::refused(
                RefusalKind::WrongState,
                format!(
                    "the sandbox has one machine, that of the container {}, which runs",
                    info.id
                ),
            )),
            None => Ok(()),
        }
    }

    pub(super) fn check_shares(&self, shares: &[MachineShare]) -> Result<(), SandboxError> {
        const MOST: usize = BootMachine::MAX_SHARES;
        if shares.len() > MOST {
            let count = shares.len();
            return Err(invalid(format!(
                "{count} shared directories, but a machine has at most {MOST}"
            )));
        }
        for (index, share) in shares.iter().enumerate() {
            let tag = &share.tag;
            if !share.is_valid() {
                return Err(invalid(format!(
                    "{tag:?} is not the tag of a directory of the sandbox: it has 1 to 36 bytes"
                )));
            }
            if shares.iter().take(index).any(|other| other.tag == *tag) {
                return Err(invalid(format!(
                    "two shared directories have the tag {tag:?}"
                )));
            }
        }
        Ok(())
    }

    /// Opens the directories that a machine shares.
    pub(super) fn open_shares(
        &self,
        shares: Vec<MachineShare>,
    ) -> Result<Vec<OpenShare>, SandboxError> {
        let open = |share: MachineShare| match &self.share {
            Some(all) => Ok(share.open(all)?),
            None => Err(invalid(format!(
                "the sandbox was launched without a directory to share: there is none for the \
                 tag {:?}",
                share.tag
            ))),
        };
        shares.into_iter().map(open).collect()
    }

    pub(super) async fn make(&self, boot: BootMachine) -> Result<(Arc<Vm>, Started), SandboxError> {
        let size = size_of_machine(&boot);
        let boots = Arc::<Boots>::default();
        let leased = Arc::clone(&boots);
        self.dhcp
            .run(boot.dhcp, move || leased.reached(BootPhase::Address))
            .map_err(invalid)?;
        let host = self.host.as_ref().map_err(|why| {
            SandboxError::refused(RefusalKind::Internal, format!("no machine: {why}"))
        })?;
        let mut nics = Vec::new();
        for (index, (header, fd)) in self.nics.iter().enumerate() {
            let interface = self.network.interfaces.get(index);
            nics.push(MachineNic {
                name: interface.map_or_else(String::new, |interface| interface.name.clone()),
                kind: header.kind,
                fd: fd.try_clone().map_err(MachineError::Duplicate)?,
                mac: interface.map_or(header.mac, |interface| interface.mac),
                mtu: interface.map_or(header.mtu, |interface| interface.mtu),
                addresses: interface.map_or_else(Vec::new, addresses_of),
                is_down: interface.is_some_and(|interface| interface.is_down).into(),
            });
        }
        let plan = MachinePlan {
            kernel: boot.kernel,
            program: boot.program,
            initramfs: boot.initramfs,
            cmdline: boot.cmdline,
            uuid: boot.uuid,
            identity: boot.identity,
            size,
            disks: boot.disks,
            nics,
            shares: self.open_shares(boot.shares)?,
            plugged: Mutex::new(boot.plugged.into_iter().map(PluggedIn::new).collect()),
        };
        let life = VmLife {
            loader_limit: boot.loader_limit,
            before: boot.before,
            boots,
            ends_at_reboot: boot.ends_at_reboot,
            is_idle: boot.is_idle,
        };
        let host = Arc::clone(host);
        let beginning = match (boot.incoming, boot.saved) {
            _ if boot.is_idle => Beginning::Idle,
            (Some(_), _) => Beginning::Arrives,
            (None, Some(saved)) => Beginning::Saved(saved),
            (None, None) => match boot.kept {
                Some(kept) => Beginning::Kept(kept),
                None => Beginning::Boot,
            },
        };
        let (log, events) = (boot.log, self.events.clone());
        Vm::start(boot.id, plan, beginning, life, log, host, events).await
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Vec<Arc<Vm>>> {
        self.vms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn vm(&self, id: &str) -> Result<Arc<Vm>, SandboxError> {
        let vms = self.lock();
        let vm = vms.iter().find(|vm| vm.container.id == id);
        vm.cloned().ok_or_else(|| not_found(id))
    }

    /// The machine that runs, if one does.
    pub(super) fn running(&self) -> Option<Arc<Vm>> {
        let vms = self.lock();
        let running = vms.iter().find(|vm| vm.is_running());
        running.cloned()
    }

    pub(in super::super) fn stopped(&self) -> watch::Receiver<bool> {
        self.stopped.subscribe()
    }

    pub(super) fn end(&self, exit: SandboxExit) {
        self.stopped.send_replace(true);
        self.ended.send_if_modified(|ended| {
            let is_first = ended.is_none();
            ended.get_or_insert(exit);
            is_first
        });
    }

    /// Pauses the guest between two instructions.
    pub(in super::super) async fn pause(&self) -> Result<(), SandboxError> {
        let _turn = self.pausing.lock().await;
        let vm = self.running().ok_or_else(no_machine)?;
        vm.migrations.must_be_over()?;
        vm.machine()?
            .pause()
            .await
            .map_err(SandboxError::wrong_state)?;
        self.is_paused.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Resumes a paused guest.
    pub(in super::super) async fn resume(&self) -> Result<(), SandboxError> {
        let _turn = self.pausing.lock().await;
        let vm = self.running().ok_or_else(no_machine)?;
        // It may run elsewhere.
        vm.migrations.must_be_over()?;
        vm.machine()?
            .resume()
            .await
            .map_err(SandboxError::wrong_state)?;
        self.is_paused.store(false, Ordering::Relaxed);
        vm.set_clock();
        Ok(())
    }

    /// Connects to a vsock port of the guest. The stream ends if the guest refuses.
    pub(in super::super) async fn vsock(&self, port: u32) -> Result<OwnedFd, SandboxError> {
        let vm = self.running().ok_or_else(no_machine)?;
        let stream = vm.machine()?.ports().connect(port).await;
        Ok(stream.map_err(SandboxError::wrong_state)?.into())
    }

    pub(in super::super) fn is_paused(&self) -> bool {
        self.is_paused.load(Ordering::Relaxed)
    }

    pub(in super::super) fn list(&self) -> Vec<ContainerInfo> {
        let made = self.entries.all();
        made.iter().map(|container| container.info()).collect()
    }

    pub(in super::super) fn end_with(
        &self,
        id: &str,
    ) -> Result<watch::Receiver<Option<ProcessExit>>, SandboxError> {
        self.entries.get(id)?.exit(None)
    }

    pub(in super::super) async fn guest_is_gone(&self) {
        let made = self.entries.all();
        join_all(made.iter().map(|container| container.guest_is_gone())).await;
    }

    pub(in super::super) async fn detach_readers(&self) {
        let made = self.entries.all();
        join_all(made.iter().map(|container| container.detach_readers())).await;
    }

    /// Makes a guest that is to stop run, if it is paused, and stay here, if it moves.
    pub(super) async fn wake(&self) {
        if let Some(migration) = self.running().and_then(|vm| vm.migrations.latest()) {
            migration.end_for_stop().await;
        }
        if self.is_paused()
            && let Err(error) = self.resume().await
        {
            warn!(%error, "the guest stays paused");
        }
    }
}

impl EndOfMachine for Arc<OwnOs> {
    async fn exit(&self) -> SandboxExit {
        let mut ended = self.ended.subscribe();
        let exit = ended.wait_for(Option::is_some).await;
        let exit = exit.ok().and_then(|exit| exit.clone());
        exit.unwrap_or(SandboxExit::Died)
    }

    fn has_stopped(&self) -> bool {
        *self.stopped.borrow()
    }

    async fn lost(&self) {
        // There is no agent to lose.
        std::future::pending().await
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    fn ask_to_stop(&self) {
        self.is_ending.store(true, Ordering::SeqCst);
        match self.running() {
            Some(vm) => {
                let this = Arc::clone(self);
                tokio::spawn(async move {
                    this.wake().await;
                    // The pod's own grace period ends with a kill.
                    Vm::stop(&vm, Duration::MAX);
                });
            }
            None => self.end(SandboxExit::PoweredOff),
        }
    }

    fn kill(&self) {
        if let Some(vm) = self.running() {
            vm.kill();
        }
    }
}

/// The addresses of an interface, without the lengths of their prefixes.
fn addresses_of(interface: &Interface) -> Vec<IpAddr> {
    let addresses = interface.addresses.iter();
    let parsed = addresses.filter_map(|text| text.split('/').next()?.parse().ok());
    parsed.collect()
}

fn size_of_machine(boot: &BootMachine) -> MachineSize {
    let (memory, growth, grown) = (boot.memory, boot.growth, boot.grown);
    MachineSize::new(boot.vcpus, boot.max_vcpus, memory, growth, grown)
}
