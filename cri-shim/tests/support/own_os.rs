//! Sandboxes whose guest has an operating system of its own, with guests of a few instructions.

use std::fs::{self, File};
use std::io::PipeWriter;

use podvisor_cri::sandbox::{
    BootMachine, ContainerInfo, JailMode, LaunchConfig, SandboxClient, StdioFds,
};

use super::Root;
use super::guest_files::elf;
use super::pod::{Pod, eventually};

/// The configuration of a sandbox without a machine. Jails need root.
pub(crate) fn config(pod: &Pod) -> LaunchConfig {
    LaunchConfig {
        jail: match rustix::process::geteuid().is_root() {
            true => JailMode::Enforced,
            false => JailMode::Disabled,
        },
        cgroup_parent: None,
        ..LaunchConfig::of_own_os("test", pod.dir())
    }
}

/// A guest without an operating system, which says that it is ready and reads the serial port: `r`
/// resets it, `p` powers it off, all else comes back.
pub(crate) fn kernel(pod: &Pod) -> File {
    kernel_that_says(pod, "ready\n")
}

pub(crate) fn kernel_that_says(pod: &Pod, said: &str) -> File {
    kernel_of(
        pod,
        said,
        &[
            0x66, 0xba, 0xfd, 0x03, // loop: the line status
            0xec, 0xa8, 0x01, 0x74, 0xf7, // until there is a byte
            0x66, 0xba, 0xf8, 0x03, 0xec, // read it
            0x3c, b'r', 0x74, 0x07, 0x3c, b'p', 0x74, 0x0c, // reset, off
            0xee, 0xeb, 0xe7, // echo, loop
            0x66, 0xba, 0x64, 0x00, 0xb0, 0xfe, 0xee, 0xeb, 0xfe, // reset
            0x66, 0xba, 0x00, 0x06, 0xb0, 0x34, 0xee, 0xeb, 0xfe, // off
        ],
    )
}

/// A guest that says something and powers itself off.
pub(crate) fn kernel_that_ends(pod: &Pod, said: &str) -> File {
    let off = [0x66, 0xba, 0x00, 0x06, 0xb0, 0x34, 0xee, 0xeb, 0xfe];
    kernel_of(pod, said, &off)
}

/// A guest that says `ready`, and answers each byte with a line of one letter, the next one of the
/// alphabet; `p` powers it off.
pub(crate) fn kernel_that_counts(pod: &Pod) -> File {
    kernel_of(
        pod,
        "ready\n",
        &[
            0xb3, 0x40, // before A
            0x66, 0xba, 0xfd, 0x03, // loop: the line status
            0xec, 0xa8, 0x01, 0x74, 0xf7, // until there is a byte
            0x66, 0xba, 0xf8, 0x03, 0xec, // read it
            0x3c, b'p', 0x74, 0x0a, // off
            0xfe, 0xc3, 0x88, 0xd8, 0xee, 0xb0, 0x0a, 0xee, 0xeb, 0xe4, // next letter, loop
            0x66, 0xba, 0x00, 0x06, 0xb0, 0x34, 0xee, 0xeb, 0xfe, // off
        ],
    )
}

/// A guest that says something, and executes this code.
fn kernel_of(pod: &Pod, said: &str, code: &[u8]) -> File {
    let say = said.as_bytes().iter().flat_map(|byte| [0xb0, *byte, 0xee]);
    let serial = [0x66, 0xba, 0xf8, 0x03];
    let begin = serial.into_iter().chain(say);
    let code: Vec<u8> = begin.chain(code.iter().copied()).collect();
    let root = Root::default();
    let mut bytes = fs::read(elf(&root)).unwrap();
    bytes[24..32].copy_from_slice(&0x0100_0200_u64.to_le_bytes());
    bytes[0x200..0x200 + code.len()].copy_from_slice(&code);
    let path = pod.path(&format!("own-kernel-{}-{}", said.len(), code.len()));
    fs::write(&path, bytes).unwrap();
    File::open(path).unwrap()
}

/// A machine for this guest, whose log has its name.
pub(crate) fn machine(pod: &Pod, id: &str) -> BootMachine {
    BootMachine {
        memory: 64 << 20,
        log: Some(pod.open_log(id)),
        ..BootMachine::new(id, kernel(pod))
    }
}

pub(crate) async fn says(pod: &Pod, id: &str, times: usize) {
    let said = || pod.log(id).matches("stdout F ready\n").count();
    eventually("what the guest says", || said() >= times).await;
    assert_eq!(said(), times);
}

/// Attaches to a machine's console; returns the end that types.
pub(crate) async fn attach(sandbox: &SandboxClient, id: &str) -> PipeWriter {
    let (stdin, typing) = std::io::pipe().unwrap();
    let stdio = StdioFds {
        stdin: Some(stdin.into()),
        ..StdioFds::default()
    };
    sandbox.attach(id, stdio).await.unwrap();
    typing
}

pub(crate) async fn info_of(sandbox: &SandboxClient, id: &str) -> ContainerInfo {
    let list = sandbox.list().await.unwrap();
    list.into_iter().find(|info| info.id == id).unwrap()
}
