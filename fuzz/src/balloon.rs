//! The balloon with a hostile driver, and an owner that sets targets and requests statistics.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arbitrary::Arbitrary;
use podvisor_devices::balloon::BalloonDevice;

use crate::driver::{self, Bench, steps};

#[derive(Arbitrary, Debug)]
enum Step {
    Driver(driver::Step),
    Target(u64),
    Stats,
}

/// Runs the program `data`.
///
/// # Panics
/// If the balloon misbehaves, for example answers more often than it was asked.
pub fn run(data: &[u8]) {
    let mut bench = Bench::new(BalloonDevice::new());
    let answered = Arc::new(AtomicUsize::new(0));
    let mut asked = 0;
    for step in steps(data) {
        match step {
            Step::Driver(step) => bench.step(step),
            Step::Target(bytes) => bench.device.set_target(bytes),
            Step::Stats => {
                let answered = answered.clone();
                let reply = move |_| {
                    answered.fetch_add(1, Ordering::Relaxed);
                };
                // A fault parks the device like any other fault of this queue.
                if bench.device.request_stats(reply).unwrap_or(false) {
                    asked += 1;
                }
            }
        }
    }
    assert!(answered.load(Ordering::Relaxed) <= asked);
    driver::finish(bench);
}

#[cfg(test)]
mod tests {
    #[test]
    fn smoke() {
        crate::smoke::run("balloon", super::run);
    }
}
