//! Network cards of a guest that runs before its network is known: those of a template, and those
//! of a machine that starts while its network is set up. The agent sets their real addresses and
//! MTUs when it learns them.

use std::os::fd::OwnedFd;

use super::types::NicConfig;
use crate::machine::NicKind;

/// The MTU of a network in user space: so large that few calls carry much data.
pub const STREAM_MTU: u16 = 65_520;

/// The largest possible MTU; any interface may have a smaller one. A driver does not accept an MTU
/// later that is larger than its card's initial one.
const TAP_MTU: u16 = u16::MAX;

/// Most cards of a machine.
pub(super) const MAX_NICS: u8 = 16;

/// The MTU of such a card.
pub(super) const fn mtu(kind: NicKind) -> u16 {
    match kind {
        NicKind::Tap => TAP_MTU,
        NicKind::Stream => STREAM_MTU,
    }
}

/// The cards' addresses: locally administered ones, which a sandbox's cards do not have by chance.
pub(super) fn macs() -> impl Iterator<Item = [u8; 6]> {
    let mac = |card| [2, b'p', b'o', b'd', b'v', card];
    (0..MAX_NICS).map(mac)
}

/// Creates cards on taps whose interfaces are not known yet, at most as many as a machine may have.
/// Their real addresses and MTUs come with the network, in the same order.
pub fn provisional_nics(taps: Vec<OwnedFd>) -> Vec<NicConfig> {
    let nic = |(fd, mac)| NicConfig {
        kind: NicKind::Tap,
        fd,
        mac,
        mtu: TAP_MTU,
    };
    taps.into_iter().zip(macs()).map(nic).collect()
}
