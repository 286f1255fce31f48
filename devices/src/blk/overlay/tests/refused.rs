//! Overlays that come from an untrusted source.

use super::*;

/// Returns the error for a valid overlay with a cluster of data that was changed by `change`.
fn refused(change: impl FnOnce(&mut Vec<u8>)) -> Qcow2Error {
    let mut rig = Rig::new(&numbered(4 << 16));
    rig.write(0, &[1; 2 << 16]);
    rig.disk = None;
    let mut bytes = std::fs::read(rig.path("overlay")).unwrap();
    change(&mut bytes);
    std::fs::write(rig.path("overlay"), bytes).unwrap();
    rig.open().unwrap_err()
}

fn put(bytes: &mut [u8], at: usize, field: &[u8]) {
    bytes[at..at + field.len()].copy_from_slice(field);
}

#[test]
fn headers_of_something_else_are_refused() {
    let field = |at: usize, value: u32| refused(|bytes| put(bytes, at, &value.to_be_bytes()));
    assert!(matches!(refused(Vec::clear), Qcow2Error::NotQcow2));
    assert!(matches!(
        refused(|bytes| bytes.truncate(100)),
        Qcow2Error::NotQcow2
    ));
    assert!(matches!(field(0, 0), Qcow2Error::NotQcow2));
    // Version, clusters, encryption, snapshots, other features, bitmaps, refcount widths.
    for (at, value) in [
        (4, 2),
        (20, 9),
        (32, 1),
        (60, 1),
        (76, 4),
        (72, 1),
        (92, 1),
        (96, 5),
    ] {
        let error = field(at, value);
        assert!(
            matches!(error, Qcow2Error::Unsupported { .. }),
            "{at}: {error}"
        );
    }
    assert!(matches!(
        field(76, 1),
        Qcow2Error::Marked { state: "dirty" }
    ));
    assert!(matches!(
        field(76, 3),
        Qcow2Error::Marked { state: "corrupt" }
    ));
    // Without the name of a base, without its format, with another format.
    for (at, value) in [
        (16, 0),
        (104, 0),
        (112, u32::from_be_bytes(*b"vdi\0")),
        (108, 9999),
    ] {
        let error = field(at, value);
        assert!(matches!(error, Qcow2Error::NoRawBase), "{at}: {error}");
    }
    assert!(matches!(field(24, 1 << 20), Qcow2Error::TooLarge { .. }));
    // A disk larger than its L1 table; tables at invalid offsets.
    for (at, value) in [
        (24, 1),
        (36, 0),
        (44, 0),
        (44, 512),
        (40, 1),
        (52, 0),
        (48, 1),
        (56, 0),
    ] {
        let error = field(at, value);
        assert!(matches!(error, Qcow2Error::Damaged { .. }), "{at}: {error}");
    }
}

