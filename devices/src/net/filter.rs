//! Receive filters: the settings of a driver (§5.1.6.5.1, §5.1.6.5.2), and which frames follow
//! from them. The backend applies them, so that they cost the device nothing per frame.

use super::mac::MacAddress;

/// The maximum number of unicast addresses of a driver, besides its own: the kernel compares eight
/// with those of frames.
pub(super) const MAX_UNICAST: usize = 7;

/// The maximum number of multicast addresses: the kernel hashes them to 64 bits, of which more
/// would leave few at 0.
pub(super) const MAX_MULTICAST: usize = 64;

const BROADCAST: MacAddress = MacAddress([0xff; 6]);

/// The number that stands for too many addresses in a saved table.
const TOO_MANY: u8 = u8::MAX;

/// Bits of a saved filter.
const PROMISCUOUS: u8 = 1 << 0;
const ALL_MULTICAST: u8 = 1 << 1;

/// The frames that a driver wants, by their destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReceiveFilter {
    /// All frames.
    All,
    /// Frames to some addresses.
    Only {
        /// The driver's own address and its unicast addresses: at least one, at most eight.
        unicast: Vec<MacAddress>,
        /// Multicast and broadcast.
        multicast: Multicast,
    },
}

/// The multicast and broadcast frames that a driver wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Multicast {
    /// All of them.
    All,
    /// Frames to these addresses: that of broadcast, and at most 64 others.
    Only(Vec<MacAddress>),
}

/// Addresses that a driver has set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Table {
    Known(Vec<MacAddress>),
    /// They were not kept.
    TooMany,
}

impl Table {
    /// Creates a table of `bytes`, six for each address, of which there are at most `max`.
    pub(super) fn new(bytes: &[u8], max: usize) -> Self {
        let (addresses, _) = bytes.as_chunks::<6>();
        match addresses.len() > max {
            true => Self::TooMany,
            false => Self::Known(addresses.iter().copied().map(MacAddress).collect()),
        }
    }

    fn save(&self, bytes: &mut Vec<u8>) {
        match self {
            // At most MAX_MULTICAST.
            Self::Known(list) => {
                bytes.push(u8::try_from(list.len()).unwrap_or(TOO_MANY));
                bytes.extend(list.iter().flat_map(|mac| mac.0));
            }
            Self::TooMany => bytes.push(TOO_MANY),
        }
    }

    /// Takes a table off the front of `bytes`; `None` if they are too few.
    fn restore(bytes: &mut &[u8], max: usize) -> Option<Self> {
        let (count, rest) = bytes.split_first()?;
        let len = match *count {
            TOO_MANY => {
                *bytes = rest;
                return Some(Self::TooMany);
            }
            count => usize::from(count).saturating_mul(6),
        };
        let (table, rest) = rest.split_at_checked(len)?;
        *bytes = rest;
        Some(Self::new(table, max))
    }
}

/// The settings of a driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RxMode {
    pub(super) promiscuous: bool,
    pub(super) all_multicast: bool,
    pub(super) unicast: Table,
    pub(super) multicast: Table,
}

impl Default for RxMode {
    /// All frames, for a driver that sets nothing.
    fn default() -> Self {
        Self {
            promiscuous: true,
            all_multicast: false,
            unicast: Table::Known(Vec::new()),
            multicast: Table::Known(Vec::new()),
        }
    }
}

impl RxMode {
    /// The frames that a driver with this address wants. Tables that were too large count as all
    /// addresses.
    pub(super) fn filter(&self, own: MacAddress) -> ReceiveFilter {
        let (false, Table::Known(unicast)) = (self.promiscuous, &self.unicast) else {
            return ReceiveFilter::All;
        };
        let multicast = match &self.multicast {
            Table::Known(list) if !self.all_multicast => {
                Multicast::Only(std::iter::once(&BROADCAST).chain(list).copied().collect())
            }
            _ => Multicast::All,
        };
        ReceiveFilter::Only {
            unicast: std::iter::once(&own).chain(unicast).copied().collect(),
            multicast,
        }
    }

