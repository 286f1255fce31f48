//! Lists of directories.

use super::*;

#[test]
fn directories_are_listed_whole_in_parts_and_told_of_only_where_asked() {
    let rig = rig();
    for n in 0..20 {
        std::fs::write(rig.path(&format!("file{n}")), "").unwrap();
    }
    let plain = rig.list(ROOT, false);
    assert_eq!(plain.len(), 22);
    for size in [0, 512, 1 << 20, u32::MAX] {
        assert_eq!(rig.list_by(ROOT, false, size), plain);
    }
    assert!(plain.iter().all(|(_, number)| *number == 0));
    assert_eq!(rig.tree.table().objects(), 0);
    let told = rig.list(ROOT, true);
    let names = |list: &[(String, u64)]| list.iter().map(|(n, _)| n.clone()).collect::<Vec<_>>();
    assert_eq!(names(&plain), names(&told));
    for (name, number) in &told {
        assert_eq!(*number == 0, name == "." || name == "..", "{name}");
    }
    // Those that did not fit were forgotten again.
    for (_, number) in told {
        rig.tree.forget(&me(), number, 1);
    }
    assert_eq!(rig.tree.table().objects(), 0);
}

#[test]
fn of_a_directory_hardly_more_is_read_than_fits_into_the_reply() {
    let rig = rig();
    for n in 0..400 {
        std::fs::write(rig.path(&format!("file{n:03}")), "").unwrap();
    }
    let (handle, _) = rig.tree.opendir(&me(), ROOT, 0).unwrap();
    let handle = handle.unwrap();
    // As Linux asks: for a page, of which an entry takes 32 bytes, or 160 with its object.
    for (plus, len, most) in [(false, 32, 140), (true, 160, 40)] {
        let mut room = 4096;
        let mut add = |_: DirEntry<'_>, _| {
            let fits = if room >= len { len } else { 0 };
            room -= fits;
            Ok(fits)
        };
        let of = (ROOT, handle);
        let tree = &rig.tree;
        tree.entries(&me(), of, (4096, 0), plus, &mut add).unwrap();
        let handle = tree.handle(handle, ROOT).unwrap();
        let directory = file(&handle);
        // What the host would read next.
        let mut buffer = vec![std::mem::MaybeUninit::uninit(); 64 << 10];
        let mut rest = rustix::fs::RawDir::new(&*directory, &mut buffer);
        let mut unread = 0;
        while rest.next().is_some() {
            unread += 1;
        }
        assert!(402 - unread <= most, "{} with {plus}", 402 - unread);
    }
}
