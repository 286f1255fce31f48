//! Which disk of the machine holds which image.

use std::collections::BTreeSet;

/// Digits of a digest that make its disk's serial number: as many as that may have.
const SERIAL_LEN: usize = 20;

/// Why an image has no disk.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ImageError {
    #[error("`{0}` is not the digest of an image: it has too few hexadecimal digits")]
    Digest(String),
    #[error("all {0} disks for images are in use: the sandbox was launched with too few")]
    NoSlot(usize),
    #[error("the image is still being ejected from its disk: try again")]
    Leaving,
}

/// What a specification has as the source of a mount that is the image of this digest.
pub(crate) fn mount_source(digest: &str) -> Option<String> {
    Some(format!("image:{}", serial(digest).ok()?))
}

/// The serial number of the disk with the image of this digest.
pub(super) fn serial(digest: &str) -> Result<String, ImageError> {
    let hex = digest.rsplit_once(':').map_or(digest, |(_, hex)| hex);
    match hex.get(..SERIAL_LEN) {
        Some(serial) if serial.bytes().all(|byte| byte.is_ascii_hexdigit()) => {
            Ok(serial.to_ascii_lowercase())
        }
        _ => Err(ImageError::Digest(digest.chars().take(100).collect())),
    }
}

/// What is to be done about an image's disk.
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
    /// The image's; empty: the disk is free.
    serial: String,
    /// The containers that use it.
    users: BTreeSet<String>,
}

impl Slot {
    /// Nobody uses the image, and the disk was not yet said to be empty.
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

    /// Notes that `container` uses the image.
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

    /// Notes that `container` is gone; the disks that nobody uses any more, also those that could
    /// not be emptied when an earlier one went.
    pub(super) fn leave(&mut self, container: &str) -> Vec<usize> {
        let slots = self.slots.iter_mut().enumerate();
        let left = slots.filter_map(|(index, slot)| {
            slot.users.remove(container);
            slot.is_leaving().then_some(index)
        });
        left.collect()
    }

    /// The disk is empty, again or still.
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
        // Until it is said to be empty, nobody gets the disk, which may become so at any moment.
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
