//! Each device on MMIO and on PCI, with a driver that executes any program.
//!
//! The targets of devices drive them directly. Here the same driver also has registers: it resets
//! the device, gives up, stops queues and masks interrupts while requests are in flight, and its
//! machine is paused and continues as a clone.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use arbitrary::Arbitrary;
use podvisor_devices::balloon::BalloonDevice;
use podvisor_devices::blk::{BlockDevice, IoEngine, open_disk};
use podvisor_devices::console::ConsoleDevice;
use podvisor_devices::fs::FsDevice;
use podvisor_devices::mem::{BLOCK_SIZE, MemDevice, MemRegion};
use podvisor_devices::net::{MemoryNic, NetDevice, Nic};
use podvisor_devices::pci::MessageInterrupt;
use podvisor_devices::pmem::PmemDevice;
use podvisor_devices::rng::RngDevice;
use podvisor_devices::testing::{DirectLink, backend_readable, memory};
use podvisor_devices::virtio::transport::pci::{
    COMMON, DEVICE, MSIX_TABLE, NOTIFY, NOTIFY_MULTIPLIER,
};
use podvisor_devices::virtio::transport::{
    MmioInterrupt, MmioTransport, PciInterrupt, PciTransport, TransportParts,
};
use podvisor_devices::virtio::{DeviceInfo, Interrupt, Progress, QueueConfig, VirtioDevice};
use podvisor_devices::vsock::VsockDevice;
use podvisor_devices::{GuestRam, WriteLog};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::driver::{self, MAX_CALLS, MEMORY, Rings, steps};
use crate::pmem;

/// `VIRTIO_F_VERSION_1`, without which no device starts.
const VERSION_1: u64 = 1 << 32;

/// Where the window of device-specific configuration is on MMIO.
const MMIO_CONFIG: u64 = 0x100;

#[derive(Arbitrary, Debug)]
enum Step {
    Driver(driver::Step),
    /// Resets the device and starts it as a correct driver does, with these of its features and
    /// queues.
    SetUp {
        features: u64,
        queues: u8,
    },
    /// Writes any value to the status register; 128 gives up.
    Status(u8),
    StopQueue(u8),
    /// Writes any value to a register.
    Register(u16, u32),
    /// Masks a vector, or all, if there are some.
    Mask {
        vector: Option<u8>,
        masked: bool,
    },
    /// The event loop runs a turn.
    Serve,
    /// The machine is paused, or resumed.
    Pause(bool),
    /// The machine continues as a clone.
    Clone,
}

/// Runs a program: its first byte selects the device, the second one the transport.
///
/// # Panics
/// If a transport or a device misbehaves, or the host lacks something.
pub fn run(data: &[u8]) {
    let Some(([kind, bus], program)) = data.split_first_chunk() else {
        return;
    };
    let make = maker(*kind);
    let mut guest = Guest::new(&*make, *bus);
    for step in steps(program) {
        guest.step(step, &*make);
        let status = guest.front.status();
        let running = guest.link.with(|worker| worker.is_serving());
        assert!(!running || status & 4 != 0, "runs without DRIVER_OK");
    }
    guest.pause(false);
    guest.serve();
    // After any program, the driver may start again.
    guest.set_up(u64::MAX, u8::MAX);
    assert_eq!(guest.front.status(), 15);
    guest.serve();
}

type Make = dyn Fn() -> Box<dyn VirtioDevice>;

