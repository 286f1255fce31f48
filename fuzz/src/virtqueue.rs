//! A virtqueue over rings with any content.

use std::sync::Arc;

use arbitrary::Arbitrary;
use podvisor_devices::testing::{CountingInterrupt, DriverQueue, memory, queue_resources};
use podvisor_devices::virtio::{
    Chain, MAX_SEGMENTS, Queue, QueueConfig, QueueFault, QueueResources,
};
use vm_memory::{Bytes, GuestAddress};

use crate::driver::{Addr, Len, MEMORY, QUEUE_SIZE, steps};

const RINGS: u64 = 0x1_0000;

#[derive(Arbitrary, Debug)]
enum Step {
    Chain(Vec<(Addr, Len)>, Vec<(Addr, Len)>),
    Descriptor(u8, Addr, Len, u8, u16),
    Available(u16),
    AvailableIndex(u16),
    Write(Addr, Vec<u8>),
    Next,
    Read(u16, u16),
    Fill(u16, Vec<u8>),
    Complete(u32),
    Undo,
    Notify,
    Kicks(bool),
    Configure(u32, u64, u64, u64),
}

/// Runs the program `data`; its first byte selects whether `EVENT_IDX` is in use.
///
/// # Panics
/// If the queue returns an invalid chain.
pub fn run(data: &[u8]) {
    let Some((mode, data)) = data.split_first() else {
        return;
    };
    let mem = memory(usize::try_from(MEMORY).expect("small"));
    let mut driver = DriverQueue::new(&mem, RINGS, QUEUE_SIZE);
    let irq = Arc::new(CountingInterrupt::default());
    let (event_idx, indirect_desc) = (mode & 1 != 0, mode & 2 == 0);
    let make = |config: &QueueConfig| {
        let resources = QueueResources {
            event_idx,
            indirect_desc,
            ..queue_resources(&mem, irq.clone())
        };
        Queue::new(0, QUEUE_SIZE, config, resources)
    };
    let mut queue = make(&driver.config()).expect("a sound configuration");
    let mut taken: Vec<Chain> = Vec::new();
    for step in steps(data) {
        let result: Result<(), QueueFault> = match step {
            Step::Chain(readable, writable) => {
                let most = usize::from(QUEUE_SIZE) / 2;
                let part = |buffers: Vec<(Addr, Len)>| -> Vec<_> {
                    let buffers = buffers.iter().take(most);
                    buffers.map(|(addr, len)| (addr.get(), len.get())).collect()
                };
                driver.add(&part(readable), &part(writable));
                Ok(())
            }
            Step::Descriptor(index, addr, len, flags, next) => {
                let index = u16::from(index) % QUEUE_SIZE;
                driver.descriptor(index, addr.get(), len.get(), flags.into(), next);
                Ok(())
            }
            Step::Available(head) => {
                driver.make_available(head);
                Ok(())
            }
            Step::AvailableIndex(index) => {
                driver.set_avail_idx(index);
                Ok(())
            }
            Step::Write(addr, bytes) => {
                // Beyond guest memory there is nothing to write to.
                let _ = mem.write_slice(&bytes, GuestAddress(addr.get()));
                Ok(())
            }
            Step::Next => queue.next().map(|chain| {
                if let Some(chain) = chain {
                    assert!(
                        taken.iter().all(|other| other.head() != chain.head()),
                        "descriptor {} came out twice",
                        chain.head()
                    );
                    check(&mem, &chain);
                    taken.push(chain);
                }
            }),
            Step::Read(offset, len) => {
                if let Some(chain) = taken.last() {
                    let (offset, len) = (usize::from(offset), usize::from(len));
                    let fits = offset + len <= chain.readable_len();
                    let read = chain.read(&mem, offset, &mut vec![0; len]);
                    assert_eq!(read.is_ok(), fits);
                }
                Ok(())
            }
            Step::Fill(offset, bytes) => {
                if let Some(chain) = taken.last() {
                    let offset = usize::from(offset);
                    let fits = offset + bytes.len() <= chain.writable_len();
                    assert_eq!(chain.write(&mem, offset, &bytes).is_ok(), fits);
                }
                Ok(())
            }
            Step::Complete(len) => match taken.pop() {
                Some(chain) => queue.complete(chain, len),
                None => Ok(()),
            },
            Step::Undo => {
                if let Some(chain) = taken.pop() {
                    queue.undo_pop(chain);
                }
                Ok(())
            }
            Step::Notify => queue.notify(),
            Step::Kicks(true) => queue.enable_kicks().map(drop),
            Step::Kicks(false) => queue.disable_kicks(),
            Step::Configure(size, desc_table, avail_ring, used_ring) => {
                let config = QueueConfig {
                    size,
                    ready: true,
                    desc_table,
                    avail_ring,
                    used_ring,
                };
                // Most are refused; any other must be usable.
                if let Ok(mut other) = make(&config) {
                    if let Ok(Some(chain)) = other.next() {
                        check(&mem, &chain);
                        let _ = other.complete(chain, 0);
                    }
                    let _ = other.notify();
                }
                Ok(())
            }
        };
        if result.is_err() {
            taken.clear();
            driver = DriverQueue::new(&mem, RINGS, QUEUE_SIZE);
            queue = make(&driver.config()).expect("a sound configuration");
        }
    }
}

/// Checks that a chain's segments are guest memory, as many as announced, and few enough.
fn check(mem: &podvisor_devices::GuestRam, chain: &Chain) {
    let mut slices = Vec::new();
    chain
        .readable_slices(mem, 0, chain.readable_len(), &mut slices)
        .expect("guest memory");
    let mut count = slices.len();
    let len: usize = slices.iter().map(vm_memory::VolatileSlice::len).sum();
    assert_eq!(len, chain.readable_len());
    chain
        .writable_slices(mem, 0, chain.writable_len(), &mut slices)
        .expect("guest memory");
    count += slices.len();
    let len: usize = slices.iter().map(vm_memory::VolatileSlice::len).sum();
    assert_eq!(len, chain.writable_len());
    assert!(count <= MAX_SEGMENTS);
}

#[cfg(test)]
mod tests {
    #[test]
    fn smoke() {
        crate::smoke::run("virtqueue", super::run);
    }
}
