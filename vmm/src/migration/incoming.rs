//! The side that a VM moves to.

use std::error::Error;
use std::io::{Read, Write};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use podvisor_devices::GuestRam;
use podvisor_devices::blk::Disk;
use vm_memory::{Bytes as _, GuestAddress, GuestMemory as _};

use super::ahead::VmAhead;
use super::disks::{MovingDisk, PluggedIdentity, TargetDisks, decode, decode_plugged};
use super::error::ReceiveError;
use super::stream::{MessageKind, Stream, StreamError};
use crate::cpuid;
use crate::kvm::KvmDevice;
use crate::memory::{CHUNK, GuestMemory, MemoryShape, MemorySize, PAGE_SIZE};
use crate::snapshot::{MachineState, Snapshot, decode_moving};

/// By how much the guest's clocks may be moved on: hosts whose clocks are further apart than this
/// are not believed.
const MAX_DOWNTIME: Duration = Duration::from_secs(60);

/// What a migration may take of this host. Nothing is allocated beyond it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MigrationLimits {
    /// Guest memory, with what may be plugged in.
    pub memory: MemorySize,
    /// The time until everything is here. An hour by default.
    pub time: Duration,
}

impl MigrationLimits {
    /// Returns the defaults with this limit of memory.
    #[must_use]
    pub fn memory(memory: MemorySize) -> Self {
        Self {
            memory,
            time: Duration::from_secs(3600),
        }
    }
}

/// A VM that is to move here: known, but not accepted yet.
///
/// ```no_run
/// # fn take(stream: std::os::unix::net::UnixStream) -> Result<(), Box<dyn std::error::Error>> {
/// use podvisor_vmm::{BlockDevice, IncomingMigration, KvmDevice, MemorySize, MigrationLimits};
///
/// let incoming = IncomingMigration::open(stream, MigrationLimits::memory(MemorySize::gib(4)))?;
/// println!("{} vCPUs, devices {:?}", incoming.vcpus(), incoming.devices());
/// let arrived = incoming.receive(&KvmDevice::open()?)?;
/// let vm = arrived
///     .builder()
///     .block(BlockDevice::open("shared-root.img")?)
///     .build()?;
/// arrived.start(&vm)?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct IncomingMigration<S> {
    stream: Stream<S>,
    pub(super) announced: MachineState,
    announced_disks: Vec<MovingDisk>,
    plugged: Vec<PluggedIdentity>,
    pub(super) disks: TargetDisks,
    limits: MigrationLimits,
    began: Instant,
}

impl<S: Read + Write> IncomingMigration<S> {
    /// Reads from a connection what is to come. The connection has limits of its own for each read
    /// and write: a side that says nothing is waited for otherwise.
    ///
    /// # Errors
    /// See [`ReceiveError`]; the other side was told then.
    pub fn open(stream: S, limits: MigrationLimits) -> Result<Self, ReceiveError> {
        let mut stream = Stream::accept(stream)?;
        let announced = read_hello(&mut stream, limits);
        let announced = announced.inspect_err(|error| stream.refuse(&error.to_string()))?;
        Ok(Self {
            stream,
            announced: announced.state,
            announced_disks: announced.disks,
            plugged: announced.plugged,
            disks: TargetDisks::default(),
            limits,
            began: Instant::now(),
        })
    }

    /// Returns the number of vCPUs.
    #[must_use]
    pub fn vcpus(&self) -> u8 {
        u8::try_from(self.announced.vcpus.len()).unwrap_or(u8::MAX)
    }

    /// Returns the amount of guest memory, without what may be plugged in.
    #[must_use]
    pub fn memory(&self) -> MemorySize {
        self.announced.memory.boot
    }

    /// Returns the amount of memory that may be plugged in.
    #[must_use]
    pub fn hotplug_memory(&self) -> MemorySize {
        self.announced.memory.hotplug
    }

    /// Returns the names of the virtio devices, in order, as [`Snapshot::devices`] does: the
    /// builder of the VM needs each of them.
    #[must_use]
    pub fn devices(&self) -> Vec<String> {
        self.announced.builders_devices()
    }

    /// Returns what was plugged in since the VM was built, as its owner there has named it. They
    /// are among [`Self::devices`], wherever the VM has them.
    #[must_use]
    pub fn plugged(&self) -> &[PluggedIdentity] {
        &self.plugged
    }

    /// Returns the disks whose contents come with the memory.
    #[must_use]
    pub fn disks(&self) -> &[MovingDisk] {
        &self.announced_disks
    }

    /// Says where the contents of [`Self::disks`] go: to new disks of the same kinds and lengths,
    /// in their order, whose backends complete requests at once. They are closed when all of it is
    /// here.
    #[must_use]
    pub fn store_disks(mut self, disks: Vec<Box<dyn Disk>>) -> Self {
        self.disks = TargetDisks(disks);
        self
    }