/// Returns a function that always creates the same device.
fn maker(kind: u8) -> Box<Make> {
    match kind % 10 {
        0 => Box::new(|| Box::new(RngDevice::new())),
        engine @ (1 | 2) => {
            let file = tempfile::tempfile_in("/dev/shm").or_else(|_| tempfile::tempfile());
            let file = file.expect("a temporary file");
            file.set_len(64 * 512).expect("a small file");
            Box::new(move || {
                let file = file.try_clone().expect("a descriptor");
                let (engine, queues) = match engine {
                    1 => (IoEngine::Sync, 1),
                    _ => (IoEngine::Uring, 3),
                };
                let disk = open_disk(file, engine).expect("a regular file");
                Box::new(BlockDevice::new(disk).queues(queues))
            })
        }
        3 => Box::new(|| {
            let (input, _) = UnixStream::pair().expect("sockets");
            let device = ConsoleDevice::new(Box::new(std::io::sink())).input(input.into());
            Box::new(device.expect("a socket can be waited for"))
        }),
        4 => Box::new(|| {
            let nic = || Box::new(MemoryNic::pair().0) as Box<dyn Nic>;
            Box::new(NetDevice::over(vec![nic(), nic()]).expect("descriptors"))
        }),
        5 => Box::new(|| Box::new(VsockDevice::in_process(3).expect("descriptors"))),
        6 => Box::new(|| Box::new(BalloonDevice::new())),
        7 => Box::new(|| {
            let region = MemRegion {
                start: 1 << 27,
                len: 40 * BLOCK_SIZE,
            };
            Box::new(MemDevice::new(region).expect("blocks"))
        }),
        8 => {
            static SHARED: LazyLock<PathBuf> = LazyLock::new(|| {
                let place = tempfile::tempdir().expect("a directory").keep();
                std::fs::write(place.join("file"), "some text").expect("a file");
                place
            });
            Box::new(|| {
                let device = FsDevice::open("fuzz", &*SHARED);
                let device = device.and_then(|device| device.max_open(40)?.read_only());
                Box::new(device.expect("a directory"))
            })
        }
        _ => {
            let file = pmem::image();
            Box::new(move || {
                let file = file.try_clone().expect("a descriptor");
                let mut device = PmemDevice::from_file(file).expect("an image");
                device.place(1 << 32);
                Box::new(device)
            })
        }
    }
}

#[derive(Debug)]
struct Nobody;
impl MessageInterrupt for Nobody {
    fn send(&self, _: u64, _: u32) {}
}

/// The registers as a driver sees them.
enum Front {
    Mmio(Box<MmioTransport>),
    Pci(Box<PciTransport>),
}

impl Front {
    fn status(&mut self) -> u8 {
        match self {
            Self::Mmio(mmio) => mmio.status(),
            Self::Pci(pci) => pci.status(),
        }
    }

    fn set_status(&mut self, status: u8) {
        match self {
            Self::Mmio(mmio) => mmio.write(0x70, &u32::from(status).to_le_bytes()),
            Self::Pci(pci) => pci.write_bar(COMMON + 0x14, &[status]),
        }
    }

    /// Accepts these of the features that are offered.
    fn accept(&mut self, features: u64) {
        for half in 0..2u32 {
            let mut word = [0; 4];
            match self {
                Self::Mmio(mmio) => {
                    mmio.write(0x14, &half.to_le_bytes());
                    mmio.read(0x10, &mut word);
                }
                Self::Pci(pci) => {
                    pci.write_bar(COMMON, &half.to_le_bytes());
                    pci.read_bar(COMMON + 4, &mut word);
                }
            }
            let wanted = u32::try_from(features >> (32 * half) & 0xffff_ffff).expect("32 bits");
            let accepted = u32::from_le_bytes(word) & wanted;
            match self {
                Self::Mmio(mmio) => {
                    mmio.write(0x24, &half.to_le_bytes());
                    mmio.write(0x20, &accepted.to_le_bytes());
                }
                Self::Pci(pci) => {
                    pci.write_bar(COMMON + 8, &half.to_le_bytes());
                    pci.write_bar(COMMON + 0xc, &accepted.to_le_bytes());
                }
            }
        }
    }

    fn enable(&mut self, index: u16, config: &QueueConfig) {
        let rings = [config.desc_table, config.avail_ring, config.used_ring];
        match self {
            Self::Mmio(mmio) => {
                let mut write = |register, value: u32| mmio.write(register, &value.to_le_bytes());
                write(0x30, index.into());
                write(0x38, config.size);
                for (register, ring) in [0x80, 0x90, 0xa0].into_iter().zip(rings) {
                    // In the first MiB.
                    write(register, u32::try_from(ring).expect("32 bits"));
                }
                write(0x44, 1);
            }
            Self::Pci(pci) => {
                let size = u16::try_from(config.size).expect("a small queue");
                pci.write_bar(COMMON + 0x16, &index.to_le_bytes());
                pci.write_bar(COMMON + 0x18, &size.to_le_bytes());
                pci.write_bar(COMMON + 0x1a, &index.to_le_bytes());
                for (register, ring) in [0x20, 0x28, 0x30].into_iter().zip(rings) {
                    pci.write_bar(COMMON + register, &ring.to_le_bytes());
                }
                pci.write_bar(COMMON + 0x1c, &[1, 0]);
            }
        }
    }

