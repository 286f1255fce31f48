//! Ranges that are discarded or filled with zeroes.

use super::*;

#[test]
fn ranges_are_discarded_and_filled_with_zeroes() {
    let mut rig = Rig::new();
    for (kind, sector, flags) in [(WRITE_ZEROES, 1, 0), (WRITE_ZEROES, 4, 1), (DISCARD, 6, 0)] {
        assert_eq!(rig.range(kind, sector, 2, flags), 0, "{kind} {sector}");
        assert_eq!(rig.first_byte(sector), 0);
        assert_eq!(rig.first_byte(sector + 1), 0);
    }
    assert_eq!(rig.first_byte(3), 3, "what lies between is left alone");
    assert_eq!(rig.range(WRITE_ZEROES, 3, 0, 0), 0, "nothing is nothing");
    assert_eq!(rig.first_byte(3), 3);
    let count = |name| crate::testing::counter(&rig.device, name);
    assert_eq!(
        (count("discard_bytes"), count("zeroed_bytes")),
        (1024, 2048)
    );
}

#[test]
fn ranges_beyond_the_disk_or_with_unknown_flags_are_refused() {
    let mut rig = Rig::new();
    for kind in [DISCARD, WRITE_ZEROES] {
        for (sector, count) in [
            (8, 1),
            (7, 2),
            (0, u32::MAX),
            (u64::MAX, 1),
            (u64::MAX / 512, 1),
            (u64::MAX - 1, 2),
        ] {
            assert_eq!(
                rig.range(kind, sector, count, 0),
                1,
                "{kind} {sector} {count}"
            );
        }
        assert_eq!(rig.range(kind, 0, 1, 2), 2);
        assert_eq!(rig.range(kind, 0, 1, u32::MAX), 2);
        // Another length than that of a range; several of which one has an unknown flag; more.
        for (len, flags, status) in [
            (0, 2, 1),
            (15, 2, 1),
            (17, 2, 1),
            (31, 2, 1),
            (32, 0, 1),
            (32, 2, 2),
            (16 << 12, 0, 1),
            (16 << 12, 2, 2),
        ] {
            rig.header(kind, 0);
            let ranges = vec![0u8; 16 << 12];
            rig.mem.write_slice(&ranges, GuestAddress(DATA)).unwrap();
            let at = GuestAddress(DATA + 16 + 12);
            rig.mem.write_obj(flags, at).unwrap();
            rig.driver.add(&[(HEADER, 16), (DATA, len)], &[(STATUS, 1)]);
            assert_eq!(rig.device.on_queue(0).unwrap(), Progress::Idle);
            assert_eq!(rig.status(), status, "{kind} {len} {flags}");
        }
    }
    assert_eq!(rig.range(DISCARD, 0, 1, 1), 2, "only zeroes may unmap");
    assert_eq!((rig.first_byte(1), rig.first_byte(7)), (1, 7));
    let mut rig = Rig::over(disk_of_8_sectors().read_only());
    for kind in [DISCARD, WRITE_ZEROES] {
        for (sector, flags) in [(1, 0), (1, 2), (u64::MAX, 0)] {
            assert_eq!(rig.range(kind, sector, 1, flags), 2, "it is not offered");
        }
    }
    assert_eq!(rig.first_byte(1), 1);
}

#[test]
fn more_zeroes_than_the_configuration_allows_are_refused() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(4 << 30).unwrap();
    let mut rig = Rig::over(BlockDevice::new(Box::new(FileDisk::new(file).unwrap())));
    let mut config = [0; 60];
    rig.device.info().config.read(0, &mut config);
    let limit = |at: usize| u32::from_le_bytes(config[at..at + 4].try_into().unwrap());
    for (kind, limit) in [(DISCARD, limit(36)), (WRITE_ZEROES, limit(48))] {
        assert_eq!(rig.range(kind, 0, limit, 0), 0);
        assert_eq!(rig.range(kind, 0, limit + 1, 0), 1);
    }
}

#[test]
fn an_operation_that_the_host_does_not_have_is_unsupported() {
    #[derive(Debug)]
    struct Plain;
    impl Disk for Plain {
        fn len(&self) -> u64 {
            1 << 20
        }
        fn submit(&mut self, _: &GuestRam, _: u16, _: Operation<'_, '_>) -> Submitted {
            Submitted::Done(Err(std::io::Error::from_raw_os_error(libc::EOPNOTSUPP)))
        }
    }
    let mut rig = Rig::over(BlockDevice::new(Box::new(Plain)));
    assert_eq!(rig.range(DISCARD, 0, 1, 0), 2);
}
