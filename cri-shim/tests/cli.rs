//! The command line without guests: its output, its errors and their texts, and that an error
//! leaves nothing behind.

mod support;

use std::fs;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Stdio};

use rustix::event::{PollFd, PollFlags, poll};
use serde_json::{Value, json};
use support::guest_files::{elf, run};
use support::image::Image;
use support::registry::Registry;
use support::{OVERLAY_ON_RUN, Ran, Root};

#[test]
fn without_a_command_the_usage_is_shown() {
    let root = Root::default();
    let ran = root.output(&[]);
    assert_eq!(ran.code, Some(2), "{ran:?}");
    for command in ["run", "pull", "images", "rmi", "version", "completions"] {
        assert!(ran.stderr.contains(command), "{ran:?}");
    }
    let help = root.output(&["--help"]);
    assert_eq!(help.code, Some(0));
    assert!(help.stdout.contains("Usage: podvisor"), "{help:?}");
}

#[test]
fn a_typo_gets_a_suggestion() {
    let root = Root::default();
    let ran = root.output(&["iamges"]);
    assert_eq!(ran.code, Some(2), "{ran:?}");
    assert!(ran.stderr.contains("'images'"), "{ran:?}");
    let ran = root.output(&["run", "--memroy", "1G", "busybox"]);
    assert_eq!(ran.code, Some(125), "{ran:?}");
    assert!(ran.stderr.contains("'--memory'"), "{ran:?}");
    let ran = root.output(&["images", "--jsno"]);
    assert_eq!(ran.code, Some(2), "{ran:?}");
    assert!(ran.stderr.contains("'--json'"), "{ran:?}");
}

#[test]
fn sizes_that_make_no_sense_are_refused_with_the_remedy() {
    let root = Root::default();
    for (arguments, words) in [
        (["--memory", "lots"], "512M"),
        (["--memory", "1M"], "64M"),
        (["--cpus", "0"], "from 0.01 to 255"),
        (["--cpus", "two"], "from 0.01 to 255"),
        (["--hostname", "a b"], "letters, digits"),
        (["--pull", "sometimes"], "missing"),
    ] {
        let ran = root.output(&["run", arguments[0], arguments[1], "busybox"]);
        assert_eq!(ran.code, Some(125), "{ran:?}");
        assert!(ran.stderr.contains(words), "{ran:?}");
    }
}

#[test]
fn more_memory_than_the_machine_has_is_refused() {
    let root = Root::default();
    let kernel = elf(&root);
    let ran = run(
        &root,
        &["--kernel", &kernel, "--memory", "9000T", "busybox"],
    );
    ran.refused(125, &["--memory", "more than", "ask for less"]);
}

#[test]
fn a_kernel_that_is_none_is_named() {
    let root = Root::default();
    run(&root, &["--kernel", "/no/such/kernel", "busybox"]).refused(125, &["/no/such/kernel"]);
    run(&root, &["--kernel", "/etc/passwd", "busybox"]).refused(125, &["/etc/passwd", "vmlinux"]);
    run(&root, &["--kernel", "/", "busybox"]).refused(125, &["directory"]);
    run(&root, &["--cpus", "65", "busybox"]).refused(125, &["built for 64", "--kernel"]);
    assert!(!root.path().join("images").exists());
}

#[test]
fn guest_files_that_are_not_there_are_asked_for() {
    let root = Root::default();
    let empty = root.path().join("empty");
    fs::create_dir(&empty).unwrap();
    let mut command = root.podvisor(&["run", "busybox"]);
    let ran = Ran::new(command.env("PODVISOR_GUEST_DIR", &empty).output().unwrap());
    ran.refused(125, &["vmlinux", "PODVISOR_GUEST_DIR", "--kernel"]);
}

#[test]
fn an_image_that_is_not_here_and_may_not_be_pulled_is_refused() {
    let root = Root::default();
    let kernel = elf(&root);
    let ran = run(&root, &["--kernel", &kernel, "--pull", "never", "nosuch"]);
    ran.refused(125, &["nosuch", "podvisor pull"]);
}

