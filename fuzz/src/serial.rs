//! The serial port with any register accesses and input.

use arbitrary::Arbitrary;
use podvisor_devices::legacy::serial::SerialPort;
use vmm_sys_util::eventfd::EventFd;

use crate::driver::steps;

#[derive(Arbitrary, Debug)]
enum Step {
    Read(u8),
    Write(u8, u8),
    Input(Vec<u8>),
}

/// Runs the program `data`.
///
/// # Panics
/// If no eventfd can be created.
pub fn run(data: &[u8]) {
    let line = EventFd::new(vmm_sys_util::eventfd::EFD_NONBLOCK).expect("an eventfd");
    let mut port = SerialPort::new(line, Box::new(std::io::sink()));
    for step in steps(data) {
        match step {
            Step::Read(offset) => {
                std::hint::black_box(port.read(offset));
            }
            Step::Write(offset, value) => port.write(offset, value),
            Step::Input(bytes) => assert!(port.input(&bytes) <= bytes.len()),
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn smoke() {
        crate::smoke::run("serial", super::run);
    }
}