    pub(super) fn save(&self, bytes: &mut Vec<u8>) {
        let bit = |is_set, bit| if is_set { bit } else { 0 };
        bytes.push(bit(self.promiscuous, PROMISCUOUS) | bit(self.all_multicast, ALL_MULTICAST));
        self.unicast.save(bytes);
        self.multicast.save(bytes);
    }

    /// Parses all of `bytes`, which are not trusted; `None` if they are invalid.
    pub(super) fn restore(mut bytes: &[u8]) -> Option<Self> {
        let (bits, rest) = bytes.split_first()?;
        bytes = rest;
        let mode = Self {
            promiscuous: bits & PROMISCUOUS != 0,
            all_multicast: bits & ALL_MULTICAST != 0,
            unicast: Table::restore(&mut bytes, MAX_UNICAST)?,
            multicast: Table::restore(&mut bytes, MAX_MULTICAST)?,
        };
        let known = bits & !(PROMISCUOUS | ALL_MULTICAST) == 0;
        (known && bytes.is_empty()).then_some(mode)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: MacAddress = MacAddress([2, 0, 0, 0, 0, 1]);

    /// Tables of this many addresses.
    fn mode(unicast: u8, multicast: u8) -> RxMode {
        let table = |first, count, max| {
            let addresses = (0..count).flat_map(|n| [first, 0, 0, 0, 0, n]);
            Table::new(&addresses.collect::<Vec<_>>(), max)
        };
        RxMode {
            promiscuous: false,
            all_multicast: false,
            unicast: table(2, unicast, MAX_UNICAST),
            multicast: table(3, multicast, MAX_MULTICAST),
        }
    }

    #[test]
    fn a_driver_that_sets_nothing_gets_all_frames() {
        assert_eq!(RxMode::default().filter(OWN), ReceiveFilter::All);
    }

    #[test]
    fn the_own_address_and_broadcast_pass_besides_the_tables() {
        let ReceiveFilter::Only { unicast, multicast } = mode(7, 64).filter(OWN) else {
            panic!("all frames");
        };
        assert_eq!((unicast.len(), unicast[0], unicast[7].0[5]), (8, OWN, 6));
        let Multicast::Only(multicast) = multicast else {
            panic!("all multicast");
        };
        assert_eq!((multicast.len(), multicast[0]), (65, BROADCAST));
    }

    #[test]
    fn more_addresses_than_are_kept_are_all_of_their_kind() {
        assert_eq!(mode(8, 1).filter(OWN), ReceiveFilter::All);
        let only_own = ReceiveFilter::Only {
            unicast: vec![OWN],
            multicast: Multicast::All,
        };
        assert_eq!(mode(0, 65).filter(OWN), only_own);
        let all_multicast = RxMode {
            all_multicast: true,
            ..mode(0, 3)
        };
        assert_eq!(all_multicast.filter(OWN), only_own);
    }

    #[test]
    fn a_saved_mode_is_the_same_again_and_a_damaged_one_is_refused() {
        for (unicast, multicast) in [(0, 0), (7, 64), (8, 65), (1, 65), (8, 1)] {
            for bits in 0..4 {
                let mode = RxMode {
                    promiscuous: bits & 1 != 0,
                    all_multicast: bits & 2 != 0,
                    ..mode(unicast, multicast)
                };
                let mut bytes = Vec::new();
                mode.save(&mut bytes);
                assert_eq!(RxMode::restore(&bytes), Some(mode));
                for len in 0..bytes.len() {
                    assert_eq!(RxMode::restore(&bytes[..len]), None, "{len}");
                }
                bytes[0] |= 4;
                assert_eq!(RxMode::restore(&bytes), None);
                bytes[0] &= 3;
                bytes.push(0);
                assert_eq!(RxMode::restore(&bytes), None);
            }
        }
        // Tables that another version could keep.
        let bytes = [&[0, 8][..], &[2; 48], &[65], &[3; 390]].concat();
        assert_eq!(RxMode::restore(&bytes), Some(mode(8, 65)));
    }
}
