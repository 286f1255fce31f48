//! What lists, descriptions and statistics tell.

use super::*;

/// Returns the container's state in `inspect`, and its line of `ps --json`.
fn described(root: &Root, name: &str) -> (Value, Value) {
    let json = |arguments: &[&str]| -> Value {
        let ran = root.output(arguments);
        serde_json::from_str(&ran.stdout).unwrap_or_else(|_| panic!("{ran:?}"))
    };
    let state = json(&["inspect", name])[0]["State"].clone();
    let filter = format!("name=^{name}$");
    let listed = json(&["ps", "-a", "--json", "-f", &filter])[0].clone();
    (state, listed)
}

#[test]
fn a_container_that_has_ended_still_tells_when_it_started() {
    let root = Root::default();
    ended(&root, "exited", 1, 2000);
    let dead = ended(&root, "dead", 2, 2000);
    let never = ended(&root, "never", 3, 2000);
    container(&root, "unknown", 4);
    let change = |dir: &Path, started: u64, exit: Value| {
        let path = dir.join("exit.json");
        let text = fs::read_to_string(&path).unwrap();
        let mut record: Value = serde_json::from_str(&text).unwrap();
        record["exit"] = exit;
        record["containers"][0]["started_at_ns"] = json!(started * 1_000_000_000);
        record["containers"][0]["exit"]["code"] = json!(137);
        fs::write(path, record.to_string()).unwrap();
    };
    change(&dead, 1000, json!({"Failed": "x"}));
    change(&never, 0, json!("PoweredOff"));
    for (name, status, started) in [
        ("exited", "exited", json!("1970-01-01T00:00:00Z")),
        ("dead", "dead", json!("1970-01-01T00:16:40Z")),
        ("never", "exited", Value::Null),
        ("unknown", "dead", Value::Null),
    ] {
        let (state, listed) = described(&root, name);
        assert_eq!(
            (&state["Status"], &listed["State"]),
            (&json!(status), &json!(status))
        );
        assert_eq!(state["StartedAt"], started, "{name}");
        assert_eq!(listed["StartedAt"], started, "{name}");
    }
}

#[test]
fn the_image_and_the_stop_signal_of_a_container_are_named_as_docker_names_them() {
    let root = Root::default();
    ended(&root, "web", 1, 1000);
    let inspected = root.output(&["inspect", "web"]);
    let inspected: Value = serde_json::from_str(&inspected.stdout).unwrap();
    let config = &inspected[0]["Config"];
    assert_eq!(
        (&config["Image"], &config["StopSignal"]),
        (&json!("box"), &json!("SIGTERM"))
    );
}

#[test]
fn the_exit_code_of_what_has_not_ended_is_0_as_dockers() {
    let root = Root::default();
    let dir = container(&root, "up", 1);
    let _machine = StandIn::in_dir(&dir, &[&*"01".repeat(32)]);
    let (state, listed) = described(&root, "up");
    assert_eq!(
        (&state["Running"], &state["ExitCode"], &listed["ExitCode"]),
        (&json!(true), &json!(0), &json!(0))
    );
    let dir = container(&root, "new", 2);
    let claim = fs::File::open(&dir).unwrap();
    flock(&claim, FlockOperation::LockExclusive).unwrap();
    let (state, listed) = described(&root, "new");
    assert_eq!(
        (&state["Running"], &state["ExitCode"], &listed["ExitCode"]),
        (&json!(false), &json!(0), &json!(0))
    );
}

#[test]
fn metrics_and_logs_are_for_machines_too() {
    let root = Root::default();
    ended(&root, "old", 1, 1000);
    let first = "# HELP podvisor_containers Containers by state\n\
                 # TYPE podvisor_containers gauge\n\
                 podvisor_containers{state=\"exited\"} 1\n";
    let ran = root.output(&["metrics"]);
    assert!(ran.stdout.starts_with(first), "{ran:?}");
    let flags = ["--log-level", "debug", "--log-format", "json"];
    let run = [&["run"], &flags[..], &["--pull", "never", "none"]].concat();
    let ran = root.output(&run);
    assert_eq!(ran.code, Some(125), "{ran:?}");
    let first: Value = serde_json::from_str(ran.stderr.lines().next().unwrap()).unwrap();
    assert_eq!(
        (&first["level"], &first["message"]),
        (&json!("DEBUG"), &json!("begin"))
    );
    assert!(first["timestamp"].is_string(), "{first}");
}

#[test]
fn statistics_end_when_nobody_reads_them() {
    let root = Root::default();
    let mut stats = root.podvisor(&["stats", "--format", "json"]);
    let mut stats = stats.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(stats.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "[]");
    drop(lines);
    assert!(stats.wait().unwrap().success());
}

