//! Handles: what the owner of a VM can do with a device that runs on its event loop.

use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use podvisor_devices::balloon::{BalloonDevice, BalloonStats};
use podvisor_devices::blk::{BlockDevice, Disk, DiskClones};
use podvisor_devices::console::{ConsoleDevice, PortsDevice, PortsError};
use podvisor_devices::fs::FsDevice;
use podvisor_devices::mem::MemDevice;
use podvisor_devices::net::{LinkState, NetDevice};
use podvisor_devices::pmem::{PmemDevice, PmemRegion};
use podvisor_devices::virtio::{Counter, Fault, ReadCounters, VirtioDevice, Worker};
use podvisor_devices::vsock::VsockDevice;

use super::attach::AttachedDevice;
use crate::memory::MemorySize;
use crate::vm::hardware::io::Link;
use crate::vm::lock::lock;

/// How long a call waits for a device that is busy. On an overloaded node, or with a small CPU
/// share, a thread may not run for seconds.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// Why a call on a device was not carried out, or not in time.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HandleError {
    /// The VM has no such device.
    #[error("this VM has no {kind}{}: it has {}", named(.name), .there.join(", "))]
    NoSuchDevice {
        /// The kind of device.
        kind: &'static str,
        /// Its name; empty if any would do.
        name: String,
        /// The names of all devices.
        there: Vec<String>,
    },
    /// The VM has not been started, has ended, or the device was unplugged.
    #[error("{device} is not available: its VM is not running, or it was unplugged")]
    NotRunning {
        /// The device's name.
        device: String,
    },
    /// The device's backend blocks. The call was cancelled: it has not changed anything, and is
    /// not carried out later. (What [`crate::vm::Vm::unplug`] does then is said there.)
    #[error("{device} is busy: its host side does not answer")]
    Busy {
        /// The device's name.
        device: String,
    },
    /// The device has begun to carry out the call, and does not get on with it. It finishes the
    /// call when its backend returns.
    #[error("{device} has not finished yet: its host side does not answer")]
    Unfinished {
        /// The device's name.
        device: String,
    },
    /// The guest has no driver that supports this, or its driver does not answer.
    #[error("the guest's driver of {device} does not answer")]
    NoDriver {
        /// The device's name.
        device: String,
    },
    /// The device refused.
    #[error("{device} failed")]
    Fault {
        /// The device's name.
        device: String,
        /// Why.
        #[source]
        source: Fault,
    },
    /// The device has no such port, or its host's end cannot be used.
    #[error("{device} failed")]
    Port {
        /// The device's name.
        device: String,
        /// Why.
        #[source]
        source: PortsError,
    },
    /// The host refused.
    #[error("{device} failed")]
    Host {
        /// The device's name.
        device: String,
        /// Why.
        #[source]
        source: io::Error,
    },
}

fn named(name: &str) -> String {
    if name.is_empty() {
        String::new()
    } else {
        format!(" named {name:?}")
    }
}

/// A device of a VM, of this type. Cheap to clone; usable from any thread, even after the VM is
/// gone.
pub struct DeviceHandle<D> {
    name: String,
    link: Link,
    counters: Arc<dyn ReadCounters>,
    queues: usize,
    _device: PhantomData<fn(D)>,
}

impl<D> Clone for DeviceHandle<D> {
    fn clone(&self) -> Self {
        Self {
            name: self.name.clone(),
            link: self.link.clone(),
            counters: self.counters.clone(),
            queues: self.queues,
            _device: PhantomData,
        }
    }
}

impl<D> fmt::Debug for DeviceHandle<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceHandle")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// A memory balloon.
pub type BalloonHandle = DeviceHandle<BalloonDevice>;
/// A block device.
pub type BlockHandle = DeviceHandle<BlockDevice>;
/// A console.
pub type ConsoleHandle = DeviceHandle<ConsoleDevice>;
/// A network card.
pub type NetHandle = DeviceHandle<NetDevice>;
/// A shared directory.
pub type FsHandle = DeviceHandle<FsDevice>;
/// A memory device.
pub type MemHandle = DeviceHandle<MemDevice>;
/// A memory image.
pub type PmemHandle = DeviceHandle<PmemDevice>;
/// A device of named ports.
pub type PortsHandle = DeviceHandle<PortsDevice>;
/// A socket device.
pub type VsockHandle = DeviceHandle<VsockDevice>;

