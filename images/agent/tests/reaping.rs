//! The reaper reaps every child of its process, so it has a process of its own here.

use std::process::Command;

use podvisor_agent::reaper::{self, ended};
use podvisor_agent_protocol::ExitStatus;
use rustix::process::Pid;

fn shell(script: &str) -> Pid {
    Pid::from_child(&Command::new("sh").args(["-c", script]).spawn().unwrap())
}

#[tokio::test]
async fn every_child_is_reaped_once_and_its_status_goes_to_who_asked() {
    let (reaper, reaping) = reaper::start().unwrap();
    let reaping = tokio::spawn(reaping);
    let launch = reaper.launch();

    // Claimed while it runs.
    let mut running = launch.claim(shell("read x < /dev/null; exit 42")).unwrap();
    let exit = ended(&mut running.exit).await.unwrap();
    assert_eq!(exit.status, ExitStatus::Code(42));
    assert!(exit.at_ns > 0);

    let mut killed = launch.claim(shell("kill -9 $$")).unwrap();
    let exit = ended(&mut killed.exit).await.unwrap();
    assert_eq!(exit.status, ExitStatus::Signal(9));
    assert_eq!(exit.status.shell_code(), 137);

    // Reaped before it is claimed: a later child's end shows that the earlier was seen.
    let early = shell("exit 7");
    let pidfd = rustix::process::pidfd_open(early, rustix::process::PidfdFlags::empty()).unwrap();
    let gone = || {
        rustix::process::pidfd_send_signal(&pidfd, rustix::process::Signal::CONT)
            == Err(rustix::io::Errno::SRCH)
    };
    while !gone() {
        let mut other = launch.claim(shell("true")).unwrap();
        ended(&mut other.exit).await.unwrap();
    }
    let mut early = launch.claim(early).unwrap();
    assert!(early.pidfd.is_none());
    assert_eq!(
        ended(&mut early.exit).await.unwrap().status,
        ExitStatus::Code(7)
    );

    // Many at once, behind few signals.
    let mut children: Vec<_> = (0..50)
        .map(|n| (n, launch.claim(shell(&format!("exit {n}"))).unwrap()))
        .collect();
    for (n, child) in &mut children {
        assert_eq!(
            ended(&mut child.exit).await.unwrap().status,
            ExitStatus::Code(*n)
        );
    }

    // Nobody's child cannot be claimed.
    assert!(launch.claim(Pid::from_raw(i32::MAX).unwrap()).is_err());
    assert!(!reaping.is_finished());
}
