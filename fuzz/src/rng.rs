//! The entropy device with a hostile driver.

use podvisor_devices::rng::RngDevice;

use crate::driver;

/// Runs the driver's program `data`.
pub fn run(data: &[u8]) {
    driver::run(RngDevice::new(), data);
}

#[cfg(test)]
mod tests {
    #[test]
    fn smoke() {
        crate::smoke::run("rng", super::run);
    }
}
