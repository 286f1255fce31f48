//! VMs with a guest that has no operating system and does what the test says: it polls its memory
//! for orders (read or write an address or a port) and executes them. A test is thus a driver, with
//! rings in real guest memory and registers behind real exits.
//!
//! Nothing here needs more of KVM than its instruction emulator supports.

mod attacks;
mod blocked;
mod boot;
mod contradictions;
mod devices;
mod dumps;
mod events;
mod firmware;
mod handles;
mod life;
mod migrate;
mod net;
mod orders;
mod pci;
mod plug;
mod pmem;
mod ports;
mod snapshot;
mod snapshot_files;
mod threads;

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use podvisor_devices::GuestRam;
use podvisor_devices::testing::DriverQueue;
use podvisor_devices::virtio::transport::WINDOW_SIZE;
use vm_memory::{Bytes, GuestAddress};

use super::{RestoreBuilder, Vm, VmBuilder, VmError};
use crate::boot::testing::{Elf, LOAD};
use crate::{Kernel, MemorySize, Snapshot, layout};
use orders::{OBEY, ORDERS, Order};

/// The time limit for anything, however busy the machine is. It detects hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// Creates a kernel of these instructions, entered in 32-bit protected mode without paging.
fn kernel(code: &[u8]) -> Kernel {
    let elf = Elf::new(code, 0).with_pvh(u32::try_from(LOAD).unwrap());
    let mut file: File = tempfile::tempfile().unwrap();
    file.write_all(&elf.bytes()).unwrap();
    Kernel::from_file(file).unwrap()
}

/// A VM that runs `code`.
fn tiny(code: &[u8]) -> VmBuilder {
    Vm::builder()
        .kernel(kernel(code))
        .memory(MemorySize::mib(32))
}

/// Returns a path for a snapshot.
fn place() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("snapshot");
    (dir, place)
}

/// A writer that keeps what is written.
#[derive(Clone, Default)]
struct Kept(Arc<Mutex<Vec<u8>>>);

impl Write for Kept {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Runs `call` on its own thread and fails if it hangs.
fn in_time<T: Send + 'static>(what: &str, call: impl FnOnce() -> T + Send + 'static) -> T {
    let (tx, rx) = mpsc::channel();
    std::thread::spawn(move || tx.send(call()));
    rx.recv_timeout(PATIENCE)
        .unwrap_or_else(|_| panic!("{what} hangs"))
}

/// Waits until `done` returns true.
fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "{what} does not come");
        std::thread::yield_now();
    }
}

/// Pauses a VM in which nothing blocks. On an overloaded machine its threads may not be scheduled
/// in time: it is then retried.
fn pause(vm: &Vm) {
    wait_for("a pause", || match vm.pause() {
        Ok(()) => true,
        Err(VmError::Busy { .. }) => false,
        Err(error) => panic!("{error}"),
    });
}

/// A running VM whose guest executes orders.
struct Guest {
    vm: Arc<Vm>,
    mem: GuestRam,
}

impl Guest {
    fn start(configure: impl FnOnce(VmBuilder) -> VmBuilder) -> Self {
        Self::of(configure(tiny(OBEY)))
    }

    /// Starts a VM whose kernel or firmware executes orders.
    fn of(builder: VmBuilder) -> Self {
        let vm = Arc::new(builder.build().unwrap());
        vm.start().unwrap();
        let mem = vm.context.machine.memory.ram().clone();
        Self { vm, mem }
    }

    /// Restores a guest from a snapshot.
    fn restore(
        snapshot: &Snapshot,
        configure: impl FnOnce(RestoreBuilder) -> RestoreBuilder,
    ) -> Self {
        let vm = Arc::new(configure(snapshot.builder()).build().unwrap());
        vm.start().unwrap();
        let mem = vm.context.machine.memory.ram().clone();
        Self { vm, mem }
    }

    fn put(&self, offset: u64, value: u32) {
        self.mem
            .store(value, GuestAddress(ORDERS + offset), Ordering::SeqCst)
            .unwrap();
    }

    fn get(&self, offset: u64) -> u32 {
        self.mem
            .load(GuestAddress(ORDERS + offset), Ordering::SeqCst)
            .unwrap()
    }

