//! Logs of containers.

use super::*;

#[test]
fn logs_of_a_container_that_is_being_started_are_followed() {
    let root = Root::default();
    let dir = container(&root, "one", 1);
    let claim = fs::File::open(&dir).unwrap();
    flock(&claim, FlockOperation::LockExclusive).unwrap();
    let mut logs = root.podvisor(&["logs", "-f", "one"]);
    let mut logs = logs.stdout(Stdio::piped()).spawn().unwrap();
    while !waits_for_a_lock(logs.id()) {
        assert_eq!(logs.try_wait().unwrap(), None, "it did not wait");
    }
    let line = "2026-01-31T12:00:00.000000000Z stdout F a\n";
    fs::write(dir.join("container.log"), line).unwrap();
    ended(&root, "one", 1, 1000);
    flock(claim.as_fd(), FlockOperation::Unlock).unwrap();
    Ran::of(logs).printed("a\n");
}

#[test]
fn logs_are_followed_until_the_time_that_was_told() {
    let root = Root::default();
    let dir = container(&root, "one", 1);
    let line = "2026-01-31T12:00:00.000000000Z stdout F a\n";
    fs::write(dir.join("container.log"), line).unwrap();
    let machine = StandIn::in_dir(&dir, &[&*"01".repeat(32)]);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let until = (now.as_secs() + 2).to_string();
    root.output(&["logs", "-f", "--until", &until, "one"])
        .printed("a\n");
    drop(machine);
    let _mute = Mute::in_dir(&container(&root, "stuck", 2));
    root.output(&["logs", "-f", "stuck"])
        .refused(1, &["does not answer", "podvisor rm -f"]);
}

#[test]
fn logs_are_of_one_container_or_of_several_by_their_names() {
    let root = Root::default();
    for (name, number) in [("one", 1), ("two", 2)] {
        let log = ended(&root, name, number, 1000).join("container.log");
        let line = |text| format!("2026-01-31T12:00:00.000000000Z stdout F {text}\n");
        fs::write(log, line("a") + &line("b")).unwrap();
    }
    root.output(&["logs", "--tail", "all", "one"])
        .printed("a\nb\n");
    root.output(&["logs", "-n", "1", "one"]).printed("b\n");
    root.output(&["logs", "-f", "-n", "1", "one", "two"])
        .printed("one b\ntwo b\n");
    for all in ["--tail=-1", "-n-1"] {
        root.output(&["logs", all, "one"]).printed("a\nb\n");
    }
    root.output(&["logs", "--tail", "-1", "one"])
        .printed("a\nb\n");
    let ran = root.output(&["logs", "--tail", "some", "one"]);
    assert_eq!(ran.code, Some(2), "{ran:?}");
}

#[test]
fn a_long_line_of_a_log_is_one_line_to_tail_timestamps_and_names() {
    let root = Root::default();
    let time = "2026-01-31T12:00:00.000000000Z";
    let record = |stream: &str, tag: &str, text: &str| format!("{time} {stream} {tag} {text}\n");
    let [a, b] = ["a", "b"].map(|text| text.repeat(16 << 10));
    for (name, number) in [("one", 1), ("two", 2)] {
        let log = ended(&root, name, number, 1000).join("container.log");
        let lines = [
            record("stdout", "F", "first"),
            record("stdout", "P", &a),
            record("stderr", "F", "error"),
            record("stdout", "P", &b),
            record("stdout", "F", "end"),
            record("stdout", "P", "unfinished"),
        ];
        fs::write(log, lines.concat()).unwrap();
    }
    let ran = root.output(&["logs", "-n", "3", "one"]);
    ran.printed(&format!("{a}{b}end\nunfinished"));
    assert_eq!(ran.stderr, "error\n");
    root.output(&["logs", "-t", "-n", "1", "one"])
        .printed(&format!("{time} unfinished\n"));
    for flags in ["-tn3", "-ftn3"] {
        let ran = root.output(&["logs", flags, "one", "two"]);
        let lines = |name: &str| format!("{name} {time} {a}{b}end\n{name} {time} unfinished\n");
        ran.printed(&(lines("one") + &lines("two")));
        let error = |name: &str| format!("{name} {time} error\n");
        assert_eq!(ran.stderr, error("one") + &error("two"), "{flags}");
    }
}