#[test]
fn a_registry_that_is_down_is_named() {
    let root = Root::default();
    // Bound but not listening, so that no other process listens there.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let port = socket.local_addr().unwrap();
    let image = format!("{port}/app:1");
    let kernel = elf(&root);
    run(&root, &["--kernel", &kernel, &image]).refused(125, &[&port.to_string()]);
    root.output(&["pull", &image])
        .refused(1, &[&port.to_string()]);
    assert_eq!(root.output(&["images", "-q"]).stdout, "");
}

#[test]
fn a_name_that_is_none_is_refused() {
    let root = Root::default();
    root.output(&["pull", "NOT/An:Image:x"])
        .refused(1, &["NOT/An:Image:x"]);
}

#[test]
fn a_terminal_is_needed_for_an_interactive_one() {
    let root = Root::default();
    run(&root, &["-it", "busybox"]).refused(125, &["not a terminal", "-t"]);
}

#[test]
fn a_pulled_image_is_listed_and_removed() {
    let root = Root::default();
    let image = Image::busybox(json!({ "Cmd": ["sh"] }));
    let (id, manifest) = (image.config.digest.clone(), image.manifest.digest.clone());
    let registry = Registry::serve(&[("test/busybox", image)]);
    let name = registry.name("test/busybox");
    let repository = name.trim_end_matches(":1");

    let pulled = root.output(&["pull", &name]);
    pulled.printed(&format!("{id}\n"));
    assert!(pulled.stderr.contains("1 layer"), "{pulled:?}");
    let again = root.output(&["pull", "--quiet", "--json", &name]);
    let view: Value = serde_json::from_str(&again.stdout).unwrap();
    assert_eq!(again.stderr, "");
    assert_eq!(
        (&view["id"], &view["repoTags"]),
        (&json!(id), &json!([name]))
    );
    assert_eq!(view["created"], "2026-01-02T03:04:05Z");

    let table = root.output(&["images"]);
    let mut lines = table.stdout.lines();
    let heading: Vec<&str> = lines.next().unwrap().split_whitespace().collect();
    assert_eq!(
        heading,
        ["REPOSITORY", "TAG", "IMAGE", "ID", "CREATED", "SIZE"]
    );
    let row: Vec<&str> = lines.next().unwrap().split_whitespace().collect();
    assert_eq!(row[..3], [repository, "1", &id[7..19]]);
    assert_eq!(lines.next(), None);
    assert_eq!(
        root.output(&["images", "-q"]).stdout,
        format!("{}\n", &id[7..19])
    );
    let quiet = root.output(&["images", "-q", "--no-trunc"]);
    assert_eq!(quiet.stdout, format!("{id}\n"));
    let listed: Value = serde_json::from_str(&root.output(&["images", "--json"]).stdout).unwrap();
    assert_eq!(listed.as_array().unwrap().len(), 1);

    let removed = root.output(&["rmi", &name]);
    removed.printed(&format!(
        "Untagged: {name}\nUntagged: {repository}@{manifest}\nDeleted: {id}\n"
    ));
    assert_eq!(root.output(&["images", "--json"]).stdout, "[]\n");
    assert!(root.files_ending_in(".erofs").is_empty());
}

#[test]
fn removing_what_is_not_here_fails_unless_forced() {
    let root = Root::default();
    root.output(&["rmi", "nosuch"])
        .refused(1, &["nosuch", "podvisor images"]);
    root.output(&["rmi", "-f", "nosuch"]).printed("");
}

#[test]
fn a_layer_that_is_not_what_it_should_be_is_refused_and_leaves_nothing() {
    let root = Root::default();
    let image = Image::busybox(json!({})).with_a_lie();
    let layer = image.layer.digest.clone();
    let registry = Registry::serve(&[("test/lie", image)]);
    let ran = root.output(&["pull", &registry.name("test/lie")]);
    ran.refused(1, &[&layer[..19]]);
    assert_eq!(root.output(&["images", "-q"]).stdout, "");
    assert!(root.files_ending_in(".erofs").is_empty());
}

#[test]
fn an_image_that_the_registry_lacks_is_named() {
    let root = Root::default();
    let registry = Registry::serve(&[]);
    let name = registry.name("test/none");
    root.output(&["pull", &name]).refused(1, &["test/none"]);
}

