use super::*;
use proptest::prelude::*;
use serde_json::json;

fn spec() -> serde_json::Value {
    json!({
        "ociVersion": "1.2.0",
        "root": {"path": "ignored"},
        "process": {
            "args": ["sh", "-c", "true"],
            "cwd": "/",
            "env": ["PATH=/bin"],
            "user": {"uid": 0, "gid": 0, "additionalGids": [7]},
            "noNewPrivileges": false
        },
        "linux": {"namespaces": [{"type": "mount"}, {"type": "pid"}]}
    })
}

fn parsed(value: &serde_json::Value) -> Result<Spec, SpecError> {
    parse(&serde_json::to_vec(value).unwrap())
}

#[test]
fn a_usual_specification_is_taken_and_placed() {
    let mut spec = parsed(&spec()).unwrap();
    place(
        &mut spec,
        Path::new("/run/x/rootfs"),
        true,
        &Cgroup::new("c1"),
    );
    let root = spec.root().as_ref().unwrap();
    assert_eq!(root.path(), Path::new("/run/x/rootfs"));
    assert_eq!(root.readonly(), Some(true));
    let group = spec.linux().as_ref().unwrap().cgroups_path().as_deref();
    assert_eq!(group, Some(Path::new("/podvisor/c1")));
    let namespaces = spec
        .linux()
        .as_ref()
        .unwrap()
        .namespaces()
        .as_ref()
        .unwrap();
    assert!(
        namespaces
            .iter()
            .any(|n| n.typ() == LinuxNamespaceType::Cgroup)
    );
}

#[test]
fn what_the_agent_does_not_do_is_refused() {
    let broken: [(&str, serde_json::Value); 7] = [
        ("/hooks", json!({"createRuntime": [{"path": "/bin/true"}]})),
        ("/linux/namespaces", json!([{"type": "pid"}])),
        (
            "/linux/namespaces",
            json!([{"type": "mount", "path": "/proc/1/ns/mnt"}]),
        ),
        ("/process/args", json!([])),
        ("/process/args", json!(["a\u{0}b"])),
        ("/process/env", json!(["A=\u{0}"])),
        ("/process/cwd", json!("relative")),
    ];
    for (pointer, value) in broken {
        let mut spec = spec();
        match spec.pointer_mut(pointer) {
            Some(place) => *place = value,
            None => spec[pointer.trim_start_matches('/')] = value,
        }
        assert!(
            matches!(parsed(&spec), Err(SpecError::Refused(_))),
            "{pointer}"
        );
    }
}

#[test]
fn a_specification_over_the_bound_is_refused() {
    let error = parse(&vec![b' '; limits::SPEC_BYTES + 1]).unwrap_err();
    assert!(matches!(error, SpecError::TooLarge { .. }));
}

#[test]
fn json_that_nests_without_end_is_an_error() {
    assert!(matches!(
        parse(&[b'['; 100_000]),
        Err(SpecError::Malformed { .. })
    ));
}

#[test]
fn user_home_and_terminal_are_filled_in() {
    let mut spec = parsed(&spec()).unwrap();
    let process = spec.process_mut().as_mut().unwrap();
    let user = User {
        uid: 33,
        gid: 34,
        additional_gids: vec![4, 7],
        home: Some("/var/www".into()),
    };
    complete_process(process, Some(user), |_| unreachable!(), true);
    assert_eq!((process.user().uid(), process.user().gid()), (33, 34));
    assert_eq!(
        process.user().additional_gids().as_deref(),
        Some(&[4, 7, 34][..])
    );
    let env = process.env().as_ref().unwrap();
    assert_eq!(
        env[1..],
        ["HOME=/var/www".to_owned(), "TERM=xterm".to_owned()]
    );
    assert_eq!(process.terminal(), Some(true));
}

#[test]
fn a_home_that_is_given_stays_and_an_empty_one_does_not() {
    let mut process = parsed(&spec()).unwrap().process().clone().unwrap();
    process.set_env(Some(vec!["HOME=/here".into()]));
    complete_process(&mut process, None, |_| unreachable!(), false);
    assert_eq!(
        process.env().as_deref(),
        Some(&["HOME=/here".to_owned()][..])
    );

    process.set_env(Some(vec!["HOME=".into()]));
    complete_process(
        &mut process,
        None,
        |uid| (uid == 0).then(|| "/root".into()),
        false,
    );
    assert_eq!(
        process.env().as_deref(),
        Some(&["HOME=/root".to_owned()][..])
    );
}

