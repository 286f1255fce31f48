//! The file system device with a hostile client: requests with valid headers and any arguments, on
//! a small tree next to a file that must stay out of reach.

use std::fs;
use std::path::{Path, PathBuf};

use arbitrary::Arbitrary;
use podvisor_devices::fs::FsDevice;

use crate::driver::{self, Addr, Bench, Len, buffers, steps};

/// The request queue.
const REQUESTS: u8 = 1;

/// Opcodes from 0 on, with some that do not exist.
const OPCODES: u8 = 56;
const FALLOCATE: u8 = 43;

/// The content of the file next to the shared directory.
const SECRET: &[u8] = b"not shared";

#[derive(Arbitrary, Debug)]
enum Name {
    /// A name that exists, or may exist.
    Known(u8),
    Any(Vec<u8>),
}

const NAMES: [&[u8]; 8] = [
    b"file\0",
    b"dir\0",
    b"link\0",
    b"new\0",
    b"..\0",
    b"../secret\0",
    b".\0",
    b"user.name\0",
];

#[derive(Arbitrary, Debug)]
enum Step {
    Driver(driver::Step),
    /// A request with a matching header.
    Request {
        opcode: u8,
        node: u8,
        /// Its arguments in 8-byte words: small numbers are handles, sizes and flags.
        words: Vec<u16>,
        names: Vec<Name>,
        room: Vec<(Addr, Len)>,
    },
    /// The host changes the tree.
    Host(u8),
}

struct Place(PathBuf);

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn place() -> Place {
    let parent = Path::new("/dev/shm");
    let parent = if parent.is_dir() {
        parent.to_path_buf()
    } else {
        std::env::temp_dir()
    };
    let name = format!("podvisor-fuzz-{}-{}", std::process::id(), driver::unique());
    let place = Place(parent.join(name));
    let shared = place.0.join("shared");
    fs::create_dir_all(shared.join("dir")).expect("a directory");
    fs::write(place.0.join("secret"), SECRET).expect("a file");
    fs::write(shared.join("file"), "some text").expect("a file");
    fs::write(shared.join("dir/inner"), "more text").expect("a file");
    std::os::unix::fs::symlink("../secret", shared.join("link")).expect("a link");
    place
}

/// Runs the program `data`.
///
/// # Panics
/// If the device misbehaves, or a client reached a file outside of the share.
pub fn run(data: &[u8]) {
    let place = place();
    let shared = place.0.join("shared");
    let device = FsDevice::open("fuzz", &shared)
        .and_then(|device| device.max_open(40))
        .expect("a directory");
    let mut bench = Bench::new(device);
    for step in steps(data) {
        match step {
            Step::Driver(step) => bench.step(step),
            Step::Request {
                opcode,
                node,
                words,
                names,
                room,
            } => {
                let mut body: Vec<u8> = words
                    .iter()
                    .take(8)
                    .flat_map(|word| u64::from(*word).to_le_bytes())
                    .collect();
                // A random length must not fill the memory of this machine.
                let names = if opcode % OPCODES == FALLOCATE {
                    &[]
                } else {
                    names.as_slice()
                };
                for name in names.iter().take(2) {
                    match name {
                        Name::Known(n) => body.extend(NAMES[usize::from(*n) % NAMES.len()]),
                        Name::Any(bytes) => body.extend(bytes.iter().take(300)),
                    }
                }
                let request = bench.place(&request(opcode, node, &body));
                bench.chain(REQUESTS, &[request], &buffers(&room));
                bench.notify(REQUESTS.into());
            }
            // All of these may fail: the client changes the same tree.
            Step::Host(0) => drop(fs::rename(shared.join("dir"), shared.join("moved"))),
            Step::Host(1) => drop(fs::remove_file(shared.join("file"))),
            Step::Host(2) => drop(fs::rename(shared.join("moved"), place.0.join("out"))),
            Step::Host(_) => {
                drop(fs::remove_dir_all(shared.join("dir")));
                drop(std::os::unix::fs::symlink("/", shared.join("dir")));
            }
        }
        bench.take_used();
    }
    driver::finish(bench);
    let secret = fs::read(place.0.join("secret")).expect("the file");
    assert_eq!(secret, SECRET, "a client reached what is not shared");
    // The directory, the file, and a directory that the host itself moved.
    assert!(fs::read_dir(&place.0).expect("the directory").count() <= 3);
}

/// Builds a request with `struct fuse_in_header` in front.
fn request(opcode: u8, node: u8, body: &[u8]) -> Vec<u8> {
    let len = u32::try_from(40 + body.len()).expect("short");
    let mut bytes = len.to_le_bytes().to_vec();
    bytes.extend(u32::from(opcode % OPCODES).to_le_bytes());
    bytes.extend(1u64.to_le_bytes());
    bytes.extend(u64::from(node % 8).to_le_bytes());
    // The user is root, whatever that is mapped to.
    bytes.extend([0; 16]);
    bytes.extend(body);
    bytes
}

#[cfg(test)]
mod tests {
    #[test]
    fn smoke() {
        crate::smoke::run("fs", super::run);
    }
}
