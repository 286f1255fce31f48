//! What a frame's header can leave to the other side (virtio 1.3 §5.1.6).

/// Work that one side of the header leaves to the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offloads {
    /// Checksums of TCP and UDP may be partial.
    pub checksum: bool,
    /// TCP over IPv4 may be unsegmented, up to 64 KiB.
    pub tso4: bool,
    /// The same for TCP over IPv6.
    pub tso6: bool,
    /// Such frames may have the CWR bit.
    pub ecn: bool,
    /// UDP may be unsegmented: datagrams of one length, the last one shorter, under one header.
    pub uso: bool,
}

impl Offloads {
    /// All work is left to the other side.
    pub const ALL: Self = Self {
        checksum: true,
        tso4: true,
        tso6: true,
        ecn: true,
        uso: true,
    };

    /// The intersection of both.
    pub(super) fn and(self, other: Self) -> Self {
        Self {
            checksum: self.checksum && other.checksum,
            tso4: self.tso4 && other.tso4,
            tso6: self.tso6 && other.tso6,
            ecn: self.ecn && other.ecn,
            uso: self.uso && other.uso,
        }
    }

    /// Each side does its own work.
    pub const NONE: Self = Self {
        checksum: false,
        tso4: false,
        tso6: false,
        ecn: false,
        uso: false,
    };
}