#[test]
fn a_file_that_is_mostly_a_hole_is_refused_by_its_length() {
    let rig = Rig::new(&numbered(4 << 16));
    // Not all file systems on disks support files of this length; one in memory does.
    let memory = rustix::fs::memfd_create("overlay", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let mut file = File::from(memory);
    file.write_all(&std::fs::read(rig.path("overlay")).unwrap())
        .unwrap();
    let most = ENTRIES * COUNTS * CLUSTER;
    file.set_len(most).unwrap();
    let open = |file: &File| Qcow2Disk::open(rig.base(), file.try_clone().unwrap());
    open(&file).unwrap();
    for long in [most + 1, 1 << 60] {
        file.set_len(long).unwrap();
        let error = open(&file).map(|_| ()).unwrap_err();
        assert!(matches!(error, Qcow2Error::Damaged { .. }), "{error}");
    }
}

#[test]
fn mappings_that_cannot_be_are_refused() {
    /// The offsets of the L1 table, of its only L2 table, and of the first cluster of data.
    const L1: usize = 3 << 16;
    let table = |bytes: &[u8]| {
        let entry = u64::from_be_bytes(bytes[L1..L1 + 8].try_into().unwrap());
        (entry & crate::blk::overlay::header::OFFSET) as usize
    };
    let own = crate::blk::overlay::header::OWN;
    let data = |bytes: &[u8], n: usize| {
        let at = table(bytes) + 8 * n;
        u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
    };
    for wrong in [
        // In the header, in the L1 table, misaligned, beyond the file, not its own, compressed.
        own,
        own | L1 as u64,
        own | 4 << 16 | 512,
        own | 1 << 40,
        4 << 16,
        own | 1 << 62,
        own | 4 << 16 | 2,
        own | 1,
    ] {
        let error = refused(|bytes| {
            let at = table(bytes);
            put(bytes, at, &wrong.to_be_bytes());
        });
        assert!(
            matches!(error, Qcow2Error::Damaged { .. }),
            "{wrong:x}: {error}"
        );
        let error = refused(|bytes| put(bytes, L1, &wrong.to_be_bytes()));
        assert!(
            matches!(error, Qcow2Error::Damaged { .. }),
            "{wrong:x}: {error}"
        );
    }
    let twice = refused(|bytes| {
        let (at, first) = (table(bytes), data(bytes, 0));
        put(bytes, at + 8, &first.to_be_bytes());
    });
    assert!(matches!(twice, Qcow2Error::Damaged { .. }), "{twice}");
    // Its old place, but without the flag that it has only one reference.
    for at in [|_: &[u8]| L1, table] {
        let error = refused(|bytes| {
            let at = at(bytes);
            bytes[at] &= 0x7f;
        });
        assert!(matches!(error, Qcow2Error::Damaged { .. }), "{error}");
    }
    let cut = refused(|bytes| bytes.truncate(4 << 16));
    assert!(matches!(cut, Qcow2Error::Damaged { .. }), "{cut}");
}

#[test]
fn a_new_overlay_is_as_large_and_its_image_named_as_long_as_it_may_be() {
    use super::super::header::new_image;
    let name = |len: usize| PathBuf::from("n".repeat(len));
    let made = |size, len| new_image(size, &name(len));
    for (size, len) in [(MAX_SIZE, 1), (MAX_SIZE + 511, 1), (512, 1023), (0, 1)] {
        let pieces = made(size, len).unwrap();
        let header = &pieces[0].1;
        let sectors = size / 512 * 512;
        assert_eq!(header[24..32], sectors.to_be_bytes());
        assert!(header.ends_with("n".repeat(len).as_bytes()));
        // Each piece has whole clusters, after the one before it.
        let mut end = CLUSTER;
        for (at, bytes) in &pieces[1..] {
            assert_eq!((*at, bytes.len() as u64 % CLUSTER), (end, 0));
            end += bytes.len() as u64;
        }
    }
    let error = made(MAX_SIZE + 512, 1).unwrap_err();
    assert!(matches!(error, Qcow2Error::TooLarge { .. }), "{error}");
    for len in [0, 1024] {
        let error = made(512, len).unwrap_err();
        assert!(matches!(error, Qcow2Error::Name), "{len}: {error}");
    }
}

#[test]
fn an_entry_that_another_process_damages_later_is_an_error() {
    let mut rig = Rig::new(&numbered(4 << 16));
    rig.write(0, &[1; 2 << 16]);
    rig.reopen();
    let file = rig.overlay();
    let word = |at: u64| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at).unwrap();
        u64::from_be_bytes(bytes)
    };
    // The L1 table's first entry, with the flag of a cluster that is used once.
    let own = 1 << 63;
    let table = word(word(40)) & !own;
    let end = file.metadata().unwrap().len();
    let behind = end.next_multiple_of(CLUSTER) | own;
    file.write_all_at(&behind.to_be_bytes(), table + 8).unwrap();
    assert_eq!(rig.read(0, 512), [1; 512]);
    let mem = rig.mem.clone();
    let disk = rig.disk.as_mut().unwrap();
    let error = read(disk, &mem, 1 << 16, 512).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    let slices = pieces(&mem, 512);
    let write = Operation::Write {
        offset: 1 << 16,
        slices: &slices,
    };
    assert!(rig.ask(write).is_err());
    assert_eq!(file.metadata().unwrap().len(), end);
}
