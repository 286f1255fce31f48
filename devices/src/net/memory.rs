//! A backend in memory, for tests and fuzz targets.
#![allow(clippy::unwrap_used, clippy::missing_panics_doc)]

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};

use rustix::event::{EventfdFlags, eventfd};
use vm_memory::VolatileSlice;

use super::filter::ReceiveFilter;
use super::header::HEADER_LEN;
use super::nic::Nic;
use super::offloads::Offloads;

/// A frame and the header before it.
type Frame = ([u8; HEADER_LEN], Vec<u8>);

#[derive(Debug)]
struct Shared {
    to_driver: VecDeque<Frame>,
    from_driver: VecDeque<Frame>,
    offloads: Offloads,
    switches: u64,
    /// In order.
    filters: Vec<ReceiveFilter>,
    refuses: Option<io::ErrorKind>,
    refuses_filters: bool,
    receives: u64,
}

/// A NIC whose wire ends in a [`MemoryWire`].
#[derive(Debug)]
pub struct MemoryNic {
    shared: Arc<Mutex<Shared>>,
    ready: Arc<OwnedFd>,
}

/// The other end of a [`MemoryNic`].
#[derive(Clone, Debug)]
pub struct MemoryWire {
    shared: Arc<Mutex<Shared>>,
    ready: Arc<OwnedFd>,
}

impl MemoryNic {
    /// Creates a NIC and its wire.
    #[must_use]
    pub fn pair() -> (Self, MemoryWire) {
        let shared = Arc::new(Mutex::new(Shared {
            to_driver: VecDeque::new(),
            from_driver: VecDeque::new(),
            offloads: Offloads::default(),
            switches: 0,
            filters: Vec::new(),
            refuses: None,
            refuses_filters: false,
            receives: 0,
        }));
        let ready = Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap());
        let wire = MemoryWire {
            shared: shared.clone(),
            ready: ready.clone(),
        };
        (Self { shared, ready }, wire)
    }
}

impl MemoryWire {
    /// Sends a frame to the driver, with a header of zeroes.
    pub fn send(&self, frame: &[u8]) {
        self.send_with([0; HEADER_LEN], frame);
    }

    /// Sends a frame to the driver, with this header.
    pub fn send_with(&self, header: [u8; HEADER_LEN], frame: &[u8]) {
        let frame = (header, frame.to_vec());
        self.shared.lock().unwrap().to_driver.push_back(frame);
        rustix::io::write(&self.ready, &1u64.to_ne_bytes()).unwrap();
    }

    /// Returns the next frame of the driver, with its header.
    #[must_use]
    pub fn receive(&self) -> Option<Frame> {
        self.shared.lock().unwrap().from_driver.pop_front()
    }

    /// The number of frames that the device has not fetched yet.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.shared.lock().unwrap().to_driver.len()
    }

    /// How often the offloads were set.
    #[must_use]
    pub fn switches(&self) -> u64 {
        self.shared.lock().unwrap().switches
    }

    /// The offloads that the driver accepts.
    #[must_use]
    pub fn offloads(&self) -> Offloads {
        self.shared.lock().unwrap().offloads
    }

    /// The filters that were set since the last call, in order. All of them are ignored.
    #[must_use]
    pub fn filters(&self) -> Vec<ReceiveFilter> {
        std::mem::take(&mut self.shared.lock().unwrap().filters)
    }

    /// Makes setting a filter other than [`ReceiveFilter::All`] fail from now on.
    pub fn refuse_filters(&self) {
        self.shared.lock().unwrap().refuses_filters = true;
    }

    /// How often the device tried to receive a frame.
    #[must_use]
    pub fn receives(&self) -> u64 {
        self.shared.lock().unwrap().receives
    }

    /// Makes sending the driver's frames fail with this error from now on.
    pub fn refuse(&self, kind: Option<io::ErrorKind>) {
        self.shared.lock().unwrap().refuses = kind;
    }
}

impl Nic for MemoryNic {
    fn send(&mut self, header: &[u8; HEADER_LEN], frame: &[VolatileSlice<'_>]) -> io::Result<()> {
        let mut shared = self.shared.lock().unwrap();
        if let Some(kind) = shared.refuses {
            return Err(kind.into());
        }
        let mut bytes = Vec::new();
        for slice in frame {
            let mut part = vec![0u8; slice.len()];
            slice.copy_to(&mut part);
            bytes.extend(part);
        }
        shared.from_driver.push_back((*header, bytes));
        Ok(())
    }

    fn receive(
        &mut self,
        header: &mut [u8; HEADER_LEN],
        frame: &[VolatileSlice<'_>],
    ) -> io::Result<usize> {
        let mut shared = self.shared.lock().unwrap();
        shared.receives = shared.receives.saturating_add(1);
        let Some((its_header, bytes)) = shared.to_driver.pop_front() else {
            let mut count = [0; 8];
            // Fails if nothing was sent since.
            let _ = rustix::io::read(&self.ready, &mut count);
            return Err(io::ErrorKind::WouldBlock.into());
        };
        *header = its_header;
        let mut rest = bytes.as_slice();
        for slice in frame {
            let (now, later) = rest.split_at(rest.len().min(slice.len()));
            slice.copy_from(now);
            rest = later;
        }
        Ok(bytes.len().saturating_sub(rest.len()))
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.ready.as_fd()
    }

    fn set_offloads(&mut self, offloads: Offloads) -> io::Result<()> {
        let mut shared = self.shared.lock().unwrap();
        shared.offloads = offloads;
        shared.switches = shared.switches.saturating_add(1);
        Ok(())
    }

    fn set_filter(&mut self, filter: &ReceiveFilter) -> io::Result<()> {
        let mut shared = self.shared.lock().unwrap();
        shared.filters.push(filter.clone());
        match shared.refuses_filters && *filter != ReceiveFilter::All {
            true => Err(io::ErrorKind::Unsupported.into()),
            false => Ok(()),
        }
    }
}
