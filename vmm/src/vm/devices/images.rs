//! Memory images of a VM: their placement, writes by a guest, and files that were truncated.

use std::any::Any;
use std::fs::File;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvm_ioctls::{Cap, Kvm};
use podvisor_devices::legacy::power::PowerRequest;
use podvisor_devices::pmem::{PmemDevice, PmemRegion, Refusals};
use podvisor_devices::virtio::{RateLimit, RestoreError};

use super::attach::NewDevice;
use crate::kvm::KvmError;
use crate::memory::{GuestMemory, MemoryShape, next_image};
use crate::snapshot::SnapshotError;
use crate::vm::error::BuildError;
use crate::vm::hardware::bus::{Bus, BusDevice};

/// The interval of log lines about a guest that writes to an image.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// An image of a VM.
#[derive(Debug)]
struct Image {
    name: String,
    region: PmemRegion,
    file: Arc<File>,
    file_len: u64,
    refusals: Refusals,
}

/// The images of a VM.
#[derive(Debug, Default)]
pub(crate) struct Images(Vec<Image>);

/// Assigns an address to each image of a new VM.
pub(crate) fn place(devices: &mut [NewDevice], shape: MemoryShape) {
    let mut start = shape.images_start();
    for new in devices {
        let any: &mut dyn Any = &mut *new.device;
        if let Some(image) = any.downcast_mut::<PmemDevice>() {
            image.place(start);
            start = next_image(start.saturating_add(image.region().len));
        }
    }
}

/// Returns the end of a VM's memory and of the images among `devices`, which have addresses.
pub(crate) fn end(devices: &[NewDevice], shape: MemoryShape) -> u64 {
    let images = devices.iter().filter_map(|new| {
        let any: &dyn Any = &*new.device;
        let region = any.downcast_ref::<PmemDevice>()?.region();
        Some(region.start.saturating_add(region.len))
    });
    images.fold(shape.end(), u64::max)
}

impl Images {
    /// Maps the images among `devices`, whose addresses may be a snapshot's.
    pub(crate) fn map(
        kvm: &Kvm,
        devices: &[NewDevice],
        memory: &mut GuestMemory,
    ) -> Result<Self, BuildError> {
        let mut images = Vec::new();
        let mut free = memory.shape().images_start();
        for new in devices {
            let any: &dyn Any = &*new.device;
            let Some(device) = any.downcast_ref::<PmemDevice>() else {
                continue;
            };
            let region = device.region();
            if region.start < free {
                let what = "a memory image where none can be";
                return Err(
                    SnapshotError::of_device(&new.name)(RestoreError::Invalid { what }).into(),
                );
            }
            free = region.start.saturating_add(region.len);
            memory.add_image(region, device.file(), device.file_len())?;
            images.push(Image {
                name: new.name.clone(),
                region,
                file: device.file().clone(),
                file_len: device.file_len(),
                refusals: device.refusals(),
            });
        }
        if !images.is_empty() && !kvm.check_extension(Cap::ReadonlyMem) {
            return Err(BuildError::Kvm(KvmError::MissingCapability {
                name: "KVM_CAP_READONLY_MEM",
            }));
        }
        Ok(Self(images))
    }

    /// Adds the images to the bus, to catch a guest's writes: KVM does not execute them.
    pub(crate) fn insert(&self, bus: &Bus) -> Result<(), BuildError> {
        for image in &self.0 {
            let window = ImageFaults {
                name: image.name.clone(),
                refusals: image.refusals.clone(),
                log: Mutex::new(RateLimit::new(LOG_INTERVAL)),
            };
            bus.mmio
                .insert(image.region.start, image.region.len, Arc::new(window))
                .map_err(|error| BuildError::Addresses(Box::new(error)))?;
        }
        Ok(())
    }

