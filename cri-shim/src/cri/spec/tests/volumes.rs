//! Volumes and other mounts.

use super::*;

#[test]
fn volumes_are_mounted_parents_first_and_over_the_defaults() {
    let volume = |name: &str, destination: &str, readonly| Volume {
        source: VolumeSource::Shared(name.to_owned()),
        destination: destination.to_owned(),
        readonly,
        is_slave: false,
        flags: StatVfsMountFlags::NODEV,
        asked: StatVfsMountFlags::empty(),
    };
    let volumes = [
        Volume {
            flags: StatVfsMountFlags::NOSUID | StatVfsMountFlags::NOEXEC,
            asked: StatVfsMountFlags::NOEXEC | StatVfsMountFlags::NODEV,
            ..volume("v0", "/data/inner", false)
        },
        volume("v1", "/data", true),
        volume("v2", "dev/shm", false),
        Volume {
            source: VolumeSource::Image {
                digest: format!("sha256:{}", "ab".repeat(32)),
                below: "a/b".to_owned(),
            },
            asked: StatVfsMountFlags::NOEXEC,
            ..volume("", "/data/model", true)
        },
    ];
    let volumes = {
        let memory = MemorySource {
            key: 3,
            below: Some("in it".to_owned()),
            size: Some(4096),
            mode: 0o2777,
            uid: 0,
            gid: 7,
        };
        let of_memory = |memory, destination| Volume {
            source: VolumeSource::Memory(memory),
            flags: StatVfsMountFlags::empty(),
            asked: StatVfsMountFlags::NOSUID,
            ..volume("", destination, false)
        };
        let whole = MemorySource {
            below: None,
            size: None,
            ..memory.clone()
        };
        let [a, b, c, d] = volumes;
        [
            a,
            b,
            c,
            d,
            of_memory(memory, "/a/b/c"),
            of_memory(whole, "/a/b/c/d"),
        ]
    };
    const IMAGE: &str = "image:abababababababababab/a/b";
    let built = build_with(&container(), &volumes).unwrap();
    let mounts = built.spec.mounts().clone().unwrap();
    let found: Vec<(String, String)> = mounts
        .iter()
        .filter(|mount| {
            mount
                .source()
                .as_ref()
                .and_then(|s| s.to_str())
                .is_some_and(|s| s.starts_with("/run") || s.starts_with("memory:") || s == IMAGE)
        })
        .map(|mount| {
            let options = mount.options().clone().unwrap().join(",");
            (mount.destination().to_str().unwrap().to_owned(), options)
        })
        .collect();
    assert_eq!(
        found,
        [
            ("/data".to_owned(), "rbind,rprivate,ro".to_owned()),
            (
                "/data/inner".to_owned(),
                "rbind,rprivate,rw,rnosuid,rnoexec,rnodev".to_owned()
            ),
            ("/dev/shm".to_owned(), "rbind,rprivate,rw".to_owned()),
            (
                "/data/model".to_owned(),
                "bind,ro,nosuid,nodev,noexec".to_owned()
            ),
            (
                "/a/b/c".to_owned(),
                "rbind,rprivate,rw,rnosuid,size=4096,mode=2777,uid=0,gid=7".to_owned()
            ),
            (
                "/a/b/c/d".to_owned(),
                "rbind,rprivate,rw,rnosuid,mode=2777,uid=0,gid=7".to_owned()
            ),
        ]
    );
    let mut sources = mounts.iter().filter_map(|mount| mount.source().as_deref());
    assert!(sources.any(|source| source == "memory:3/in it"));
    assert!(sources.any(|source| source == "memory:3"));
    let shm = mounts
        .iter()
        .filter(|mount| mount.destination().to_str() == Some("/dev/shm"));
    assert_eq!(shm.count(), 1);
}

#[test]
fn mounts_that_no_guest_can_have_are_refused_by_name() {
    use podvisor_cri_messages::{ImageSpec, Mount, MountPropagation};
    let good = || Mount {
        container_path: "/x".to_owned(),
        host_path: "/y".to_owned(),
        ..CriMount::default()
    };
    mounts::check(&[good()], None).unwrap();
    let refusal = |change: fn(&mut Mount)| {
        let mut mount = good();
        change(&mut mount);
        mounts::check(&[mount], None).unwrap_err().to_string()
    };
    let bidirectional = |mount: &mut Mount| {
        mount.propagation = MountPropagation::PropagationBidirectional.into();
    };
    assert!(refusal(bidirectional).contains("Bidirectional"));
    assert!(refusal(|mount| mount.container_path = "/".to_owned()).contains("container_path"));
    for own in ["/dev", "dev/", "/dev/random"] {
        let mut mount = good();
        mount.container_path = own.to_owned();
        let refused = mounts::check(&[mount], None).unwrap_err().to_string();
        assert!(refused.contains("container_path (/dev)"), "{refused}");
    }
    assert!(refusal(|mount| mount.host_path = "y".to_owned()).contains("host_path"));
    assert!(refusal(|mount| mount.recursive_read_only = true).contains("recursive_read_only"));
    let image = |mount: &mut Mount| {
        mount.image = Some(ImageSpec {
            image: "i".to_owned(),
            ..ImageSpec::default()
        });
    };
    // Either an image or a path of the host.
    assert!(refusal(image).contains("mounts.image"));
    let mut of_image = good();
    image(&mut of_image);
    of_image.host_path = String::new();
    let writable = mounts::check(std::slice::from_ref(&of_image), None).unwrap_err();
    assert!(writable.to_string().contains("set readonly"), "{writable}");
    of_image.readonly = true;
    use MountPropagation::{PropagationBidirectional, PropagationHostToContainer};
    for (propagation, is_taken) in [
        (of_image.propagation, true),
        (PropagationHostToContainer.into(), true),
        (PropagationBidirectional.into(), false),
        (7, false),
    ] {
        let of_image = Mount {
            propagation,
            ..of_image.clone()
        };
        let checked = mounts::check(&[of_image], None);
        assert_eq!(checked.is_ok(), is_taken, "{propagation}: {checked:?}");
    }
    let of_images = |count: usize| -> Vec<_> {
        let names = (0..count).map(|number| format!("image-{}", number % 33));
        let mounts = names.map(|name| {
            let mut mount = of_image.clone();
            mount.image.as_mut().unwrap().image = name;
            mount
        });
        mounts.collect()
    };
    mounts::check(&of_images(32), None).unwrap();
    let many = mounts::check(&of_images(100), None)
        .unwrap_err()
        .to_string();
    assert!(many.contains("33 images are more than 32"), "{many}");
}

#[test]
fn a_part_of_an_image_may_be_named_from_its_root() {
    let path = |path: &str| {
        let paths = mounts::sub_paths(&[CriMount {
            image_sub_path: path.to_owned(),
            ..CriMount::default()
        }])
        .ok()?;
        Some(paths.concat())
    };
    for (given, meant) in [
        ("", ""),
        (".", ""),
        ("./", ""),
        ("models", "models"),
        ("./models", "models"),
        ("a/./b//c/", "a/b/c"),
        ("..a/b..", "..a/b.."),
    ] {
        assert_eq!(path(given).as_deref(), Some(meant), "{given}");
    }
    let long = "a/".repeat(2048);
    for refused in ["/models", "..", "./../x", "a/..", "a\0b", &long] {
        assert_eq!(path(refused), None, "{refused}");
    }
}