#[test]
fn a_root_that_cannot_be_written_is_named() {
    let root = Root::default();
    let file = root.path().join("file");
    fs::write(&file, b"").unwrap();
    let file = file.to_str().unwrap();
    root.output(&["--root", file, "images"]).refused(1, &[file]);
}

#[test]
fn versions_are_told_in_text_and_json() {
    let root = Root::default();
    let text = root.output(&["version"]);
    assert_eq!(text.code, Some(0));
    assert!(text.stdout.contains("agent protocol"), "{text:?}");
    let json: Value = serde_json::from_str(&root.output(&["version", "--json"]).stdout).unwrap();
    assert_eq!(json["version"], env!("CARGO_PKG_VERSION"));
    assert!(json["agentProtocol"].is_u64(), "{json}");
    let flag = root.output(&["--version"]);
    flag.printed(&format!("podvisor {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn every_shell_gets_completions() {
    let root = Root::default();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = root.output(&["completions", shell]);
        assert_eq!(script.code, Some(0), "{shell}");
        assert!(script.stdout.contains("read-only"), "{shell}");
    }
}

/// Programs that share their stdout with podvisor may make it non-blocking.
#[test]
fn a_slow_reader_gets_everything_from_a_non_blocking_stdout() {
    let root = Root::default();
    let whole = root.output(&["completions", "bash"]).stdout;
    let (mut reader, writer) = std::io::pipe().unwrap();
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    let child = root
        .podvisor(&["completions", "bash"])
        .stdout(writer)
        .stderr(Stdio::piped())
        .spawn();
    let mut child = child.unwrap();
    // More than fits a pipe: the first read is made when it is full.
    assert!(whole.len() > 100_000);
    let mut full = [PollFd::new(&reader, PollFlags::IN)];
    poll(&mut full, None).unwrap();
    let mut read = String::new();
    reader.read_to_string(&mut read).unwrap();
    assert!(child.wait().unwrap().success());
    assert!(read == whole, "{} of {} bytes", read.len(), whole.len());
}

#[test]
fn a_reader_that_goes_away_is_no_error_and_a_full_disk_is_one() {
    let root = Root::default();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let child = root
        .podvisor(&["completions", "bash"])
        .stdout(writer)
        .stderr(Stdio::piped())
        .spawn();
    let ran = Ran::of(child.unwrap());
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""));

    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let child = root
        .podvisor(&["version"])
        .stdout(full)
        .stderr(Stdio::piped())
        .spawn();
    Ran::of(child.unwrap()).refused(1, &["stdout", "No space left"]);
}

#[test]
fn check_tells_its_verdict_alike_in_text_json_and_exit_code() {
    let root = Root::default();
    let text = root.output(&["check"]);
    let json = root.output(&["check", "--json"]);
    assert_eq!(text.code, json.code, "{text:?}");
    let report: Value = serde_json::from_str(&json.stdout).unwrap();
    let runs = report["guestsCanRun"].as_bool().unwrap();
    assert_eq!(text.code, Some(i32::from(!runs)), "{text:?}");
    for item in report["items"].as_array().unwrap() {
        let name = item["name"].as_str().unwrap();
        assert!(text.stdout.contains(name), "{name} is not in {text:?}");
    }
}

#[test]
fn check_fails_without_the_guests_files_unless_only_the_host_is_asked_about() {
    let root = Root::default();
    let check = |flags: &[&str]| {
        let mut podvisor = root.podvisor(&[&["check", "--json"], flags].concat());
        podvisor.env("PODVISOR_GUEST_DIR", root.path());
        let ran = Ran::new(podvisor.output().unwrap());
        let report: Value = serde_json::from_str(&ran.stdout).unwrap_or_else(|_| panic!("{ran:?}"));
        let items = report["items"].as_array().unwrap();
        let files = items.iter().find(|item| item["name"] == "guest files");
        (ran.code, files.cloned())
    };
    let (code, files) = check(&[]);
    let files = files.unwrap();
    assert_eq!(code, Some(1));
    assert_eq!(
        (&files["status"], &files["required"]),
        (&json!("missing"), &json!(true))
    );
    assert_eq!(check(&["--host"]).1, None);
}

