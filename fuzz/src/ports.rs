//! Named ports with a hostile driver, and hosts that come and go.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use arbitrary::Arbitrary;
use podvisor_devices::console::PortsDevice;

use crate::driver::{self, Bench, steps};

const NAMES: [&str; 2] = ["one", "two"];

#[derive(Arbitrary, Debug)]
enum Step {
    Driver(driver::Step),
    Connect(bool),
    Disconnect(bool),
    HangUp(bool),
    Write(bool, Vec<u8>),
    Read(bool),
    Backend,
}

/// Runs the program `data`.
///
/// # Panics
/// If the device misbehaves, or no sockets can be created.
pub fn run(data: &[u8]) {
    let mut hosts: [Option<UnixStream>; 2] = [None, None];
    let mut bench = Bench::new(PortsDevice::new(NAMES).expect("two names"));
    for step in steps(data) {
        match step {
            Step::Driver(step) => bench.step(step),
            Step::Connect(which) => {
                let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
                ours.set_nonblocking(true).expect("a socket's flag");
                let name = NAMES[usize::from(which)];
                bench.device.connect(name, theirs).expect("its port");
                hosts[usize::from(which)] = Some(ours);
            }
            Step::Disconnect(which) => {
                let name = NAMES[usize::from(which)];
                bench.device.disconnect(name).expect("its port");
            }
            Step::HangUp(which) => hosts[usize::from(which)] = None,
            Step::Write(which, bytes) => {
                if let Some(host) = &mut hosts[usize::from(which)] {
                    // A full socket, or one that was replaced, accepts nothing.
                    let _ = host.write(&bytes);
                }
            }
            Step::Read(which) => {
                if let Some(host) = &mut hosts[usize::from(which)] {
                    // There may be nothing.
                    let _ = host.read(&mut [0; 4096]);
                }
            }
            Step::Backend => bench.backend(),
        }
    }
    driver::finish(bench);
}

#[cfg(test)]
mod tests {
    #[test]
    fn smoke() {
        crate::smoke::run("ports", super::run);
    }
}