    /// Returns the name of an image whose file was truncated, at `address` if that is known.
    pub(crate) fn truncated(&self, address: Option<u64>) -> Option<&str> {
        let is_there = |image: &&Image| {
            let offset = |address: u64| address.checked_sub(image.region.start);
            address.is_none_or(|address| offset(address).is_some_and(|at| at < image.region.len))
        };
        let image = self.0.iter().filter(is_there).find(|image| {
            let len = rustix::fs::fstat(&image.file).map_or(0, |stat| stat.st_size);
            u64::try_from(len).unwrap_or(0) < image.file_len
        });
        image.map(|image| image.name.as_str())
    }
}

/// Handles a guest's accesses to an image that KVM does not execute.
#[derive(Debug)]
struct ImageFaults {
    name: String,
    refusals: Refusals,
    log: Mutex<RateLimit>,
}

impl BusDevice for ImageFaults {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        // The host could not read the file: see `Images::truncated`.
        data.fill(0xff);
    }

    fn write(&self, offset: u64, _data: &[u8]) -> Option<PowerRequest> {
        self.refusals.one();
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(suppressed) = log.permit() {
            let device = &self.name;
            tracing::warn!(
                device,
                offset,
                suppressed,
                "the guest wrote to an image, which is read-only"
            );
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use podvisor_devices::virtio::VirtioDevice;

    #[test]
    fn a_file_that_is_shorter_than_it_was_is_found_by_the_addresses_of_its_image() {
        const START: u64 = 1 << 32;
        let files = [(); 2].map(|()| {
            let file = tempfile::NamedTempFile::new().unwrap();
            file.as_file().set_len(0x3000).unwrap();
            file
        });
        let images = ["one", "two"].iter().zip(&files).zip([0, 1]);
        let images = images.map(|((name, file), number)| {
            let mut device = PmemDevice::open(file.path()).unwrap();
            device.place(START + (number << 30));
            Image {
                name: (*name).to_owned(),
                region: device.region(),
                file: device.file().clone(),
                file_len: device.file_len(),
                refusals: device.refusals(),
            }
        });
        let images = Images(images.collect());
        let (first, second) = (images.0[0].region, images.0[1].region);
        let places = [None, Some(first.start), Some(second.start)];
        assert_eq!(places.map(|at| images.truncated(at)), [None; 3]);
        files[1].as_file().set_len(0x2fff).unwrap();
        assert_eq!(images.truncated(None), Some("two"));
        assert_eq!(images.truncated(Some(first.start)), None);
        let last = second.start + second.len - 1;
        for (at, found) in [
            (second.start - 1, None),
            (second.start, Some("two")),
            (last, Some("two")),
            (last + 1, None),
        ] {
            assert_eq!(images.truncated(Some(at)), found, "{at:#x}");
        }
        files[1].as_file().set_len(0x3001).unwrap();
        assert_eq!(images.truncated(None), None, "longer");
    }

    #[test]
    fn each_image_has_sections_of_its_own() {
        let image = || {
            let file = tempfile::NamedTempFile::new().unwrap();
            file.as_file().set_len(5 << 20).unwrap();
            Box::new(PmemDevice::open(file.path()).unwrap())
        };
        let named = |device: Box<dyn VirtioDevice>| NewDevice {
            name: "pmem".to_owned(),
            device,
            slot: None,
        };
        let rng = Box::new(podvisor_devices::rng::RngDevice::new());
        let mut devices = [named(image()), named(rng), named(image())];
        place(&mut devices, MemoryShape::fixed(crate::MemorySize::mib(32)));
        let starts = devices.iter().filter_map(|new| {
            let any: &dyn Any = &*new.device;
            Some(any.downcast_ref::<PmemDevice>()?.region().start)
        });
        let expected = [1 << 32, (1 << 32) + (128 << 20)];
        assert_eq!(starts.collect::<Vec<u64>>(), expected);
        let shape = MemoryShape::fixed(crate::MemorySize::mib(32));
        assert_eq!(end(&devices, shape), expected[1] + (6 << 20));
        assert_eq!(end(&[], shape), 1 << 32);
    }
}
