//! What a running machine is asked for.

use std::fs::File;
use std::io;
use std::ops::ControlFlow;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use podvisor_vmm::{
    BlockHandle, DumpProgress, FsDevice, HandleError, LinkState, MemorySize, PortsHandle, State,
    Vm, VsockHandle, WorkingSet,
};
use tokio::sync::watch;
use tracing::debug;

use super::console::Console;
use super::error::MachineError;
use super::exit::MachineExit;
use super::pause::{PauseCall, UndoPause};

/// The library's name of that directory's device.
const SHARE_DEVICE: &str = "fs0";

/// A running machine, which is killed when it is dropped.
#[derive(Debug)]
pub struct Machine {
    pub(super) vm: Arc<Vm>,
    pub(super) spare: Vec<BlockHandle>,
    pub(super) ports: Ports,
    pub(super) console: Option<Arc<Console>>,
    pub(super) stopped: watch::Receiver<bool>,
    pub(super) exit: watch::Receiver<Option<MachineExit>>,
}

/// Access to the vsock ports of a machine's guest.
#[derive(Debug, Clone)]
pub struct Ports(pub(super) VsockHandle);

impl Ports {
    /// Opens a stream to a port of the guest. Data that is written waits until the guest accepts;
    /// the stream ends if the guest refuses.
    ///
    /// # Errors
    /// The machine does not run, or no more connections are possible.
    pub async fn connect(&self, port: u32) -> Result<UnixStream, MachineError> {
        let vsock = self.0.clone();
        // The device may be busy.
        let connect = tokio::task::spawn_blocking(move || vsock.connect(port));
        match connect.await {
            Ok(connected) => Ok(connected?),
            Err(error) => Err(MachineError::Thread(io::Error::other(error))),
        }
    }
}

/// What was read from a machine's disks and written to them, since it was built.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskTraffic {
    /// Requests to read.
    pub reads: u64,
    /// Bytes that were read.
    pub read_bytes: u64,
    /// Requests to write.
    pub writes: u64,
    /// Bytes that were written.
    pub write_bytes: u64,
}

impl Machine {
    /// Returns access to the guest's vsock ports.
    #[must_use]
    pub fn ports(&self) -> &Ports {
        &self.ports
    }

    /// Pauses the guest between two instructions. It continues with [`Self::resume`], or if the
    /// future of this call is dropped.
    ///
    /// # Errors
    /// The machine does not run, or a device is in the middle of a long operation.
    pub async fn pause(&self) -> Result<(), MachineError> {
        let call = Arc::new(PauseCall::default());
        let _undo = UndoPause {
            vm: Arc::clone(&self.vm),
            call: Arc::clone(&call),
        };
        let attempts = Arc::clone(&call);
        let paused = self.blocking(move |vm| attempts.carry_out(|| vm.pause(), || vm.resume()));
        let paused = paused.await;
        call.deliver();
        paused
    }

    /// Resumes a paused guest.
    ///
    /// # Errors
    /// The machine is not paused.
    pub async fn resume(&self) -> Result<(), MachineError> {
        self.blocking(|vm| match vm.state() {
            // It has arrived paused from another host.
            State::Created => vm.start(),
            _ => vm.resume(),
        })
        .await
    }