impl<D: VirtioDevice> DeviceHandle<D> {
    /// Finds the device named `name`, or the first one of this type.
    pub(crate) fn find(
        devices: &[Arc<AttachedDevice>],
        kind: &'static str,
        name: Option<&str>,
    ) -> Result<Self, HandleError> {
        devices
            .iter()
            .filter(|device| device.kind == std::any::TypeId::of::<D>())
            .find(|device| name.is_none_or(|name| device.name == name))
            .map(|device| Self {
                name: device.name.clone(),
                link: device.link.clone(),
                counters: device.counters.clone(),
                queues: device.info.queue_sizes.len(),
                _device: PhantomData,
            })
            .ok_or_else(|| HandleError::NoSuchDevice {
                kind,
                name: name.unwrap_or_default().to_owned(),
                there: devices.iter().map(|device| device.name.clone()).collect(),
            })
    }

    /// Returns the device's name, as in [`crate::vm::Vm::counters`].
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the device's counters.
    #[must_use]
    pub fn counters(&self) -> Vec<Counter> {
        self.counters.read()
    }

    /// Runs `work` with the device, on its event loop, between two turns; also while the VM is
    /// paused.
    ///
    /// # Errors
    /// [`HandleError::NotRunning`] before the VM is started, after it has ended, and for a device
    /// that was unplugged; [`HandleError::Busy`] if `work` does not begin within 30 seconds: it was
    /// dropped; [`HandleError::Unfinished`] if it has begun by then, and is not done 30 seconds
    /// later: it continues.
    ///
    /// # Panics
    /// If `work` does; the VM keeps running.
    pub fn run<R: Send + 'static>(
        &self,
        work: impl FnOnce(&mut D) -> R + Send + 'static,
    ) -> Result<R, HandleError> {
        self.run_within(CALL_TIMEOUT, work)
    }

    /// As [`Self::run`], with another timeout, which both the beginning and the end may take.
    pub(crate) fn run_within<R: Send + 'static>(
        &self,
        timeout: Duration,
        work: impl FnOnce(&mut D) -> R + Send + 'static,
    ) -> Result<R, HandleError> {
        let result = ask_within(timeout, &self.name, &self.link, |worker| {
            worker.with_device(|device| {
                let device: &mut dyn std::any::Any = device;
                let device = device.downcast_mut();
                // The loop also serves other devices, which must not end because of it.
                device.map(|device| catch_unwind(AssertUnwindSafe(|| work(device))))
            })
        })?;
        // The type was checked when the handle was created.
        let result = result.ok_or_else(|| HandleError::NotRunning {
            device: self.name.clone(),
        })?;
        Ok(result.unwrap_or_else(|panic| resume_unwind(panic)))
    }

    fn host(&self) -> impl FnOnce(io::Error) -> HandleError {
        let device = self.name.clone();
        move |source| HandleError::Host { device, source }
    }
}

/// Runs `work` with the worker of the device `name`, on its event loop.
pub(crate) fn ask<R: Send + 'static>(
    name: &str,
    link: &Link,
    work: impl FnOnce(&mut Worker) -> R + Send + 'static,
) -> Result<R, HandleError> {
    ask_within(CALL_TIMEOUT, name, link, work)
}

fn ask_within<R: Send + 'static>(
    timeout: Duration,
    name: &str,
    link: &Link,
    work: impl FnOnce(&mut Worker) -> R + Send + 'static,
) -> Result<R, HandleError> {
    let gone = || HandleError::NotRunning {
        device: name.to_owned(),
    };
    if !link.has_begun() {
        return Err(gone());
    }
    let (done, wait) = sync_channel(1);
    // Whoever takes the work out decides: the loop carries it out, the caller cancels it.
    let work = Arc::new(Mutex::new(Some(work)));
    let waiting = work.clone();
    let sent = link.try_send(Box::new(move |worker| {
        let Some(work) = lock(&waiting).take() else {
            return;
        };
        // The receiver is gone after a timeout.
        let _ = done.send(work(worker));
    }));
    if !sent {
        return Err(gone());
    }
    match wait.recv_timeout(timeout) {
        Ok(result) => return Ok(result),
        Err(RecvTimeoutError::Disconnected) => return Err(gone()),
        Err(RecvTimeoutError::Timeout) => {}
    }
    let cancelled = lock(&work).take();
    if cancelled.is_some() {
        return Err(HandleError::Busy {
            device: name.to_owned(),
        });
    }
    wait.recv_timeout(timeout).map_err(|error| match error {
        RecvTimeoutError::Timeout => HandleError::Unfinished {
            device: name.to_owned(),
        },
        RecvTimeoutError::Disconnected => gone(),
    })
}

