//! The console with a hostile driver, and input from the host.

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use arbitrary::Arbitrary;
use podvisor_devices::console::ConsoleDevice;

use crate::driver::{self, Bench, steps};

#[derive(Arbitrary, Debug)]
enum Step {
    Driver(driver::Step),
    Input(Vec<u8>),
    EndOfInput,
    Resize(u16, u16),
    Backend,
}

/// Runs the program `data`.
///
/// # Panics
/// If the console misbehaves, or no sockets can be created.
pub fn run(data: &[u8]) {
    let (input, mut peer) = UnixStream::pair().expect("a pair of sockets");
    peer.set_nonblocking(true).expect("a socket's flag");
    let device = ConsoleDevice::new(Box::new(std::io::sink()))
        .input(input.into())
        .expect("a socket can be waited for");
    let mut bench = Bench::new(device);
    for step in steps(data) {
        match step {
            Step::Driver(step) => bench.step(step),
            Step::Input(bytes) => {
                // A full socket, or one that has been shut down, accepts nothing.
                let _ = peer.write(&bytes);
            }
            Step::EndOfInput => {
                let _ = peer.shutdown(Shutdown::Write);
            }
            Step::Resize(columns, rows) => bench.device.resize(columns, rows),
            Step::Backend => bench.backend(),
        }
    }
    driver::finish(bench);
}

#[cfg(test)]
mod tests {
    #[test]
    fn smoke() {
        crate::smoke::run("console", super::run);
    }
}
