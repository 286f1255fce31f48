//! Launches of programs that are not podvisor.

use super::*;
use crate::sandbox::IoLimit;

#[tokio::test]
async fn last_words_are_the_end_of_the_log_and_nothing_that_a_terminal_acts_on() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join(LOG);
    // As large as a hostile process can make it: mostly a hole.
    let file = File::create(&log).unwrap();
    file.set_len(1 << 40).unwrap();
    let mut file = OpenOptions::new().append(true).open(&log).unwrap();
    io::Write::write_all(&mut file, b"\nwhy \x1b[2Jit ended\n").unwrap();
    let launched = Launched {
        child: None,
        cgroup: None,
    };
    assert_eq!(last_words(launched, &log).await, "why  [2Jit ended");
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
    let (header, _files) = prepare(config, None).unwrap();
    let (_ours, theirs) = StdUnixStream::pair().unwrap();
    let group = Some(Cgroup::unusable());
    let (mut launched, outside) = spawn(&program, &header, theirs, group).unwrap();
    assert!(launched.cgroup.is_none());
    let cause = causes(&outside.unwrap());
    assert!(cause.contains("cgroup.procs: No such file"), "{cause}");
    launched.ended().await;
}

/// Whether a template is kept when a process that was to clone it does this.
async fn keeps_template(what: &str) -> bool {
    let dir = tempfile::tempdir().unwrap();
    let templates = dir.path().join("templates");
    let (program, config) = program(dir.path(), what);
    let config = LaunchConfig {
        templates: Some(templates.clone()),
        ..config
    };
    let shape = Shape::of(&config).unwrap();
    shape.pretend(&program, &templates);
    let launching = Launching::begin_program(&program, config).await.unwrap();
    assert!(launching.has_template);
    launching.finish(GuestNetwork::default()).await.unwrap_err();
    shape.find(&program, &templates).is_some()
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
async fn a_template_is_kept_when_its_clone_answers_and_refuses_a_pod() {
    assert!(keeps_template(&answers(&failed())).await);
}

#[tokio::test]
async fn a_template_is_removed_when_no_guest_comes_of_it() {
    let failed = LaunchReply {
        blames_template: true,
        ..failed()
    };
    assert!(!keeps_template(&answers(&failed)).await);
}

#[tokio::test]
async fn a_template_is_removed_when_its_clones_process_crashes_and_kept_when_it_is_killed() {
    assert!(!keeps_template("kill -SEGV $$").await);
    assert!(keeps_template("kill -KILL $$").await);
    assert!(keeps_template("exit 1").await);
}