/// This needs root.
#[test]
fn check_names_a_place_of_volumes_that_maps_no_users() {
    let root = Root::default();
    let podvisor = root.podvisor(&["check", "--json"]);
    let script = format!("{OVERLAY_ON_RUN} && exec \"$@\"");
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", &script, "sh"]);
    command
        .arg(podvisor.get_program())
        .args(podvisor.get_args())
        .current_dir(root.path());
    let ran = Ran::new(command.output().unwrap());
    let report: Value = serde_json::from_str(&ran.stdout).unwrap_or_else(|_| panic!("{ran:?}"));
    let items = report["items"].as_array().unwrap();
    let item = items.iter().find(|item| item["name"] == "mapped users");
    let item = item.unwrap_or_else(|| panic!("{ran:?}"));
    assert_eq!(item["status"], "warning", "{ran:?}");
    let found = item["found"].as_str().unwrap();
    assert!(found.starts_with("refused on /"), "{found}");
    assert!(found.contains("root on the host"), "{found}");
}

#[test]
fn check_names_the_setting_that_refuses_user_namespaces() {
    let root = Root::default();
    let podvisor = root.podvisor(&["check", "--json"]);
    // The limit is one of a user namespace's, and the process has no privileges in it.
    let script = "echo 0 > /proc/sys/user/max_user_namespaces && \
                  exec setpriv --bounding-set=-all --inh-caps=-all \"$@\"";
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "sh", "-c", script, "sh"]);
    command
        .arg(podvisor.get_program())
        .args(podvisor.get_args());
    let ran = Ran::new(command.output().unwrap());
    let report: Value = serde_json::from_str(&ran.stdout).unwrap_or_else(|_| panic!("{ran:?}"));
    let items = report["items"].as_array().unwrap();
    let item = items.iter().find(|item| item["name"] == "user namespaces");
    let item = item.unwrap_or_else(|| panic!("{ran:?}"));
    assert_eq!(item["status"], "missing");
    assert_eq!((ran.code, &item["required"]), (Some(1), &json!(true)));
    assert!(item["found"].as_str().unwrap().contains("No space left"));
    let remedy = item["remedy"].as_str().unwrap();
    assert!(remedy.contains("user.max_user_namespaces"), "{remedy}");
}

#[test]
fn the_root_need_not_exist() {
    let root = Root::default();
    let deep = root.path().join("a/b");
    let ran = root.output(&["--root", deep.to_str().unwrap(), "images", "--json"]);
    ran.printed("[]\n");
    assert!(fs::metadata(&deep).unwrap().permissions().mode() & 0o007 <= 0o005);
}

#[test]
fn a_command_of_docker_that_there_is_not_says_what_to_do_instead() {
    let root = Root::default();
    for (command, words) in [
        ("start", "podvisor run"),
        ("build", "podvisor load"),
        ("login", "docker login"),
    ] {
        root.output(&[command, "x"]).refused(2, &[command, words]);
    }
    let help = root.output(&["help", "ps"]);
    assert_eq!(
        (help.code, help.stdout.contains("List containers")),
        (Some(0), true)
    );
    let unknown = root.output(&["nonsense"]);
    assert!(unknown.stderr.contains("unrecognized"), "{unknown:?}");
    // Errors of arguments begin like all others.
    let missing = root.output(&["rm"]);
    for ran in [unknown, missing, root.output(&["ps", "--nonsense"])] {
        let begins = ran.stderr.starts_with("podvisor: ");
        assert!(begins && ran.stderr.contains("--help"), "{ran:?}");
    }
}

#[test]
fn help_that_cannot_be_written_is_a_failure() {
    let full = std::fs::File::options()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let root = Root::default();
    let helped = root.podvisor(&["--help"]).stdout(full).status().unwrap();
    assert_eq!(helped.code(), Some(1));
}

