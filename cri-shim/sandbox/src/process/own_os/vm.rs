//! One container's machine: boot, reboot, stop, end.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Mutex as AsyncMutex, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, timeout};
use tracing::{debug, info, warn};

use super::super::super::agent::now_ns;
use super::super::super::error::SandboxError;
use super::super::super::events::EventLog;
use super::super::super::stdio::{GuestStreams, StreamSet};
use super::super::super::types::{
    BootEvent, BootPhase, BootWay, ProcessExit, RefusalKind, RestartPolicy, Started,
};
use super::super::container::Container;
use super::super::output::ContainerStreams;
use super::super::restart::Processes;
use super::agent_of_machine::{AgentOfMachine, Running};
use super::boots::{Boots, Start};
use super::delays::RebootDelays;
use super::dumps::Dumps;
use super::migrations::Migrations;
use super::outcome::MachineOutcome;
use super::refusals::{must_share_nothing, no_machine};
use crate::machine::{
    Arrival, ArriveError, BootProgram, BuiltMachine, ContinueAs, HostFiles, KeptKernel, Machine,
    MachineError, MachineExit, MachinePlan, MovingDisk, OpenShare, SavedMachine, SerialPort,
    causes,
};

/// The number that stands for a process of a guest whose processes nobody here knows.
const PID: u32 = 1;

/// How long the kill of a machine with a hanging disk is waited for.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// What was asked of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Wanted {
    /// To run, also after a reboot.
    Running,
    /// To power itself off.
    Off,
    /// To be killed.
    Killed,
}

/// Whether a machine is being saved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Saving {
    /// It is not.
    #[default]
    No,
    /// It is, and may go on.
    Begun,
    /// It was, and goes on elsewhere.
    Done,
}

/// A machine that is being saved, until this is dropped.
#[derive(Debug)]
pub(super) struct SavingMachine<'a>(&'a Vm);

impl SavingMachine<'_> {
    /// The machine goes on from its files alone.
    pub(super) fn done(self) {
        *self.0.saving() = Saving::Done;
    }
}

impl Drop for SavingMachine<'_> {
    fn drop(&mut self) {
        let mut saving = self.0.saving();
        if *saving == Saving::Begun {
            *saving = Saving::No;
        }
    }
}

/// How a container's first machine begins.
#[derive(Debug)]
pub(super) enum Beginning {
    /// It boots.
    Boot,
    /// It starts the kernel that was kept of its image.
    Kept(KeptKernel),
    /// It continues a saved one.
    Saved(SavedMachine),
    /// It comes from elsewhere, later.
    Arrives,
    /// There is none.
    Idle,
}

/// How a machine is built.
#[derive(Debug)]
enum First {
    Boot,
    Kept(KeptKernel),
    Saved(SavedMachine),
}

/// Bounds of a machine's life.
#[derive(Debug, Default)]
pub(super) struct VmLife {
    /// How long the loader may take to its first line; the kernel is not the loader's without it.
    pub(super) loader_limit: Option<Duration>,
    /// What came before the first machine.
    pub(super) before: Vec<BootEvent>,
    /// Where its boots are reported.
    pub(super) boots: Arc<Boots>,
    /// A guest that reboots by itself has ended.
    pub(super) ends_at_reboot: bool,
    /// There is no machine.
    pub(super) is_idle: bool,
}

/// A container whose process is a machine.
#[derive(Debug)]
pub(super) struct Vm {
    pub(super) container: Arc<Container>,
    plan: MachinePlan,
    life: VmLife,
    port: SerialPort,
    host: Arc<HostFiles>,
    /// `None` between two machines and after the last one.
    machine: Mutex<Option<Arc<Machine>>>,
    pub(super) wanted: watch::Sender<Wanted>,
    /// The machine has no loader: it continues a saved one, or starts a kept kernel.
    is_past_loader: AtomicBool,
    saving: Mutex<Saving>,
    /// The machine is killed to build another one.
    pub(super) is_reset: AtomicBool,
    /// Until then, a guest that powers itself off is booted again.
    pub(super) restart: Mutex<Option<Instant>>,
    pub(super) agent: AsyncMutex<Option<Arc<AgentOfMachine>>>,
    programs: Mutex<Vec<Running>>,
    thaw: Mutex<Option<AbortHandle>>,
    pub(super) migrations: Migrations,
    pub(super) dumps: Dumps,
}

