//! The state of the device in a snapshot.

use super::config::LinkState;
use super::feature;
use crate::virtio::{RestoreError, SavedDevice};

/// The format of a device with one queue pair.
const ONE_PAIR: u32 = 1;
/// The format of a device with several.
const SEVERAL_PAIRS: u32 = 2;
/// The same, for a device whose link is down.
const ONE_PAIR_DOWN: u32 = 3;
const SEVERAL_PAIRS_DOWN: u32 = 4;

/// The settings of a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DriverState {
    pub(super) mac: [u8; 6],
    /// A subset of [`feature::GUEST_OFFLOADS`].
    pub(super) offloads: u64,
    /// Queue pairs in use.
    pub(super) active: u16,
    /// Set by the device's owner; the driver was notified.
    pub(super) link: LinkState,
}

impl DriverState {
    /// Serializes it for a device with this number of pairs.
    pub(super) fn save(&self, pairs: u16) -> SavedDevice {
        let mut bytes = [&self.mac[..], &self.offloads.to_le_bytes()].concat();
        if pairs > 1 {
            bytes.extend(self.active.to_le_bytes());
        }
        SavedDevice {
            version: version(pairs, self.link),
            bytes,
        }
    }

    /// Parses the state of a device with as many pairs; it is not trusted.
    pub(super) fn restore(saved: &SavedDevice, pairs: u16) -> Result<Self, RestoreError> {
        let link = match saved.version {
            ONE_PAIR_DOWN | SEVERAL_PAIRS_DOWN => LinkState::Down,
            _ => LinkState::Up,
        };
        let bytes = saved.of_version(version(pairs, link))?;
        let invalid = |what| RestoreError::Invalid { what };
        let wrong_length = invalid("a network card's state has another length");
        let Some((mac, rest)) = bytes.split_first_chunk() else {
            return Err(wrong_length);
        };
        let Some((offloads, rest)) = rest.split_first_chunk() else {
            return Err(wrong_length);
        };
        let offloads = u64::from_le_bytes(*offloads);
        let active = match (rest, pairs) {
            ([], ..=1) => 1,
            ([low, high], 2..) => u16::from_le_bytes([*low, *high]),
            _ => return Err(wrong_length),
        };
        if offloads & !feature::GUEST_OFFLOADS != 0 {
            return Err(invalid("offloads of a network card that do not exist"));
        }
        if !(1..=pairs).contains(&active) {
            return Err(invalid(
                "a number of queue pairs that the card does not have",
            ));
        }
        Ok(Self {
            mac: *mac,
            offloads,
            active,
            link,
        })
    }
}

fn version(pairs: u16, link: LinkState) -> u32 {
    match (pairs, link) {
        (..=1, LinkState::Up) => ONE_PAIR,
        (_, LinkState::Up) => SEVERAL_PAIRS,
        (..=1, LinkState::Down) => ONE_PAIR_DOWN,
        (_, LinkState::Down) => SEVERAL_PAIRS_DOWN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATE: DriverState = DriverState {
        mac: [2, 9, 9, 9, 9, 9],
        offloads: feature::GUEST_CSUM,
        active: 1,
        link: LinkState::Up,
    };

    #[test]
    fn a_card_of_one_pair_writes_what_it_always_did() {
        let saved = STATE.save(1);
        assert_eq!((saved.version, saved.bytes.len()), (1, 14));
        assert_eq!(DriverState::restore(&saved, 1).unwrap(), STATE);
        assert!(DriverState::restore(&saved, 2).is_err());
    }

    #[test]
    fn a_link_that_is_down_is_down_again() {
        for pairs in [1, 4] {
            let down = DriverState {
                link: LinkState::Down,
                ..STATE
            };
            assert_eq!(
                DriverState::restore(&down.save(pairs), pairs).unwrap(),
                down
            );
            assert!(DriverState::restore(&down.save(pairs), 5 - pairs).is_err());
        }
    }

    #[test]
    fn nobody_restores_pairs_that_do_not_exist() {
        for active in [0, 1, 3, 4, 5, u16::MAX] {
            let state = DriverState { active, ..STATE };
            let restored = DriverState::restore(&state.save(4), 4);
            match (1..=4).contains(&active) {
                true => assert_eq!(restored.unwrap(), state),
                false => assert!(restored.is_err(), "{active}"),
            }
        }
        for len in (0..16).chain([17]) {
            let bytes = vec![0; len];
            assert!(DriverState::restore(&SavedDevice { version: 2, bytes }, 4).is_err());
        }
    }
}