    /// Refuses it, with a reason that the other side shows.
    pub fn refuse(mut self, reason: &str) {
        self.stream.refuse(reason);
    }

    /// Accepts it, and returns when all of the VM is here and it stands still where it was. Before
    /// any memory is sent, this host's processor is compared with what the guest knows.
    ///
    /// # Errors
    /// See [`ReceiveError`]; the other side was told then, and the VM runs on there.
    pub fn receive(mut self, kvm: &KvmDevice) -> Result<ArrivedMigration<S>, ReceiveError> {
        match self.receive_all(kvm) {
            Ok(Received {
                state,
                memory,
                paused_at,
                ahead,
            }) => Ok(ArrivedMigration {
                stream: self.stream,
                snapshot: Snapshot::moved(state, memory),
                ahead: Mutex::new(Some(ahead)),
                is_running: paused_at > 0,
            }),
            Err(error) => {
                // With its causes: it is all that the other side learns.
                self.stream.refuse(&causes(&error));
                Err(error)
            }
        }
    }

    fn receive_all(&mut self, kvm: &KvmDevice) -> Result<Received, ReceiveError> {
        let most = self.announced.max_vcpus;
        let here = cpuid::guest_cpuid(&kvm.kvm()?, most, None)?;
        self.announced.check_cpu(here.as_slice())?;
        self.disks.check(&self.announced_disks)?;
        let memory = GuestMemory::anonymous(self.announced.memory)?;
        let ahead = VmAhead::create(kvm, &self.announced, &memory)?;
        self.stream.send(MessageKind::Accept, 0, &[])?;
        self.stream.flush()?;
        let (state, paused_at) = self.receive_into(&memory)?;
        Ok(Received {
            state,
            memory,
            paused_at,
            ahead,
        })
    }

    /// Receives the contents of memory, and the paused machine with the time of its pause.
    pub(super) fn receive_into(
        &mut self,
        memory: &GuestMemory,
    ) -> Result<(MachineState, u64), ReceiveError> {
        let mut contents = Vec::new();
        let mut buffer = vec![0; CHUNK as usize];
        loop {
            let message = self.stream.receive(&mut contents)?;
            if self.began.elapsed() > self.limits.time {
                let limit = self.limits.time;
                return Err(ReceiveError::Time { limit });
            }
            match message.kind {
                MessageKind::Pages => put_pages(memory.ram(), message.number, &contents)?,
                MessageKind::Zeroes => {
                    let len = contents.first_chunk().copied().unwrap_or_default();
                    let len = u64::from_le_bytes(len);
                    check_pages(memory.ram(), message.number, len)?;
                    let end = message.number.saturating_add(len);
                    memory.clear(&(message.number..end), &mut buffer)?;
                }
                MessageKind::Blocks => self.disks.put(message.number, &mut contents)?,
                MessageKind::BlockZeroes => self.disks.clear(message.number, &contents)?,
                MessageKind::Round => {
                    self.stream
                        .send(MessageKind::Received, message.number, &[])?;
                    self.stream.flush()?;
                }
                MessageKind::State => {
                    let mut state = decode_moving(&contents).map_err(ReceiveError::State)?;
                    self.check_same(&state)?;
                    self.disks.finish()?;
                    state.advance(since(message.number));
                    return Ok((state, message.number));
                }
                other => {
                    let found = other as u32;
                    Err(StreamError::Unexpected { found })?;
                }
            }
        }
    }

    /// Checks that the paused machine has the form that was announced: memory was allocated for it,
    /// and devices may have been opened.
    fn check_same(&self, state: &MachineState) -> Result<(), ReceiveError> {
        let names = |state: &MachineState| {
            let names = state.devices.iter().map(|device| device.name.clone());
            names.collect::<Vec<_>>()
        };
        let announced = &self.announced;
        let what = if state.memory != announced.memory {
            "memory"
        } else if state.vcpus.len() < announced.vcpus.len()
            || state.max_vcpus != announced.max_vcpus
        {
            "vCPUs"
        } else if names(state) != names(announced) {
            "devices"
        } else if state.cpuid.as_slice() != announced.cpuid.as_slice() {
            "features of the processor"
        } else {
            return Ok(());
        };
        Err(ReceiveError::Changed { what })
    }
}

/// What was received.
struct Received {
    state: MachineState,
    memory: GuestMemory,
    paused_at: u64,
    ahead: VmAhead,
}

/// A VM of which everything is here, and which stands still where it was.
#[derive(Debug)]
pub struct ArrivedMigration<S> {
    stream: Stream<S>,
    snapshot: Snapshot,
    ahead: Mutex<Option<VmAhead>>,
    is_running: bool,
}