impl Vm {
    /// Creates the container, and its machine unless that comes from elsewhere.
    pub(super) async fn start(
        id: String,
        plan: MachinePlan,
        beginning: Beginning,
        mut life: VmLife,
        log: Option<OwnedFd>,
        host: Arc<HostFiles>,
        events: Option<Arc<EventLog>>,
    ) -> Result<(Arc<Self>, Started), SandboxError> {
        let (port, stream) = SerialPort::new().map_err(MachineError::SerialPort)?;
        let streams = GuestStreams::of_console(stream);
        let streams = ContainerStreams::start(streams, log, false, false)?;
        let set = StreamSet {
            stdin: true,
            stdout: true,
            stderr: false,
        };
        let processes = Processes::new(RestartPolicy::Never, set, None);
        let container = Container::new(id, PID, streams, processes, events);
        let before = std::mem::take(&mut life.before);
        let vm = Arc::new(Self {
            container: Arc::new(container),
            plan,
            life,
            port,
            host,
            machine: Mutex::default(),
            wanted: watch::Sender::new(Wanted::Running),
            is_past_loader: AtomicBool::new(matches!(beginning, Beginning::Saved(_))),
            saving: Mutex::default(),
            is_reset: AtomicBool::new(false),
            restart: Mutex::default(),
            agent: AsyncMutex::default(),
            programs: Mutex::default(),
            thaw: Mutex::default(),
            migrations: Migrations::default(),
            dumps: Dumps::default(),
        });
        vm.life.boots.begin(before);
        match beginning {
            Beginning::Boot => Self::build(&vm, First::Boot).await?,
            Beginning::Kept(kept) => Self::build(&vm, First::Kept(kept)).await?,
            Beginning::Saved(saved) => {
                Self::build(&vm, First::Saved(saved)).await?;
                vm.set_clock();
            }
            Beginning::Arrives => vm.starts(BootWay::Migration, None),
            Beginning::Idle => {}
        }
        let started = Started {
            pid: PID,
            started_at_ns: now_ns(),
        };
        vm.container.runs(started);
        Ok((vm, started))
    }

    /// Builds and starts a machine.
    async fn build(this: &Arc<Self>, first: First) -> Result<(), MachineError> {
        let vm = Arc::clone(this);
        let built = tokio::task::spawn_blocking(move || {
            let machine = match first {
                First::Saved(saved) => {
                    let machine = vm.plan.continued(&saved, &vm.host, &vm.port)?;
                    vm.starts(
                        match saved.continues {
                            ContinueAs::Same => BootWay::SavedState,
                            ContinueAs::Copy => BootWay::Snapshot,
                        },
                        None,
                    );
                    machine
                }
                First::Boot => vm.build_as_planned()?,
                First::Kept(kept) => vm.start_kept(&kept)?,
            };
            let machine = machine.start()?;
            vm.begin_with_plugged_memory(&machine);
            *vm.lock() = Some(Arc::new(machine));
            vm.boots().reached(BootPhase::Machine);
            Ok::<_, MachineError>(())
        });
        built
            .await
            .map_err(|error| MachineError::Thread(std::io::Error::other(error)))??;
        if *this.wanted.borrow() == Wanted::Killed {
            // That came while it was built.
            this.kill();
        }
        Ok(())
    }

    /// Builds a machine that starts a kept kernel; by the loader if that cannot be started.
    fn start_kept(&self, kept: &KeptKernel) -> Result<BuiltMachine, MachineError> {
        match self.plan.build_kept(kept, &self.host, &self.port) {
            Ok(machine) => {
                self.is_past_loader.store(true, Ordering::SeqCst);
                self.starts(BootWay::KeptKernel, Some(kept));
                Ok(machine)
            }
            Err(error) => {
                let (container, why) = (&self.container.id, causes(&error));
                warn!(
                    container,
                    why, "the kept kernel is not started: the loader is"
                );
                self.build_as_planned()
            }
        }
    }

    /// Builds a machine that starts the loader, or a kernel of its own.
    fn build_as_planned(&self) -> Result<BuiltMachine, MachineError> {
        let machine = self.plan.build(&self.host, &self.port)?;
        self.starts(
            match (self.plan.program, self.life.loader_limit) {
                (BootProgram::Firmware, _) => BootWay::Firmware,
                (BootProgram::Kernel, Some(_)) => BootWay::Loader,
                (BootProgram::Kernel, None) => BootWay::OwnKernel,
            },
            None,
        );
        Ok(machine)
    }