impl BalloonHandle {
    /// Asks the guest to give up this much of its memory in total: more than before inflates the
    /// balloon, less deflates it. The guest does so as far as it can, and takes memory back when it
    /// has none left.
    ///
    /// # Errors
    /// See [`Self::run`].
    pub fn set_target(&self, size: MemorySize) -> Result<(), HandleError> {
        self.run(move |device| device.set_target(size.as_bytes()))
    }

    /// Returns how much memory the guest reports to have given up.
    ///
    /// # Errors
    /// See [`Self::run`].
    pub fn actual(&self) -> Result<MemorySize, HandleError> {
        self.run(|device| MemorySize::bytes(device.actual()))
    }

    /// Asks the guest for its memory statistics, and waits up to `timeout` for the answer.
    ///
    /// # Errors
    /// See [`Self::run`]; [`HandleError::NoDriver`] if it does not answer.
    pub fn stats(&self, timeout: Duration) -> Result<BalloonStats, HandleError> {
        let (send, receive) = sync_channel(1);
        let asked = self.run(move |device| {
            device.request_stats(move |stats| {
                // The receiver is gone after a timeout.
                let _ = send.send(stats);
            })
        })?;
        let no_driver = || HandleError::NoDriver {
            device: self.name.clone(),
        };
        let asked = asked.map_err(|source| HandleError::Fault {
            device: self.name.clone(),
            source,
        })?;
        if !asked {
            return Err(no_driver());
        }
        receive.recv_timeout(timeout).map_err(|_| no_driver())
    }
}

impl MemHandle {
    /// Asks the guest to have this much memory plugged in beyond what it booted with, rounded up to
    /// 2 MiB, and at most as much as
    /// [`VmBuilder::hotplug_memory`](crate::vm::VmBuilder::hotplug_memory) set. The guest complies as
    /// far as it can: memory that is in use is not unplugged.
    ///
    /// # Errors
    /// See [`Self::run`].
    pub fn request(&self, size: MemorySize) -> Result<(), HandleError> {
        self.run(move |device| device.request(size.as_bytes()))
    }

    /// As [`Self::request`], and waits up to `timeout` until the guest has complied. Returns what
    /// is plugged in then: more or less than requested if the guest could not comply.
    ///
    /// # Errors
    /// See [`Self::run`].
    pub fn request_and_wait(
        &self,
        size: MemorySize,
        timeout: Duration,
    ) -> Result<MemorySize, HandleError> {
        let there = self.run(move |device| device.request_and_tell(size.as_bytes()))?;
        // Completed or not, the result is what is plugged in.
        let _ = there.recv_timeout(timeout);
        self.plugged()
    }

    /// Returns how much memory is plugged in now.
    ///
    /// # Errors
    /// See [`Self::run`].
    pub fn plugged(&self) -> Result<MemorySize, HandleError> {
        self.run(|device| MemorySize::bytes(device.plugged()))
    }
}

impl PmemHandle {
    /// Returns where the image lies in the guest's address space, by which a guest distinguishes
    /// images.
    ///
    /// # Errors
    /// See [`Self::run`].
    pub fn region(&self) -> Result<PmemRegion, HandleError> {
        self.run(|device| device.region())
    }
}