    fn stop_queue(&mut self, index: u8) {
        match self {
            Self::Mmio(mmio) => {
                mmio.write(0x30, &u32::from(index).to_le_bytes());
                mmio.write(0x44, &[0; 4]);
            }
            Self::Pci(pci) => {
                pci.write_bar(COMMON + 0x16, &u16::from(index).to_le_bytes());
                pci.write_bar(COMMON + 0x1c, &[0; 2]);
            }
        }
    }

    fn notify(&mut self, queue: u8) {
        match self {
            Self::Mmio(mmio) => mmio.write(0x50, &u32::from(queue).to_le_bytes()),
            Self::Pci(pci) => {
                let at = NOTIFY + u64::from(NOTIFY_MULTIPLIER) * u64::from(queue);
                pci.write_bar(at, &u16::from(queue).to_le_bytes());
            }
        }
    }

    fn register(&mut self, register: u16, value: u32) {
        let value = value.to_le_bytes();
        match self {
            Self::Mmio(mmio) => mmio.write(u64::from(register & 0xffc), &value),
            Self::Pci(pci) => pci.write_bar(u64::from(register & 0x3ffc), &value),
        }
    }

    fn mask(&mut self, vector: Option<u8>, masked: bool) {
        let Self::Pci(pci) = self else {
            return;
        };
        match vector {
            Some(vector) => {
                let entry = MSIX_TABLE + 16 * u64::from(vector % 8);
                pci.write_bar(entry, &0xfee0_0000u32.to_le_bytes());
                pci.write_bar(entry + 12, &u32::from(masked).to_le_bytes());
            }
            None => {
                let control: u16 = if masked { 0xc000 } else { 0x8000 };
                pci.write_config(0x42, &control.to_le_bytes());
            }
        }
    }

    fn read_config(&mut self, offset: u64, data: &mut [u8]) {
        match self {
            Self::Mmio(mmio) => mmio.read(MMIO_CONFIG.saturating_add(offset), data),
            Self::Pci(pci) => pci.read_bar(DEVICE.saturating_add(offset), data),
        }
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        match self {
            Self::Mmio(mmio) => mmio.write(MMIO_CONFIG.saturating_add(offset), data),
            Self::Pci(pci) => pci.write_bar(DEVICE.saturating_add(offset), data),
        }
    }
}

/// A device, its event loop and its driver.
struct Guest {
    rings: Rings,
    bus: u8,
    front: Front,
    info: DeviceInfo,
    irq: Arc<dyn Interrupt>,
    link: DirectLink,
    kicks: Vec<Arc<EventFd>>,
    paused: bool,
}

impl Guest {
    fn new(make: &Make, bus: u8) -> Self {
        let mem = memory(usize::try_from(MEMORY).expect("small"));
        let queues = make().info().queue_sizes.len();
        let rings = Rings::new(mem, queues);
        Self::with_rings(rings, make(), bus)
    }

    fn with_rings(rings: Rings, device: Box<dyn VirtioDevice>, bus: u8) -> Self {
        let info = device.info();
        let eventfd = || EventFd::new(EFD_NONBLOCK).expect("an eventfd");
        let kicks: Vec<_> = info
            .queue_sizes
            .iter()
            .map(|_| Arc::new(eventfd()))
            .collect();
        let mem: GuestRam = rings.mem.clone();
        let parts = |link: &DirectLink| TransportParts {
            info: info.clone(),
            link: Arc::new(link.clone()),
            mem: mem.clone(),
            kicks: kicks.clone(),
            writes: WriteLog::default(),
        };
        let (front, link, irq): (_, _, Arc<dyn Interrupt>) = if bus.is_multiple_of(2) {
            let irq = Arc::new(MmioInterrupt::new(eventfd()));
            let link = DirectLink::new(device, irq.clone());
            let front = Front::Mmio(Box::new(MmioTransport::new(parts(&link), irq.clone())));
            (front, link, irq)
        } else {
            let irq = Arc::new(PciInterrupt::new(info.queue_sizes.len(), Nobody));
            let link = DirectLink::new(device, irq.clone());
            let front = Front::Pci(Box::new(PciTransport::new(parts(&link), irq.clone())));
            (front, link, irq)
        };
        Self {
            rings,
            bus,
            front,
            info,
            irq,
            link,
            kicks,
            paused: false,
        }
    }

