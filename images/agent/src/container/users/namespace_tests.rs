use serde_json::json;

use super::*;

fn spec_of(linux: serde_json::Value) -> Spec {
    let spec = json!({"ociVersion": "1.2.0", "root": {"path": "x"}, "linux": linux});
    serde_json::from_value(spec).unwrap()
}

fn range(container: u32, guest: u32, size: u32) -> serde_json::Value {
    json!({"containerID": container, "hostID": guest, "size": size})
}

fn taken(uids: &serde_json::Value, gids: &serde_json::Value) -> Option<IdMaps> {
    let namespaces = json!([{"type": "mount"}, {"type": "user"}]);
    let linux = json!({"namespaces": namespaces, "uidMappings": uids, "gidMappings": gids});
    IdMaps::take(&mut spec_of(linux)).ok().flatten()
}

fn maps() -> IdMaps {
    let (uids, gids) = (range(0, 65_536, 65_536), range(0, 131_072, 65_536));
    taken(&json!([uids]), &json!([gids])).unwrap()
}

#[test]
fn libcontainer_is_not_told_of_a_user_namespace() {
    let namespaces = json!([{"type": "user"}, {"type": "mount"}]);
    let ids = json!([range(0, 65_536, 65_536)]);
    let linux = json!({"namespaces": namespaces, "uidMappings": ids, "gidMappings": ids});
    let mut spec = spec_of(linux);
    let maps = IdMaps::take(&mut spec).unwrap().unwrap();
    assert_eq!(maps.root().uid, 65_536);
    let linux = spec.linux().as_ref().unwrap();
    assert_eq!(linux.uid_mappings(), &None);
    assert_eq!(linux.gid_mappings(), &None);
    let namespaces = linux.namespaces().as_ref().unwrap();
    let kinds: Vec<_> = namespaces.iter().map(|one| one.typ()).collect();
    assert_eq!(kinds, [LinuxNamespaceType::Mount]);
    // A specification without one is left unchanged.
    let namespaces = json!({"namespaces": [{"type": "mount"}]});
    assert_eq!(IdMaps::take(&mut spec_of(namespaces)).unwrap(), None);
}

#[test]
fn namespaces_and_mappings_that_do_not_fit_together_are_refused() {
    let good = json!([range(0, 65_536, 65_536)]);
    for linux in [
        json!({"namespaces": [{"type": "mount"}], "uidMappings": good, "gidMappings": good}),
        json!({"namespaces": [{"type": "user"}]}),
        json!({"namespaces": [{"type": "user"}], "uidMappings": good}),
        json!({
            "namespaces": [{"type": "user", "path": "/proc/1/ns/user"}],
            "uidMappings": good, "gidMappings": good,
        }),
    ] {
        let taken = IdMaps::take(&mut spec_of(linux.clone()));
        assert!(matches!(taken, Err(SpecError::Refused(_))), "{linux}");
    }
    let many: Vec<_> = (0..65).map(|n| range(n, 1000 + n, 1)).collect();
    for bad in [
        json!([]),
        json!([range(0, 0, 1000)]),
        json!([range(1, 65_536, 1000)]),
        json!([range(0, 65_536, 0)]),
        json!([range(0, u32::MAX, 2)]),
        json!([range(0, 1000, 10), range(5, 2000, 10)]),
        json!([range(0, 1000, 10), range(10, 1009, 10)]),
        json!(many),
    ] {
        assert_eq!(taken(&bad, &good), None, "{bad}");
        assert_eq!(taken(&good, &bad), None, "{bad}");
    }
    assert!(taken(&json!([range(0, 1000, 10), range(10, 2000, 10)]), &good).is_some());
}

#[test]
fn ids_are_those_of_their_range_and_others_are_refused() {
    let maps = maps();
    assert_eq!(maps.id(IdKind::User, 1000).unwrap(), 66_536);
    assert_eq!(maps.id(IdKind::Group, 65_535).unwrap(), 196_607);
    let error = maps.id(IdKind::Group, 65_536).unwrap_err();
    assert!(error.to_string().starts_with("group 65536 is not mapped"));
    let Owner { uid, gid } = maps.root();
    assert_eq!((uid, gid), (65_536, 131_072));
}

#[test]
fn a_specifications_file_systems_and_devices_are_owned_by_those_who_the_container_means() {
    let mut spec = spec_of(json!({
        "devices": [{"path": "/dev/x", "type": "c", "major": 1, "minor": 3, "gid": 6}],
    }));
    let mounts = json!([
        {"destination": "/dev", "type": "tmpfs", "options": ["nosuid", "mode=755"]},
        {"destination": "/tmp", "type": "tmpfs", "options": ["uid=1000"]},
        {"destination": "/dev/pts", "type": "devpts", "options": ["newinstance", "gid=5"]},
        {"destination": "/sys", "type": "sysfs", "options": ["ro"]},
    ]);
    spec.set_mounts(serde_json::from_value(mounts).unwrap());
    let maps = maps();
    maps.translate(&mut spec).unwrap();
    let mounts = spec.mounts().as_ref().unwrap();
    let options: Vec<_> = mounts.iter().map(|mount| mount.options().clone()).collect();
    let expected = [
        vec!["nosuid", "mode=755", "uid=65536", "gid=131072"],
        vec!["uid=66536", "gid=131072"],
        vec!["newinstance", "gid=131077"],
        vec!["ro"],
    ];
    for (options, expected) in options.into_iter().zip(expected) {
        assert_eq!(options.unwrap(), expected);
    }
    let device = &spec.linux().as_ref().unwrap().devices().as_ref().unwrap()[0];
    assert_eq!((device.uid(), device.gid()), (Some(65_536), Some(131_078)));
    let beyond = json!([{"destination": "/t", "type": "tmpfs", "options": ["uid=65536"]}]);
    spec.set_mounts(serde_json::from_value(beyond).unwrap());
    assert!(matches!(
        maps.translate(&mut spec),
        Err(NamespaceError::NotMapped { .. })
    ));
}

#[test]
fn a_mapping_is_written_as_the_kernel_reads_it() {
    let maps = taken(
        &json!([range(0, 1000, 10), range(10, 2000, 5)]),
        &json!([range(0, 1000, 10)]),
    );
    assert_eq!(lines(&maps.unwrap().uids), "0 1000 10\n10 2000 5\n");
    let longest = format!("{0} {0} {0}\n", u32::MAX).len();
    assert!(longest * MAX_LINES < 4096);
}