    /// Notes what a machine that does not run yet starts, and reads its console along.
    fn starts(&self, way: BootWay, kept: Option<&KeptKernel>) {
        let cmdline = match (way, kept) {
            (BootWay::OwnKernel, _) => Some(self.plan.cmdline.clone()),
            (_, kept) => kept.map(|kept| kept.cmdline.clone()),
        };
        self.boots().starts(Start {
            way,
            entry: kept.map(|kept| kept.title.clone()),
            cmdline,
        });
        if matches!(
            way,
            BootWay::Loader | BootWay::KeptKernel | BootWay::OwnKernel | BootWay::Firmware
        ) {
            self.port.read_along(self.boots().reader(way));
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Option<Arc<Machine>>> {
        self.machine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the machine that runs.
    pub(super) fn machine(&self) -> Result<Arc<Machine>, SandboxError> {
        self.lock().clone().ok_or_else(|| match self.is_running() {
            true => SandboxError::refused(RefusalKind::WrongState, "the guest reboots just now"),
            false => no_machine(),
        })
    }

    /// Whether the container has not ended.
    pub(super) fn is_running(&self) -> bool {
        self.container
            .exit(None)
            .is_ok_and(|exit| exit.borrow().is_none())
    }

    /// Returns the reports of how its machines are booted.
    pub(super) fn boots(&self) -> &Arc<Boots> {
        &self.life.boots
    }

    /// Returns what its machines are built from.
    pub(super) fn plan(&self) -> &MachinePlan {
        &self.plan
    }

    pub(super) fn saving(&self) -> MutexGuard<'_, Saving> {
        self.saving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses what a machine that is being saved cannot do.
    pub(super) fn must_not_be_saved(&self) -> Result<(), SandboxError> {
        match *self.saving() {
            Saving::No => Ok(()),
            _ => Err(SandboxError::refused(
                RefusalKind::WrongState,
                "the machine is being saved: wait until it is done",
            )),
        }
    }

    /// Refuses what a machine with shared directories cannot do.
    pub(super) fn must_share_nothing(&self) -> Result<(), SandboxError> {
        must_share_nothing(self.plan.shares.iter().map(OpenShare::tag))
    }

    /// Begins to save the machine, which is not reset meanwhile.
    pub(super) fn begin_saving(&self) -> Result<SavingMachine<'_>, SandboxError> {
        let mut saving = self.saving();
        if *saving != Saving::No {
            return Err(SandboxError::refused(
                RefusalKind::WrongState,
                "the machine is being saved already",
            ));
        }
        *saving = Saving::Begun;
        Ok(SavingMachine(self))
    }

    /// Programs that run in the guest by its agent.
    pub(super) fn programs(&self) -> MutexGuard<'_, Vec<Running>> {
        self.programs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the task that thaws file systems, in place of an earlier one.
    pub(super) fn set_thaw(&self, thaw: Option<AbortHandle>) {
        let before = std::mem::replace(
            &mut *self.thaw.lock().unwrap_or_else(PoisonError::into_inner),
            thaw,
        );
        if let Some(before) = before {
            before.abort();
        }
    }

    /// Memory of the machine in bytes.
    pub(super) fn memory(&self) -> u64 {
        self.plan.size.all_memory()
    }

    /// Waits for the machine's end, and for those that follow its reboots; first for its arrival,
    /// which fails with the reason, if it comes from elsewhere.
    pub(super) async fn live(
        self: &Arc<Self>,
        arrival: Option<impl Future<Output = Result<(), String>>>,
    ) -> MachineOutcome {
        if self.life.is_idle {
            self.is_asked_to_end().await;
            return self.outcome(MachineExit::PoweredOff);
        }
        let mut delays = RebootDelays::default();
        let mut is_booted = arrival.is_none();
        if let Some(arrival) = arrival
            && let Err(why) = arrival.await
        {
            self.container.set_never_came();
            return self.outcome(MachineExit::Failed(why));
        }
        loop {
            let begin = Instant::now();
            let machine = self.lock().clone();
            if let Some(machine) = &machine {
                self.holds_agent_port(Arc::clone(machine));
            }
            let exit = match machine {
                // One that has come has no loader any more.
                Some(machine) if !is_booted => machine.ended().await,
                Some(machine) => self.end_of(machine).await,
                None => MachineExit::Killed,
            };
            is_booted = true;
            // What it has left behind is asked after its end.
            let ended = self.lock().clone();
            if let Some(migration) = self.migrations.latest()
                && migration.end_with_machine(&exit.to_string()).await
            {
                self.discard().await;
                return self.last(MachineExit::Moved, ended);
            }
            self.discard().await;
            if *self.saving() == Saving::Done {
                self.unlock_disks_after(ended);
                return MachineOutcome::saved();
            }
            let is_reset = self.is_reset.swap(false, Ordering::SeqCst);
            let is_restart = self.takes_restart() && exit == MachineExit::PoweredOff;
            let is_own = exit == MachineExit::Reset && !self.life.ends_at_reboot;
            let is_reboot =
                (is_own || is_reset || is_restart) && *self.wanted.borrow() == Wanted::Running;
            if !is_reboot {
                return self.last(exit, ended);
            }
            drop(ended);
            let delay = delays.next(begin.elapsed());
            info!(container = self.container.id, ?delay, "the guest reboots");
            let mut wanted = self.wanted.subscribe();
            let stopped = wanted.wait_for(|wanted| *wanted != Wanted::Running);
            if timeout(delay, stopped).await.is_ok() {
                return self.last(MachineExit::Reset, None);
            }
            self.boots().begin(Vec::new());
            if let Err(error) = Self::build(self, First::Boot).await {
                let why = causes(&error);
                return self.outcome(MachineExit::Failed(format!(
                    "the guest rebooted, and no machine could be built for it: {why}"
                )));
            }
        }
    }

    /// The outcome of the last machine, which has ended. Another container may have its disks.
    fn last(self: &Arc<Self>, exit: MachineExit, machine: Option<Arc<Machine>>) -> MachineOutcome {
        self.unlock_disks_after(machine);
        self.outcome(exit)
    }

    /// Waits for a machine's end; ends it if its loader never writes a line.
    async fn end_of(&self, machine: Arc<Machine>) -> MachineExit {
        let is_past_loader = self.is_past_loader.swap(false, Ordering::SeqCst);
        if let Some(limit) = self.life.loader_limit
            && !is_past_loader
        {
            let too_long = async {
                sleep(limit).await;
                while machine.is_paused() {
                    sleep(limit).await;
                }
            };
            tokio::select! {
                exit = machine.ended() => return exit,
                () = self.port.loader_writes() => {}
                () = too_long => {
                    let why = self.hang(&machine, limit);
                    warn!(container = self.container.id, why, "the machine is killed");
                    // Its disk may keep its threads for good.
                    let kill = tokio::task::spawn_blocking(move || machine.kill());
                    let _ = timeout(KILL_TIMEOUT, kill).await;
                    return MachineExit::Failed(why);
                }
            }
        }
        machine.ended().await
    }

    /// Says why a loader writes nothing.
    fn hang(&self, machine: &Machine, limit: Duration) -> String {
        let disks = machine.waiting_disks();
        let disks = disks
            .iter()
            .filter_map(|number| self.plan.disks.get(*number));
        let serials: Vec<String> = disks.map(|disk| format!("{:?}", disk.serial)).collect();
        let seconds = limit.as_secs();
        match serials.as_slice() {
            [] => format!(
                "the loader wrote nothing within {seconds} s, though its disks answer; is the host \
                 too busy?"
            ),
            serials => format!(
                "the loader wrote nothing within {seconds} s: a disk does not answer: {}; look at \
                 the file system or device on this host that has it",
                serials.join(", ")
            ),
        }
    }

    fn outcome(&self, exit: MachineExit) -> MachineOutcome {
        let is_wanted = *self.wanted.borrow() == Wanted::Running;
        let was_asked = !is_wanted || self.life.ends_at_reboot;
        MachineOutcome::new(exit, &self.port.tail(), was_asked)
    }

    /// Frees what the last machine has: another one may need it.
    async fn discard(&self) {
        self.forget_agent().await;
        let machine = self.lock().take();
        // Its threads may take a moment to end.
        let dropped = tokio::task::spawn_blocking(move || drop(machine));
        if let Err(error) = dropped.await {
            debug!(%error, "the task that freed a machine ended");
        }
    }

    /// Writes the rest of the output, and reports the container's end.
    pub(super) async fn report(&self, outcome: &MachineOutcome) {
        self.port.close();
        let exit = ProcessExit {
            code: outcome.code(),
            exited_at_ns: now_ns(),
            oom_killed: false,
            of_machine: false,
        };
        self.container.set_message(outcome.message());
        self.container.ends(exit).await;
    }

    /// Takes a machine that has come.
    pub(super) fn takes(&self, machine: Machine) {
        *self.lock() = Some(Arc::new(machine));
        self.boots().reached(BootPhase::Machine);
        if *self.wanted.borrow() == Wanted::Killed {
            // That came meanwhile.
            self.kill();
        }
    }

    /// Receives a machine from a connection; blocks until it runs.
    pub(super) fn receive(
        &self,
        connection: &UnixStream,
        tell: impl FnMut(Arrival),
    ) -> Result<(Machine, bool), ArriveError> {
        self.plan.receive(&self.host, &self.port, connection, tell)
    }

    /// Makes what the guest has written to disks durable.
    pub(super) fn sync_disks(&self) -> Result<(), MachineError> {
        self.plan.sync_disks()
    }

    /// Takes the locks of disks that were opened without.
    pub(super) fn lock_disks(&self) -> Result<(), MachineError> {
        self.plan.lock_disks()
    }

    /// Returns the disks whose contents go with the memory.
    pub(super) fn moving_disks(&self) -> Vec<MovingDisk> {
        self.plan.moving_disks()
    }

    /// Tells the networks of the machine's cards once where they are now.
    pub(super) fn announce(&self) {
        self.plan.announce();
    }

    /// Whether the guest's file systems are frozen.
    pub(super) fn is_frozen(&self) -> bool {
        let thaw = self.thaw.lock().unwrap_or_else(PoisonError::into_inner);
        thaw.as_ref().is_some_and(|thaw| !thaw.is_finished())
    }
}
