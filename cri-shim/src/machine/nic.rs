//! Network cards.

use std::os::fd::OwnedFd;

use podvisor_vmm::{MacAddress, NetDevice, NetDeviceError};
use serde::{Deserialize, Serialize};

/// The kind of a network card's backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NicKind {
    /// A tap, opened with `IFF_VNET_HDR`.
    #[default]
    Tap,
    /// A connected stream socket that carries each frame after its length, as `passt` does.
    Stream,
}

/// A network card.
#[derive(Debug)]
pub struct Nic {
    /// The kind of its backend.
    pub kind: NicKind,
    /// The backend's open descriptor.
    pub fd: OwnedFd,
    /// The guest's hardware address.
    pub mac: [u8; 6],
    /// Largest packet in bytes.
    pub mtu: u16,
}

impl Nic {
    /// Creates the device.
    pub(super) fn device(self) -> Result<NetDevice, NetDeviceError> {
        let device = match self.kind {
            NicKind::Tap => NetDevice::tap(self.fd),
            NicKind::Stream => NetDevice::stream(self.fd),
        };
        Ok(device?.mac(MacAddress(self.mac)).mtu(self.mtu))
    }
}
