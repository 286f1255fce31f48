//! A device on PCI with any accesses: by the ports of configuration space, in its BAR, and with
//! interrupts meanwhile. Any state that a driver causes can be restored by another device.

use std::sync::{Arc, Mutex};

use arbitrary::Arbitrary;
use podvisor_devices::pci::{MessageInterrupt, PciBus, PciFunction};
use podvisor_devices::rng::RngDevice;
use podvisor_devices::testing::{DirectLink, DriverQueue, memory};
use podvisor_devices::virtio::transport::pci::{COMMON, MSIX_TABLE, NOTIFY};
use podvisor_devices::virtio::transport::{PciInterrupt, PciTransport, TransportParts};
use podvisor_devices::virtio::{Interrupt, Progress, VirtioDevice};
use podvisor_devices::{GuestRam, WriteLog};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::driver::{Addr, BUFFERS, Len, MEMORY, steps};

#[derive(Arbitrary, Debug)]
enum Step {
    /// The ports from 0xCF8 on.
    In(u8, u8),
    Out(u8, Vec<u8>),
    /// A register of the device's configuration space, by its aligned double word.
    Config(u8, u32),
    Read(u64, u8),
    Write(u64, Vec<u8>),
    /// The common configuration, with valid widths.
    Common(u8, u8, u64),
    /// A word of MSI-X's table.
    Vector(u8, u32),
    SetUp,
    Buffer(Addr, Len),
    Memory(Addr, Vec<u8>),
    /// The event loop handles notifications.
    Serve,
    Change,
    SaveAndRestore,
}

#[derive(Debug)]
struct Nobody;
impl MessageInterrupt for Nobody {
    fn send(&self, _: u64, _: u32) {}
}

#[derive(Debug)]
struct Function(Mutex<PciTransport>);

impl Function {
    fn with<R>(&self, work: impl FnOnce(&mut PciTransport) -> R) -> R {
        work(&mut self.0.lock().expect("no panic while it was held"))
    }
}

impl PciFunction for Function {
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        self.with(|pci| pci.read_config(offset, data));
    }
    fn write_config(&self, offset: u64, data: &[u8]) {
        self.with(|pci| pci.write_config(offset, data));
    }
}

struct Device {
    function: Arc<Function>,
    irq: Arc<PciInterrupt>,
    link: DirectLink,
    kick: Arc<EventFd>,
}

fn device(mem: &GuestRam) -> Device {
    let device = RngDevice::new();
    let info = device.info();
    let irq = Arc::new(PciInterrupt::new(info.queue_sizes.len(), Nobody));
    let kick = Arc::new(EventFd::new(EFD_NONBLOCK).expect("an eventfd"));
    let link = DirectLink::new(Box::new(device), irq.clone());
    let parts = TransportParts {
        info,
        link: Arc::new(link.clone()),
        mem: mem.clone(),
        kicks: vec![kick.clone()],
        writes: WriteLog::default(),
    };
    let function = PciTransport::new(parts, irq.clone());
    Device {
        function: Arc::new(Function(Mutex::new(function))),
        irq,
        link,
        kick,
    }
}

/// Runs the program `data`.
///
/// # Panics
/// If the transport or its device misbehaves, or no eventfds can be created.
pub fn run(data: &[u8]) {
    let mem = memory(usize::try_from(MEMORY).expect("small"));
    let Device {
        function,
        irq,
        link,
        kick,
    } = device(&mem);
    let bus = PciBus::new();
    bus.insert(1, function.clone()).expect("a free slot");
    let mut driver = DriverQueue::new(&mem, 0x1_0000, 16);
    for step in steps(data) {
        match step {
            Step::In(port, len) => bus.read(port.into(), &mut vec![0xa5; usize::from(len)]),
            Step::Out(port, bytes) => bus.write(port.into(), &bytes),
            Step::Config(register, value) => {
                let address = 1 << 31 | 1 << 11 | u32::from(register & !3);
                bus.write(0, &address.to_le_bytes());
                bus.write(4, &value.to_le_bytes());
            }
            Step::Read(offset, len) => {
                let mut bytes = vec![0xa5; usize::from(len)];
                function.with(|pci| pci.read_bar(offset, &mut bytes));
            }
            Step::Write(offset, bytes) => function.with(|pci| pci.write_bar(offset, &bytes)),
            Step::Common(register, width, value) => {
                let width = 1 << (width % 4);
                let offset = COMMON + u64::from(register & 0x3f);
                let bytes = &value.to_le_bytes()[..width];
                function.with(|pci| pci.write_bar(offset, bytes));
            }
            Step::Vector(word, value) => {
                let offset = MSIX_TABLE + 4 * u64::from(word % 12);
                function.with(|pci| pci.write_bar(offset, &value.to_le_bytes()));
            }
            Step::SetUp => {
                driver = DriverQueue::new(&mem, 0x1_0000, 16);
                function.with(|pci| set_up(pci, &driver));
            }
            Step::Buffer(addr, len) => {
                driver.add(&[], &[(BUFFERS, 8), (addr.get(), len.get())]);
                function.with(|pci| pci.write_bar(NOTIFY, &[0; 2]));
            }
            Step::Memory(addr, bytes) => {
                // Beyond guest memory there is nothing to write to.
                let _ = mem.write_slice(&bytes, GuestAddress(addr.get()));
            }
            Step::Serve => {
                if kick.read().is_ok() {
                    for _ in 0..1000 {
                        let result = link.with(|worker| worker.on_queue(0));
                        if result.expect("no fault of the host's") == Progress::Idle {
                            break;
                        }
                    }
                }
            }
            Step::Change => irq.signal_config(),
            Step::SaveAndRestore => {
                link.with(|worker| worker.pause());
                let queues = link.with(|worker| worker.queue_states());
                let saved = function.with(PciTransport::save);
                let other = device(&mem);
                other.link.with(|worker| worker.pause());
                let again = other.function.with(|pci| {
                    pci.restore(&saved, &queues).expect("a state of a device's");
                    pci.save()
                });
                // A pending interrupt is sent immediately when it is unmasked.
                assert_eq!(
                    (again.transport, again.config),
                    (saved.transport, saved.config)
                );
                link.with(|worker| worker.resume());
            }
        }
        let status = function.with(PciTransport::status);
        let running = link.with(|worker| worker.is_serving());
        assert!(!running || status & 4 != 0, "runs without DRIVER_OK");
    }
}

fn set_up(pci: &mut PciTransport, driver: &DriverQueue) {
    let config = driver.config();
    for (offset, width, value) in [
        (0x14, 1, 0),
        (0x14, 1, 1),
        (0x14, 1, 3),
        (0x08, 4, 1),
        (0x0c, 4, 1),
        (0x14, 1, 11),
        (0x16, 2, 0),
        (0x18, 2, u64::from(config.size)),
        (0x20, 8, config.desc_table),
        (0x28, 8, config.avail_ring),
        (0x30, 8, config.used_ring),
        (0x1c, 2, 1),
        (0x14, 1, 15),
    ] {
        pci.write_bar(COMMON + offset, &u64::to_le_bytes(value)[..width]);
    }
    assert_eq!(pci.status(), 15, "a sound driver starts the device");
}

#[cfg(test)]
mod tests {
    #[test]
    fn smoke() {
        crate::smoke::run("pci", super::run);
    }
}
