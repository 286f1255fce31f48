//! What a read of a disk costs where the device's event loop serves its queue, and where a thread
//! of the queue's own does. There is no guest: the driver is the main thread, which makes a request
//! available, notifies, and waits for the interrupt.
//!
//! ```text
//! cargo build --release -p podvisor-devices --features test-utils --example queue_reads
//! cargo xtask host --icount -- chrt -b 0 target/release/examples/queue_reads
//! ```
//!
//! There, where each instruction takes a nanosecond, figures are instructions per read: those of
//! the thread that serves the queue, and all of them, with the driver's and the kernel's to switch
//! between the two. Elsewhere they are nanoseconds. `chrt -b` has each thread run until it waits:
//! on one CPU the driver would otherwise ask again before the server waits, as no guest does.

use std::error::Error;
use std::fs;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Instant;

use podvisor_devices::GuestRam;
use podvisor_devices::blk::{BlockDevice, FileDisk};
use podvisor_devices::testing::{DriverQueue, memory};
use podvisor_devices::virtio::{Interrupt, PollEvents, Poller, Progress, Queue, Wait, Worker};
use podvisor_devices::vm_memory::{Bytes, GuestAddress};
use podvisor_devices::vmm_sys_util::eventfd::EventFd;

/// The size of the disk, which stays in the page cache.
const DISK: u64 = 16 << 20;
const BLOCK: u32 = 4096;
const WARM: u64 = 500;
const READS: u64 = 5000;

/// Guest physical addresses.
const RINGS: [u64; 2] = [0x1_0000, 0x2_0000];
const HEADER: u64 = 0x3_0000;
const STATUS: u64 = 0x3_0100;
const DATA: u64 = 0x4_0000;

/// An interrupt that the driver waits for.
#[derive(Debug)]
struct Line(EventFd);

impl Interrupt for Line {
    fn signal_queue(&self, _: u16) {
        let _ = self.0.write(1);
    }

    fn signal_config(&self) {}

    fn signal_needs_reset(&self) {}
}

/// What a read costs.
#[derive(Clone, Copy, Debug)]
struct Cost {
    own: u64,
    total: u64,
}

fn main() -> Result<(), Box<dyn Error>> {
    println!(
        "4 KiB of a disk, per read (served: the thread that serves; total: the driver's, too)"
    );
    for queue in [0, 1] {
        let server = ["the device's event loop", "a thread of the queue"][usize::from(queue)];
        let Cost { own, total } = measure(queue)?;
        println!("{server:26} served {own:6}  total {total:6}");
    }
    Ok(())
}

/// Reads through one queue of a device with two.
fn measure(index: u16) -> Result<Cost, Box<dyn Error>> {
    let mem = memory(1 << 20);
    let irq = Arc::new(Line(EventFd::new(0)?));
    let mut drivers = RINGS.map(|at| DriverQueue::new(&mem, at, 64));
    let queues: Vec<_> = (0u16..)
        .zip(&drivers)
        .map(|(index, driver)| driver.device_queue(index, irq.clone()))
        .collect();
    let kicks = queues
        .iter()
        .map(|queue| queue.kick().try_clone())
        .collect::<Result<Vec<_>, _>>()?;
    let device = BlockDevice::new(Box::new(FileDisk::new(disk()?)?)).queues(2);
    let (tell, ids) = channel();
    let mut worker = Worker::new("disk".to_owned(), Box::new(device), irq.clone());
    for body in worker.begin_threads() {
        let tell = tell.clone();
        thread::spawn(move || {
            let _ = tell.send(own_schedstat());
            body.run();
        });
    }
    let own = match index {
        0 => event_loop(worker, queues, &kicks)?,
        _ => {
            worker.start(0, queues);
            // As long as this program runs.
            std::mem::forget(worker);
            ids
        }
    };
    let schedstat = own.recv()?;
    let kick = kicks.get(usize::from(index)).ok_or("no such queue")?;
    let driver = drivers.get_mut(usize::from(index)).ok_or("no such queue")?;
    let mut read = |number: u64| -> Result<(), Box<dyn Error>> {
        let sector = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (DISK / u64::from(BLOCK)) * 8;
        ask(&mem, driver, sector)?;
        kick.write(1)?;
        while driver.take_used().is_none() {
            irq.0.read()?;
        }
        Ok(())
    };
    (0..WARM).try_for_each(&mut read)?;
    let (began, before) = (Instant::now(), cpu(&schedstat)?);
    (0..READS).try_for_each(&mut read)?;
    let total = u64::try_from(began.elapsed().as_nanos())? / READS;
    let own = (cpu(&schedstat)? - before) / READS;
    Ok(Cost { own, total })
}

/// An unlinked file with contents.
fn disk() -> Result<fs::File, Box<dyn Error>> {
    let path = std::env::temp_dir().join(format!("queue_reads-{}", std::process::id()));
    fs::write(&path, vec![0x5a; usize::try_from(DISK)?])?;
    let file = fs::File::open(&path)?;
    fs::remove_file(&path)?;
    Ok(file)
}

/// Serves the first queue as a VM's event loop does.
fn event_loop(
    mut worker: Worker,
    queues: Vec<Queue>,
    kicks: &[EventFd],
) -> Result<Receiver<String>, Box<dyn Error>> {
    let poller = Poller::new()?;
    for (id, kick) in (0..).zip(kicks.iter().take(1)) {
        poller.add_kick(kick, id)?;
    }
    let (tell, id) = channel();
    thread::spawn(move || {
        let _ = tell.send(own_schedstat());
        worker.start(0, queues);
        let mut events = PollEvents::default();
        while let Ok(ready) = poller.wait(Wait::Blocking, &mut events) {
            for _ in ready {
                while let Ok(Progress::More) = worker.on_queue(0) {}
            }
        }
    });
    Ok(id)
}

/// Makes a read available.
fn ask(mem: &GuestRam, driver: &mut DriverQueue, sector: u64) -> Result<(), Box<dyn Error>> {
    mem.write_obj(0u64, GuestAddress(HEADER))?;
    mem.write_obj(sector, GuestAddress(HEADER + 8))?;
    driver.add(&[(HEADER, 16)], &[(DATA, BLOCK), (STATUS, 1)]);
    Ok(())
}

/// Where the kernel tells of this thread's CPU time.
fn own_schedstat() -> String {
    format!(
        "/proc/self/task/{}/schedstat",
        rustix::thread::gettid().as_raw_nonzero()
    )
}

/// Returns the CPU time of a thread in ns.
fn cpu(schedstat: &str) -> Result<u64, Box<dyn Error>> {
    let text = fs::read_to_string(schedstat)?;
    let first = text.split(' ').next().ok_or("an empty schedstat")?;
    Ok(first.parse()?)
}
