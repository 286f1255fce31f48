//! Disks that grow, come and go while their guest runs.

use super::*;

#[tokio::test]
async fn a_disk_grows_while_its_guest_runs_and_never_shrinks() {
    let pod = Pod::default();
    let sandbox = launch(config(&pod)).await.unwrap();
    let path = pod.path("data");
    let disk = |is_read_only, serial: &str| {
        let path = pod.path(serial);
        fs::write(&path, [1; 4096]).unwrap();
        let file = File::options().read(true).write(true).open(&path);
        MachineDisk {
            contents: DiskContents::Raw {
                file: file.unwrap(),
                is_read_only,
            },
            serial: serial.to_owned(),
            moves: DiskMove::Shared,
        }
    };
    let boot = BootMachine {
        disks: vec![disk(false, "data"), disk(true, "fixed")],
        ..machine(&pod, "vm")
    };
    sandbox.boot_machine(boot).await.unwrap();
    says(&pod, "vm", 1).await;
    sandbox.grow_disk("vm", "data", 1 << 20).await.unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), 1 << 20);
    for (serial, bytes, named) in [
        ("data", 4096, "not made smaller"),
        ("fixed", 2 << 20, "read-only"),
        ("other", 2 << 20, "\"other\""),
    ] {
        let error = sandbox.grow_disk("vm", serial, bytes).await.unwrap_err();
        assert_eq!(error.kind(), Some(RefusalKind::InvalidArgument), "{error}");
        assert!(error.to_string().contains(named), "{error}");
    }
    assert_eq!(fs::metadata(&path).unwrap().len(), 1 << 20);
    sandbox.shutdown(Duration::ZERO).await.unwrap();
}

/// A file of so many bytes that is a disk.
pub(crate) fn disk_file(pod: &Pod, name: &str) -> File {
    let path = pod.path(name);
    fs::write(&path, [1; 4096]).unwrap();
    open_disk(pod, name)
}

fn open_disk(pod: &Pod, name: &str) -> File {
    let opened = File::options().read(true).write(true).open(pod.path(name));
    opened.unwrap()
}

#[tokio::test]
async fn disks_come_and_go_while_the_guest_runs_and_stay_when_it_reboots() {
    let pod = Pod::default();
    let sandbox = launch(config(&pod)).await.unwrap();
    let boot = BootMachine {
        disks: vec![MachineDisk {
            contents: DiskContents::Raw {
                file: disk_file(&pod, "boot"),
                is_read_only: false,
            },
            serial: "boot".to_owned(),
            moves: DiskMove::Shared,
        }],
        ..machine(&pod, "vm")
    };
    sandbox.boot_machine(boot).await.unwrap();
    says(&pod, "vm", 1).await;
    let plug = |serial: &'static str, file: File| sandbox.plug_disk("vm", serial, file, false);
    plug("data", disk_file(&pod, "data")).await.unwrap();
    // Again, by who does not know that it was done.
    plug("data", open_disk(&pod, "data")).await.unwrap();
    for (serial, file, kind, named) in [
        ("data", "other", RefusalKind::AlreadyExists, "\"data\""),
        ("boot", "other", RefusalKind::AlreadyExists, "\"boot\""),
        ("more", "data", RefusalKind::WrongState, "in use"),
        ("more", "boot", RefusalKind::WrongState, "in use"),
        ("", "other", RefusalKind::InvalidArgument, "1 to 20"),
    ] {
        let opened = match file {
            "other" => disk_file(&pod, file),
            there => open_disk(&pod, there),
        };
        let error = plug(serial, opened).await.unwrap_err();
        assert_eq!(error.kind(), Some(kind), "{error}");
        assert!(error.to_string().contains(named), "{error}");
    }
    // A new machine has it, too.
    sandbox.reset_machine("vm").await.unwrap();
    says(&pod, "vm", 2).await;
    let error = plug("more", open_disk(&pod, "data")).await.unwrap_err();
    assert!(error.to_string().contains("in use"), "{error}");
    let save = SaveMachine {
        state: File::create(pod.path("state")).unwrap(),
        memory: File::create(pod.path("memory")).unwrap(),
        disks: Vec::new(),
        plugged: vec!["other".to_owned()],
        then: AfterSave::GoOn,
    };
    // Whoever continues it would not give it what it has.
    let error = sandbox.save_machine("vm", save).await.unwrap_err();
    let said = error.to_string();
    assert!(
        said.contains("\"data\"") && said.contains("\"other\""),
        "{said}"
    );
    // This guest reads no registers: what it does not release is taken away.
    let unplug = |serial: &'static str| sandbox.unplug_disk("vm", serial, Duration::from_millis(1));
    assert_eq!(unplug("data").await.unwrap(), Unplugged::Forced);
    assert_eq!(unplug("data").await.unwrap(), Unplugged::Released);
    let error = unplug("boot").await.unwrap_err();
    assert_eq!(error.kind(), Some(RefusalKind::InvalidArgument), "{error}");
    // Nobody has it any more.
    plug("more", open_disk(&pod, "data")).await.unwrap();
    sandbox.pause().await.unwrap();
    let error = plug("last", disk_file(&pod, "last")).await.unwrap_err();
    assert_eq!(error.kind(), Some(RefusalKind::WrongState), "{error}");
    let error = unplug("more").await.unwrap_err();
    assert_eq!(error.kind(), Some(RefusalKind::WrongState), "{error}");
    sandbox.resume().await.unwrap();
    assert_eq!(unplug("more").await.unwrap(), Unplugged::Forced);
    sandbox.shutdown(Duration::ZERO).await.unwrap();
}

#[tokio::test]
async fn a_machine_without_a_free_slot_gets_no_disk() {
    let pod = Pod::default();
    let sandbox = launch(config(&pod)).await.unwrap();
    sandbox.boot_machine(machine(&pod, "vm")).await.unwrap();
    says(&pod, "vm", 1).await;
    let mut refused = None;
    for number in 0..31 {
        let serial = format!("disk{number}");
        let file = disk_file(&pod, &serial);
        if let Err(error) = sandbox.plug_disk("vm", &serial, file, false).await {
            refused = Some(error);
            break;
        }
    }
    let error = refused.unwrap();
    assert_eq!(
        error.kind(),
        Some(RefusalKind::ResourceExhausted),
        "{error}"
    );
    let limit = Duration::from_millis(1);
    sandbox.unplug_disk("vm", "disk3", limit).await.unwrap();
    let file = disk_file(&pod, "next");
    sandbox.plug_disk("vm", "next", file, true).await.unwrap();
    // All of them fit into the next machine.
    sandbox.reset_machine("vm").await.unwrap();
    says(&pod, "vm", 2).await;
    sandbox.shutdown(Duration::ZERO).await.unwrap();
}
