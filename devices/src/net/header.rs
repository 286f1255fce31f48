//! `struct virtio_net_hdr` (§5.1.6): the header before each frame, and its valid values.

use super::offloads::Offloads;

/// Bytes of the header: with `VERSION_1` there is always a number of buffers in it.
pub const HEADER_LEN: usize = 12;

/// The longest frame in bytes, without its header (§5.1.6.3.1): 65535 bytes after an IPv6 header of
/// 40 and an Ethernet header of 14, and room for a tag of 4 (802.1Q).
pub const MAX_FRAME: usize = 65_535 + 40 + 14 + 4;

/// The bytes of an Ethernet frame beyond its MTU: its header, and a tag.
pub(super) const BEYOND_MTU: usize = 14 + 4;

/// An Ethernet header; a shorter frame is invalid.
pub(super) const MIN_FRAME: usize = 14;

/// The smallest segment size of TCP: with smaller ones a frame would keep the host's kernel busy
/// with thousands. Linux sends none below 8 bytes of payload (`tcp_min_snd_mss`).
const MIN_SEGMENT: u16 = 8;

/// The most datagrams in one frame, as many as Linux makes of one call (`UDP_MAX_SEGMENTS`):
/// kernels before 6.7 do not count those that come from a tap.
const MAX_DATAGRAMS: usize = 128;

/// Bytes of a UDP header.
const UDP_HEADER_LEN: usize = 8;

const F_NEEDS_CSUM: u8 = 1;
const F_DATA_VALID: u8 = 2;

const GSO_NONE: u8 = 0;
const GSO_TCPV4: u8 = 1;
const GSO_TCPV6: u8 = 4;
const GSO_UDP_L4: u8 = 5;
const GSO_ECN: u8 = 0x80;

/// The header, decoded; all fields are little-endian on the wire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) flags: u8,
    pub(super) gso_type: u8,
    pub(super) hdr_len: u16,
    pub(super) gso_size: u16,
    pub(super) csum_start: u16,
    pub(super) csum_offset: u16,
    pub(super) num_buffers: u16,
}

/// Why a frame is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Malformed {
    /// Shorter than an Ethernet header, or longer than [`MAX_FRAME`].
    Length,
    /// It uses an offload that was not negotiated, or does not exist.
    Offload,
    /// Offsets or sizes that do not fit the frame.
    Bounds,
}

impl Header {
    pub(super) fn decode(raw: [u8; HEADER_LEN]) -> Self {
        let [flags, gso_type, h0, h1, g0, g1, s0, s1, o0, o1, n0, n1] = raw;
        Self {
            flags,
            gso_type,
            hdr_len: u16::from_le_bytes([h0, h1]),
            gso_size: u16::from_le_bytes([g0, g1]),
            csum_start: u16::from_le_bytes([s0, s1]),
            csum_offset: u16::from_le_bytes([o0, o1]),
            num_buffers: u16::from_le_bytes([n0, n1]),
        }
    }

    /// Whether the frame must be segmented before it is sent on a wire.
    pub(super) fn is_segmented(self) -> bool {
        self.gso_type != GSO_NONE
    }

    pub(super) fn encode(self) -> [u8; HEADER_LEN] {
        let [h0, h1] = self.hdr_len.to_le_bytes();
        let [g0, g1] = self.gso_size.to_le_bytes();
        let [s0, s1] = self.csum_start.to_le_bytes();
        let [o0, o1] = self.csum_offset.to_le_bytes();
        let [n0, n1] = self.num_buffers.to_le_bytes();
        let Self {
            flags, gso_type, ..
        } = self;
        [flags, gso_type, h0, h1, g0, g1, s0, s1, o0, o1, n0, n1]
    }

