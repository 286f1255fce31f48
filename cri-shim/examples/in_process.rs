//! A program in a container in a virtual machine, by the library: in this process, and again in a
//! jailed one. Prints its exit codes.
//!
//! `cargo run -p podvisor-cri --example in_process -- ROOTFS.erofs target/debug/podvisor`
use podvisor_cri::sandbox::{ContainerRun, StdioFds};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(image), Some(podvisor)) = (args.next(), args.next()) else {
        return Err("usage: in_process ROOTFS.erofs PODVISOR".into());
    };
    let program = ContainerRun::new(image).command(["/bin/busybox", "uname", "-s"]);
    let here = program.in_process(StdioFds::of_this_process()?).await?;
    let jailed = program
        .jailed(podvisor.as_ref(), StdioFds::of_this_process()?)
        .await?;
    println!("{} {}", here.code, jailed.code);
    std::process::exit(0) // A thread may still wait for stdin.
}
