//! How containers and pods are stopped, killed and removed.

use super::*;

#[test]
fn a_pod_stops_all_its_containers_at_once_and_ends_whatever_comes_of_that() {
    let root = Root::default();
    let pod = container(&root, "shop", 1);
    rewrite(&pod, &[("isPod", json!(true))]);
    let ids = [2, 3].map(|number: u8| format!("{number:02x}").repeat(32));
    for (name, number) in [("web", 2), ("db", 3)] {
        let own = container(&root, name, number);
        rewrite(&own, &[("pod", json!("01".repeat(32)))]);
    }
    let mut machine = StandIn::in_dir(&pod, &[&*ids[0], &*ids[1]]);
    fs::write(machine.file("Stop"), "").unwrap();
    fs::write(machine.file("refuse-Stop"), "the guest does not answer").unwrap();
    let stop = root
        .podvisor(&["pod", "stop", "shop"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    until("the question to both", || machine.called("Stop") == 2);
    fs::remove_file(machine.file("Stop")).unwrap();
    Ran::of(stop).printed("shop\n");
    assert_eq!(machine.called("Shutdown"), 1);
    assert!(machine.child.wait().unwrap().success());
}

#[test]
fn a_run_that_is_interrupted_says_so_though_its_container_stays() {
    let host = Host::default();
    let pod = container(&host.root, "shop", 1);
    rewrite(&pod, &[("isPod", json!(true))]);
    let machine = StandIn::in_dir(&pod, &[]);
    fs::write(machine.file("Create"), "").unwrap();
    fs::write(machine.file("refuse-Delete"), "no such luck").unwrap();
    let mut run = host.root.podvisor(&["run", "--pod", "shop", "box", "true"]);
    let run = run.stderr(Stdio::piped()).spawn().unwrap();
    until("the container", || machine.called("Create") == 1);
    let pid = Pid::from_raw(run.id().try_into().unwrap()).unwrap();
    kill_process(pid, Signal::INT).unwrap();
    Ran::of(run).refused(130, &["no such luck"]);
}

#[test]
fn a_machine_that_does_not_answer_is_shown_and_killed_by_force_alone() {
    let root = Root::default();
    let dir = container(&root, "stuck", 0xab);
    let mut mute = Mute::in_dir(&dir);
    let pid = mute.child.id();
    let ps = root.output(&["ps", "--json"]);
    assert_eq!(ps.code, Some(0), "{ps:?}");
    let ps: Value = serde_json::from_str(&ps.stdout).unwrap();
    assert_eq!(
        (&ps[0]["State"], &ps[0]["Pid"]),
        (&json!("unresponsive"), &json!(pid))
    );
    let process = pid.to_string();
    for command in ["stop", "rm"] {
        root.output(&[command, "stuck"])
            .refused(1, &["does not answer", &process, "podvisor rm -f"]);
    }
    assert!(mute.child.try_wait().unwrap().is_none());
    root.output(&["rm", "-f", "stuck"]).printed("stuck\n");
    assert!(!mute.child.wait().unwrap().success());
    assert!(!dir.exists());
}

#[test]
fn a_run_ends_by_a_signal_while_it_clears_away() {
    let host = Host::default();
    let mut mute = Mute::in_dir(&container(&host.root, "stuck", 0xab));
    // Files that it accepts as a guest's: it ends before it boots from them.
    symlink("/bin/busybox", host.root.path().join("vmlinux")).unwrap();
    fs::write(host.root.path().join("initramfs.cpio"), "none").unwrap();
    let mut run = host.root.podvisor(&["run", "box", "true"]);
    let run = run
        .env("PODVISOR_GUEST_DIR", host.root.path())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    mute.says("connected");
    let pid = Pid::from_raw(run.id().try_into().unwrap()).unwrap();
    kill_process(pid, Signal::INT).unwrap();
    let ran = Ran::of(run);
    assert_eq!(ran.code, Some(130), "{ran:?}");
}

#[test]
fn a_stop_waits_for_who_starts_the_container() {
    let root = Root::default();
    let dir = container(&root, "starting", 0xcd);
    let claim = fs::File::open(&dir).unwrap();
    flock(&claim, FlockOperation::LockExclusive).unwrap();
    // While a guest boots, its machine's process does not answer.
    let booting = Mute::in_dir(&dir);
    let ps = root.output(&["ps", "--json"]);
    let ps: Value = serde_json::from_str(&ps.stdout).unwrap();
    assert_eq!(ps[0]["State"], "created");
    drop(booting);
    let mut stop = root.podvisor(&["stop", "starting"]);
    let mut stop = stop.stdout(Stdio::piped()).spawn().unwrap();
    while !waits_for_a_lock(stop.id()) {
        assert_eq!(stop.try_wait().unwrap(), None, "it did not wait");
    }
    flock(claim.as_fd(), FlockOperation::Unlock).unwrap();
    // Its starter created nothing.
    Ran::of(stop).printed("starting\n");
}

#[test]
fn removing_by_force_does_not_wait_for_the_guest_of_one_that_is_being_started() {
    let root = Root::default();
    let dir = container(&root, "starting", 0xcd);
    let claim = fs::File::open(&dir).unwrap();
    flock(&claim, FlockOperation::LockExclusive).unwrap();
    let mut booting = Mute::in_dir(&dir);
    let mut remove = root.podvisor(&["rm", "-f", "starting"]);
    let remove = remove.stdout(Stdio::piped()).spawn().unwrap();
    assert!(!booting.child.wait().unwrap().success());
    flock(claim.as_fd(), FlockOperation::Unlock).unwrap();
    Ran::of(remove).printed("starting\n");
    assert!(!dir.exists());
}

#[test]
fn commands_in_a_container_end_by_a_signal_while_its_machine_is_waited_for() {
    let root = Root::default();
    let mut mute = Mute::in_dir(&container(&root, "stuck", 1));
    for command in [
        ["exec", "stuck", "true"].as_slice(),
        &["attach", "stuck"],
        &["top", "stuck"],
    ] {
        let mut command = root.podvisor(command);
        let child = command.stderr(Stdio::piped()).spawn().unwrap();
        mute.says("connected");
        let pid = Pid::from_raw(child.id().try_into().unwrap()).unwrap();
        kill_process(pid, Signal::INT).unwrap();
        let ran = Ran::of(child);
        assert_eq!(ran.code, Some(130), "{ran:?}");
    }
}

#[test]
fn what_no_process_can_have_is_refused_before_anything_is_asked() {
    let root = Root::default();
    for (flag, value, words) in [
        ("-e", "=x", "without a name"),
        ("-e", "", "without a name"),
        ("-w", "srv", "not absolute"),
    ] {
        let ran = root.output(&["exec", flag, value, "nobody", "true"]);
        ran.refused(125, &[words]);
    }
}

#[test]
fn a_wrong_command_line_has_the_exit_code_of_its_command() {
    let root = Root::default();
    for (command, code) in [
        ("run", 125),
        ("exec", 125),
        ("debug", 125),
        ("attach", 125),
        ("ps", 2),
    ] {
        assert_eq!(
            root.output(&[command, "--nonsense"]).code,
            Some(code),
            "{command}"
        );
    }
    for command in [["exec", "nobody", "true"].as_slice(), &["attach", "nobody"]] {
        root.output(command)
            .refused(125, &["no container `nobody`"]);
    }
}

#[test]
fn dockers_flags_of_stop_and_rm_are_taken() {
    let root = Root::default();
    let dir = ended(&root, "old", 1, 1000);
    root.output(&["stop", "--timeout", "5", "old"])
        .printed("old\n");
    root.output(&["rm", "-v", "old"]).printed("old\n");
    assert!(!dir.exists());
}

#[test]
fn removing_by_force_what_is_not_there_is_no_failure() {
    let root = Root::default();
    let dir = ended(&root, "old", 1, 1000);
    root.output(&["rm", "-f", "nobody", "old"]).printed("old\n");
    assert!(!dir.exists());
    root.output(&["pod", "rm", "-f", "nobody"]).printed("");
    root.output(&["rm", "nobody"]).refused(1, &["no container"]);
    root.output(&["pod", "rm", "nobody"])
        .refused(1, &["no pod"]);
}
