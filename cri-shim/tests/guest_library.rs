//! The library's own API for a container in a machine, as in its example and in the README. These
//! tests need a KVM that runs guests.

mod support;

use std::path::Path;
use std::process::{Command, Stdio};

use podvisor_images::Store;
use support::Ran;
use support::host::{Host, sandboxes};

#[test]
fn guest_example_runs_a_container_in_process_and_jailed() {
    let host = Host::default();
    let store = Store::open(host.root.path().join("images")).unwrap();
    let image = store.resolve("box").unwrap();
    let program = Path::new(env!("CARGO_BIN_EXE_podvisor"));
    let target = program.parent().unwrap();
    let mut example = Command::new(target.join("examples/in_process"));
    example.arg(image.rootfs()).arg(program);
    example
        .stdin(Stdio::null())
        .env("PODVISOR_BOOT_TIMEOUT", "900");
    let ran = Ran::new(example.output().unwrap());
    ran.printed("Linux\nLinux\n0 0\n");
    assert_eq!(sandboxes(), [0; 0]);
}