    pub(super) async fn blocking<E: Send + 'static>(
        &self,
        work: impl FnOnce(&Vm) -> Result<(), E> + Send + 'static,
    ) -> Result<(), MachineError>
    where
        MachineError: From<E>,
    {
        let vm = Arc::clone(&self.vm);
        match tokio::task::spawn_blocking(move || work(&vm)).await {
            Ok(done) => Ok(done?),
            Err(error) => Err(MachineError::Thread(io::Error::other(error))),
        }
    }

    /// Writes the state of a paused guest to a new directory, from which clones can start.
    ///
    /// # Errors
    /// The machine is not paused, or the directory cannot be written.
    pub async fn snapshot(&self, dir: PathBuf) -> Result<(), MachineError> {
        self.blocking(move |vm| vm.snapshot(dir)).await
    }

    /// As [`Self::snapshot`], to two empty files.
    ///
    /// # Errors
    /// The machine is not paused, or the files cannot be written: they are empty then.
    pub(crate) fn snapshot_to(&self, state: &File, memory: &File) -> Result<(), MachineError> {
        Ok(self.vm.snapshot_to(state, memory)?)
    }

    /// Writes the memory and the registers of a paused guest to an empty file, for debuggers.
    ///
    /// # Errors
    /// The machine is not paused any more, `progress` broke it off, or the file cannot be written:
    /// it is empty then.
    pub(crate) fn dump_to(
        &self,
        file: &File,
        progress: impl FnMut(DumpProgress) -> ControlFlow<()>,
    ) -> Result<(), MachineError> {
        Ok(self.vm.dump_to(file, progress)?)
    }

    /// Returns the memory that a machine that started as a clone has written since.
    ///
    /// # Errors
    /// It did not start as a clone.
    pub fn working_set(&self) -> Result<WorkingSet, MachineError> {
        Ok(self.vm.working_set()?)
    }

    /// Becomes true when the guest no longer runs, though it is not known yet how the machine
    /// ended: that may take some time, after which [`Self::ended`] is certain to return.
    #[must_use]
    pub fn stopped(&self) -> watch::Receiver<bool> {
        self.stopped.clone()
    }

    /// Counters of the guest's vsock connections by name: which side closed them.
    #[must_use]
    pub fn vsock_counters(&self) -> Vec<(&'static str, u64)> {
        let devices = self.vm.counters().into_iter();
        let vsock = devices.filter(|counted| counted.device.starts_with("vsock"));
        let counters = vsock.flat_map(|counted| counted.counters);
        counters
            .map(|counter| (counter.name, counter.value))
            .collect()
    }

    /// What was read from the disks and written to them, all together.
    #[must_use]
    pub fn disk_traffic(&self) -> DiskTraffic {
        let mut sum = DiskTraffic::default();
        let devices = self.vm.counters().into_iter();
        let disks = devices.filter(|counted| counted.device.starts_with("blk"));
        for counter in disks.flat_map(|counted| counted.counters) {
            let field = match counter.name {
                "reads" => &mut sum.reads,
                "read_bytes" => &mut sum.read_bytes,
                "writes" => &mut sum.writes,
                "write_bytes" => &mut sum.write_bytes,
                _ => continue,
            };
            *field = field.saturating_add(counter.value);
        }
        sum
    }

    /// Whether the guest is paused.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        self.vm.state() == podvisor_vmm::State::Paused
    }

    /// Returns the numbers of the disks, from 0 in their order, that have taken a request and not
    /// answered it.
    #[must_use]
    pub fn waiting_disks(&self) -> Vec<usize> {
        let of_disk = |device: &str| device.strip_prefix("blk").and_then(|it| it.parse().ok());
        let counted = self.vm.counters();
        let disks = counted.iter().filter_map(|counted| {
            let number: usize = of_disk(&counted.device)?;
            let counters = counted.counters.iter();
            let counters: Vec<_> = counters.map(|it| (it.name, it.value)).collect();
            has_unanswered(&counters).then_some(number)
        });
        disks.collect()
    }

    /// Has the guest see how large the disk of this device is now.
    pub(crate) fn look_at_disk(&self, device: &str) -> Result<(), MachineError> {
        Ok(self.vm.block(device)?.resize()?)
    }

    /// Gives the card at this place in the order of cards a link, or takes it away; the guest's
    /// driver is told.
    pub(crate) fn set_link(&self, card: usize, link: LinkState) -> Result<(), MachineError> {
        Ok(self.vm.net(&format!("net{card}"))?.set_link(link)?)
    }

    /// Whether a thread of the machine, which has ended, was left behind in a request of the guest:
    /// it may still write to a disk.
    pub(crate) fn has_abandoned(&self) -> bool {
        !self.vm.abandoned().is_empty()
    }

    /// Waits until there is no such thread any more.
    pub(crate) fn wait_abandoned(&self) {
        self.vm.wait_abandoned();
    }

    /// Waits until the machine ends. There may be any number of callers.
    pub async fn ended(&self) -> MachineExit {
        let mut exit = self.exit.clone();
        let known = exit.wait_for(Option::is_some).await;
        match known.as_deref() {
            Ok(Some(exit)) => exit.clone(),
            _ => MachineExit::Failed("the thread that waited for it is gone".to_owned()),
        }
    }

    /// Changes the guest's additional memory to `bytes`, or as near to it as possible within
    /// `patience`: memory in use is not taken away. Returns how much additional memory it has then.
    ///
    /// # Errors
    /// The machine was built without growth, or has ended.
    pub async fn grow(&self, bytes: u64, patience: Duration) -> Result<u64, MachineError> {
        let memory = self.vm.hotplug_memory()?;
        let reach = move || memory.request_and_wait(MemorySize::bytes(bytes), patience);
        match tokio::task::spawn_blocking(reach).await {
            Ok(reached) => Ok(reached?.as_bytes()),
            Err(error) => Err(MachineError::Thread(io::Error::other(error))),
        }
    }

    /// Requests that the guest's additional memory becomes `bytes`, and does not wait.
    ///
    /// # Errors
    /// The machine was built without growth, or has ended.
    pub(crate) fn request_memory(&self, bytes: u64) -> Result<(), MachineError> {
        Ok(self
            .vm
            .hotplug_memory()?
            .request(MemorySize::bytes(bytes))?)
    }

    /// Counts files and directories that were removed on the host but are kept because the guest
    /// still knows them, though it does not have them open. Each call looks at one part of the
    /// shared directory: see [`FsDevice::count_removed_objects`].
    ///
    /// # Errors
    /// The machine does not run, or its file system device does not answer.
    pub async fn count_removed_objects(&self) -> Result<usize, MachineError> {
        // Machines without a shared directory have nothing to count.
        let Ok(share) = self.vm.fs(SHARE_DEVICE) else {
            return Ok(0);
        };
        let look = move || share.run(FsDevice::count_removed_objects);
        match tokio::task::spawn_blocking(look).await {
            Ok(found) => Ok(found?),
            Err(error) => Err(MachineError::Thread(io::Error::other(error))),
        }
    }

    /// Adds vCPUs until there are `count`; the guest has to bring them up then. None are removed.
    ///
    /// # Errors
    /// The machine was built for fewer vCPUs, or does not run.
    pub async fn add_cpus(&self, count: u8) -> Result<(), MachineError> {
        if count <= self.vm.vcpus() {
            return Ok(());
        }
        self.blocking(move |vm| vm.add_vcpus(count)).await
    }

    /// Returns the number of vCPUs.
    #[must_use]
    pub fn cpus(&self) -> u8 {
        self.vm.vcpus()
    }

    /// Connects a stream to the guest's serial console: it gets recent output and all that follows,
    /// and its input is typed. This does not depend on the guest's answering. The stream ends with
    /// the machine.
    ///
    /// # Errors
    /// [`MachineError::NoConsole`], or too many clients are connected.
    pub fn attach_console(&self, stream: UnixStream) -> Result<(), MachineError> {
        let console = self.console.as_ref().ok_or(MachineError::NoConsole)?;
        console
            .attach(&self.vm, stream)
            .map_err(MachineError::Console)
    }

    /// Presses the power button, which a guest that knows it takes as the request to power itself
    /// off.
    ///
    /// # Errors
    /// The machine has no such button, or does not run.
    pub fn press_power_button(&self) -> Result<(), MachineError> {
        Ok(self.vm.press_power_button()?)
    }

    /// Returns whether a program in the guest has the port of QEMU's guest agent open.
    ///
    /// # Errors
    /// The machine has no such port, or does not run.
    pub async fn has_guest_agent(&self) -> Result<bool, MachineError> {
        self.on_ports(|ports| ports.is_open(podvisor_guest_agent::PORT))
            .await
    }

    /// Connects to the port of QEMU's guest agent. The stream of an earlier call is closed.
    ///
    /// # Errors
    /// As [`Self::has_guest_agent`].
    pub async fn connect_guest_agent(&self) -> Result<UnixStream, MachineError> {
        self.on_ports(|ports| ports.connect(podvisor_guest_agent::PORT))
            .await
    }

    async fn on_ports<T: Send + 'static>(
        &self,
        work: impl FnOnce(&PortsHandle) -> Result<T, HandleError> + Send + 'static,
    ) -> Result<T, MachineError> {
        let ports = self.vm.ports()?;
        // The device may be busy.
        match tokio::task::spawn_blocking(move || work(&ports)).await {
            Ok(done) => Ok(done?),
            Err(error) => Err(MachineError::Thread(io::Error::other(error))),
        }
    }

    /// Powers the machine off immediately. Returns when its threads have ended.
    pub fn kill(&self) {
        // Refused if it has stopped already.
        if let Err(error) = self.vm.stop() {
            debug!(%error, "the machine was not running");
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Whether a disk with these counters, by name, has requests that it has not answered.
fn has_unanswered(counters: &[(&str, u64)]) -> bool {
    let begun = counters.iter().find(|(name, _)| *name == "begun");
    // Each answer has a class of latency.
    let is_class = |name: &str| name.starts_with("under_") || name.ends_with("_or_more");
    let classes = counters.iter().filter(|(name, _)| is_class(name));
    let answered: u64 = classes.map(|(_, value)| value).sum();
    begun.is_some_and(|(_, begun)| *begun > answered)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_with_more_requests_than_answers_has_not_answered() {
        let counters = |begun, under_16us, slow| {
            [
                ("begun", begun),
                ("reads", 99),
                ("under_16us", under_16us),
                ("65ms_or_more", slow),
            ]
        };
        assert!(has_unanswered(&counters(3, 1, 1)));
        assert!(!has_unanswered(&counters(3, 1, 2)));
        assert!(!has_unanswered(&[]));
    }
}
