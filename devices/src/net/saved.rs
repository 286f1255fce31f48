//! The state of the device in a snapshot.

use super::config::LinkState;
use super::feature;
use super::filter::RxMode;
use crate::virtio::{RestoreError, SavedDevice};

/// The format of a device with one queue pair.
const ONE_PAIR: u32 = 1;
/// The format of a device with several.
const SEVERAL_PAIRS: u32 = 2;
/// The same, for a device whose link is down.
const ONE_PAIR_DOWN: u32 = 3;
const SEVERAL_PAIRS_DOWN: u32 = 4;
/// Added to each of these: the same with a receive filter, of a driver that has set one.
const FILTERED: u32 = 4;

/// The settings of a driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DriverState {
    pub(super) mac: [u8; 6],
    /// A subset of [`feature::GUEST_OFFLOADS`].
    pub(super) offloads: u64,
    /// Queue pairs in use.
    pub(super) active: u16,
    /// Set by the device's owner; the driver was notified.
    pub(super) link: LinkState,
    pub(super) rx_mode: RxMode,
}

impl DriverState {
    /// Serializes it for a device with this number of pairs.
    pub(super) fn save(&self, pairs: u16) -> SavedDevice {
        let mut bytes = [&self.mac[..], &self.offloads.to_le_bytes()].concat();
        if pairs > 1 {
            bytes.extend(self.active.to_le_bytes());
        }
        let filtered = self.rx_mode != RxMode::default();
        if filtered {
            self.rx_mode.save(&mut bytes);
        }
        SavedDevice {
            version: version(pairs, self.link, filtered),
            bytes,
        }
    }

    /// Parses the state of a device with as many pairs; it is not trusted.
    pub(super) fn restore(saved: &SavedDevice, pairs: u16) -> Result<Self, RestoreError> {
        let (unfiltered, filtered) = match saved.version.checked_sub(FILTERED) {
            Some(version @ 1..) => (version, true),
            _ => (saved.version, false),
        };
        let link = match unfiltered {
            ONE_PAIR_DOWN | SEVERAL_PAIRS_DOWN => LinkState::Down,
            _ => LinkState::Up,
        };
        let bytes = saved.of_version(version(pairs, link, filtered))?;
        let invalid = |what| RestoreError::Invalid { what };
        let wrong_length = invalid("a network card's state has another length");
        let Some((mac, rest)) = bytes.split_first_chunk() else {
            return Err(wrong_length);
        };
        let Some((offloads, rest)) = rest.split_first_chunk() else {
            return Err(wrong_length);
        };
        let offloads = u64::from_le_bytes(*offloads);
        let (active, rest) = match (rest, pairs) {
            (rest, ..=1) => (1, rest),
            ([low, high, rest @ ..], 2..) => (u16::from_le_bytes([*low, *high]), rest),
            _ => return Err(wrong_length),
        };
        let rx_mode = match (rest, filtered) {
            ([], false) => RxMode::default(),
            (rest, true) => {
                let mode = RxMode::restore(rest);
                mode.ok_or_else(|| invalid("a network card's receive filter is damaged"))?
            }
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
            rx_mode,
        })
    }
}

fn version(pairs: u16, link: LinkState, filtered: bool) -> u32 {
    let unfiltered: u32 = match (pairs, link) {
        (..=1, LinkState::Up) => ONE_PAIR,
        (_, LinkState::Up) => SEVERAL_PAIRS,
        (..=1, LinkState::Down) => ONE_PAIR_DOWN,
        (_, LinkState::Down) => SEVERAL_PAIRS_DOWN,
    };
    unfiltered.saturating_add(if filtered { FILTERED } else { 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> DriverState {
        DriverState {
            mac: [2, 9, 9, 9, 9, 9],
            offloads: feature::GUEST_CSUM,
            active: 1,
            link: LinkState::Up,
            rx_mode: RxMode::default(),
        }
    }

    fn filtered() -> RxMode {
        RxMode {
            promiscuous: false,
            ..RxMode::default()
        }
    }

    #[test]
    fn a_card_of_one_pair_writes_what_it_always_did() {
        let saved = state().save(1);
        assert_eq!((saved.version, saved.bytes.len()), (1, 14));
        assert_eq!(DriverState::restore(&saved, 1).unwrap(), state());
        assert!(DriverState::restore(&saved, 2).is_err());
    }

    #[test]
    fn a_link_that_is_down_is_down_again() {
        for pairs in [1, 4] {
            let down = DriverState {
                link: LinkState::Down,
                ..state()
            };
            assert_eq!(
                DriverState::restore(&down.save(pairs), pairs).unwrap(),
                down
            );
            assert!(DriverState::restore(&down.save(pairs), 5 - pairs).is_err());
        }
    }

    #[test]
    fn a_filter_that_was_set_is_set_again() {
        for (pairs, link, version) in [
            (1, LinkState::Up, 5),
            (4, LinkState::Up, 6),
            (1, LinkState::Down, 7),
            (4, LinkState::Down, 8),
        ] {
            let state = DriverState {
                link,
                rx_mode: filtered(),
                ..state()
            };
            let saved = state.save(pairs);
            assert_eq!(saved.version, version);
            assert_eq!(DriverState::restore(&saved, pairs).unwrap(), state);
            assert!(DriverState::restore(&saved, 5 - pairs).is_err());
            for len in 0..saved.bytes.len() {
                let mut short = saved.clone();
                short.bytes.truncate(len);
                assert!(DriverState::restore(&short, pairs).is_err(), "{len}");
            }
            for version in [version - 4, version + 4] {
                let other = SavedDevice {
                    version,
                    ..saved.clone()
                };
                assert!(DriverState::restore(&other, pairs).is_err(), "{version}");
            }
        }
    }

    #[test]
    fn nobody_restores_pairs_that_do_not_exist() {
        for active in [0, 1, 3, 4, 5, u16::MAX] {
            let state = DriverState { active, ..state() };
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