    /// Converts the driver's header of a frame of `len` bytes to that for a backend. Fails if it
    /// uses an offload that was not negotiated (§5.1.6.2), or does not fit the frame.
    pub(super) fn for_backend(self, len: usize, offered: Offloads) -> Result<Self, Malformed> {
        if !(MIN_FRAME..=MAX_FRAME).contains(&len) {
            return Err(Malformed::Length);
        }
        let mut clean = Self::default();
        if self.flags & F_NEEDS_CSUM != 0 {
            if !offered.checksum {
                return Err(Malformed::Offload);
            }
            let end = usize::from(self.csum_start)
                .saturating_add(usize::from(self.csum_offset))
                .saturating_add(2);
            if end > len {
                return Err(Malformed::Bounds);
            }
            clean.flags = F_NEEDS_CSUM;
            clean.csum_start = self.csum_start;
            clean.csum_offset = self.csum_offset;
        }
        if self.gso_type == GSO_NONE {
            return Ok(clean);
        }
        // A segment's checksum can only be computed after segmentation.
        if !self.is_permitted(offered) || clean.flags & F_NEEDS_CSUM == 0 {
            return Err(Malformed::Offload);
        }
        if !self.segments_are_few(len) {
            return Err(Malformed::Bounds);
        }
        clean.gso_type = self.gso_type;
        clean.gso_size = self.gso_size;
        // §5.1.6.2.2: it is only a hint. A tap refuses one that is too long.
        clean.hdr_len = self.hdr_len.min(u16::try_from(len).unwrap_or(u16::MAX));
        Ok(clean)
    }

    /// Whether the kind of segments was negotiated. The mark of ECN is one of TCP.
    fn is_permitted(self, offered: Offloads) -> bool {
        let ecn = self.gso_type & GSO_ECN != 0;
        match self.gso_type & !GSO_ECN {
            GSO_TCPV4 => offered.tso4 && (offered.ecn || !ecn),
            GSO_TCPV6 => offered.tso6 && (offered.ecn || !ecn),
            GSO_UDP_L4 => offered.uso && !ecn,
            _ => false,
        }
    }

    /// Whether a frame of `len` bytes has no more segments than a driver has reason to send.
    fn segments_are_few(self, len: usize) -> bool {
        if self.gso_type != GSO_UDP_L4 {
            return self.gso_size >= MIN_SEGMENT;
        }
        let headers = usize::from(self.csum_start).saturating_add(UDP_HEADER_LEN);
        let most = MAX_DATAGRAMS.saturating_mul(self.gso_size.into());
        self.gso_size > 0 && len.saturating_sub(headers) <= most
    }

    /// Whether the frame consists of several segments, and is not only marked with ECN.
    pub(super) fn has_segments(self) -> bool {
        self.gso_type & !GSO_ECN != GSO_NONE
    }

    /// Whether a driver that accepts these offloads may get a frame with this header (§5.1.6.4.1).
    pub(super) fn is_accepted(self, accepted: Offloads) -> bool {
        let segments = match self.gso_type & !GSO_ECN {
            GSO_NONE => true,
            GSO_TCPV4 => accepted.tso4,
            GSO_TCPV6 => accepted.tso6,
            GSO_UDP_L4 => accepted.uso,
            _ => false,
        };
        let ecn = accepted.ecn || self.gso_type & GSO_ECN == 0;
        let checksum = accepted.checksum || self.flags & F_NEEDS_CSUM == 0;
        segments && ecn && checksum
    }

