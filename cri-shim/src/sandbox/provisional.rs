//! Network cards of a guest that runs before its network is known: a template's, and those of a
//! machine that starts while its network is made. The agent gives them their real addresses and
//! sizes when it is told.

use std::os::fd::OwnedFd;

use super::types::NicConfig;
use crate::machine::NicKind;

/// The largest packet of a network in user space: so large that few calls carry much.
pub const STREAM_MTU: u16 = 65_520;

/// The largest packet of all, which any interface's may be less than: a driver takes no larger
/// one later than its card has at first.
const TAP_MTU: u16 = u16::MAX;

/// Cards that a machine may have at most.
pub(super) const MAX_NICS: u8 = 16;

/// Largest packet of such a card.
pub(super) const fn mtu(kind: NicKind) -> u16 {
    match kind {
        NicKind::Tap => TAP_MTU,
        NicKind::Stream => STREAM_MTU,
    }
}

/// The cards' addresses, which no card of a sandbox's has by chance: locally administered ones.
pub(super) fn macs() -> impl Iterator<Item = [u8; 6]> {
    let mac = |card| [2, b'p', b'o', b'd', b'v', card];
    (0..MAX_NICS).map(mac)
}

/// Cards on taps whose interfaces are not known yet, at most as many as a machine may have. Their
/// real addresses and sizes come with the network, in the same order.
pub fn provisional_nics(taps: Vec<OwnedFd>) -> Vec<NicConfig> {
    let nic = |(fd, mac)| NicConfig {
        kind: NicKind::Tap,
        fd,
        mac,
        mtu: TAP_MTU,
    };
    taps.into_iter().zip(macs()).map(nic).collect()
}
