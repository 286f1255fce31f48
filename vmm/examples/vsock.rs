//! Boots a guest that connects to port 1024 of its host, and prints the first line that it sends.
//!
//! `cargo run --example vsock -- target/guest/vmlinux target/guest/initramfs.cpio`
//!
//! A guest reaches port P of CID 2 at the unix socket `PATH_P`; the host reaches port P of the
//! guest by connecting to `PATH` and sending `CONNECT P`.
use std::error::Error;
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixListener;

use podvisor_vmm::{Initramfs, Kernel, MemorySize, Vm, VsockDevice};

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(kernel), Some(initramfs)) = (args.next(), args.next()) else {
        return Err("usage: vsock KERNEL INITRAMFS".into());
    };
    let dir = std::env::temp_dir().join(format!("vsock-example-{}", std::process::id()));
    std::fs::create_dir(&dir)?;
    let path = dir.join("vsock");
    let listener = UnixListener::bind(dir.join("vsock_1024"))?;
    let vm = Vm::builder()
        .kernel(Kernel::open(kernel)?)
        .initramfs(Initramfs::open(initramfs)?)
        .cmdline("quiet panic=-1 reboot=k")
        .memory(MemorySize::mib(128))
        .vsock(VsockDevice::unix_mux(3, &path)?)
        .build()?;
    vm.start()?;
    let (stream, _) = listener.accept()?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    println!("the guest says: {}", line.trim_end());
    vm.stop()?;
    std::fs::remove_dir_all(&dir)?;
    Ok(())
}