    /// Returns a backend's header in the form for the driver, for a frame that is spread over
    /// `buffers` chains.
    pub(super) fn for_driver(self, accepted: Offloads, buffers: u16) -> Self {
        let mut header = Self {
            num_buffers: buffers,
            ..self
        };
        if !accepted.checksum {
            // §5.1.6.4.1: both bits need VIRTIO_NET_F_GUEST_CSUM.
            header.flags &= !(F_NEEDS_CSUM | F_DATA_VALID);
        }
        header
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ALL: Offloads = Offloads::ALL;

    fn tcp4() -> Header {
        Header {
            flags: F_NEEDS_CSUM,
            gso_type: GSO_TCPV4,
            hdr_len: 54,
            gso_size: 1448,
            csum_start: 34,
            csum_offset: 16,
            num_buffers: 0,
        }
    }

    /// Datagrams of 1,400 bytes over IPv4.
    fn udp() -> Header {
        Header {
            gso_type: GSO_UDP_L4,
            hdr_len: 42,
            gso_size: 1400,
            csum_offset: 6,
            ..tcp4()
        }
    }

    #[test]
    fn an_offload_that_was_negotiated_passes_as_it_is() {
        assert_eq!(tcp4().for_backend(20_000, ALL), Ok(tcp4()));
        assert_eq!(udp().for_backend(20_000, ALL), Ok(udp()));
        let ecn = Header {
            gso_type: GSO_TCPV6 | GSO_ECN,
            ..tcp4()
        };
        assert_eq!(ecn.for_backend(20_000, ALL), Ok(ecn));
        assert!(ecn.is_segmented() && !Header::default().is_segmented());
        // Each kind of segments without any other.
        for (gso_type, tso4, tso6) in [(GSO_TCPV4, true, false), (GSO_TCPV6, false, true)] {
            let offered = |ecn| Offloads {
                checksum: true,
                tso4,
                tso6,
                ecn,
                uso: false,
            };
            let header = Header { gso_type, ..tcp4() };
            assert_eq!(header.for_backend(20_000, offered(false)), Ok(header));
            let gso_type = gso_type | GSO_ECN;
            let marked = Header { gso_type, ..tcp4() };
            assert_eq!(marked.for_backend(20_000, offered(true)), Ok(marked));
        }
    }

    #[test]
    fn an_offload_that_was_not_negotiated_is_refused() {
        let plain = Offloads::default();
        let without = |change: fn(&mut Offloads)| {
            let mut offloads = ALL;
            change(&mut offloads);
            offloads
        };
        let ecn = Header {
            gso_type: GSO_TCPV4 | GSO_ECN,
            ..tcp4()
        };
        let ipv6 = Header {
            gso_type: GSO_TCPV6,
            ..tcp4()
        };
        for (header, offered) in [
            (tcp4(), plain),
            (tcp4(), without(|o| o.tso4 = false)),
            (tcp4(), without(|o| o.checksum = false)),
            (ipv6, without(|o| o.tso6 = false)),
            (ecn, without(|o| o.ecn = false)),
            (udp(), without(|o| o.uso = false)),
        ] {
            assert_eq!(
                header.for_backend(20_000, offered),
                Err(Malformed::Offload),
                "{header:?} {offered:?}"
            );
        }
        // UDP fragments (3), UDP with a mark of TCP, and kinds that do not exist.
        for gso_type in [2, 3, 0x85, 0x80, 0x7f] {
            let header = Header { gso_type, ..tcp4() };
            assert_eq!(header.for_backend(20_000, ALL), Err(Malformed::Offload));
        }
        for header in [tcp4(), udp()] {
            let without_checksum = Header { flags: 0, ..header };
            assert_eq!(
                without_checksum.for_backend(20_000, ALL),
                Err(Malformed::Offload)
            );
        }
    }

    #[test]
    fn offsets_and_sizes_beyond_the_frame_are_refused() {
        for header in [
            Header {
                csum_start: 18_000,
                csum_offset: 1_999,
                ..tcp4()
            },
            Header {
                csum_start: u16::MAX,
                csum_offset: u16::MAX,
                ..tcp4()
            },
            Header {
                gso_size: 0,
                ..tcp4()
            },
            Header {
                gso_size: MIN_SEGMENT - 1,
                ..tcp4()
            },
        ] {
            assert_eq!(
                header.for_backend(20_000, ALL),
                Err(Malformed::Bounds),
                "{header:?}"
            );
        }
    }

    #[test]
    fn a_frame_has_as_many_datagrams_as_linux_sends_in_one() {
        for (gso_size, len, few) in [
            (1, 42 + 128, true),
            (1, 42 + 129, false),
            (500, 42 + 64_000, true),
            (500, 42 + 64_001, false),
            (0, 42, false),
            (1, 42, true),
        ] {
            let header = Header { gso_size, ..udp() };
            let got = header.for_backend(len, ALL);
            assert_eq!(got.is_ok(), few, "{gso_size} of {len}: {got:?}");
            assert!(few || got == Err(Malformed::Bounds));
        }
    }

    #[test]
    fn headers_longer_than_the_frame_end_with_it() {
        for (len, hdr_len, passed) in [
            (20_000, 20_001, 20_000),
            (1514, u16::MAX, 1514),
            (MAX_FRAME, u16::MAX, u16::MAX),
            (1514, 0, 0),
        ] {
            let header = |hdr_len| Header { hdr_len, ..tcp4() };
            let got = header(hdr_len).for_backend(len, ALL);
            assert_eq!(got, Ok(header(passed)), "{hdr_len} of {len}");
        }
    }

    #[test]
    fn frames_too_short_or_too_long_are_refused() {
        for len in [0, MIN_FRAME - 1, MAX_FRAME + 1, usize::MAX] {
            assert_eq!(
                Header::default().for_backend(len, ALL),
                Err(Malformed::Length)
            );
        }
        for len in [MIN_FRAME, MAX_FRAME] {
            assert_eq!(
                Header::default().for_backend(len, ALL),
                Ok(Header::default())
            );
        }
    }

    #[test]
    fn fields_without_their_flag_and_unknown_flags_do_not_reach_the_backend() {
        let header = Header {
            flags: 0xfe,
            gso_type: GSO_NONE,
            ..tcp4()
        };
        assert_eq!(header.for_backend(100, ALL), Ok(Header::default()));
    }

    #[test]
    fn a_driver_that_does_not_check_checksums_is_not_told_of_them() {
        let header = Header {
            flags: F_DATA_VALID,
            ..Header::default()
        };
        assert_eq!(header.for_driver(Offloads::default(), 3).flags, 0);
        assert_eq!(header.for_driver(ALL, 3).flags, F_DATA_VALID);
        assert_eq!(header.for_driver(ALL, 3).num_buffers, 3);
    }

    #[test]
    fn a_driver_gets_what_it_accepts() {
        let header = |flags, gso_type| Header {
            flags,
            gso_type,
            ..Header::default()
        };
        let only = |checksum, tso4, tso6, ecn| Offloads {
            checksum,
            tso4,
            tso6,
            ecn,
            uso: false,
        };
        let udp = Offloads {
            uso: true,
            ..Offloads::NONE
        };
        assert!(header(F_DATA_VALID, 0).is_accepted(Offloads::NONE));
        assert!(!header(F_NEEDS_CSUM, 0).is_accepted(Offloads::NONE));
        for (gso_type, needed, others) in [
            (
                1,
                only(true, true, false, false),
                only(true, false, true, true),
            ),
            (
                4,
                only(true, false, true, false),
                only(true, true, false, true),
            ),
            (
                0x81,
                only(true, true, false, true),
                only(true, true, true, false),
            ),
            (
                0x80,
                only(true, false, false, true),
                only(true, true, true, false),
            ),
            (
                5,
                Offloads {
                    checksum: true,
                    ..udp
                },
                only(true, true, true, true),
            ),
        ] {
            let header = header(F_NEEDS_CSUM, gso_type);
            assert!(header.is_accepted(needed) && header.is_accepted(ALL));
            assert!(!header.is_accepted(others), "{gso_type:#x}");
        }
        for gso_type in [2, 3, 0x7f] {
            assert!(!header(F_NEEDS_CSUM, gso_type).is_accepted(ALL));
        }
    }

    proptest! {
        #[test]
        fn decoding_what_was_encoded_gives_the_same(raw: [u8; HEADER_LEN]) {
            prop_assert_eq!(Header::decode(raw).encode(), raw);
        }

        #[test]
        fn what_passes_fits_the_frame(raw: [u8; HEADER_LEN], len in 0usize..70_000) {
            if let Ok(header) = Header::decode(raw).for_backend(len, ALL) {
                prop_assert!(len <= MAX_FRAME);
                prop_assert!(usize::from(header.hdr_len) <= len);
                let gso_size = usize::from(header.gso_size);
                let fits = match header.gso_type {
                    GSO_NONE => true,
                    GSO_UDP_L4 => len <= usize::from(header.csum_start) + 8 + 128 * gso_size,
                    _ => header.gso_size >= MIN_SEGMENT,
                };
                prop_assert!(fits);
                prop_assert_eq!(header.num_buffers, 0);
            }
        }
    }
}
