//! Machines that are saved, and go on.

use super::*;

/// Files for a saved machine in the pod's directory.
pub(super) fn save(pod: &Pod, name: &str, then: AfterSave) -> (SaveMachine, PathBuf, PathBuf) {
    let (state, memory) = (
        pod.path(&format!("{name}-state")),
        pod.path(&format!("{name}-memory")),
    );
    let file = |path: &Path| {
        let mut options = File::options();
        let options = options.read(true).write(true).create_new(true);
        options.open(path).unwrap()
    };
    let save = SaveMachine {
        state: file(&state),
        memory: file(&memory),
        disks: Vec::new(),
        plugged: Vec::new(),
        then,
    };
    (save, state, memory)
}

pub(super) fn saved(state: &Path, memory: &Path, continues: ContinueAs) -> Option<SavedMachine> {
    let mut options = File::options();
    let options = options.read(true).write(true);
    Some(SavedMachine {
        state: options.open(state).unwrap(),
        memory: File::open(memory).unwrap(),
        continues,
    })
}

#[tokio::test]
async fn a_saved_machine_goes_on_in_another_sandbox_once_and_its_copies_as_often_as_wanted() {
    let (pod, next) = (Pod::default(), Pod::default());
    let sandbox = launch(config(&pod)).await.unwrap();
    let disk = pod.path("disk");
    fs::write(&disk, [7; 8192]).unwrap();
    let with_disk = |pod: &Pod| {
        let mut boot = machine(pod, "vm");
        let mut options = File::options();
        let file = options.read(true).write(true).open(&disk).unwrap();
        let contents = DiskContents::Raw {
            file,
            is_read_only: false,
        };
        let serial = "root".to_owned();
        boot.disks.push(MachineDisk {
            moves: DiskMove::default(),
            contents,
            serial,
        });
        // The loader of one that continues has written its line long ago.
        boot.loader_limit = Some(Duration::from_secs(1));
        boot
    };
    let mut boot = with_disk(&pod);
    boot.loader_limit = None;
    sandbox.boot_machine(boot).await.unwrap();
    says(&pod, "vm", 1).await;

    // It goes on beside its snapshot, which has a copy of its disk.
    let (mut files, state, memory) = save(&pod, "one", AfterSave::GoOn);
    let copy = pod.path("copy");
    files.disks = vec![File::create_new(&copy).unwrap().into()];
    sandbox.save_machine("vm", files).await.unwrap();
    assert!(fs::read(&copy).unwrap() == [7; 8192]);
    let mut typing = attach(&sandbox, "vm").await;
    typing.write_all(b"still alive\n").unwrap();
    let echoes = || pod.log("vm").contains("stdout F still alive\n");
    eventually("the guest's echo", echoes).await;
    let (mut files, _, _) = save(&pod, "more", AfterSave::GoOn);
    files.disks = (0..2)
        .map(|_| tempfile::tempfile().unwrap().into())
        .collect();
    let refused = sandbox.save_machine("vm", files).await.unwrap_err();
    assert!(refused.to_string().contains("2 files"), "{refused}");

    // A file that takes nothing: the machine goes on, and nothing counts.
    let (mut files, unwritten, _) = save(&pod, "two", AfterSave::End);
    files.memory = File::open(&memory).unwrap();
    let refused = sandbox.save_machine("vm", files).await.unwrap_err();
    assert!(refused.to_string().contains("memory"), "{refused}");
    assert_eq!(fs::metadata(&unwritten).unwrap().len(), 0);
    typing.write_all(b"alive, too\n").unwrap();
    let echoes = || pod.log("vm").contains("stdout F alive, too\n");
    eventually("the guest's second echo", echoes).await;

    let (files, last_state, last_memory) = save(&pod, "three", AfterSave::End);
    sandbox.save_machine("vm", files).await.unwrap();
    assert_eq!(sandbox.wait("vm", None).await.unwrap().code, 0);
    assert_eq!(info_of(&sandbox, "vm").await.message, None);
    sandbox.shutdown(Duration::ZERO).await.unwrap();
    assert_eq!(sandbox.ended().await, SandboxExit::PoweredOff);

    let sandbox = launch(config(&next)).await.unwrap();
    // One of another shape is refused, and the files are as they were.
    let mut other = with_disk(&next);
    other.vcpus = 2;
    other.max_vcpus = 3;
    other.saved = saved(&last_state, &last_memory, ContinueAs::Same);
    let refused = sandbox.boot_machine(other).await.unwrap_err();
    let said = refused.to_string();
    assert!(said.contains("1 CPUs") && said.contains("2 CPUs"), "{said}");
    let mut same = with_disk(&next);
    same.saved = saved(&last_state, &last_memory, ContinueAs::Same);
    sandbox.boot_machine(same).await.unwrap();
    let mut typing = attach(&sandbox, "vm").await;
    typing.write_all(b"hello\n").unwrap();
    eventually("the echo of a machine that goes on", || {
        next.log("vm").contains("stdout F hello\n")
    })
    .await;
    // It has not booted, and cannot go on from there a second time.
    assert!(!next.log("vm").contains("ready"));
    assert_eq!(fs::metadata(&last_state).unwrap().len(), 0);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(info_of(&sandbox, "vm").await.state, ContainerState::Running);
    // Its reboot is a boot.
    typing.write_all(b"r").unwrap();
    says(&next, "vm", 1).await;
    typing.write_all(b"p").unwrap();
    sandbox.wait("vm", None).await.unwrap();
    let mut again = machine(&next, "again");
    again.saved = saved(&last_state, &last_memory, ContinueAs::Same);
    let refused = sandbox.boot_machine(again).await.unwrap_err();
    assert!(refused.to_string().contains("state"), "{refused}");

    // Each keeps its disk until it is deleted.
    let mut before = "vm";
    for name in ["copy1", "copy2"] {
        sandbox.delete_container(before).await.unwrap();
        before = name;
        let mut boot = with_disk(&next);
        name.clone_into(&mut boot.id);
        boot.log = Some(next.open_log(name));
        boot.saved = saved(&state, &memory, ContinueAs::Copy);
        sandbox.boot_machine(boot).await.unwrap();
        let mut typing = attach(&sandbox, name).await;
        typing.write_all(b"hello\np").unwrap();
        assert_eq!(sandbox.wait(name, None).await.unwrap().code, 0);
        let log = next.log(name);
        assert!(
            log.contains("stdout F hello\n") && !log.contains("ready"),
            "{log}"
        );
    }
    sandbox.shutdown(Duration::ZERO).await.unwrap();
}

