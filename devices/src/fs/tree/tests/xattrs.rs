//! Extended attributes.

use super::*;

#[test]
fn attributes_that_mean_something_to_the_host_do_not_exist() {
    let rig = rig();
    std::fs::write(rig.path("file"), "").unwrap();
    let object = rig.look_up(ROOT, "file").unwrap().inode;
    for reserved in [
        "security.selinux",
        "security.capability.x",
        "security.ima",
        "trusted",
        "podvisor.trusted.a",
    ] {
        let attribute = name(reserved);
        let refused = Some(Errno::OPNOTSUPP);
        assert_eq!(
            code(rig.tree.setxattr(&me(), object, &attribute, b"1", 0)),
            refused
        );
        assert_eq!(
            code(rig.tree.getxattr(&me(), object, &attribute, 10).map(drop)),
            refused
        );
        assert_eq!(
            code(rig.tree.removexattr(&me(), object, &attribute)),
            refused
        );
    }
    let flags = rig.tree.setxattr(&me(), object, c"user.a", b"1", 0xff);
    assert_eq!(code(flags), Some(Errno::INVAL));
}

/// The names of an object's attributes on the host, in order.
fn names_on_host(path: &Path) -> Vec<String> {
    let mut list = vec![0; 4096];
    let len = rustix::fs::listxattr(path, &mut *list).unwrap();
    let names = list[..len].split(|byte| *byte == 0);
    let names = names.map(|name| String::from_utf8(name.to_vec()).unwrap());
    let mut names: Vec<_> = names.filter(|name| name.starts_with("user.")).collect();
    names.sort();
    names
}

#[test]
fn attributes_of_the_guests_root_are_users_attributes_on_the_host() {
    let rig = rig();
    std::fs::write(rig.path("file"), "").unwrap();
    std::fs::create_dir(rig.path("dir")).unwrap();
    let tree = &rig.tree;
    let all = [
        "security.capability",
        "trusted.overlay.opaque",
        "user.a",
        "user.podvisor.trusted.b",
    ];
    for path in ["file", "dir"] {
        let object = rig.look_up(ROOT, path).unwrap().inode;
        for attribute in all {
            let value = attribute.as_bytes();
            tree.setxattr(&me(), object, &name(attribute), value, 0)
                .unwrap();
        }
        let on_host = [
            "user.a",
            "user.podvisor.security.capability",
            "user.podvisor.trusted.overlay.opaque",
            "user.podvisor.user.podvisor.trusted.b",
        ];
        assert_eq!(names_on_host(&rig.path(path)), on_host);
        // Names on the host that no client has set are not shown.
        let flags = rustix::fs::XattrFlags::empty();
        for stray in ["user.podvisor.system.x", "user.podvisor.user.x"] {
            rustix::fs::setxattr(rig.path(path), stray, b"", flags).unwrap();
        }
        let ListxattrReply::Names(list) = tree.listxattr(&me(), object, 1000).unwrap() else {
            panic!("no names");
        };
        let list = String::from_utf8(list).unwrap();
        let mut list: Vec<_> = list.split_terminator('\0').collect();
        list.sort_unstable();
        assert_eq!(list, all);
        for attribute in all {
            let value = tree.getxattr(&me(), object, &name(attribute), 100);
            let GetxattrReply::Value(value) = value.unwrap() else {
                panic!("no value");
            };
            assert_eq!(value, attribute.as_bytes());
        }
        // The client cannot read or create it by its name on the host.
        let hidden = c"user.podvisor.security.capability";
        let found = tree.getxattr(&me(), object, hidden, 100).map(drop);
        assert_eq!(code(found), Some(Errno::NODATA));
        for attribute in all {
            tree.removexattr(&me(), object, &name(attribute)).unwrap();
        }
        let strays = ["user.podvisor.system.x", "user.podvisor.user.x"];
        assert_eq!(names_on_host(&rig.path(path)), strays);
        let long = name(&format!("trusted.{}", "a".repeat(255 - 8)));
        let refused = tree.setxattr(&me(), object, &long, b"", 0);
        assert_eq!(code(refused), Some(Errno::RANGE));
    }
    symlink("file", rig.path("link")).unwrap();
    let link = rig.look_up(ROOT, "link").unwrap().inode;
    let refused = tree.setxattr(&me(), link, c"trusted.a", b"", 0);
    assert_eq!(code(refused), Some(Errno::OPNOTSUPP));
}

#[test]
fn of_an_attribute_the_client_gets_the_length_the_value_or_that_it_has_no_room() {
    let rig = rig();
    std::fs::write(rig.path("file"), "").unwrap();
    let object = rig.look_up(ROOT, "file").unwrap().inode;
    rig.tree
        .setxattr(&me(), object, c"user.a", b"value", 0)
        .unwrap();
    for (size, value) in [
        (0, Ok(None)),
        (1, Err(Errno::RANGE)),
        (4, Err(Errno::RANGE)),
        (5, Ok(Some(b"value".to_vec()))),
        (u32::MAX, Ok(Some(b"value".to_vec()))),
    ] {
        let got = rig.tree.getxattr(&me(), object, c"user.a", size);
        let got = got.map(|reply| match reply {
            GetxattrReply::Count(count) => {
                assert_eq!(count, 5);
                None
            }
            GetxattrReply::Value(value) => Some(value),
        });
        let got = got.map_err(|error| Errno::from_io_error(&error).unwrap());
        assert_eq!(got, value, "{size}");
    }
    let missing = rig.tree.getxattr(&me(), object, c"user.b", 0).map(drop);
    assert_eq!(code(missing), Some(Errno::NODATA));
}

#[test]
fn a_program_that_is_emptied_loses_its_capabilities() {
    let rig = rig();
    std::fs::write(rig.path("file"), "text").unwrap();
    let object = rig.look_up(ROOT, "file").unwrap().inode;
    let capability = c"security.capability";
    let tree = &rig.tree;
    let lost = || code(tree.getxattr(&me(), object, capability, 0).map(drop));
    let write = libc::O_WRONLY.cast_unsigned();
    let truncate = write | libc::O_TRUNC.cast_unsigned();
    for empties in [false, true] {
        tree.setxattr(&me(), object, capability, b"1", 0).unwrap();
        let flags = if empties { truncate } else { write };
        tree.open(&me(), object, flags, 0).unwrap();
        assert_eq!(lost(), empties.then_some(Errno::NODATA));
    }
}
