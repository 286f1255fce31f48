//! The header of every packet (§5.10.6).

use super::HOST_CID;

/// Bytes of a header.
pub(super) const HEADER_LEN: usize = 44;

/// `VIRTIO_VSOCK_TYPE_STREAM`.
pub(super) const TYPE_STREAM: u16 = 1;

/// Flag of [`Op::Shutdown`]: the sender will not receive any more.
pub(super) const SHUTDOWN_RECEIVE: u32 = 1;
/// Flag of [`Op::Shutdown`]: the sender will not send any more.
pub(super) const SHUTDOWN_SEND: u32 = 2;
/// Both.
pub(super) const SHUTDOWN_BOTH: u32 = SHUTDOWN_RECEIVE | SHUTDOWN_SEND;

/// The operation of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum Op {
    Request = 1,
    Response = 2,
    Reset = 3,
    Shutdown = 4,
    Data = 5,
    CreditUpdate = 6,
    CreditRequest = 7,
}

impl Op {
    /// Returns the operation with this number; `None` if it is unknown.
    pub(super) fn from_raw(raw: u16) -> Option<Self> {
        Some(match raw {
            1 => Self::Request,
            2 => Self::Response,
            3 => Self::Reset,
            4 => Self::Shutdown,
            5 => Self::Data,
            6 => Self::CreditUpdate,
            7 => Self::CreditRequest,
            _ => return None,
        })
    }
}

/// The two ends of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Ports {
    pub(super) guest: u32,
    pub(super) host: u32,
}

/// `struct virtio_vsock_hdr`, unchecked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) src_cid: u64,
    pub(super) dst_cid: u64,
    pub(super) src_port: u32,
    pub(super) dst_port: u32,
    /// Bytes of payload.
    pub(super) len: u32,
    pub(super) kind: u16,
    pub(super) op: u16,
    pub(super) flags: u32,
    pub(super) buf_alloc: u32,
    pub(super) fwd_cnt: u32,
}

impl Header {
    /// Creates the header of a packet to the guest, on a stream.
    pub(super) fn to_guest(guest_cid: u64, ports: Ports, op: Op) -> Self {
        Self {
            src_cid: HOST_CID,
            dst_cid: guest_cid,
            src_port: ports.host,
            dst_port: ports.guest,
            kind: TYPE_STREAM,
            op: op as u16,
            ..Self::default()
        }
    }

    /// Creates the reset in response to a packet that belongs to no connection.
    pub(super) fn reset_for(packet: &Self) -> Self {
        Self {
            src_cid: packet.dst_cid,
            dst_cid: packet.src_cid,
            src_port: packet.dst_port,
            dst_port: packet.src_port,
            kind: packet.kind,
            op: Op::Reset as u16,
            ..Self::default()
        }
    }

    /// Returns the ports of a packet that the guest sent.
    pub(super) fn ports(&self) -> Ports {
        Ports {
            guest: self.src_port,
            host: self.dst_port,
        }
    }

    pub(super) fn from_bytes(bytes: &[u8; HEADER_LEN]) -> Self {
        let mut rest = bytes.as_slice();
        Self {
            src_cid: u64::from_le_bytes(take(&mut rest)),
            dst_cid: u64::from_le_bytes(take(&mut rest)),
            src_port: u32::from_le_bytes(take(&mut rest)),
            dst_port: u32::from_le_bytes(take(&mut rest)),
            len: u32::from_le_bytes(take(&mut rest)),
            kind: u16::from_le_bytes(take(&mut rest)),
            op: u16::from_le_bytes(take(&mut rest)),
            flags: u32::from_le_bytes(take(&mut rest)),
            buf_alloc: u32::from_le_bytes(take(&mut rest)),
            fwd_cnt: u32::from_le_bytes(take(&mut rest)),
        }
    }

    pub(super) fn to_bytes(self) -> [u8; HEADER_LEN] {
        let fields: [&[u8]; 10] = [
            &self.src_cid.to_le_bytes(),
            &self.dst_cid.to_le_bytes(),
            &self.src_port.to_le_bytes(),
            &self.dst_port.to_le_bytes(),
            &self.len.to_le_bytes(),
            &self.kind.to_le_bytes(),
            &self.op.to_le_bytes(),
            &self.flags.to_le_bytes(),
            &self.buf_alloc.to_le_bytes(),
            &self.fwd_cnt.to_le_bytes(),
        ];
        let mut bytes = [0; HEADER_LEN];
        for (to, from) in bytes.iter_mut().zip(fields.into_iter().flatten()) {
            *to = *from;
        }
        bytes
    }
}

/// Takes the first `N` bytes off `rest`; the caller has checked that there are enough.
fn take<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
    match rest.split_first_chunk() {
        Some((first, later)) => {
            *rest = later;
            *first
        }
        None => [0; N],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn fields_lie_where_the_specification_puts_them() {
        let mut raw = [0; HEADER_LEN];
        for (n, byte) in raw.iter_mut().enumerate() {
            *byte = n as u8;
        }
        let header = Header::from_bytes(&raw);
        assert_eq!(header.src_cid, 0x0706_0504_0302_0100);
        assert_eq!(header.dst_cid, 0x0f0e_0d0c_0b0a_0908);
        assert_eq!(header.src_port, 0x1312_1110);
        assert_eq!(header.dst_port, 0x1716_1514);
        assert_eq!(header.len, 0x1b1a_1918);
        assert_eq!((header.kind, header.op), (0x1d1c, 0x1f1e));
        assert_eq!(header.flags, 0x2322_2120);
        assert_eq!(header.buf_alloc, 0x2726_2524);
        assert_eq!(header.fwd_cnt, 0x2b2a_2928);
    }

    proptest! {
        #[test]
        fn any_header_survives_the_wire(raw in proptest::collection::vec(any::<u8>(), HEADER_LEN)) {
            let raw: [u8; HEADER_LEN] = raw.try_into().unwrap();
            prop_assert_eq!(Header::from_bytes(&raw).to_bytes(), raw);
        }

        #[test]
        fn operations_are_their_numbers(raw: u16) {
            match Op::from_raw(raw) {
                Some(op) => prop_assert_eq!(op as u16, raw),
                None => prop_assert!(raw == 0 || raw > 7),
            }
        }
    }
}
