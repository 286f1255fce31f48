//! The assignment of images to disks of the machine.

use std::collections::BTreeSet;

use podvisor_agent_protocol::MountSource;

/// Digits of a digest in its disk's serial number: as many as fit.
const SERIAL_LEN: usize = 20;

/// The reason why an image has no disk.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ImageError {
    #[error("`{0}` is not the digest of an image: it has too few hexadecimal digits")]
    Digest(String),
    #[error("all {0} disks for images are in use: the sandbox was launched with too few")]
    NoSlot(usize),
    #[error("the image is still being ejected from its disk: try again")]
    Leaving,
}

/// Returns the source by which a specification mounts the image of this digest, or a path in it.
pub fn mount_source(digest: &str, below: Option<&str>) -> Option<String> {
    let serial = serial(digest).ok()?;
    let serial = serial.as_str();
    Some(MountSource::Image { serial, below }.to_string())
}

/// Returns the serial number of the disk with the image of this digest.
pub(super) fn serial(digest: &str) -> Result<String, ImageError> {
    let hex = digest.rsplit_once(':').map_or(digest, |(_, hex)| hex);
    match hex.get(..SERIAL_LEN) {
        Some(serial) if serial.bytes().all(|byte| byte.is_ascii_hexdigit()) => {
            Ok(serial.to_ascii_lowercase())
        }
        _ => Err(ImageError::Digest(digest.chars().take(100).collect())),
    }
}

/// The action that places an image on a disk.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Placement {
    /// The image is on a disk already.
    Present,
    /// This disk is to get the image.
    Insert(usize),
}

/// The machine's disks for images.
#[derive(Debug)]
pub(super) struct Slots {
    slots: Vec<Slot>,
}

#[derive(Debug, Clone, Default)]
struct Slot {
    /// The image's serial; empty if the disk is free.
    serial: String,
    /// The containers that use it.
    users: BTreeSet<String>,
}

impl Slot {
    /// No container uses the image, but the disk has not been reported as empty yet.
    fn is_leaving(&self) -> bool {
        self.users.is_empty() && !self.serial.is_empty()
    }
}

impl Slots {
    pub(super) fn new(count: usize) -> Self {
        Self {
            slots: vec![Slot::default(); count],
        }
    }

    /// Records that `container` uses the image.
    pub(super) fn take(&mut self, serial: &str, container: &str) -> Result<Placement, ImageError> {
        if let Some(slot) = self.slots.iter_mut().find(|slot| slot.serial == serial) {
            if slot.is_leaving() {
                return Err(ImageError::Leaving);
            }
            slot.users.insert(container.to_owned());
            return Ok(Placement::Present);
        }
        let count = self.slots.len();
        let mut slots = self.slots.iter_mut().enumerate();
        let free = slots.find(|(_, slot)| slot.serial.is_empty());
        let (index, slot) = free.ok_or(ImageError::NoSlot(count))?;
        serial.clone_into(&mut slot.serial);
        slot.users.insert(container.to_owned());
        Ok(Placement::Insert(index))
    }

    /// Records that `container` is gone; returns the disks that are no longer used, including those
    /// that could not be emptied earlier.
    pub(super) fn leave(&mut self, container: &str) -> Vec<usize> {
        let slots = self.slots.iter_mut().enumerate();
        let left = slots.filter_map(|(index, slot)| {
            slot.users.remove(container);
            slot.is_leaving().then_some(index)
        });
        left.collect()
    }

    /// Records that the disk is empty, again or still.
    pub(super) fn freed(&mut self, index: usize) {
        if let Some(slot) = self.slots.get_mut(index) {
            *slot = Slot::default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_serial_is_the_beginning_of_the_digest() {
        let digest = format!("sha256:{}", "0123456789abcdef".repeat(4));
        assert_eq!(serial(&digest).unwrap(), "0123456789abcdef0123");
        assert_eq!(serial(&"AB".repeat(32)).unwrap(), "ab".repeat(10));
        for bad in [
            "",
            "sha256:",
            "sha256:0123",
            "sha256:zzzzzzzzzzzzzzzzzzzzzzzz",
            "äääääääääääääää",
        ] {
            assert!(serial(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn containers_of_one_image_share_a_disk_and_the_last_frees_it() {
        let mut slots = Slots::new(2);
        assert_eq!(slots.take("a", "1"), Ok(Placement::Insert(0)));
        assert_eq!(slots.take("a", "2"), Ok(Placement::Present));
        assert_eq!(slots.take("b", "3"), Ok(Placement::Insert(1)));
        assert_eq!(slots.take("c", "4"), Err(ImageError::NoSlot(2)));
        assert!(slots.leave("1").is_empty());
        assert_eq!(slots.leave("2"), [0]);
        // Until it is reported as empty, the disk is not used: it may become empty at any moment.
        assert_eq!(slots.take("c", "4"), Err(ImageError::NoSlot(2)));
        assert_eq!(slots.take("a", "5"), Err(ImageError::Leaving));
        assert_eq!(slots.leave("anybody"), [0]);
        slots.freed(0);
        assert_eq!(slots.take("c", "4"), Ok(Placement::Insert(0)));
        assert!(slots.leave("nobody").is_empty());
    }

    #[test]
    fn a_container_with_volumes_of_images_leaves_all_their_disks() {
        let mut slots = Slots::new(3);
        slots.take("a", "1").unwrap();
        slots.take("b", "1").unwrap();
        slots.take("b", "2").unwrap();
        slots.take("c", "1").unwrap();
        slots.freed(2);
        assert_eq!(slots.leave("1"), [0]);
        slots.freed(0);
        assert_eq!(slots.leave("2"), [1]);
    }
}
