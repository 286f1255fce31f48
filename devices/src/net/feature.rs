//! Feature bits of the network device (§5.1.3), and the offloads that they represent.

use super::offloads::Offloads;

pub(super) const CSUM: u64 = 1 << 0;
pub(super) const GUEST_CSUM: u64 = 1 << 1;
pub(super) const CTRL_GUEST_OFFLOADS: u64 = 1 << 2;
pub(super) const MTU: u64 = 1 << 3;
pub(super) const MAC: u64 = 1 << 5;
pub(super) const GUEST_TSO4: u64 = 1 << 7;
pub(super) const GUEST_TSO6: u64 = 1 << 8;
pub(super) const GUEST_ECN: u64 = 1 << 9;
pub(super) const HOST_TSO4: u64 = 1 << 11;
pub(super) const HOST_TSO6: u64 = 1 << 12;
pub(super) const HOST_ECN: u64 = 1 << 13;
pub(super) const MRG_RXBUF: u64 = 1 << 15;
pub(super) const STATUS: u64 = 1 << 16;
pub(super) const CTRL_VQ: u64 = 1 << 17;
pub(super) const CTRL_RX: u64 = 1 << 18;
pub(super) const MQ: u64 = 1 << 22;
pub(super) const CTRL_MAC_ADDR: u64 = 1 << 23;
pub(super) const GUEST_USO4: u64 = 1 << 54;
pub(super) const GUEST_USO6: u64 = 1 << 55;
pub(super) const HOST_USO: u64 = 1 << 56;

/// UDP's segments for both versions of IP: backends have both or none.
const GUEST_USO: u64 = GUEST_USO4 | GUEST_USO6;

/// The features that a driver may switch while it runs (§5.1.6.5.6).
pub(super) const GUEST_OFFLOADS: u64 = GUEST_CSUM | GUEST_TSO4 | GUEST_TSO6 | GUEST_ECN | GUEST_USO;

/// The features that do not depend on the backend.
const ALWAYS: u64 = MAC | MRG_RXBUF | STATUS | CTRL_VQ | CTRL_RX | CTRL_MAC_ADDR;

/// Returns the features that a device over a backend with these offloads offers.
pub(super) fn of_backend(offloads: Offloads) -> u64 {
    let when = |is_so, features| if is_so { features } else { 0 };
    let segments = offloads.tso4 || offloads.tso6;
    if !offloads.checksum {
        // The others need it (§5.1.3.1).
        return ALWAYS;
    }
    ALWAYS
        | CSUM
        | GUEST_CSUM
        | CTRL_GUEST_OFFLOADS
        | when(offloads.tso4, HOST_TSO4 | GUEST_TSO4)
        | when(offloads.tso6, HOST_TSO6 | GUEST_TSO6)
        | when(offloads.ecn && segments, HOST_ECN | GUEST_ECN)
        | when(offloads.uso, HOST_USO | GUEST_USO)
}

/// Returns the offloads that the driver accepts from the device.
pub(super) fn accepted(features: u64) -> Offloads {
    let has = |bit| features & bit != 0;
    let checksum = has(GUEST_CSUM);
    Offloads {
        checksum,
        tso4: checksum && has(GUEST_TSO4),
        tso6: checksum && has(GUEST_TSO6),
        ecn: checksum && has(GUEST_ECN),
        uso: checksum && features & GUEST_USO == GUEST_USO,
    }
}

/// Returns the offloads that the device accepts from the driver.
pub(super) fn offered(features: u64) -> Offloads {
    let has = |bit| features & bit != 0;
    let checksum = has(CSUM);
    Offloads {
        checksum,
        tso4: checksum && has(HOST_TSO4),
        tso6: checksum && has(HOST_TSO6),
        ecn: checksum && has(HOST_ECN),
        uso: checksum && has(HOST_USO),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_offers_what_its_backend_can_do() {
        let none = of_backend(Offloads::NONE);
        assert_eq!(none, ALWAYS);
        let ipv4 = Offloads {
            checksum: true,
            tso4: true,
            ..Offloads::NONE
        };
        let offers = of_backend(ipv4);
        assert_eq!(offered(offers), ipv4);
        assert_eq!(accepted(offers), ipv4);
        assert_eq!(offered(of_backend(Offloads::ALL)), Offloads::ALL);
        assert_eq!(
            offered(of_backend(Offloads {
                checksum: false,
                ..ipv4
            })),
            Offloads::NONE
        );
    }

    #[test]
    fn a_driver_gets_segments_of_udp_if_it_takes_both_versions_of_ip() {
        assert!(accepted(GUEST_CSUM | GUEST_USO).uso);
        for features in [
            GUEST_CSUM | GUEST_USO4,
            GUEST_CSUM | GUEST_USO6,
            GUEST_USO,
            GUEST_CSUM | HOST_USO,
        ] {
            assert!(!accepted(features).uso, "{features:#x}");
        }
    }

    #[test]
    fn features_have_the_numbers_of_the_specification() {
        let bits = |numbers: &[u32]| numbers.iter().map(|number| 1 << number).sum::<u64>();
        // MAC, MRG_RXBUF, STATUS, CTRL_VQ, CTRL_RX, CTRL_MAC_ADDR.
        let always = [5, 15, 16, 17, 18, 23];
        assert_eq!(of_backend(Offloads::NONE), bits(&always));
        // CSUM, GUEST_CSUM, CTRL_GUEST_OFFLOADS; GUEST and HOST of TSO4, TSO6 and ECN.
        let tcp = bits(&[0, 1, 2, 7, 8, 9, 11, 12, 13]);
        let without_uso = Offloads {
            uso: false,
            ..Offloads::ALL
        };
        assert_eq!(of_backend(without_uso), bits(&always) | tcp);
        // ECN is about segments of TCP (§5.1.3.1).
        let ecn_alone = Offloads {
            checksum: true,
            ecn: true,
            ..Offloads::NONE
        };
        assert_eq!(of_backend(ecn_alone), bits(&always) | bits(&[0, 1, 2]));
        // GUEST_USO4, GUEST_USO6, HOST_USO.
        let udp = bits(&[54, 55, 56]);
        assert_eq!(of_backend(Offloads::ALL), bits(&always) | tcp | udp);
        assert_eq!(GUEST_OFFLOADS, bits(&[1, 7, 8, 9, 54, 55]));
        assert_eq!((MTU, MQ), (bits(&[3]), bits(&[22])));
    }
}
