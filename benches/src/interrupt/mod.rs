//! The cost of a line's interrupt: from the thread that raises it to the guest's handler and back,
//! raised and lowered by ioctl, and by an irqfd.
//!
//! The guest is a few bytes of real mode: it halts, and its handler notifies this process by a
//! write to a port. Everything but the way to the guest is the same for both.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, Thread};
use std::time::Instant;

use anyhow::{Context, Result};
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use serde::Serialize;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::output;

/// The line, and the 8259's vector for it.
const LINE: u32 = 5;
const VECTOR: usize = 8 + LINE as usize;

const MEMORY: usize = 1 << 16;
const CODE: usize = 0x1000;
const HANDLER: usize = 0x1100;
const STACK: u64 = 0x8000;

/// Ports by which the guest reports that it is ready, and that its handler runs.
const READY: u16 = 0x11;
const HANDLED: u16 = 0x10;

/// Sets up the first 8259 for vectors from 8 on, with all lines masked except the fifth, and halts
/// forever.
const PROGRAM: [u8; 26] = [
    0xb0, 0x11, 0xe6, 0x20, 0xb0, 0x08, 0xe6, 0x21, 0xb0, 0x04, 0xe6, 0x21, 0xb0, 0x01, 0xe6, 0x21,
    0xb0, 0xdf, 0xe6, 0x21, 0xe6, 0x11, 0xfb, 0xf4, 0xeb, 0xfd,
];
/// Ends the interrupt, and reports that.
const HANDLING: [u8; 7] = [0xb0, 0x20, 0xe6, 0x20, 0xe6, 0x10, 0xcf];

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Interrupts of each way, after some that warm the caches
    #[arg(long, value_name = "N", default_value_t = 2000)]
    interrupts: usize,
    /// Write the results as JSON to this file, or to stdout (`-`)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Means, in µs.
#[derive(Debug, Serialize)]
struct Report {
    interrupts: usize,
    by_ioctl: f64,
    by_irqfd: f64,
}

pub(crate) fn command(args: &Args) -> Result<()> {
    let guest = Guest::boot().context("a guest for interrupts")?;
    let by_ioctl = guest.mean(args.interrupts, || {
        guest.vm.set_irq_line(LINE, true)?;
        guest.vm.set_irq_line(LINE, false)
    })?;
    let event = EventFd::new(EFD_NONBLOCK)?;
    guest.vm.register_irqfd(&event, LINE)?;
    let by_irqfd = guest.mean(args.interrupts, || {
        event
            .write(1)
            .map_err(|error| kvm_ioctls::Error::new(error.raw_os_error().unwrap_or(libc::EIO)))
    })?;
    let report = Report {
        interrupts: args.interrupts,
        by_ioctl,
        by_irqfd,
    };
    output::print(&report, args.json.as_deref())?;
    // Its only vCPU halts forever.
    std::process::exit(0)
}

struct Guest {
    vm: VmFd,
    handled: Arc<AtomicUsize>,
}

impl Guest {
    #[allow(unsafe_code)] // the guest's memory
    fn boot() -> Result<Self> {
        let vm = Kvm::new()?.create_vm()?;
        vm.create_irq_chip()?;
        let mut memory = vec![0; MEMORY];
        let handler = u32::try_from(HANDLER)?.to_le_bytes();
        for (at, bytes) in [
            (CODE, &PROGRAM[..]),
            (HANDLER, &HANDLING[..]),
            (4 * VECTOR, &handler[..]),
        ] {
            if let Some(place) = memory.get_mut(at..at + bytes.len()) {
                place.copy_from_slice(bytes);
            }
        }
        let shared = map(&memory)?;
        let region = kvm_userspace_memory_region {
            slot: 0,
            flags: 0,
            guest_phys_addr: 0,
            memory_size: MEMORY as u64,
            userspace_addr: shared,
        };
        // SAFETY: the mapping has that size, and is never unmapped.
        unsafe { vm.set_user_memory_region(region)? };
        let vcpu = vm.create_vcpu(0)?;
        let mut special = vcpu.get_sregs()?;
        special.cs.base = 0;
        special.cs.selector = 0;
        vcpu.set_sregs(&special)?;
        let mut registers = vcpu.get_regs()?;
        registers.rip = CODE as u64;
        registers.rsp = STACK;
        registers.rflags = 2;
        vcpu.set_regs(&registers)?;
        let handled = Arc::new(AtomicUsize::new(0));
        let (count, waiting) = (Arc::clone(&handled), thread::current());
        thread::spawn(move || run(vcpu, &count, &waiting));
        let guest = Self { vm, handled };
        guest.wait_for(1);
        Ok(guest)
    }

    /// Returns the mean time of `count` interrupts, in µs, after a tenth as many for warming up.
    fn mean(&self, count: usize, raise: impl Fn() -> Result<(), kvm_ioctls::Error>) -> Result<f64> {
        let series = |count: usize| -> Result<f64> {
            let began = Instant::now();
            for _ in 0..count {
                let before = self.handled.load(Ordering::Acquire);
                raise().context("the line cannot be raised")?;
                self.wait_for(before + 1);
            }
            Ok(began.elapsed().as_secs_f64() * 1e6 / count as f64)
        };
        series(count / 10 + 1)?;
        series(count)
    }

    fn wait_for(&self, count: usize) {
        while self.handled.load(Ordering::Acquire) < count {
            thread::park();
        }
    }
}

/// Runs the guest, counts its reports, and wakes the thread that waits for them.
fn run(mut vcpu: VcpuFd, count: &AtomicUsize, waiting: &Thread) {
    loop {
        match vcpu.run() {
            Ok(VcpuExit::IoOut(READY | HANDLED, _)) => {
                count.fetch_add(1, Ordering::Release);
                waiting.unpark();
            }
            Ok(_) => {}
            Err(error) if error.errno() == libc::EINTR => {}
            Err(error) => {
                eprintln!("the guest cannot run: {error}");
                std::process::exit(1);
            }
        }
    }
}

/// Creates a permanent mapping with the content `bytes`.
#[allow(unsafe_code)] // mmap
fn map(bytes: &[u8]) -> Result<u64> {
    // SAFETY: a new anonymous mapping, at any address.
    let place = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes.len(),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if place == libc::MAP_FAILED {
        return Err(io::Error::last_os_error()).context("the guest's memory");
    }
    // SAFETY: the mapping is as long as the bytes, and is not used elsewhere yet.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), place.cast(), bytes.len()) };
    Ok(place as u64)
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            interrupts,
            by_ioctl,
            by_irqfd,
        } = self;
        writeln!(
            f,
            "An interrupt of a line, from a thread to the guest's handler and back, means of {interrupts}"
        )?;
        writeln!(f, "raised and lowered by ioctl: {by_ioctl:.1} µs")?;
        writeln!(f, "by an irqfd: {by_irqfd:.1} µs")?;
        writeln!(f, "by ioctl over by irqfd: {:.2}", by_ioctl / by_irqfd)
    }
}
