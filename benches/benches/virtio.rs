//! The cost of the virtio core per request and per register access, without a guest: `cargo bench
//! -p podvisor-benches`.
//!
//! The driver's side (a descriptor table, the avail ring) is written again in every round, so each
//! figure is a whole round trip: compare two of them rather than reading one on its own.

use std::hint::black_box;
use std::sync::Arc;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use podvisor_devices::WriteLog;
use podvisor_devices::rng::RngDevice;
use podvisor_devices::testing::{CountingInterrupt, DirectLink, DriverQueue, memory};
use podvisor_devices::virtio::VirtioDevice;
use podvisor_devices::virtio::transport::{MmioInterrupt, MmioTransport, TransportParts};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

const MEMORY: usize = 1 << 20;
const RINGS: u64 = 0x10000;
const BUFFERS: u64 = 0x40000;

/// `next` and `complete` of chains like a block request's: header, data, status.
fn queue(c: &mut Criterion) {
    let mem = memory(MEMORY);
    for (name, data_segments) in [("3 descriptors", 1), ("18 descriptors", 16)] {
        let mut driver = DriverQueue::new(&mem, RINGS, 256);
        let mut queue = driver.device_queue(0, Arc::new(CountingInterrupt::default()));
        let readable = [(BUFFERS, 16)];
        let mut writable: Vec<(u64, u32)> = (1..=data_segments)
            .map(|segment| (BUFFERS + segment * 4096, 4096))
            .collect();
        writable.push((BUFFERS + 0x30000, 1));
        let mut group = c.benchmark_group("queue");
        group.throughput(Throughput::Elements(1));
        group.bench_function(format!("next and complete, {name}"), |b| {
            b.iter(|| {
                driver.add(&readable, &writable);
                let chain = queue.next().unwrap().unwrap();
                queue.complete(black_box(chain), 4097).unwrap();
                driver.take_used().unwrap()
            });
        });
        group.bench_function(format!("the driver's side alone, {name}"), |b| {
            let mut driver = DriverQueue::new(&mem, RINGS * 2, 256);
            b.iter(|| driver.add(&readable, &writable));
        });
        group.finish();
    }
}

/// Registers that a driver reads and writes while it runs.
fn registers(c: &mut Criterion) {
    let eventfd = || EventFd::new(EFD_NONBLOCK).unwrap();
    let irq = Arc::new(MmioInterrupt::new(eventfd()));
    let device = RngDevice::new();
    let parts = TransportParts {
        info: device.info(),
        link: Arc::new(DirectLink::new(Box::new(device), irq.clone())),
        mem: memory(MEMORY),
        kicks: vec![Arc::new(eventfd())],
        writes: WriteLog::default(),
    };
    let mut transport = MmioTransport::new(parts, irq);
    let mut group = c.benchmark_group("mmio");
    for (name, offset) in [("MagicValue", 0x000), ("InterruptStatus", 0x060)] {
        group.bench_function(format!("read {name}"), |b| {
            let mut data = [0; 4];
            b.iter(|| {
                transport.read(black_box(offset), &mut data);
                data
            });
        });
    }
    group.bench_function("write InterruptACK", |b| {
        b.iter(|| transport.write(black_box(0x064), &1_u32.to_le_bytes()));
    });
    group.finish();
}

criterion_group!(benches, queue, registers);
criterion_main!(benches);
