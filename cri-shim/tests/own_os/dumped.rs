//! Machines whose memory is written for debuggers.

use super::*;

fn dump(name: &str, file: &File) -> DumpMachine {
    DumpMachine {
        name: name.to_owned(),
        file: file.try_clone().unwrap(),
        limit: Duration::from_secs(60),
    }
}

async fn dumped(sandbox: &SandboxClient, name: &str, file: &File) -> DumpInfo {
    sandbox.dump_machine("vm", dump(name, file)).await.unwrap();
    let info = sandbox.dump_ended("vm").await.unwrap().unwrap();
    assert_eq!(info.name, name);
    info
}

#[tokio::test]
async fn a_dump_is_written_while_the_guest_stands_still_and_the_guest_goes_on() {
    let pod = Pod::default();
    let sandbox = launch(config(&pod)).await.unwrap();
    sandbox.boot_machine(machine(&pod, "vm")).await.unwrap();
    says(&pod, "vm", 1).await;
    assert_eq!(sandbox.dump("vm").await.unwrap(), None);
    let path = pod.path("one");
    let file = File::create_new(&path).unwrap();
    let info = dumped(&sandbox, "one", &file).await;
    assert_eq!((info.state, info.reason.as_str()), (DumpState::Done, ""));
    assert!(info.total > 0 && info.done == info.total, "{info:?}");
    assert_eq!(sandbox.dump("vm").await.unwrap(), Some(info));
    let mut readelf = Command::new("readelf");
    let said = readelf
        .args(["-W", "-h", "-n"])
        .arg(&path)
        .output()
        .unwrap();
    let said = String::from_utf8(said.stdout).unwrap();
    assert!(said.contains("CORE (Core file)"), "{said}");
    assert_eq!(said.matches("NT_PRSTATUS").count(), 1, "{said}");
    let mut typing = attach(&sandbox, "vm").await;
    typing.write_all(b"still alive\n").unwrap();
    let echoes = || pod.log("vm").contains("stdout F still alive\n");
    eventually("the guest's echo", echoes).await;

    // A file that has something: it stays, and the guest goes on.
    let len = file.metadata().unwrap().len();
    let info = dumped(&sandbox, "two", &file).await;
    assert_eq!(info.state, DumpState::Failed);
    assert!(info.reason.contains("empty regular file"), "{info:?}");
    assert_eq!(file.metadata().unwrap().len(), len);
    typing.write_all(b"alive, too\n").unwrap();
    let echoes = || pod.log("vm").contains("stdout F alive, too\n");
    eventually("the guest's second echo", echoes).await;

    // One that stood still before stands still after it.
    sandbox.pause().await.unwrap();
    let file = tempfile::tempfile().unwrap();
    let info = dumped(&sandbox, "three", &file).await;
    assert_eq!(info.state, DumpState::Done, "{info:?}");
    assert!(sandbox.is_paused().await.unwrap());
    sandbox.resume().await.unwrap();

    let mut nameless = dump("", &file);
    let refused = sandbox.dump_machine("vm", nameless).await.unwrap_err();
    assert_eq!(refused.kind(), Some(RefusalKind::InvalidArgument));
    nameless = dump("four", &file);
    typing.write_all(b"p").unwrap();
    assert_eq!(sandbox.wait("vm", None).await.unwrap().code, 0);
    let refused = sandbox.dump_machine("vm", nameless).await.unwrap_err();
    assert_eq!(refused.kind(), Some(RefusalKind::WrongState));
    sandbox.shutdown(Duration::ZERO).await.unwrap();
}

#[tokio::test]
async fn a_dump_that_takes_too_long_or_whose_machine_is_killed_has_failed() {
    let pod = Pod::default();
    let sandbox = launch(config(&pod)).await.unwrap();
    sandbox.boot_machine(machine(&pod, "vm")).await.unwrap();
    says(&pod, "vm", 1).await;
    let file = tempfile::tempfile().unwrap();
    let hurried = DumpMachine {
        limit: Duration::ZERO,
        ..dump("hurried", &file)
    };
    sandbox.dump_machine("vm", hurried).await.unwrap();
    let info = sandbox.dump_ended("vm").await.unwrap().unwrap();
    assert_eq!(info.state, DumpState::Failed, "{info:?}");
    assert!(info.reason.contains("within 0 s"), "{info:?}");
    let mut typing = attach(&sandbox, "vm").await;
    typing.write_all(b"still alive\n").unwrap();
    let echoes = || pod.log("vm").contains("stdout F still alive\n");
    eventually("the guest's echo", echoes).await;
    sandbox.shutdown(Duration::ZERO).await.unwrap();
}
