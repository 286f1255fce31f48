//! The state of the device in a snapshot.

use super::config::LinkState;
use super::feature;
use super::filter::RxMode;
use crate::virtio::{RestoreError, SavedDevice};

/// The layout: MAC address (6 bytes), offloads (8), queue pairs in use (2), the bits below (1), and
/// the receive filter to the end. A field that is added later goes into a new version, beside which
/// this one is still read. Those up to 8 had no bits: each number stood for one set of them.
const VERSION: u32 = 9;

/// The link is down.
const LINK_DOWN: u8 = 1 << 0;
/// There is a receive filter; without one, the driver gets all frames.
const FILTERED: u8 = 1 << 1;

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
    pub(super) fn save(&self) -> SavedDevice {
        let mut bytes = self.mac.to_vec();
        bytes.extend(self.offloads.to_le_bytes());
        bytes.extend(self.active.to_le_bytes());
        let down = match self.link {
            LinkState::Down => LINK_DOWN,
            LinkState::Up => 0,
        };
        if self.rx_mode == RxMode::default() {
            bytes.push(down);
        } else {
            bytes.push(down | FILTERED);
            self.rx_mode.save(&mut bytes);
        }
        SavedDevice {
            version: VERSION,
            bytes,
        }
    }

    /// Parses the state of a device with this number of queue pairs; it is not trusted.
    pub(super) fn restore(saved: &SavedDevice, pairs: u16) -> Result<Self, RestoreError> {
        let invalid = |what| RestoreError::Invalid { what };
        let fields = Fields::split(saved.of_version(VERSION)?);
        let Fields {
            mac,
            offloads,
            active,
            bits,
            filter,
        } = fields.ok_or_else(|| invalid("a network card's state has another length"))?;
        let rx_mode = match (bits & FILTERED != 0, filter) {
            (false, []) => Some(RxMode::default()),
            (false, _) => None,
            (true, filter) => RxMode::restore(filter),
        };
        let rx_mode =
            rx_mode.ok_or_else(|| invalid("a network card's receive filter is damaged"))?;
        if bits & !(LINK_DOWN | FILTERED) != 0 {
            return Err(invalid("settings of a network card that do not exist"));
        }
        if offloads & !feature::GUEST_OFFLOADS != 0 {
            return Err(invalid("offloads of a network card that do not exist"));
        }
        if !(1..=pairs).contains(&active) {
            return Err(invalid(
                "a number of queue pairs that the card does not have",
            ));
        }
        Ok(Self {
            mac,
            offloads,
            active,
            link: match bits & LINK_DOWN {
                0 => LinkState::Up,
                _ => LinkState::Down,
            },
            rx_mode,
        })
    }
}

/// The fields as they are stored; what follows is the filter.
struct Fields<'a> {
    mac: [u8; 6],
    offloads: u64,
    active: u16,
    bits: u8,
    filter: &'a [u8],
}

impl<'a> Fields<'a> {
    fn split(bytes: &'a [u8]) -> Option<Self> {
        let (mac, rest) = bytes.split_first_chunk()?;
        let (offloads, rest) = rest.split_first_chunk()?;
        let (active, rest) = rest.split_first_chunk()?;
        let (bits, filter) = rest.split_first()?;
        Some(Self {
            mac: *mac,
            offloads: u64::from_le_bytes(*offloads),
            active: u16::from_le_bytes(*active),
            bits: *bits,
            filter,
        })
    }
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

    fn filtered() -> DriverState {
        DriverState {
            link: LinkState::Down,
            rx_mode: RxMode {
                promiscuous: false,
                ..RxMode::default()
            },
            ..state()
        }
    }

    #[test]
    fn each_setting_is_the_same_again() {
        let (link, rx_mode) = (filtered().link, filtered().rx_mode);
        let down = DriverState { link, ..state() };
        let filter = DriverState { rx_mode, ..state() };
        for state in [state(), down, filter, filtered()] {
            let saved = state.save();
            assert_eq!(DriverState::restore(&saved, 1).unwrap(), state);
            assert_eq!(DriverState::restore(&saved, 4).unwrap(), state);
        }
    }

    #[test]
    fn the_layout_is_what_it_was_when_its_version_was_given() {
        let saved = DriverState {
            active: 3,
            ..filtered()
        };
        let bytes = [2, 9, 9, 9, 9, 9, 2, 0, 0, 0, 0, 0, 0, 0, 3, 0, 3, 0, 0, 0];
        let expected = SavedDevice {
            version: 9,
            bytes: bytes.to_vec(),
        };
        assert_eq!(saved.save(), expected);
    }

    #[test]
    fn a_state_that_is_cut_or_longer_or_of_another_version_is_refused() {
        for state in [state(), filtered()] {
            let saved = state.save();
            let other = |version, bytes: &[u8]| SavedDevice {
                version,
                bytes: bytes.to_vec(),
            };
            for len in 0..saved.bytes.len() {
                let cut = other(VERSION, &saved.bytes[..len]);
                assert!(DriverState::restore(&cut, 1).is_err(), "{len}");
            }
            let longer = other(VERSION, &[&saved.bytes[..], &[0]].concat());
            assert!(DriverState::restore(&longer, 1).is_err());
            for version in [0, 1, 8, 10] {
                let other = other(version, &saved.bytes);
                assert!(DriverState::restore(&other, 1).is_err(), "{version}");
            }
        }
    }

    #[test]
    fn settings_that_do_not_exist_are_refused() {
        for (at, bit) in [(6, 1), (13, 0x80), (16, 4), (16, 0x80)] {
            let mut saved = state().save();
            saved.bytes[at] |= bit;
            assert!(DriverState::restore(&saved, 1).is_err(), "byte {at}");
        }
    }

    #[test]
    fn nobody_restores_pairs_that_do_not_exist() {
        for active in [0, 1, 3, 4, 5, u16::MAX] {
            let state = DriverState { active, ..state() };
            let restored = DriverState::restore(&state.save(), 4);
            match (1..=4).contains(&active) {
                true => assert_eq!(restored.unwrap(), state),
                false => assert!(restored.is_err(), "{active}"),
            }
        }
    }
}