#[test]
fn files_are_shown_unless_the_specification_mounts_there() {
    let directory = tempfile::tempdir().unwrap();
    let mut value = spec();
    let source = "/run/podvisor/shared/hosts";
    value["mounts"] = json!([{"destination": "/etc/hosts", "type": "bind", "source": source}]);
    let mut spec = parsed(&value).unwrap();
    let file = |destination, contents| EtcFile {
        destination,
        contents,
    };
    show_files(
        &mut spec,
        directory.path(),
        &[
            file("/etc/hosts", b"ours"),
            file("/etc/hostname", b""),
            file("/etc/resolv.conf", b"nameserver 10.0.0.1\n"),
        ],
        None,
    )
    .unwrap();
    let mounts = spec.mounts().as_ref().unwrap();
    assert_eq!(mounts.len(), 2);
    assert_eq!(mounts[1].destination(), Path::new("/etc/resolv.conf"));
    let shown = std::fs::read(mounts[1].source().as_ref().unwrap()).unwrap();
    assert_eq!(shown, b"nameserver 10.0.0.1\n");
    let options = |mount: &Mount| mount.options().clone().unwrap();
    assert_eq!(options(&mounts[1]), ["bind", "rw", "rprivate"]);

    let mut read_only = parsed(&super::tests::spec()).unwrap();
    let root = Path::new("/run/x/rootfs");
    place(&mut read_only, root, true, &Cgroup::new("c1"));
    let hostname = [file("/etc/hostname", b"a\n")];
    show_files(&mut read_only, directory.path(), &hostname, None).unwrap();
    let mounts = read_only.mounts().as_ref().unwrap();
    assert_eq!(options(mounts.last().unwrap()), ["bind", "ro", "rprivate"]);
    assert!(!directory.path().join("hosts").exists());

    let huge = vec![0; limits::ETC_FILE_BYTES + 1];
    let error = show_files(
        &mut spec,
        directory.path(),
        &[file("/etc/hostname", &huge)],
        None,
    );
    assert!(matches!(error, Err(SpecError::TooLarge { .. })));
}

#[test]
fn bind_mounts_take_from_shares_only() {
    let with = |source: &str, options: &[&str]| {
        let mut value = spec();
        value["mounts"] = json!([{"destination": "/x", "source": source, "options": options}]);
        parsed(&value)
    };
    with("/run/podvisor/shared/data", &["rbind", "ro"]).unwrap();
    with("/dev/shm", &["bind"]).unwrap();
    with("/dev/null", &["bind"]).unwrap();
    // Not a bind mount: the source is only a name.
    with("/proc", &["ro"]).unwrap();
    for outside in [
        "/",
        "/proc",
        "/run/podvisor/shared",
        "run/podvisor/shared/x",
        "/run/podvisor/shared/../state/c1",
        "/run/podvisor/images/vda",
        "",
    ] {
        for option in ["bind", "rbind"] {
            let refused = with(outside, &[option]);
            assert!(matches!(refused, Err(SpecError::Refused(_))), "{outside:?}");
        }
    }
}

#[test]
fn nothing_is_mounted_where_a_container_has_something_of_its_own() {
    let with = |destination: &str, kind: &str| {
        let mut value = spec();
        value["mounts"] = json!([{"destination": destination, "type": kind,
            "source": "/run/podvisor/shared/data"}]);
        parsed(&value)
    };
    for own in ["/dev", "/dev/null"] {
        assert!(
            matches!(with(own, "bind"), Err(SpecError::Refused(_))),
            "{own}"
        );
    }
    with("/dev/termination-log", "bind").unwrap();
    with("/dev", "tmpfs").unwrap();
}

