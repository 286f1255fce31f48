//! Launches of programs that are not podvisor.

use std::fs::{self, File};

use super::*;
use crate::{IoLimit, NicConfig};

#[tokio::test]
async fn last_words_are_the_end_of_the_log_and_nothing_that_a_terminal_acts_on() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join(LOG);
    // As large as a hostile process can make it: mostly a hole.
    let file = File::create(&log).unwrap();
    file.set_len(1 << 40).unwrap();
    let mut file = OpenOptions::new().append(true).open(&log).unwrap();
    io::Write::write_all(&mut file, b"\nwhy \x1b[2Jit ended\n").unwrap();
    let mut launched = Launched {
        child: None,
        cgroup: None,
    };
    assert_eq!(last_words(&mut launched, &log).await, "why  [2Jit ended");
    assert!(printable(&"x".repeat(5000), MAX_STDERR_TAIL).len() == MAX_STDERR_TAIL);
}

/// A program that does this, and what it is launched with, both in `dir`.
fn program(dir: &Path, what: &str) -> (PathBuf, LaunchConfig) {
    let path = |name| dir.join(name);
    for file in ["kernel", "initramfs"] {
        fs::write(path(file), "").unwrap();
    }
    let program = path("program");
    // Written by another process: a descriptor of this one's would keep it from being executed.
    let script = format!("#!/bin/sh\n/usr/bin/head -c 1 > /dev/null\n{what}\n");
    let written = std::process::Command::new("/bin/sh")
        .args(["-c", "printf %s \"$1\" > \"$0\"; chmod +x \"$0\""])
        .args([program.as_os_str(), script.as_ref()])
        .status();
    assert!(written.unwrap().success());
    let config = LaunchConfig {
        jail: JailMode::Disabled,
        cgroup_parent: None,
        ..LaunchConfig::new("test", dir, path("kernel"), path("initramfs"))
    };
    (program, config)
}

#[tokio::test]
async fn of_a_process_that_was_killed_the_likely_reasons_are_said() {
    let dir = tempfile::tempdir().unwrap();
    for (what, said) in [
        ("kill -9 $$", "its pod was removed"),
        ("exit 3", "it said nothing"),
    ] {
        let (program, config) = program(dir.path(), what);
        let launching = Launching::begin_program(&program, config).await.unwrap();
        let error = launching.finish(GuestNetwork::default()).await.unwrap_err();
        let error = causes(&error);
        assert!(error.contains(said), "{error}");
    }
}

#[tokio::test]
async fn limits_of_io_take_a_group_and_its_absence_has_a_cause() {
    let dir = tempfile::tempdir().unwrap();
    let (program, mut config) = program(dir.path(), "exec /bin/cat > /dev/null");
    config.io_limits = vec![IoLimit::default()];
    let refused = Launching::begin_program(&program, config).await;
    assert!(
        matches!(refused, Err(SandboxError::IoLimit(IoLimitError::NoGroup))),
        "{refused:?}"
    );
    let (program, config) = self::program(dir.path(), "exec /bin/cat > /dev/null");
    let header = Prepared::new(config).unwrap().header;
    let (_ours, theirs) = StdUnixStream::pair().unwrap();
    let group = Some(Cgroup::unusable());
    let (mut launched, outside) = spawn(&program, &header, theirs, group).unwrap();
    assert!(launched.cgroup.is_none());
    let cause = causes(&outside.unwrap());
    assert!(cause.contains("cgroup.procs: No such file"), "{cause}");
    launched.ended().await;
}

/// How a launch with a template ended.
struct Attempts {
    dir: tempfile::TempDir,
    error: String,
    is_template_kept: bool,
}

impl Attempts {
    /// Launches a process that does `first`, and fails with `second` if it is launched again.
    async fn of(first: &str, nic: Option<NicConfig>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let templates = dir.path().join("templates");
        let path = |name: &str| {
            dir.path()
                .join(name)
                .into_os_string()
                .into_string()
                .unwrap()
        };
        let second = answers(&LaunchReply {
            failed: Some("second".to_owned()),
            ..LaunchReply::default()
        });
        let what = format!(
            "if ! [ -e {pid} ]; then echo $$ > {pid}; echo old > {record}; {first}; exit 1; fi
            read pid < {pid}; kill -0 $pid && : > {overlap}
            /bin/dd bs=64k count=1 of={header} 2> /dev/null
            {second}",
            pid = path("pid"),
            record = path("exit.json"),
            overlap = path("overlap"),
            header = path("header"),
        );
        let (program, config) = program(dir.path(), &what);
        let config = LaunchConfig {
            templates: Some(templates.clone()),
            nics: nic.into_iter().collect(),
            ..config
        };
        let shape = Shape::of(&config).unwrap();
        shape.pretend(&program, &templates);
        let launching = Launching::begin_program(&program, config).await.unwrap();
        assert!(launching.cold.is_some());
        let error = launching.finish(GuestNetwork::default()).await.unwrap_err();
        Self {
            error: causes(&error),
            is_template_kept: shape.find(&program, &templates).is_some(),
            dir,
        }
    }

