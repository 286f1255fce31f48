//! A firmware's clock and timer with any register accesses, saved and restored in between.

use arbitrary::Arbitrary;
use podvisor_devices::legacy::firmware::FirmwareDevices;
use podvisor_devices::virtio::SavedDevice;

use crate::driver::steps;

#[derive(Arbitrary, Debug)]
enum Step {
    Read(u64),
    Write(u64, u8),
    Timer,
    Restore,
    Damaged(u32, Vec<u8>),
}

/// Runs the program `data`.
///
/// # Panics
/// If the devices misbehave.
pub fn run(data: &[u8]) {
    let mut devices = FirmwareDevices::default();
    for step in steps(data) {
        match step {
            Step::Read(offset) => {
                std::hint::black_box(devices.read_clock(offset));
            }
            Step::Write(offset, value) => devices.write_clock(offset, value),
            Step::Timer => {
                let [.., high] = devices.read_timer();
                assert_eq!(high, 0, "the timer has 24 bits");
            }
            Step::Restore => {
                let saved = devices.save();
                devices = FirmwareDevices::restored(&saved).expect("its own state");
            }
            Step::Damaged(version, bytes) => {
                if let Ok(other) = FirmwareDevices::restored(&SavedDevice { version, bytes }) {
                    devices = other;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn smoke() {
        crate::smoke::run("firmware", super::run);
    }
}