/// A disk of 4 KiB in the pod's directory.
fn plain_disk(pod: &Pod, name: &str, first: u8) -> PathBuf {
    let path = pod.path(name);
    fs::write(&path, [first; 4096]).unwrap();
    path
}

fn opened(path: &Path) -> File {
    File::options().read(true).write(true).open(path).unwrap()
}

fn raw(serial: &str, path: &Path) -> MachineDisk {
    MachineDisk {
        contents: DiskContents::Raw {
            file: opened(path),
            is_read_only: false,
        },
        serial: serial.to_owned(),
        moves: DiskMove::Shared,
    }
}

/// Those from before the guest's reboot and those from after it have different places.
#[tokio::test]
async fn a_saved_machine_has_its_plugged_disks_again() {
    let (pod, next) = (Pod::default(), Pod::default());
    let sandbox = launch(config(&pod)).await.unwrap();
    let [root, early, late] = ["root", "early", "late"].map(|name| plain_disk(&pod, name, 7));
    let boot = BootMachine {
        disks: vec![raw("root", &root)],
        plugged: vec![raw("early", &early)],
        ..machine(&pod, "vm")
    };
    sandbox.boot_machine(boot).await.unwrap();
    says(&pod, "vm", 1).await;
    let plugged = sandbox.plug_disk("vm", "late", opened(&late), false);
    plugged.await.unwrap();
    let names = |all: &[&str]| all.iter().map(|name| (*name).to_owned()).collect();
    let (mut files, state, memory) = save(&pod, "copy", AfterSave::GoOn);
    files.plugged = names(&["early", "late"]);
    let copies = ["root", "early", "late"].map(|name| pod.path(&format!("{name}-copy")));
    let made = copies
        .iter()
        .map(|path| File::create_new(path).unwrap().into());
    files.disks = made.collect();
    sandbox.save_machine("vm", files).await.unwrap();
    for copy in &copies {
        assert!(fs::read(copy).unwrap() == [7; 4096], "{}", copy.display());
    }
    let (mut files, last_state, last_memory) = save(&pod, "last", AfterSave::End);
    files.plugged = names(&["early", "late"]);
    sandbox.save_machine("vm", files).await.unwrap();
    assert_eq!(sandbox.wait("vm", None).await.unwrap().code, 0);
    sandbox.shutdown(Duration::ZERO).await.unwrap();

    let sandbox = launch(config(&next)).await.unwrap();
    let with = |name: &str, disks: [&Path; 3], plugged: usize| {
        let [root, early, late] = disks;
        let mut boot = machine(&next, name);
        boot.disks = vec![raw("root", root)];
        boot.plugged = vec![raw("early", early), raw("late", late)];
        boot.plugged.truncate(plugged);
        boot
    };
    let own = [root.as_path(), early.as_path(), late.as_path()];
    // With one less it does not begin, and is saved as before.
    let mut less = with("vm", own, 1);
    less.saved = saved(&last_state, &last_memory, ContinueAs::Same);
    let refused = sandbox.boot_machine(less).await.unwrap_err();
    assert!(refused.to_string().contains("blk2"), "{refused}");
    assert_ne!(fs::metadata(&last_state).unwrap().len(), 0);
    let mut same = with("vm", own, 2);
    same.saved = saved(&last_state, &last_memory, ContinueAs::Same);
    sandbox.boot_machine(same).await.unwrap();
    let mut typing = attach(&sandbox, "vm").await;
    typing.write_all(b"hello\n").unwrap();
    let echoes = || next.log("vm").contains("stdout F hello\n");
    eventually("the echo of a machine that goes on", echoes).await;
    assert!(!next.log("vm").contains("ready"));
    // They are what they were: they grow, go, and stay when the guest reboots.
    sandbox.grow_disk("vm", "late", 1 << 20).await.unwrap();
    assert_eq!(fs::metadata(&late).unwrap().len(), 1 << 20);
    let unplug = |serial: &'static str| sandbox.unplug_disk("vm", serial, Duration::from_millis(1));
    assert_eq!(unplug("early").await.unwrap(), Unplugged::Forced);
    sandbox.reset_machine("vm").await.unwrap();
    says(&next, "vm", 1).await;
    assert_eq!(unplug("early").await.unwrap(), Unplugged::Released);
    assert_eq!(unplug("late").await.unwrap(), Unplugged::Forced);
    typing.write_all(b"p").unwrap();
    sandbox.wait("vm", None).await.unwrap();
    sandbox.delete_container("vm").await.unwrap();

    let copies = copies.each_ref().map(PathBuf::as_path);
    let mut copy = with("copy", copies, 2);
    copy.saved = saved(&state, &memory, ContinueAs::Copy);
    sandbox.boot_machine(copy).await.unwrap();
    let mut typing = attach(&sandbox, "copy").await;
    typing.write_all(b"hello\np").unwrap();
    assert_eq!(sandbox.wait("copy", None).await.unwrap().code, 0);
    sandbox.shutdown(Duration::ZERO).await.unwrap();
}
