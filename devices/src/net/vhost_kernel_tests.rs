//! The requests to the kernel, on machines without vhost: a refused one is an error.

use std::fs::File;

use rustix::io::Errno;

use super::*;

/// Not `/dev/vhost-net`: it refuses all requests, with `ENOTTY`.
fn refusing(ram: GuestRam) -> Kernel {
    Kernel {
        fd: File::open("/dev/null").unwrap().into(),
        ram: Arc::new(ram),
    }
}

#[test]
fn a_request_that_the_kernel_refuses_is_an_error() {
    let mem = memory(1 << 20);
    let driver = DriverQueue::new(&mem, 0x1_0000, 64);
    let queue = driver.device_queue(0, Arc::new(CountingInterrupt::default()));
    let mut kernel = refusing(mem.clone());
    let ring = Ring {
        queue: None,
        active: false,
        call: eventfd().unwrap(),
        error: eventfd().unwrap(),
    };
    let refused = |result: io::Result<()>| {
        let error = result.unwrap_err();
        assert_eq!(Errno::from_io_error(&error), Some(Errno::NOTTY));
    };
    refused(kernel.begin(FEATURES, &queue));
    refused(kernel.set_memory(&mem));
    refused(kernel.set_ring(0, &queue, &ring));
    refused(kernel.serve(0, &ring, &queue, -1));
    refused(kernel.set_backend(0, -1));
    refused(kernel.leave(0).map(drop));
}

#[test]
fn rings_are_looked_up_in_the_memory_that_they_begin_with() {
    let mem = memory(1 << 20);
    let driver = DriverQueue::new(&mem, 0x1_0000, 64);
    let queue = driver.device_queue(0, Arc::new(CountingInterrupt::default()));
    let mut kernel = refusing(GuestRam::default());
    assert!(kernel.begin(FEATURES, &queue).is_err());
    let lens = |ram: &GuestRam| ram.iter().map(GuestMemoryRegion::len).collect::<Vec<_>>();
    assert_eq!(lens(kernel.mem()), [1 << 20]);
    assert!(format!("{kernel:?}").starts_with("Kernel { fd"));
}