    /// Gives an order and does not wait.
    fn order(&self, what: Order, address: u64, value: u32) {
        self.put(4, u32::try_from(address).unwrap());
        self.put(8, value);
        self.put(0, what as u32);
    }

    fn obeyed(&self) -> bool {
        self.get(0) == 0
    }

    fn carry_out(&self, what: Order, address: u64, value: u32) -> u32 {
        self.order(what, address, value);
        wait_for("an order's end", || {
            assert!(!self.vm.state().ended(), "the VM has ended");
            self.obeyed()
        });
        self.get(12)
    }

    fn write(&self, address: u64, value: u32) {
        self.carry_out(Order::Write32, address, value);
    }

    fn read(&self, address: u64) -> u32 {
        self.carry_out(Order::Read32, address, 0)
    }

    fn output(&self, port: u16, value: u8) {
        self.carry_out(Order::Out8, port.into(), value.into());
    }

    fn input(&self, port: u16) -> u8 {
        u8::try_from(self.carry_out(Order::In8, port.into(), 0)).unwrap()
    }

    fn pause(&self) {
        pause(&self.vm);
    }

    /// Returns how often the guest has polled for orders.
    fn ticks(&self) -> u32 {
        self.get(16)
    }

    fn runs_on(&self) {
        let before = self.ticks();
        wait_for("the guest's next step", || self.ticks() != before);
    }

    fn counter(&self, device: &str, name: &str) -> u64 {
        let all = self.vm.counters();
        let device = all.iter().find(|c| c.device == device).unwrap();
        let counter = device.counters.iter().find(|c| c.name == name).unwrap();
        counter.value
    }

    /// Returns the registers of a device, in the order in which devices were added.
    fn device(&self, number: u64) -> TestDevice<'_> {
        TestDevice {
            guest: self,
            window: layout::VIRTIO_MMIO_START + number * WINDOW_SIZE,
        }
    }
}

/// Notifies a device of its first queue, on any transport.
trait Notify {
    fn guest(&self) -> &Guest;
    fn notify(&self);
}

impl Notify for TestDevice<'_> {
    fn guest(&self) -> &Guest {
        self.guest
    }

    fn notify(&self) {
        self.write(0x50, 0);
    }
}

/// The MMIO registers of a device, as its driver sees them (virtio 1.3 §4.2.2).
#[derive(Clone, Copy)]
struct TestDevice<'g> {
    guest: &'g Guest,
    window: u64,
}

impl TestDevice<'_> {
    fn write(self, offset: u64, value: u32) {
        self.guest.write(self.window + offset, value);
    }

    fn read(self, offset: u64) -> u32 {
        self.guest.read(self.window + offset)
    }

    fn status(self) -> u32 {
        self.read(0x70)
    }

    /// Resets the device and starts it with its first queue, of 16 descriptors at `rings`.
    fn start(self, rings: u64) -> DriverQueue {
        self.start_queue(0, rings)
    }

    fn start_queue(self, index: u32, rings: u64) -> DriverQueue {
        let mut queues = self.start_queues(0, &[(index, rings)]);
        queues.remove(0)
    }

    /// Resets the device and starts it with the features 0 to 31 of `features`, and with these
    /// queues: the index and the rings of each.
    fn start_queues(self, features: u32, queues: &[(u32, u64)]) -> Vec<DriverQueue> {
        let low = |addr: u64| u32::try_from(addr).unwrap();
        let write = |registers: &[(u64, u32)]| {
            for (register, value) in registers {
                self.write(*register, *value);
            }
        };
        self.write(0x70, 0);
        wait_for("the end of a reset", || self.status() == 0);
        write(&[(0x70, 1), (0x70, 3), (0x24, 1), (0x20, 1)]);
        if features != 0 {
            write(&[(0x24, 0), (0x20, features)]);
        }
        write(&[(0x70, 11)]);
        let queues = queues.iter().map(|(index, rings)| {
            let queue = DriverQueue::new(&self.guest.mem, *rings, 16);
            let config = queue.config();
            write(&[
                (0x30, *index),
                (0x38, config.size),
                (0x80, low(config.desc_table)),
                (0x90, low(config.avail_ring)),
                (0xa0, low(config.used_ring)),
                (0x44, 1),
            ]);
            queue
        });
        let queues = queues.collect();
        write(&[(0x70, 15)]);
        queues
    }
}
