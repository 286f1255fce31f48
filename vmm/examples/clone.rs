//! Boots a guest, takes a snapshot of it when it says `ready`, and lets two clones go on from
//! there, which share their memory until they write it.
//!
//! `cargo run --example clone -- target/guest/vmlinux initramfs.cpio`
use std::error::Error;
use std::io::{self, Write};
use std::sync::mpsc::{Sender, channel};

use podvisor_vmm::{Initramfs, Kernel, MemorySize, Snapshot, Vm};

/// Shows what a guest writes, and tells when a line of it is `ready`. A kernel may write lines of its
/// own before.
struct Console {
    line: Vec<u8>,
    ready: Sender<()>,
}

impl Write for Console {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        io::stdout().write_all(bytes)?;
        for byte in bytes {
            if *byte != b'\n' {
                self.line.push(*byte);
            } else if std::mem::take(&mut self.line).trim_ascii() == b"ready" {
                // Nobody listens after the first one.
                let _ = self.ready.send(());
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stdout().flush()
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(kernel), Some(initramfs)) = (args.next(), args.next()) else {
        return Err("usage: clone KERNEL INITRAMFS".into());
    };
    let (ready, is_ready) = channel();
    let line = Vec::new();
    let first = Vm::builder()
        .kernel(Kernel::open(kernel)?)
        .initramfs(Initramfs::open(initramfs)?)
        .cmdline("console=ttyS0 quiet panic=-1 reboot=k")
        .memory(MemorySize::mib(128))
        .serial(Console { line, ready })
        .build()?;
    first.start()?;
    is_ready.recv()?;
    first.pause()?;
    let dir = std::env::temp_dir().join(format!("clone-example-{}", std::process::id()));
    first.snapshot(&dir)?;
    let snapshot = Snapshot::open(&dir)?;
    // The files stay as long as somebody has them open.
    std::fs::remove_dir_all(&dir)?;
    // The clones' clocks go on from here, the first one's when it is resumed.
    let clones = [
        snapshot.builder().serial(io::stdout()).build()?,
        snapshot.builder().serial(io::stdout()).build()?,
    ];
    first.resume()?;
    println!("first: {}", first.wait()?);
    for clone in clones {
        clone.start()?;
        println!("clone: {}", clone.wait()?);
    }
    Ok(())
}