impl<S: Read + Write> ArrivedMigration<S> {
    /// Returns the VM as a snapshot, of which one VM can be built.
    pub(crate) fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// Returns what was made of the VM before, once.
    pub(crate) fn take_ahead(&self) -> Option<VmAhead> {
        let mut ahead = self.ahead.lock().unwrap_or_else(PoisonError::into_inner);
        ahead.take()
    }

    /// Whether the guest ran when it was announced, and is to be started. One that was paused
    /// arrives paused.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.is_running
    }

    /// Gives up, with a reason that the other side shows: the VM runs on there.
    pub fn refuse(mut self, reason: &str) {
        self.stream.refuse(reason);
    }

    /// Tells the other side that the machine is built, waits until it gives it away, and starts it.
    pub(crate) fn take(
        mut self,
        start: impl FnOnce() -> Result<(), Box<dyn Error + Send + Sync>>,
    ) -> Result<(), ReceiveError> {
        self.stream.send(MessageKind::Ready, 0, &[])?;
        // From here on the other side does not run it any more.
        self.stream.expect(MessageKind::Run)?;
        if self.is_running
            && let Err(error) = start()
        {
            self.stream.refuse(&causes(&*error));
            return Err(ReceiveError::Start(error));
        }
        // It runs here, whether the other side learns of it or not.
        let told = self.stream.send(MessageKind::Running, 0, &[]);
        if let Err(error) = told.and_then(|()| self.stream.flush()) {
            tracing::warn!(%error, "the host that a VM came from was not told that it runs here");
        }
        Ok(())
    }
}

/// What comes before a VM is accepted.
struct Announced {
    state: MachineState,
    plugged: Vec<PluggedIdentity>,
    disks: Vec<MovingDisk>,
}

fn read_hello<S: Read + Write>(
    stream: &mut Stream<S>,
    limits: MigrationLimits,
) -> Result<Announced, ReceiveError> {
    let mut contents = Vec::new();
    let mut next = |kinds: &[MessageKind]| {
        let message = stream.receive(&mut contents)?;
        match kinds.contains(&message.kind) {
            true => Ok((message.kind, std::mem::take(&mut contents))),
            false => Err(StreamError::Unexpected {
                found: message.kind as u32,
            }),
        }
    };
    let (_, hello) = next(&[MessageKind::Hello])?;
    let state = decode_moving(&hello).map_err(ReceiveError::State)?;
    let mut plugged = Vec::new();
    let (kind, mut list) = next(&[MessageKind::Plugged, MessageKind::Disks])?;
    if kind == MessageKind::Plugged {
        plugged = decode_plugged(&list, &state.builders_devices())?;
        (_, list) = next(&[MessageKind::Disks])?;
    }
    let disks = decode(&list)?;
    let (wanted, most) = (MemoryShape::total(state.memory), limits.memory);
    match wanted > most {
        true => Err(ReceiveError::Memory { wanted, most }),
        false => Ok(Announced {
            state,
            plugged,
            disks,
        }),
    }
}

/// Checks that whole pages at an address are memory.
fn check_pages(ram: &GuestRam, address: u64, len: u64) -> Result<(), ReceiveError> {
    let is_whole = address.is_multiple_of(PAGE_SIZE) && len.is_multiple_of(PAGE_SIZE) && len > 0;
    let size = usize::try_from(len).ok();
    let is_memory = |len| ram.check_range(GuestAddress(address), len);
    match is_whole && size.is_some_and(is_memory) {
        true => Ok(()),
        false => Err(ReceiveError::NoPages { address, len }),
    }
}

fn put_pages(ram: &GuestRam, address: u64, pages: &[u8]) -> Result<(), ReceiveError> {
    let len = pages.len() as u64;
    check_pages(ram, address, len)?;
    let no_pages = |_| ReceiveError::NoPages { address, len };
    ram.write_slice(pages, GuestAddress(address))
        .map_err(no_pages)
}

/// Returns how long ago the other side's time of day was this one: zero if its clock disagrees, or
/// if there is no such time.
fn since(nanos: u64) -> Duration {
    let then = UNIX_EPOCH.checked_add(Duration::from_nanos(nanos));
    let elapsed = then.and_then(|then| SystemTime::now().duration_since(then).ok());
    match elapsed {
        Some(elapsed) if nanos > 0 && elapsed <= MAX_DOWNTIME => elapsed,
        _ => Duration::ZERO,
    }
}

/// Returns an error with its causes, in one line.
fn causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    text
}

#[cfg(test)]
#[path = "incoming_tests.rs"]
mod tests;