#[test]
fn a_pid_namespace_called_sandbox_is_the_shared_one() {
    let mut value = spec();
    value["linux"]["namespaces"][1]["path"] = json!("sandbox");
    let mut asked = parsed(&value).unwrap();
    let no_container = |_: &str| -> io::Result<PathBuf> { panic!("nobody asked") };
    join_pids(&mut asked, || Ok("/proc/7/ns/pid".into()), no_container).unwrap();
    let namespaces = asked
        .linux()
        .as_ref()
        .unwrap()
        .namespaces()
        .clone()
        .unwrap();
    assert_eq!(
        namespaces[1].path().as_deref(),
        Some(Path::new("/proc/7/ns/pid"))
    );
    let mut own = parsed(&spec()).unwrap();
    join_pids(&mut own, || panic!("nobody asked"), no_container).unwrap();

    value["linux"]["namespaces"][1]["path"] = json!("container:web");
    let mut target = parsed(&value).unwrap();
    join_pids(
        &mut target,
        || panic!("nobody asked"),
        |id| io::Result::Ok(format!("/proc/{}/ns/pid", id.len()).into()),
    )
    .unwrap();
    let namespaces = target.linux().as_ref().unwrap().namespaces().clone();
    assert_eq!(
        namespaces.unwrap()[1].path().as_deref(),
        Some(Path::new("/proc/3/ns/pid"))
    );
}

#[test]
fn an_image_is_mounted_by_the_serial_number_of_its_disk() {
    let mut value = spec();
    let mount = |source: &str| {
        json!([{ "destination": "/data", "type": "bind", "source": source,
            "options": ["bind", "ro"] }])
    };
    value["mounts"] = mount("image:0123456789abcdef0123");
    let mut asked = parsed(&value).unwrap();
    assert_eq!(mounted_images(&asked), ["0123456789abcdef0123"]);
    place_images(&mut asked, |serial| Some(Path::new("/images").join(serial))).unwrap();
    let placed = asked.mounts().as_ref().unwrap()[0].source().clone();
    assert_eq!(placed.unwrap(), Path::new("/images/0123456789abcdef0123"));
    for bad in [
        "image:",
        "images:0123",
        "image:more-than-twenty-bytes",
        "image:0123/../x",
        "image:0123//x",
        "image:/x",
    ] {
        value["mounts"] = mount(bad);
        assert!(parsed(&value).is_err(), "{bad}");
    }
}

#[test]
fn a_part_of_an_image_is_mounted_and_links_in_it_stay_in_it() {
    let image = tempfile::tempdir().unwrap();
    let root = image.path().canonicalize().unwrap();
    fs::create_dir_all(root.join("models/small")).unwrap();
    for (link, to) in [
        ("absolute", "/models/small"),
        ("models/up", "../../../models/small"),
    ] {
        std::os::unix::fs::symlink(to, root.join(link)).unwrap();
    }
    let placed = |below: &str| {
        let mut value = spec();
        value["mounts"] = json!([{ "destination": "/data", "type": "bind",
            "source": format!("image:0123/{below}"), "options": ["bind", "ro"] }]);
        let mut asked = parsed(&value).unwrap();
        assert_eq!(mounted_images(&asked), ["0123"]);
        place_images(&mut asked, |_| Some(root.clone()))?;
        let source = asked.mounts().as_ref().unwrap()[0].source().clone();
        Ok::<_, SpecError>(source.unwrap())
    };
    for below in ["models/small", "absolute", "models/up"] {
        assert_eq!(placed(below).unwrap(), root.join("models/small"), "{below}");
    }
    let error = placed("etc/passwd").unwrap_err();
    assert!(error.to_string().contains("etc/passwd"), "{error}");
}

#[test]
fn volumes_that_are_to_be_filled_are_told_from_others() {
    let mut value = spec();
    let share = |name: &str| format!("/run/podvisor/shared/{name}");
    value["mounts"] = json!([
        { "destination": "/a", "type": "bind", "source": share("a"), "options": ["rw", "fill"] },
        { "destination": "/b", "type": "bind", "source": share("b"), "options": ["rw"] },
        { "destination": "/c", "type": "tmpfs", "source": "tmpfs", "options": ["fill"] },
    ]);
    let mut asked = parsed(&value).unwrap();
    let found = take_volumes_of_image(&mut asked);
    let expected = VolumeOfImage {
        source: share("a").into(),
        destination: "/a".into(),
    };
    assert_eq!(found, [expected]);
    let left = asked.mounts().as_ref().unwrap()[0].options().clone();
    assert_eq!(left.unwrap(), ["rw"]);
    assert!(take_volumes_of_image(&mut asked).is_empty());
}

proptest! {
    #[test]
    fn any_bytes_are_parsed_without_panic(bytes: Vec<u8>) {
        let _ = (parse(&bytes), parse_process(&bytes));
    }
}
