//! Overlays that are larger than their image, and grow.

use super::*;

#[test]
fn the_end_of_an_image_within_a_cluster_is_the_end_of_the_disk() {
    let mut contents = numbered(65536 + 1024);
    let image = [contents.as_slice(), &[1; 100]].concat();
    let mut rig = Rig::new(&image);
    assert_eq!(rig.disk.as_ref().unwrap().len(), contents.len() as u64);
    rig.write(65536, &[5; 512]);
    contents[65536..65536 + 512].fill(5);
    assert!(rig.read(0, contents.len()) == contents);
    rig.ask(Operation::WriteZeroes {
        offset: 65536,
        len: 1024,
        unmap: false,
    })
    .unwrap();
    contents[65536..].fill(0);
    rig.agrees_with_qemu(&contents);
}

#[test]
fn an_image_that_became_shorter_is_an_error() {
    let mut rig = Rig::new(&numbered(2 << 16));
    File::options()
        .write(true)
        .open(rig.path("base"))
        .unwrap()
        .set_len(1 << 16)
        .unwrap();
    let mem = rig.mem.clone();
    let error = read(rig.disk.as_mut().unwrap(), &mem, 1 << 16, 512).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    let slices = pieces(&mem, 512);
    let write = Operation::Write {
        offset: 1 << 16,
        slices: &slices,
    };
    assert_eq!(
        rig.ask(write).unwrap_err().kind(),
        io::ErrorKind::UnexpectedEof
    );
    assert_eq!(rig.read(0, 512).len(), 512);
}

#[test]
fn a_grown_overlay_is_the_image_with_zeros_behind_it() {
    let image = numbered(1 << 16);
    let mut rig = Rig::new(&image);
    rig.disk = None;
    std::fs::remove_file(rig.path("overlay")).unwrap();
    let overlay = File::create_new(rig.path("overlay")).unwrap();
    // No whole number of sectors.
    let grown = create_grown_overlay(&rig.base(), &rig.path("base"), &overlay, 3 << 20 | 1);
    let (format, len) = (grown.unwrap(), (3 << 20) + 512);
    match format {
        OverlayFormat::Reflink => assert_eq!(overlay.metadata().unwrap().len(), len),
        OverlayFormat::Qcow2 => {
            rig = rig.opened();
            assert_eq!(rig.read(0, image.len()), image);
            assert!(rig.read(len - 512, 512).iter().all(|byte| *byte == 0));
            rig.write(len - 512, &[7; 512]);
            rig.reopen();
            assert_eq!(rig.read(len - 512, 512), [7; 512]);
        }
    }
    // It never becomes smaller than the image.
    let small = tempfile::tempfile().unwrap();
    create_grown_overlay(&rig.base(), &rig.path("base"), &small, 512).unwrap();
    if format == OverlayFormat::Qcow2 {
        let disk = Qcow2Disk::open(rig.base(), small).unwrap();
        assert_eq!(disk.len(), 1 << 16);
    }
}

#[test]
fn an_open_overlay_grows_when_it_looks_at_its_size_again() {
    let mut rig = Rig::sparse(2 << 20);
    rig.write(4096, &[1; 512]);
    // Beyond what one table maps.
    let size = 600 << 20;
    grow_overlay(&rig.overlay(), OverlayFormat::Qcow2, size).unwrap();
    let disk = rig.disk.as_mut().unwrap();
    assert_eq!(disk.len(), 2 << 20);
    disk.refresh().unwrap();
    assert_eq!(disk.len(), size);
    assert_eq!(rig.read(size - 512, 512), [0; 512]);
    rig.write(size - 512, &[3; 512]);
    rig.reopen();
    assert_eq!(rig.read(4096, 512), [1; 512]);
    assert_eq!(rig.read(size - 512, 512), [3; 512]);
}

#[test]
fn an_overlay_grows_with_what_is_in_it_and_never_shrinks() {
    let mut rig = Rig::sparse(2 << 20);
    rig.write(4096, &[1; 512]);
    rig.write((2 << 20) - 512, &[2; 512]);
    rig.disk = None;
    let grow = |rig: &Rig, size| grow_overlay(&rig.overlay(), OverlayFormat::Qcow2, size);
    // Beyond what one table maps.
    let size = (600 << 20) + 512;
    grow(&rig, size - 1).unwrap();
    rig.disk = Some(rig.open().unwrap());
    assert_eq!(rig.disk.as_ref().unwrap().len(), size);
    assert_eq!(rig.read(4096, 512), [1; 512]);
    assert_eq!(
        rig.read((2 << 20) - 512, 1024),
        [[2; 512], [0; 512]].concat()
    );
    rig.write(size - 512, &[3; 512]);
    rig.reopen();
    assert_eq!(rig.read(size - 512, 512), [3; 512]);
    rig.disk = None;
    for (size, is_smaller) in [(1 << 20, true), (5 << 40, false)] {
        let error = grow(&rig, size).unwrap_err();
        let smaller = matches!(error, Qcow2Error::Smaller { .. });
        let large = matches!(error, Qcow2Error::TooLarge { .. });
        assert_eq!((smaller, large), (is_smaller, !is_smaller), "{error}");
    }
    let raw = rig.path("raw");
    std::fs::write(&raw, [7; 1024]).unwrap();
    let raw = File::options().read(true).write(true).open(raw).unwrap();
    grow_overlay(&raw, OverlayFormat::Reflink, 4096).unwrap();
    assert_eq!(raw.metadata().unwrap().len(), 4096);
    assert!(grow_overlay(&raw, OverlayFormat::Reflink, 512).is_err());
    // What is no overlay stays as it is.
    assert!(grow_overlay(&raw, OverlayFormat::Qcow2, 8192).is_err());
    assert_eq!(raw.metadata().unwrap().len(), 4096);
}