#[test]
fn what_is_wrong_in_any_case_is_told_before_the_image_is_asked_for() {
    let root = Root::default();
    for (flags, words) in [
        (["--name", "a b"], "is not a container's name"),
        (["--env", "=x"], "without a name"),
        (["--workdir", "x"], "not absolute"),
        (["--volume", "/no/such/file:/x"], "--volume"),
    ] {
        let run = [
            &["run", "--pull", "always"],
            &flags[..],
            &["registry.invalid/box"],
        ]
        .concat();
        root.output(&run).refused(125, &[words]);
    }
    for flags in [
        ["--volume", "/bin:/x", "--volume", "/usr:/x/"],
        ["--tmpfs", "/x:size=1m", "--volume", "/bin:/x/"],
        ["--tmpfs", "/x", "--tmpfs", "/x/"],
    ] {
        let run = [&["run"], &flags[..], &["registry.invalid/box"]].concat();
        root.output(&run).refused(
            125,
            &["duplicate mount point /x", "--volume, --mount and --tmpfs"],
        );
    }
    let long = format!("/tmp/{}", "x".repeat(80));
    let run = [
        "--root",
        &long,
        "run",
        "--pull",
        "always",
        "registry.invalid/box",
    ];
    root.output(&run)
        .refused(125, &["--root", "PODVISOR_ROOT", "75 bytes"]);
}

#[test]
fn what_begins_otherwise_is_not_told_how_to_boot() {
    let root = Root::default();
    for flag in ["--pod", "--from-snapshot"] {
        let ran = root.output(&["run", "--boot", "cold", flag, "x", "box"]);
        assert_eq!(ran.code, Some(125), "{ran:?}");
        assert!(ran.stderr.contains("--boot <HOW>"), "{ran:?}");
        // The variable is for all machines, and is set here.
        let ran = root.output(&["run", flag, "x", "box"]);
        assert!(!ran.stderr.contains("--boot"), "{ran:?}");
    }
    let mut run = root.podvisor(&["run", "box"]);
    let ran = Ran::new(run.env("PODVISOR_BOOT", "lukewarm").output().unwrap());
    ran.refused(125, &["PODVISOR_BOOT=lukewarm"]);
}

#[test]
fn json_is_asked_for_in_either_way() {
    let root = Root::default();
    for list in [
        ["ps"].as_slice(),
        &["images"],
        &["pod", "ls"],
        &["stats", "--no-stream"],
    ] {
        for flags in [["--json"].as_slice(), &["--format", "json"]] {
            root.output(&[list, flags].concat()).printed("[]\n");
        }
        let ran = root.output(&[list, &["--format", "{{.ID}}"]].concat());
        assert_eq!(ran.code, Some(2), "{ran:?}");
        assert!(ran.stderr.contains("jq"), "{ran:?}");
    }
    for list in [
        ["ps", "-q"].as_slice(),
        &["images", "-q"],
        &["pod", "ls", "-q"],
    ] {
        assert_eq!(
            root.output(&[list, &["--json"]].concat()).code,
            Some(2),
            "{list:?}"
        );
    }
    for inspect in [
        ["inspect"].as_slice(),
        &["image", "inspect"],
        &["pod", "inspect"],
    ] {
        let ran = root.output(&[inspect, &["-f", "{{.Id}}", "x"]].concat());
        assert_eq!(ran.code, Some(2), "{ran:?}");
        assert!(ran.stderr.contains("jq"), "{ran:?}");
        let ran = root.output(&[inspect, &["--format", "json", "x"]].concat());
        assert_eq!(ran.code, Some(1), "{ran:?}");
    }
}

#[test]
fn reading_takes_a_root_that_is_not_there_for_an_empty_one() {
    let root = Root::default();
    // Directories cannot be created there.
    let nowhere = ["--root", "/sys/podvisor"];
    root.output(&[&nowhere[..], &["ps", "-a", "--json"]].concat())
        .printed("[]\n");
    root.output(&[&nowhere[..], &["logs", "x"]].concat())
        .refused(1, &["no container `x`"]);
    root.output(&[&nowhere[..], &["load", "-i", "/dev/null"]].concat())
        .refused(1, &["/sys/podvisor", "PODVISOR_ROOT"]);
}
