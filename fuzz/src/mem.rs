//! The memory device with a hostile driver, and an owner that requests more and less memory.

use arbitrary::Arbitrary;
use podvisor_devices::mem::{BLOCK_SIZE, MemDevice, MemRegion};
use podvisor_devices::virtio::VirtioDevice;

use crate::driver::{self, Bench, steps};

/// After the memory of the bench, which ends at 1 MiB.
const REGION: MemRegion = MemRegion {
    start: 1 << 27,
    len: 40 * BLOCK_SIZE,
};

#[derive(Arbitrary, Debug)]
enum Step {
    Driver(driver::Step),
    /// A request of the driver: its type, its block and the number of blocks.
    Request(u8, u8, u8),
    Owner(u32),
    /// Saves the device and continues with another one.
    Migrate,
}

/// Runs the program `data`.
///
/// # Panics
/// If the device misbehaves, for example has more plugged in than there is.
pub fn run(data: &[u8]) {
    let new = || MemDevice::new(REGION).expect("blocks");
    let mut bench = Bench::new(new());
    for step in steps(data) {
        match step {
            Step::Driver(step) => bench.step(step),
            Step::Request(kind, block, count) => {
                let mut request = [0; 24];
                request[0] = kind % 5;
                let at = REGION.start + u64::from(block % 48) * BLOCK_SIZE;
                request[8..16].copy_from_slice(&at.to_le_bytes());
                request[16] = count;
                let place = bench.place(&request);
                bench.chain(0, &[place], &[(driver::BUFFERS, 10)]);
                bench.notify(0);
            }
            Step::Owner(bytes) => bench.device.request(u64::from(bytes)),
            Step::Migrate => {
                let saved = bench.device.save();
                let mut other = new();
                other.restore(&saved).expect("what was saved");
                assert_eq!(other.plugged(), bench.device.plugged());
            }
        }
        assert!(bench.device.plugged() <= REGION.len);
    }
    driver::finish(bench);
}

#[cfg(test)]
mod tests {
    #[test]
    fn smoke() {
        crate::smoke::run("mem", super::run);
    }
}
