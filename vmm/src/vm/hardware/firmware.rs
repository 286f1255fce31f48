//! The ports of a VM that boots by a firmware.

use std::sync::{Arc, Mutex};

use podvisor_devices::legacy::cmos;
use podvisor_devices::legacy::firmware::{FirmwareDevices, TIMER_PORT, TIMER_PORTS};
use podvisor_devices::legacy::power::PowerRequest;

use super::bus::{AddressMap, BusDevice, RangeTaken};
use crate::vm::lock::lock;

/// The devices behind the ports.
pub(crate) type FirmwarePorts = Arc<Mutex<FirmwareDevices>>;

/// Puts a firmware's clock and timer at their ports.
pub(crate) fn insert(ports: &AddressMap, devices: &FirmwarePorts) -> Result<(), RangeTaken> {
    // Of these, other VMs have ports without a clock.
    for port in cmos::PORT..cmos::PORT + cmos::PORTS {
        ports.remove(port.into());
    }
    let clock = ClockPorts(devices.clone());
    ports.insert(cmos::PORT.into(), cmos::PORTS.into(), Arc::new(clock))?;
    let timer = TimerPorts(devices.clone());
    ports.insert(TIMER_PORT.into(), TIMER_PORTS.into(), Arc::new(timer))
}

/// Index and data port of the clock.
#[derive(Debug)]
struct ClockPorts(FirmwarePorts);

impl BusDevice for ClockPorts {
    fn read(&self, offset: u64, data: &mut [u8]) {
        for (offset, byte) in (offset..).zip(data) {
            *byte = lock(&self.0).read_clock(offset);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) -> Option<PowerRequest> {
        for (offset, byte) in (offset..).zip(data) {
            lock(&self.0).write_clock(offset, *byte);
        }
        None
    }

    fn has_byte_registers(&self) -> bool {
        true
    }
}

/// The timer, which is only read.
#[derive(Debug)]
struct TimerPorts(FirmwarePorts);

impl BusDevice for TimerPorts {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        let skipped = usize::try_from(offset).unwrap_or(usize::MAX);
        let count = lock(&self.0).read_timer();
        for (byte, of_count) in data.iter_mut().zip(count.iter().skip(skipped)) {
            *byte = *of_count;
        }
    }

    fn write(&self, _offset: u64, _data: &[u8]) -> Option<PowerRequest> {
        None
    }
}