    fn step(&mut self, step: Step, make: &Make) {
        match step {
            Step::Driver(step) => self.drive(step),
            Step::SetUp { features, queues } => self.set_up(features, queues),
            Step::Status(status) => self.front.set_status(status),
            Step::StopQueue(queue) => self.front.stop_queue(queue),
            Step::Register(register, value) => self.front.register(register, value),
            Step::Mask { vector, masked } => self.front.mask(vector, masked),
            Step::Serve => self.serve(),
            Step::Pause(paused) => self.pause(paused),
            Step::Clone => self.clone_to(make()),
        }
        self.rings.take_used();
    }

    fn drive(&mut self, step: driver::Step) {
        match self.rings.step(step) {
            None => {}
            Some(driver::Step::Notify(queue)) => self.front.notify(queue),
            Some(driver::Step::ReadConfig(offset, len)) => {
                self.front
                    .read_config(offset, &mut vec![0; usize::from(len)]);
            }
            Some(driver::Step::WriteConfig(offset, bytes)) => {
                self.front.write_config(offset, &bytes);
            }
            Some(driver::Step::Reset) => self.set_up(u64::MAX, u8::MAX),
            // The host reports a configuration change.
            Some(_) => self.irq.signal_config(),
        }
    }

    fn set_up(&mut self, features: u64, queues: u8) {
        self.front.set_status(0);
        assert_eq!(self.front.status(), 0, "a reset at once");
        self.rings.renew();
        self.front.set_status(1);
        self.front.set_status(3);
        self.front.accept(features | VERSION_1);
        self.front.set_status(11);
        assert_eq!(self.front.status(), 11, "features that were offered");
        for (index, config) in (0u16..).zip(self.rings.configs()) {
            if queues & 1 << (index % 8) != 0 {
                self.front.enable(index, &config);
            }
        }
        self.front.set_status(15);
        // Without a feature there may be fewer queues than were enabled.
        assert_eq!(self.front.status() & 15, 15, "what was accepted is settled");
        self.look_at_queues();
    }

    fn pause(&mut self, paused: bool) {
        if std::mem::replace(&mut self.paused, paused) == paused {
            return;
        }
        if paused {
            let (quiet, _) = self.link.with(|worker| worker.pause());
            assert!(quiet, "a disk that cannot be waited for");
        } else if self.link.with(|worker| worker.resume()) {
            self.look_at_queues();
        }
    }

    /// Does what a snapshot and a restored machine do.
    fn clone_to(&mut self, device: Box<dyn VirtioDevice>) {
        self.pause(true);
        let (queues, own) = self
            .link
            .with(|worker| (worker.queue_states(), worker.device().save()));
        let config = self.info.config.save();
        let mut device = device;
        device.restore(&own).expect("what was saved");
        let rings = Rings::new(self.rings.mem.clone(), 0);
        let mut other = Self::with_rings(rings, device, self.bus);
        other.info.config.restore(&config).expect("what was saved");
        match (&mut self.front, &mut other.front) {
            (Front::Mmio(from), Front::Mmio(to)) => to.restore(&from.save(), &queues),
            (Front::Pci(from), Front::Pci(to)) => to.restore(&from.save(), &queues),
            _ => return,
        }
        .expect("what was saved");
        std::mem::swap(&mut self.rings, &mut other.rings);
        *self = other;
        self.look_at_queues();
    }

    /// Chains may have been made available before the queues ran.
    fn look_at_queues(&self) {
        for kick in &self.kicks {
            kick.write(1).expect("a small number");
        }
    }

    fn serve(&mut self) {
        for (index, kick) in (0u16..).zip(&self.kicks) {
            if kick.read().is_ok() {
                let idle = (0..MAX_CALLS).any(|_| self.turn(Some(index)) == Progress::Idle);
                assert!(idle, "queue {index} spins");
            }
        }
        let is_ready = || {
            self.link
                .with(|worker| worker.is_serving() && backend_readable(worker.device()))
        };
        let idle = (0..MAX_CALLS).any(|_| {
            let ready = is_ready();
            if ready {
                let _ = self.turn(None);
            }
            !ready
        });
        assert!(idle, "the backend of {:?} spins", self.info.device_type);
    }

    fn turn(&self, queue: Option<u16>) -> Progress {
        let result = self.link.with(|worker| match queue {
            Some(index) => worker.on_queue(index),
            None => worker.on_backend(),
        });
        result.expect("no fault of the host's")
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn smoke() {
        crate::smoke::run("transports", super::run);
    }

    #[test]
    fn each_device_behind_each_transport() {
        for kind in 0..10 {
            for bus in 0..2 {
                super::run(&[kind, bus]);
            }
        }
    }
}