    fn has_second(&self) -> bool {
        assert_eq!(
            self.dir.path().join("header").exists(),
            self.error.ends_with("second")
        );
        self.error.ends_with("second")
    }
}

/// A process that sends `reply`, and stays until it is killed.
fn answers(reply: &LaunchReply) -> String {
    let reply = serde_json::to_string(reply).unwrap();
    let [low, high] = u16::try_from(reply.len()).unwrap().to_le_bytes();
    format!("printf '\\{low:o}\\{high:o}\\0\\0%s' '{reply}' >&0; exec /bin/cat > /dev/null")
}

fn failed() -> LaunchReply {
    LaunchReply {
        failed: Some("why".to_owned()),
        ..LaunchReply::default()
    }
}

#[tokio::test]
async fn a_kernel_that_panics_at_the_start_is_reported_with_its_last_messages() {
    let dir = tempfile::tempdir().unwrap();
    let panic = r#"{"message": "no init", "log": ["clock\u001b", "Kernel panic - no init"]}"#;
    let reply = LaunchReply {
        panic: Some(serde_json::from_str(panic).unwrap()),
        ..failed()
    };
    let (program, config) = program(dir.path(), &answers(&reply));
    let launching = Launching::begin_program(&program, config).await.unwrap();
    let error = launching.finish(GuestNetwork::default()).await.unwrap_err();
    let text = error.to_string();
    assert!(text.ends_with("kernel panic: no init"), "{text}");
    let log = error.panic().unwrap().log();
    assert_eq!(log, ["clock ", "Kernel panic - no init"]);
}

#[tokio::test]
async fn a_killed_process_that_does_not_end_is_not_waited_for_without_end() {
    let mut stuck = std::process::Command::new("sleep")
        .arg("9999")
        .spawn()
        .unwrap();
    let pid = rustix::process::Pid::from_child(&stuck);
    // In place of the process: nothing ends it, as if it waited for a disk.
    let never = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
    let mut launched = Launched {
        child: Some(Child::new(pid, never).unwrap()),
        cgroup: None,
    };
    let limit = Duration::from_millis(10);
    assert_eq!(launched.ended_within(limit).await, None);
    assert!(launched.is_running());
    stuck.kill().unwrap();
    // Whoever dropped it may have been faster.
    drop(launched);
    let _ = stuck.wait();
}

fn without_guest() -> LaunchReply {
    LaunchReply {
        blames_template: true,
        ..failed()
    }
}

#[tokio::test]
async fn a_template_is_kept_when_its_clone_answers_and_refuses_a_pod() {
    let ran = Attempts::of(&answers(&failed()), None).await;
    assert!(ran.is_template_kept && !ran.has_second(), "{}", ran.error);
}

#[tokio::test]
async fn a_guest_boots_in_place_of_a_clone_without_one_of_which_nothing_is_left() {
    for first in [&answers(&without_guest()), "kill -SEGV $$"] {
        let ran = Attempts::of(first, None).await;
        assert!(!ran.is_template_kept && ran.has_second(), "{}", ran.error);
        let path = |name| ran.dir.path().join(name);
        assert!(
            !path("overlap").exists(),
            "the first process is gone by then"
        );
        assert_eq!(fs::read(path("exit.json")).unwrap(), b"");
        let header = fs::read(path("header")).unwrap();
        let header = String::from_utf8_lossy(&header);
        assert!(header.contains(r#""has_template":false"#), "{header}");
    }
}

#[tokio::test]
async fn a_clone_without_a_guest_has_ended_before_another_process_is_started() {
    // The second attempt has no program.
    let first = format!("/bin/rm $0; {}", answers(&without_guest()));
    let ran = Attempts::of(&first, None).await;
    assert!(ran.error.starts_with("cannot start"), "{}", ran.error);
    let pid = fs::read_to_string(ran.dir.path().join("pid")).unwrap();
    assert!(!Path::new("/proc").join(pid.trim()).exists());
}

#[tokio::test]
async fn no_guest_boots_in_place_of_a_process_that_somebody_killed() {
    for first in ["kill -KILL $$", "exit 1"] {
        let ran = Attempts::of(first, None).await;
        assert!(ran.is_template_kept && !ran.has_second(), "{}", ran.error);
    }
}

#[tokio::test]
async fn a_stream_of_frames_is_used_again_only_if_none_went_through() {
    let unused = LaunchReply {
        has_unused_cards: true,
        ..without_guest()
    };
    for (first, is_usable) in [
        (answers(&unused), true),
        (answers(&without_guest()), false),
        ("kill -SEGV $$".to_owned(), false),
    ] {
        let (ours, _peer) = StdUnixStream::pair().unwrap();
        let nic = NicConfig {
            kind: NicKind::Stream,
            fd: ours.into(),
            mac: [2, 0, 0, 0, 0, 1],
            mtu: 1500,
        };
        let ran = Attempts::of(&first, Some(nic)).await;
        assert!(!ran.is_template_kept);
        assert_eq!(ran.has_second(), is_usable, "{}", ran.error);
    }
}
