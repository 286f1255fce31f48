//! What programs do in volumes.

use super::*;

#[test]
fn guest_a_termination_message_reaches_the_host() {
    let message = RUNTIME.directory("termination").join("message");
    fs::write(&message, "").unwrap();
    let (status, _) = Pod::shared().script("echo why it ended >/dev/termination-log", |config| {
        config.mounts = vec![mount(&message, "/dev/termination-log")];
    });
    assert_eq!(status.exit_code, 0);
    assert_eq!(fs::read_to_string(&message).unwrap(), "why it ended\n");
}

#[test]
fn guest_an_overlay_can_have_its_upper_directory_in_a_volume() {
    let volume = Mounted::with_attributes("overlay");
    let pod = Pod::run("overlay", |config| {
        let linux = config.linux.as_mut().unwrap();
        linux.security_context.get_or_insert_default().privileged = true;
    });
    let script = "cd /volume; mkdir -p lower/dir lower/old upper work /tmp/merged; \
                  echo 1 >lower/dir/file; echo 2 >lower/gone; \
                  merge() { mount -t overlay overlay /tmp/merged -o \
                  lowerdir=/volume/lower,upperdir=/volume/upper,workdir=/volume/work; }; \
                  merge && cd /tmp/merged && busybox rm -r dir gone && mkdir dir && \
                  echo 3 >dir/new && \
                  busybox mv dir/new old/moved && cd / && busybox umount /tmp/merged && merge && \
                  cd /tmp/merged && ls -d * */*";
    let (status, lines) = pod.script(script, |config| {
        config.mounts = vec![mount(&volume.0, "/volume")];
        security(config).privileged = true;
    });
    assert_eq!(status.exit_code, 0, "{lines:?}");
    assert_eq!(stdout(&lines), ["dir", "old", "old/moved"]);
    // A directory in place of a removed one shows none of its files.
    let upper = volume.0.join("upper/dir");
    let names = rustix::fs::listxattr(&upper, &mut vec![0; 4096][..]);
    assert!(names.unwrap() > 0);
}

#[test]
fn guest_a_program_in_a_volume_has_its_capabilities_until_it_is_written_to() {
    // Revision 2, effective, CAP_CHOWN permitted.
    const CHOWN: [u8; 20] = [1, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let attribute = match RUNTIME.is_vm {
        true => "user.podvisor.security.capability",
        false => "security.capability",
    };
    let volume = Mounted::with_attributes("capability");
    let program = volume.0.join("busybox");
    fs::copy("/bin/busybox", &program).unwrap();
    fs::write(volume.0.join("file"), "").unwrap();
    rustix::fs::setxattr(&program, attribute, &CHOWN, XattrFlags::empty()).unwrap();
    let start = |user: i64| {
        Pod::shared().start("capability", |config| {
            config.mounts = vec![mount(&volume.0, "/volume")];
            security(config).run_as_user = Some(Int64Value { value: user });
        })
    };
    let (root, user) = (start(0), start(1000));
    user.sh("/volume/busybox chown 1000 /volume/file");
    user.sh("/volume/busybox chown 2000 /volume/file");
    root.sh("echo >>/volume/busybox");
    let refused = user.try_exec(&["/volume/busybox", "chown", "0", "/volume/file"], 0);
    assert_ne!(refused.unwrap().code, 0);
    assert_eq!(fs::metadata(volume.0.join("file")).unwrap().uid(), 2000);
    let left = rustix::fs::getxattr(&program, attribute, &mut [0; 32][..]);
    assert_eq!(left, Err(rustix::io::Errno::NODATA));
    for container in [root, user] {
        container.stop(0);
        container.remove();
    }
}

#[test]
fn guest_a_working_directory_in_a_volume_is_made_and_is_roots() {
    let dir = RUNTIME.directory("work");
    let script = "pwd; busybox stat -c %u:%g:%a .; id -u";
    let (status, lines) = Pod::shared().script(script, |config| {
        config.mounts = vec![mount(&dir, "/data")];
        config.working_dir = "/data/for/it".to_owned();
        let context = security(config);
        context.run_as_user = Some(Int64Value { value: 1000 });
        context.readonly_rootfs = true;
    });
    assert_eq!(status.exit_code, 0, "{lines:?}");
    assert_eq!(stdout(&lines), ["/data/for/it", "0:0:755", "1000"]);
    assert!(dir.join("for/it").is_dir());
    if !RUNTIME.is_vm {
        return;
    }
    let read_only = Pod::shared().create("no-work", |config| {
        config.mounts = vec![Mount {
            readonly: true,
            ..mount(&dir, "/data")
        }];
        config.working_dir = "/data/other".to_owned();
    });
    let refused = ask!(start_container(StartContainerRequest {
        container_id: read_only.id.clone(),
    }))
    .unwrap_err();
    let message = refused.message();
    assert!(
        message.contains("/data/other") && message.contains("Read-only"),
        "{message}"
    );
    read_only.remove();
}
