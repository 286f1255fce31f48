//! What guest tests share: kernels, initramfs images and a serial console to read from.
#![allow(dead_code)] // each test binary uses its part

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use podvisor_vmm::{Initramfs, InitramfsBuilder, Kernel, Vm, VmBuilder, VmError};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

pub(crate) mod loader;
pub(crate) mod mounts;
pub(crate) mod tap;

/// The time limit for anything that a guest does, also on an emulated host.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// Returns the path of a file that guests boot from, built by `cargo xtask guest`.
pub(crate) fn guest_file(name: &str) -> PathBuf {
    let dir = std::env::var_os("PODVISOR_GUEST_DIR").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../target/guest")),
        PathBuf::from,
    );
    dir.join(name)
}

/// The guest kernel that `cargo xtask kernel` builds.
pub(crate) fn kernel() -> Kernel {
    Kernel::open(guest_file("vmlinux")).expect("the guest kernel: run `cargo xtask kernel`")
}

/// An initramfs of Debian's static busybox, whose init runs `script`.
pub(crate) fn busybox(script: &str) -> Initramfs {
    busybox_with(script, &[])
}

/// As [`busybox`], with more programs in `bin`.
pub(crate) fn busybox_with(script: &str, programs: &[(&str, &[u8])]) -> Initramfs {
    let busybox = std::fs::read("/bin/busybox").expect("busybox: run `cargo xtask setup`");
    let init = format!(
        "#!/bin/busybox sh\n/bin/busybox --install -s /bin\n\
         mount -t proc proc /proc\nmount -t sysfs sysfs /sys\nmount -t devtmpfs dev /dev\n\
         {script}\nreboot -f\n"
    );
    let mut initramfs = InitramfsBuilder::new().directory("bin", 0o755);
    for (name, program) in programs {
        initramfs = initramfs.file(&format!("bin/{name}"), 0o755, program);
    }
    initramfs
        .directory("dev", 0o755)
        .directory("proc", 0o755)
        .directory("sys", 0o755)
        .directory("mnt", 0o755)
        .character_device("dev/console", 0o600, 5, 1)
        .file("bin/busybox", 0o755, &busybox)
        .file("init", 0o755, init.as_bytes())
        .build()
        .expect("an initramfs")
}

/// Returns the static program compiled from `source` in this directory.
pub(crate) fn program(source: &str) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("program");
    let status = Command::new("gcc")
        .args(["-static", "-O2", "-s", "-o"])
        .arg(&program)
        .arg(
            Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("tests/support")
                .join(source),
        )
        .status();
    assert!(status.expect("gcc: run `cargo xtask setup`").success());
    std::fs::read(program).unwrap()
}

/// Raises this process's limit of open files to 65,536: one for each of a guest's files or
/// connections.
pub(crate) fn raise_limit_of_files() {
    let needed = Some(1 << 16);
    let limit = Rlimit {
        current: needed,
        maximum: needed.max(getrlimit(Resource::Nofile).maximum),
    };
    setrlimit(Resource::Nofile, limit).expect("run as root");
}

/// A VM that boots Linux, runs `script` in its init, and writes to `console`.
pub(crate) fn linux(script: &str, console: &Console) -> VmBuilder {
    linux_with(busybox(script), console)
}

/// As [`linux`], with the test's own initramfs.
pub(crate) fn linux_with(initramfs: Initramfs, console: &Console) -> VmBuilder {
    Vm::builder()
        .kernel(kernel())
        .initramfs(initramfs)
        // A host that hangs for a moment must not cause the guest to report stalls.
        .cmdline("console=ttyS0 quiet panic=-1 reboot=k pci=off rcupdate.rcu_cpu_stall_timeout=300")
        .serial(console.clone())
}

/// A kernel of a few bytes that is entered by PVH: 32-bit protected mode, flat, no paging, no
/// interrupt table.
pub(crate) fn tiny_kernel(code: &[u8]) -> Kernel {
    const LOAD: u64 = 0x10_0000;
    const CODE: u64 = 0x1000;
    let note: Vec<u8> = [4u32, 4, 18] // name and value size, XEN_ELFNOTE_PHYS32_ENTRY
        .iter()
        .flat_map(|w| w.to_le_bytes())
        .chain(*b"Xen\0")
        .chain(u32::try_from(LOAD).unwrap().to_le_bytes())
        .collect();
    let segment = |kind: u32, offset: u64, address: u64, len: u64| {
        let mut header = Vec::new();
        header.extend(kind.to_le_bytes());
        header.extend(5u32.to_le_bytes());
        for field in [offset, address, address, len, len, 4] {
            header.extend(field.to_le_bytes());
        }
        header
    };
    let mut elf = Vec::new();
    elf.extend(*b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    elf.extend(2u16.to_le_bytes()); // executable
    elf.extend(62u16.to_le_bytes()); // x86-64
    elf.extend(1u32.to_le_bytes());
    elf.extend(LOAD.to_le_bytes());
    elf.extend(64u64.to_le_bytes()); // program headers follow
    elf.extend(0u64.to_le_bytes());
    elf.extend(0u32.to_le_bytes());
    for field in [64u16, 56, 2, 0, 0, 0] {
        elf.extend(field.to_le_bytes());
    }
    elf.extend(segment(1, CODE, LOAD, code.len() as u64));
    elf.extend(segment(4, 0x200, 0, note.len() as u64));
    elf.resize(0x200, 0);
    elf.extend(&note);
    elf.resize(usize::try_from(CODE).unwrap(), 0);
    elf.extend(code);
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&elf).unwrap();
    Kernel::from_file(file).expect("a kernel of a few bytes")
}

