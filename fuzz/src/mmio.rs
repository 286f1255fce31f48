//! The MMIO transport of a device, with any register accesses.

use std::sync::Arc;

use arbitrary::Arbitrary;
use podvisor_devices::WriteLog;
use podvisor_devices::rng::RngDevice;
use podvisor_devices::testing::{DirectLink, DriverQueue, memory};
use podvisor_devices::virtio::transport::{MmioInterrupt, MmioTransport, TransportParts};
use podvisor_devices::virtio::{Progress, VirtioDevice};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::driver::{Addr, BUFFERS, Len, MEMORY, steps};

#[derive(Arbitrary, Debug)]
enum Step {
    Read(u64, u8),
    Write(u64, Vec<u8>),
    /// An aligned 32-bit write to a register.
    Register(u8, u32),
    /// Normal set-up by a driver: status, features, and a valid queue.
    SetUp,
    Buffer(Addr, Len),
    Memory(Addr, Vec<u8>),
    /// The event loop handles notifications.
    Serve,
}

/// Runs the program `data`.
///
/// # Panics
/// If the transport or its device misbehaves, or no eventfds can be created.
pub fn run(data: &[u8]) {
    let mem = memory(usize::try_from(MEMORY).expect("small"));
    let device = RngDevice::new();
    let eventfd = || EventFd::new(EFD_NONBLOCK).expect("an eventfd");
    let irq = Arc::new(MmioInterrupt::new(eventfd()));
    let kick = Arc::new(eventfd());
    let info = device.info();
    let link = DirectLink::new(Box::new(device), irq.clone());
    let parts = TransportParts {
        info,
        link: Arc::new(link.clone()),
        mem: mem.clone(),
        kicks: vec![kick.clone()],
        writes: WriteLog::default(),
    };
    let mut mmio = MmioTransport::new(parts, irq);
    let mut driver = DriverQueue::new(&mem, 0x1_0000, 16);
    for step in steps(data) {
        match step {
            Step::Read(offset, len) => {
                let mut bytes = vec![0xa5; usize::from(len)];
                mmio.read(offset, &mut bytes);
            }
            Step::Write(offset, bytes) => mmio.write(offset, &bytes),
            Step::Register(register, value) => {
                mmio.write(u64::from(register & !3), &value.to_le_bytes());
            }
            Step::SetUp => {
                driver = DriverQueue::new(&mem, 0x1_0000, 16);
                set_up(&mut mmio, &driver);
            }
            Step::Buffer(addr, len) => {
                driver.add(&[], &[(BUFFERS, 8), (addr.get(), len.get())]);
                mmio.write(0x50, &0u32.to_le_bytes());
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
        }
        let status = mmio.status();
        let running = link.with(|worker| worker.is_serving());
        assert!(!running || status & 4 != 0, "runs without DRIVER_OK");
    }
}

fn set_up(mmio: &mut MmioTransport, driver: &DriverQueue) {
    let config = driver.config();
    let low = |addr: u64| u32::try_from(addr & 0xffff_ffff).expect("32 bits");
    for (register, value) in [
        (0x70, 0),
        (0x70, 1),
        (0x70, 3),
        (0x24, 1),
        (0x20, 1),
        (0x70, 11),
        (0x30, 0),
        (0x38, config.size),
        (0x80, low(config.desc_table)),
        (0x90, low(config.avail_ring)),
        (0xa0, low(config.used_ring)),
        (0x44, 1),
        (0x70, 15),
    ] {
        mmio.write(register, &u32::to_le_bytes(value));
    }
    assert_eq!(mmio.status(), 15, "a sound driver starts the device");
}

#[cfg(test)]
mod tests {
    #[test]
    fn smoke() {
        crate::smoke::run("mmio", super::run);
    }
}
