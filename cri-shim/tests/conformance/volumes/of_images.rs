//! Images as volumes, and the volumes that an image names.

use super::*;

/// Returns path, image and sub-path of each mount in the status.
fn told_mounts(container: &Container) -> Vec<(String, String, String)> {
    let mounts = container.status().mounts.into_iter();
    let told = mounts.map(|mount| {
        let image_ref = mount.image.unwrap_or_default().image_ref;
        (mount.container_path, image_ref, mount.image_sub_path)
    });
    told.collect()
}

/// Returns PullImage's reference of an image.
fn image_ref(repository: &str) -> String {
    let pulled = ask_images!(pull_image(PullImageRequest {
        image: Some(image(repository)),
        ..Default::default()
    }));
    pulled.unwrap().image_ref
}

#[test]
fn guest_an_image_is_mounted_as_a_volume() {
    // Runtimes before Kubernetes 1.31 do not support such volumes.
    if !RUNTIME.is_vm {
        return;
    }
    let container = Pod::shared().start("image-volume", |config| {
        config.mounts = vec![Mount {
            container_path: "/model".to_owned(),
            readonly: true,
            image: Some(image("user")),
            ..Default::default()
        }];
    });
    assert_eq!(container.sh("cat /model/etc/plain"), "no program\n");
    container.sh("! touch /model/new 2>/dev/null");
    assert_eq!(container.sh("/model/bin/busybox echo runs"), "runs\n");
    assert_eq!(
        told_mounts(&container),
        [("/model".to_owned(), image_ref("user"), String::new())]
    );
    container.stop(0);
    container.remove();
    // The same image as the container's root.
    let same = Pod::shared().start("same-image", |config| {
        config.image = Some(image("user"));
        config.mounts = vec![Mount {
            container_path: "/model".to_owned(),
            readonly: true,
            image: Some(image("user")),
            ..Default::default()
        }];
    });
    assert_eq!(
        same.sh("cat /model/etc/plain /etc/plain"),
        "no program\nno program\n"
    );
    same.sh("! touch /model/new 2>/dev/null");
    same.stop(0);
    same.remove();
    let missing = Pod::shared().container_config("no-image", |config| {
        config.mounts = vec![Mount {
            container_path: "/model".to_owned(),
            readonly: true,
            image: Some(ImageSpec {
                image: "127.0.0.1:1/none:1".to_owned(),
                ..Default::default()
            }),
            ..Default::default()
        }];
    });
    let refused = Pod::shared().try_create(missing).err().unwrap();
    assert_eq!(refused.code(), Code::NotFound);
}

fn create_with_part(sub_path: &str) -> Result<Container, tonic::Status> {
    let config = Pod::shared().container_config("image-part", |config| {
        config.command = strings(&["cat", "/etc-of-it/plain"]);
        config.mounts = vec![Mount {
            container_path: "/etc-of-it".to_owned(),
            readonly: true,
            image: Some(image("user")),
            image_sub_path: sub_path.to_owned(),
            ..Default::default()
        }];
    });
    Pod::shared().try_create(config)
}

#[test]
fn guest_a_part_of_an_image_is_mounted_as_a_volume() {
    if !RUNTIME.is_vm {
        return;
    }
    let container = create_with_part("etc").unwrap();
    container.start();
    assert_eq!(container.ended().exit_code, 0);
    assert_eq!(stdout(&container.lines()), ["no program"]);
    let told = ("/etc-of-it".to_owned(), image_ref("user"), "etc".to_owned());
    assert_eq!(told_mounts(&container), [told]);
    container.remove();
    for bad in ["../etc", "/etc", "no/such"] {
        let refused = create_with_part(bad).err().unwrap();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        let message = refused.message();
        assert!(message.contains(bad), "{refused}");
        assert!(message.contains("ImageVolumeMountFailed"), "{refused}");
    }
}

#[test]
fn guest_a_read_only_root_is_one_and_its_volumes_are_not() {
    let dir = RUNTIME.directory("writable");
    let script = "touch /x 2>/dev/null && exit 1; \
                  for file in hosts hostname resolv.conf; do \
                      (echo x >> /etc/$file) 2>/dev/null && exit 2; \
                  done; \
                  touch /data/y && echo fine";
    let (status, lines) = Pod::shared().script(script, |config| {
        config.mounts = vec![mount(&dir, "/data")];
        config.command = strings(&["sh", "-c", script]);
        security(config).readonly_rootfs = true;
    });
    assert_eq!(status.exit_code, 0, "{lines:?}");
    assert_eq!(stdout(&lines), ["fine"]);
    assert!(dir.join("y").exists());
}

#[test]
fn guest_what_an_image_has_at_its_volumes_can_be_written_below_a_read_only_root() {
    let start = |mounts: Vec<Mount>| {
        Pod::shared().start("declared", |config| {
            config.image = Some(image("volumes"));
            security(config).readonly_rootfs = true;
            config.mounts = mounts;
        })
    };
    let container = start(Vec::new());
    let refused = container.try_exec(&["touch", "/srv/new"], 0).unwrap();
    assert_ne!(refused.code, 0);
    let script = "cd /data; stat -c '%n %f %u %g' . file sub sub/same link; \
                  stat -c %Y file link; test file -ef sub/same";
    let listed = container.sh(script);
    let listed: Vec<_> = listed.lines().collect();
    let expected = [
        ". 45e8 1000 1000",
        "file 81a0 1000 1000",
        "sub 41c0 1000 1000",
        "sub/same 81a0 1000 1000",
        "link a1ff 1000 1000",
        "1700000000",
        "1700000000",
    ];
    assert_eq!(listed, expected);
    let script = "echo more >>/data/file; cat /data/sub/same; ls /srv/made/here; \
                  touch /srv/made/here/new; stat -c '%a %u' /srv/made/here";
    assert_eq!(container.sh(script), "from the image\nmore\n755 0\n");
    container.stop(0);
    container.remove();

    // The next container starts with the image's files, and its own mounts take precedence.
    let dir = RUNTIME.directory("own-volume");
    let container = start(vec![mount(&dir, "/srv/made/here")]);
    container.sh("touch /srv/made/here/own; test ! -e /srv/made/here/new");
    assert_eq!(container.sh("cat /data/file"), "from the image\n");
    assert!(dir.join("own").exists());
    container.stop(0);
    container.remove();
    if RUNTIME.is_vm {
        let left = fs::read_dir(RUNTIME.root().join("volumes")).unwrap();
        assert_eq!(left.count(), 0);
    }
}