#[test]
fn the_ports_of_a_pod_are_those_of_its_containers() {
    let root = Root::default();
    let pod = container(&root, "shop", 1);
    let port = json!({"hostIp": null, "hostPort": 8080, "guestPort": 80, "protocol": "tcp"});
    rewrite(&pod, &[("isPod", json!(true)), ("ports", json!([port]))]);
    let web = container(&root, "web", 2);
    rewrite(&web, &[("pod", json!("01".repeat(32)))]);
    let machine = StandIn::in_dir(&pod, &[&*"02".repeat(32)]);
    root.output(&["port", "web"])
        .printed("80/tcp -> 0.0.0.0:8080\n");
    root.output(&["port", "web", "80"])
        .printed("0.0.0.0:8080\n");
    root.output(&["port", "web", "81"])
        .refused(1, &["81/tcp", "not published", "podvisor pod create -p"]);
    let table = root.output(&["ps"]).stdout;
    assert!(table.contains("0.0.0.0:8080->80/tcp"), "{table}");
    let (_, listed) = described(&root, "web");
    assert_eq!(listed["Ports"][0]["host_port"], 8080);
    drop(machine);
    root.output(&["port", "web", "80"]).refused(1, &["is dead"]);
}

/// Returns the names in the output of `ps -a` with these filters.
fn shown(root: &Root, filters: &[&str]) -> Vec<String> {
    let filters = filters.iter().flat_map(|filter| ["--filter", filter]);
    let arguments: Vec<&str> = ["ps", "-a", "--json"].into_iter().chain(filters).collect();
    let ran = root.output(&arguments);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let list: Vec<Value> = serde_json::from_str(&ran.stdout).unwrap();
    let name = |one: &Value| one["Names"][0].as_str().unwrap().to_owned();
    let mut names: Vec<String> = list.iter().map(name).collect();
    names.sort();
    names
}

#[test]
fn filters_of_one_kind_are_alternatives() {
    let root = Root::default();
    ended(&root, "web", 1, 1000);
    ended(&root, "db", 2, 1000);
    container(&root, "lost", 3);
    assert_eq!(shown(&root, &["name=web", "name=lost"]), ["lost", "web"]);
    assert_eq!(shown(&root, &["name=^we"]), ["web"]);
    assert!(shown(&root, &["name=^we$"]).is_empty());
    let refused = root.output(&["ps", "--filter", "name=web|db"]);
    assert_eq!(refused.code, Some(2), "{refused:?}");
    let filters = ["name=web", "name=lost", "status=exited"];
    assert_eq!(shown(&root, &filters), ["web"]);
    let both = ["status=exited", "status=dead"];
    assert_eq!(shown(&root, &both), ["db", "lost", "web"]);
    let ran = root.output(&["ps", "--filter", "status=runing"]);
    assert_eq!(ran.code, Some(2), "{ran:?}");
    assert!(ran.stderr.contains("running, paused"), "{ran:?}");
}

#[test]
fn the_containers_that_were_created_last_are_shown_though_they_have_ended() {
    let root = Root::default();
    for (name, number) in [("first", 1), ("second", 2), ("third", 3)] {
        ended(&root, name, number, 1000);
    }
    let names = |flags: &[&str]| {
        let ran = root.output(&[&["ps", "--json"], flags].concat());
        let list: Vec<Value> = serde_json::from_str(&ran.stdout).unwrap();
        let names = list.iter().map(|one| one["Names"][0].as_str().unwrap());
        names.collect::<Vec<_>>().join(" ")
    };
    assert_eq!(names(&[]), "");
    assert_eq!(names(&["-l"]), "third");
    assert_eq!(names(&["-n", "2"]), "third second");
    assert_eq!(names(&["--last", "2", "--filter", "name=first"]), "first");
    let sizes = root.output(&["ps", "-s"]);
    sizes.refused(2, &["no flag `-s`", "--host-memory"]);
    let copied = root.output(&["cp", "-a", "/etc/hosts", "third:/"]);
    copied.refused(2, &["no flag `-a`", "tar"]);
}

#[test]
fn a_container_that_does_not_answer_is_left_out_of_the_statistics() {
    let root = Root::default();
    let _mute = Mute::in_dir(&container(&root, "stuck", 1));
    let ran = root.output(&["stats", "--no-stream", "--format", "json"]);
    ran.refused(0, &["container stuck", "left out"]);
    assert_eq!(ran.stdout, "[]\n");
}
