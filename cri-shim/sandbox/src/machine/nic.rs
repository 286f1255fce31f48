//! Network cards.

use std::os::fd::OwnedFd;

use podvisor_network::guest::NicKind;
use podvisor_vmm::{LinkState, MacAddress, NetDevice, NetDeviceError};

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
    /// Whether it has a link.
    pub link: LinkState,
}

impl Nic {
    /// Creates the device.
    pub(super) fn device(self) -> Result<NetDevice, NetDeviceError> {
        let device = match self.kind {
            NicKind::Tap => NetDevice::tap(self.fd),
            NicKind::Stream => NetDevice::stream(self.fd),
        };
        let device = device?.mac(MacAddress(self.mac)).mtu(self.mtu);
        Ok(device.link(self.link))
    }
}