/// 64-bit code that writes the command line, to which `boot_params` (RSI) points, to the serial
/// console, and powers off. It runs in the ring, mode and mapping that the boot protocol
/// promises, or faults.
const TELL_CMDLINE: &[u8] = &[
    0x44, 0x8b, 0xa6, 0x28, 0x02, 0x00, 0x00, // mov r12d, [rsi + 0x228]
    0x66, 0xba, 0xf8, 0x03, // mov dx, 0x3f8
    0x41, 0x8a, 0x04, 0x24, // next: mov al, [r12]
    0x49, 0xff, 0xc4, // inc r12
    0x84, 0xc0, // test al, al
    0x74, 0x03, // jz done
    0xee, // out dx, al
    0xeb, 0xf2, // jmp next
    0x66, 0xba, 0x00, 0x06, // done: mov dx, 0x600
    0xb0, 0x34, // mov al, 0x34
    0xee, // out dx, al
    0xeb, 0xfe, // jmp $
];

/// A bzImage of protocol 2.15 that writes its command line to the serial console and powers off.
pub(crate) fn small_bzimage() -> Vec<u8> {
    const SETUP: usize = 5 * 512;
    let mut image = vec![0u8; SETUP + 0x200];
    image.extend(TELL_CMDLINE);
    image.resize(image.len().next_multiple_of(16), 0);
    let paragraphs = u32::try_from((image.len() - SETUP) / 16).unwrap();
    let fields: [(usize, &[u8]); 12] = [
        (0x1f1, &[4]),
        (0x1f4, &paragraphs.to_le_bytes()),
        (0x1fe, &[0x55, 0xaa, 0xeb, 0x6a]),
        (0x202, b"HdrS"),
        (0x206, &0x20fu16.to_le_bytes()),
        (0x211, &[1]),
        (0x22c, &0x7fff_ffffu32.to_le_bytes()),
        (0x230, &0x20_0000u32.to_le_bytes()),
        (0x234, &[1, 0, 3]),
        (0x238, &2047u32.to_le_bytes()),
        (0x258, &0x100_0000u64.to_le_bytes()),
        (0x260, &0x10_0000u32.to_le_bytes()),
    ];
    for (offset, bytes) in fields {
        image[offset..offset + bytes.len()].copy_from_slice(bytes);
    }
    image
}

/// A serial console that keeps what the guest writes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Console(Arc<(Mutex<Vec<u8>>, Condvar)>);

impl Console {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.0.lock().unwrap()).replace('\r', "")
    }

    /// Waits until the guest has written `text`.
    pub(crate) fn wait_for(&self, text: &str) {
        self.wait_for_within(text, PATIENCE);
    }

    /// Waits until the guest has written `text`, at most so long.
    pub(crate) fn wait_for_within(&self, text: &str, limit: Duration) {
        let deadline = Instant::now() + limit;
        let mut bytes = self.0.0.lock().unwrap();
        while !String::from_utf8_lossy(&bytes).contains(text) {
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(
                !left.is_zero(),
                "no {text:?} in {:?}",
                String::from_utf8_lossy(&bytes)
            );
            bytes = self.0.1.wait_timeout(bytes, left).unwrap().0;
        }
    }
}

impl Console {
    /// Waits until the guest has written more than `text`, or the deadline has passed.
    pub(crate) fn wait_for_more(&self, text: &str, deadline: Instant) {
        let bytes = self.0.0.lock().unwrap();
        let left = deadline.saturating_duration_since(Instant::now());
        let is_all = |bytes: &mut Vec<u8>| {
            String::from_utf8_lossy(bytes).replace('\r', "").len() <= text.len()
        };
        drop(self.0.1.wait_timeout_while(bytes, left, is_all).unwrap());
    }
}

impl Write for Console {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.0.0.lock().unwrap().extend_from_slice(buf);
        self.0.1.notify_all();
        Ok(buf.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Pauses a VM in which nothing blocks. On an overloaded host its threads may not be scheduled in
/// time: it is then retried.
pub(crate) fn pause(vm: &Vm) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match vm.pause() {
            Err(VmError::Busy { .. }) if Instant::now() < deadline => {}
            paused => return paused.unwrap(),
        }
    }
}

/// Runs `call` on its own thread and fails if it hangs.
pub(crate) fn in_time<T: Send + 'static>(
    what: &str,
    call: impl FnOnce() -> T + Send + 'static,
) -> T {
    let (tx, rx) = std::sync::mpsc::channel();
    std::thread::spawn(move || tx.send(call()));
    rx.recv_timeout(PATIENCE)
        .unwrap_or_else(|_| panic!("{what} hangs"))
}