impl BlockHandle {
    /// Replaces the device's disk and its serial number, and notifies the driver of the new
    /// capacity. Read-only or writable was decided when the VM was built; if writable, a file is
    /// opened by [`open_disk_for_writing`](podvisor_devices::blk::open_disk_for_writing), which
    /// locks it against other guests.
    ///
    /// # Errors
    /// See [`Self::run`].
    pub fn replace_disk(&self, disk: Box<dyn Disk>, serial: &str) -> Result<(), HandleError> {
        let serial = serial.to_owned();
        // The device's threads may not create descriptors themselves.
        let disks = DiskClones::new(disk, self.queues);
        self.run(move |device| device.replace_disk_clones(disks, &serial))
    }

    /// Checks the disk's size again and notifies the driver if it has changed.
    ///
    /// # Errors
    /// See [`Self::run`]; [`HandleError::Host`] if the size cannot be determined.
    pub fn resize(&self) -> Result<(), HandleError> {
        self.run(BlockDevice::resize)?.map_err(self.host())
    }
}

impl ConsoleHandle {
    /// Sets the terminal size and notifies the driver.
    ///
    /// # Errors
    /// See [`Self::run`].
    pub fn resize(&self, columns: u16, rows: u16) -> Result<(), HandleError> {
        self.run(move |device| device.resize(columns, rows))
    }
}

impl PortsHandle {
    /// Opens the host's end of the port named `name`. The bytes that are written wait until a
    /// program in the guest has the port open. The previous end, if there is one, is closed.
    ///
    /// # Errors
    /// See [`Self::run`]; [`HandleError::Port`] if there is no such port, [`HandleError::Host`] if
    /// there are no descriptors left.
    pub fn connect(&self, name: &str) -> Result<UnixStream, HandleError> {
        // The device's threads may not open everything.
        let (ours, theirs) = UnixStream::pair().map_err(self.host())?;
        let name = name.to_owned();
        self.run(move |device| device.connect(&name, theirs))?
            .map_err(self.port())?;
        Ok(ours)
    }

    /// Closes the host's end of the port named `name`.
    ///
    /// # Errors
    /// As [`Self::connect`].
    pub fn disconnect(&self, name: &str) -> Result<(), HandleError> {
        let name = name.to_owned();
        self.run(move |device| device.disconnect(&name))?
            .map_err(self.port())
    }

    /// Returns whether a program in the guest has the port named `name` open.
    ///
    /// # Errors
    /// As [`Self::connect`].
    pub fn is_open(&self, name: &str) -> Result<bool, HandleError> {
        let name = name.to_owned();
        self.run(move |device| device.is_open(&name))?
            .map_err(self.port())
    }

    fn port(&self) -> impl FnOnce(PortsError) -> HandleError {
        let device = self.name.clone();
        move |source| HandleError::Port { device, source }
    }
}

impl NetHandle {
    /// Sets the link up or down and notifies the driver.
    ///
    /// # Errors
    /// See [`Self::run`].
    pub fn set_link(&self, link: LinkState) -> Result<(), HandleError> {
        self.run(move |device| device.set_link(link))
    }
}

impl VsockHandle {
    /// Opens a stream to a port of the guest, without a path. Written data waits until the guest
    /// accepts the connection; the stream ends if the guest refuses it.
    ///
    /// # Errors
    /// See [`Self::run`]; [`HandleError::Host`] if descriptors or connections run out.
    pub fn connect(&self, port: u32) -> Result<UnixStream, HandleError> {
        self.run(move |device| device.connect(port))?
            .map_err(self.host())
    }

    /// Serves a port of the host: `on_connect` gets the streams that programs in the guest open to
    /// it. It is called on the device's event loop and must not block; if it panics, the VM is
    /// poisoned. Before the VM is started, and so before its guest can open any,
    /// [`VsockDevice::listen`] does the same.
    ///
    /// # Errors
    /// See [`Self::run`].
    pub fn listen(
        &self,
        port: u32,
        on_connect: impl FnMut(UnixStream) + Send + 'static,
    ) -> Result<(), HandleError> {
        self.run(move |device| device.listen(port, on_connect))
    }

    /// Ends all connections and has the driver notified that they are gone (virtio 1.3 §5.10.6.7),
    /// which may be soon after this returns.
    ///
    /// # Errors
    /// See [`Self::run`].
    pub fn reset_transport(&self) -> Result<(), HandleError> {
        self.run(VsockDevice::reset_transport)
    }
}
