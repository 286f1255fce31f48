//! Configuration space: `struct virtio_net_config` (§5.1.4), with the fields of the features that
//! are offered.

use super::mac::MacAddress;

/// The smallest MTU that a device may announce (§5.1.4.1).
pub const MIN_MTU: u16 = 68;

/// The offset of the status.
pub(super) const STATUS_AT: usize = 6;

/// `VIRTIO_NET_S_LINK_UP` (§5.1.4).
const STATUS_LINK_UP: u8 = 1;

/// The state of the link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LinkState {
    /// Frames are passed on.
    #[default]
    Up,
    /// Frames from the driver are dropped; those for it stay in the backend.
    Down,
}

/// Returns address, status, number of queue pairs, and MTU.
pub(super) fn config(mac: MacAddress, link: LinkState, pairs: u16, mtu: Option<u16>) -> Vec<u8> {
    let mtu = mtu.unwrap_or(0).to_le_bytes();
    [&mac.0[..], &status(link), &pairs.to_le_bytes(), &mtu].concat()
}

pub(super) fn status(link: LinkState) -> [u8; 2] {
    match link {
        LinkState::Up => [STATUS_LINK_UP, 0],
        LinkState::Down => [0, 0],
    }
}
