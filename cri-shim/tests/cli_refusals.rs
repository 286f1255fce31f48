//! Commands with a container that does not exist, or with an invalid value: no guest runs here.

mod support;

use support::Root;

#[test]
fn a_container_that_is_not_there_is_named_by_every_command() {
    let root = Root::default();
    let file = root.path().join("file");
    std::fs::write(&file, "").unwrap();
    let file = file.display().to_string();
    for (arguments, code) in [
        (["attach", "nobody"].as_slice(), 125),
        (&["console", "nobody"], 1),
        (&["cp", "nobody:/etc/hosts", &file], 1),
        (&["cp", &file, "nobody:/tmp"], 1),
        (&["debug", "nobody"], 125),
        (&["exec", "nobody", "true"], 125),
        (&["inspect", "nobody"], 1),
        (&["kill", "nobody"], 1),
        (&["kill", "-s", "HUP", "nobody"], 1),
        (&["logs", "nobody"], 1),
        (&["logs", "-f", "nobody"], 1),
        (&["pause", "nobody"], 1),
        (&["port", "nobody"], 1),
        (&["port", "nobody", "80"], 1),
        (&["rm", "nobody"], 1),
        (&["stats", "nobody"], 1),
        (&["stats", "--no-stream", "nobody"], 1),
        (&["stop", "nobody"], 1),
        (&["top", "nobody"], 1),
        (&["unpause", "nobody"], 1),
        (&["wait", "nobody"], 1),
    ] {
        let ran = root.output(arguments);
        println!("{arguments:?}");
        ran.refused(code, &["no container `nobody`", "podvisor ps -a"]);
        // As docker's, a list.
        let stdout = match arguments[0] {
            "inspect" => "[]\n",
            _ => "",
        };
        assert_eq!(ran.stdout, stdout, "{arguments:?}");
    }
}

#[test]
fn a_value_that_is_none_is_named_with_its_flag() {
    let root = Root::default();
    for (arguments, code, words) in [
        (
            ["kill", "-s", "NONSENSE", "web"].as_slice(),
            2,
            ["'NONSENSE'", "--signal"].as_slice(),
        ),
        (&["kill", "-s", "65", "web"], 2, &["'65'", "--signal"]),
        (&["kill", "-s", "RTMIN+31", "web"], 2, &["'RTMIN+31'"]),
        (
            &["run", "--stop-signal", "NONSENSE", "box"],
            125,
            &["'NONSENSE'", "--stop-signal"],
        ),
        (&["stop", "-t", "soon", "web"], 2, &["'soon'", "--time"]),
        (
            &["stop", "--time=4294967296", "web"],
            2,
            &["4294967296", "--time"],
        ),
        (&["logs", "--since", "soon", "web"], 2, &["'soon'", "10m"]),
        (&["logs", "--until", "25:00", "web"], 2, &["'25:00'", "10m"]),
        (&["logs", "-n", "few", "web"], 2, &["'few'", "--tail"]),
        (&["events", "--since", "soon"], 2, &["'soon'", "--since"]),
        (&["events", "-f", "colour=red"], 2, &["'colour=red'"]),
        (
            &["ps", "-f", "colour=red"],
            2,
            &["'colour=red'", "name=TEXT"],
        ),
        (&["ps", "-f", "web"], 2, &["'web'", "name=TEXT"]),
        (&["ps", "-f", "status=up"], 2, &["'status=up'", "running"]),
        (&["ps", "-f", "exited=no"], 2, &["'exited=no'", "137"]),
        (
            &["prune", "--filter", "until=soon"],
            2,
            &["'until=soon'", "--filter"],
        ),
        (&["port", "web", "http"], 2, &["'http'", "PORT"]),
        (&["stats", "--format", "xml"], 2, &["'xml'", "--format"]),
    ] {
        let ran = root.output(arguments);
        assert_eq!(ran.code, Some(code), "{arguments:?}: {ran:?}");
        for word in words {
            assert!(
                ran.stderr.contains(word),
                "{word} of {arguments:?}: {ran:?}"
            );
        }
    }
}

#[test]
fn files_that_settings_name_and_that_are_missing_are_said_with_what_to_do() {
    let root = Root::default();
    let guest = root.path().join("guest");
    std::fs::create_dir(&guest).unwrap();
    for file in ["vmlinux", "initramfs.cpio"] {
        std::fs::write(guest.join(file), "").unwrap();
    }
    let file = root.path().join("config.toml");
    let settings = "host_runtime = \"unix:///no/runtime.sock\"\n[cni]\nconfig_dir = \"/no/net.d\"\n\
                    [handlers.large]\nkernel = \"/no/kernel\"\n";
    std::fs::write(&file, settings).unwrap();
    let check = ["config", "check", file.to_str().unwrap()];
    let mut command = root.podvisor(&check);
    let ran = support::Ran::new(command.env("PODVISOR_GUEST_DIR", &guest).output().unwrap());
    assert_eq!(ran.code, Some(1), "{ran:?}");
    let expected = [
        ("large: kernel: /no/kernel is not there; ", "name a kernel"),
        ("cni.config_dir: /no/net.d is not there; ", "network plugin"),
        ("host_runtime: /no/runtime.sock is not there; ", "start"),
    ];
    let lines: Vec<_> = ran.stderr.lines().collect();
    assert_eq!(lines.len(), expected.len(), "{ran:?}");
    for (line, (what, todo)) in lines.into_iter().zip(expected) {
        let said = line.strip_prefix("podvisor: ");
        let said = said.and_then(|said| said.strip_prefix(what));
        assert!(said.is_some_and(|said| said.contains(todo)), "{line}");
    }
}
