//! Containers: their life cycle, their commands, and their exits.

use std::fs;
use std::path::Path;

use podvisor_cri_messages::*;
use tonic::Code;

use crate::client::{ask, ask_images};
use crate::fixture::{MANY_IMAGES, RUNTIME};
use crate::pod::{Container, Pod, image, labels, stdout, strings};
use crate::support::{PATIENCE, until};

fn listed(filter: ContainerFilter) -> Vec<podvisor_cri_messages::Container> {
    ask!(list_containers(ListContainersRequest {
        filter: Some(filter),
    }))
    .unwrap()
    .containers
}

fn ids(filter: ContainerFilter) -> Vec<String> {
    listed(filter).into_iter().map(|found| found.id).collect()
}

fn in_state(container: &Container, state: ContainerState) -> usize {
    ids(ContainerFilter {
        id: container.id.clone(),
        state: Some(ContainerStateValue {
            state: state as i32,
        }),
        ..Default::default()
    })
    .len()
}

#[test]
fn guest_a_container_goes_from_created_to_running_to_exited() {
    let pod = Pod::shared();
    let container = pod.create("life", |config| {
        config.labels = labels(&[("role", "life")]);
        config.annotations = labels(&[("note", "kept")]);
    });
    let status = container.status();
    assert_eq!(status.state(), ContainerState::ContainerCreated);
    assert_eq!((status.started_at, status.finished_at), (0, 0));
    assert_eq!(status.labels, labels(&[("role", "life")]));
    // Older kubelets look here for the images in use.
    let found = listed(ContainerFilter {
        id: container.id.clone(),
        ..Default::default()
    });
    let of_image = ask_images!(image_status(ImageStatusRequest {
        image: Some(image("plain")),
        verbose: false,
    }));
    assert_eq!(found[0].image_ref, of_image.unwrap().image.unwrap().id);
    assert_eq!(status.annotations, labels(&[("note", "kept")]));
    assert_eq!(in_state(&container, ContainerState::ContainerCreated), 1);
    assert_eq!(in_state(&container, ContainerState::ContainerRunning), 0);

    container.start();
    let status = container.status();
    assert_eq!(status.state(), ContainerState::ContainerRunning);
    assert!(status.started_at >= status.created_at, "{status:?}");
    let again = ask!(start_container(StartContainerRequest {
        container_id: container.id.clone(),
    }));
    again.unwrap_err();

    container.stop(0);
    container.stop(0);
    let status = container.status();
    assert_eq!(status.state(), ContainerState::ContainerExited);
    assert_eq!(status.exit_code, 137);
    assert!(status.finished_at >= status.started_at, "{status:?}");
    container.remove();
    container.remove();
    assert_eq!(container.try_status().unwrap_err().code(), Code::NotFound);
}

#[test]
fn guest_lists_of_containers_are_filtered() {
    let pod = Pod::shared();
    let container = pod.create("listed", |config| {
        config.labels = labels(&[("kind", "listed"), ("n", "1")]);
    });
    let of_pod = ContainerFilter {
        pod_sandbox_id: pod.id.clone(),
        ..Default::default()
    };
    assert!(ids(of_pod).contains(&container.id));
    let by_label = |pairs| {
        ids(ContainerFilter {
            label_selector: labels(pairs),
            ..Default::default()
        })
    };
    assert_eq!(
        by_label(&[("kind", "listed")]),
        std::slice::from_ref(&container.id)
    );
    assert!(by_label(&[("kind", "listed"), ("n", "2")]).is_empty());
    let of_none = ContainerFilter {
        pod_sandbox_id: "unknown".to_owned(),
        ..Default::default()
    };
    assert!(ids(of_none).is_empty());
    container.remove();
}

#[test]
fn guest_containers_that_have_ended_hold_nothing_but_their_exit_and_log() {
    let pod = Pod::shared();
    let mut ended = Vec::new();
    for number in 0..MANY_IMAGES {
        let container = pod.start("many", |config| {
            config.image = Some(image(&format!("many-{number}")));
            config.command = Vec::new();
        });
        container.ended();
        ended.push((container, number.to_string()));
    }
    for (container, number) in ended {
        let status = container.status();
        assert_eq!((status.exit_code, &*status.reason), (0, "Completed"));
        assert_eq!(stdout(&container.lines()), [number]);
        let exec = container.try_exec(&["true"], 0).err().unwrap();
        assert_ne!(exec.code(), Code::Internal, "{exec}");
        container.stop(0);
        container.remove();
    }
}

#[test]
fn guest_unknown_containers_are_not_found() {
    let container_id = "0123456789abcdef".to_owned();
    let code = |result: Result<(), tonic::Status>| result.unwrap_err().code();
    let start = ask!(start_container(StartContainerRequest {
        container_id: container_id.clone(),
    }));
    assert_eq!(code(start.map(drop)), Code::NotFound);
    let status = ask!(container_status(ContainerStatusRequest {
        container_id: container_id.clone(),
        verbose: false,
    }));
    assert_eq!(code(status.map(drop)), Code::NotFound);
    let exec = ask!(exec_sync(ExecSyncRequest {
        container_id: container_id.clone(),
        cmd: strings(&["true"]),
        timeout: 0,
    }));
    assert_eq!(code(exec.map(drop)), Code::NotFound);
    let stop = ask!(stop_container(StopContainerRequest {
        container_id: container_id.clone(),
        timeout: 0,
    }));
    // containerd before 1.7 answers that there is none, which the interface allows.
    if let Err(status) = stop {
        assert!(
            !RUNTIME.is_vm && status.code() == Code::NotFound,
            "{status}"
        );
    }
    ask!(remove_container(RemoveContainerRequest { container_id })).unwrap();
}

#[test]
fn guest_a_running_container_can_be_removed() {
    let container = Pod::shared().start("forced", |_| {});
    container.remove();
    assert_eq!(container.try_status().unwrap_err().code(), Code::NotFound);
}

#[test]
fn guest_a_container_that_was_never_started_can_be_stopped_and_removed() {
    let container = Pod::shared().create("unstarted", |_| {});
    container.stop(0);
    container
        .try_exec(&["true"], 0)
        .err()
        .expect("it does not run");
    container.remove();
    assert_eq!(container.try_status().unwrap_err().code(), Code::NotFound);
}

#[test]
fn guest_the_end_of_a_container_comes_as_an_event() {
    use tokio_stream::StreamExt as _;
    let mut client = crate::client::runtime();
    let events = crate::client::wait(client.get_container_events(GetEventsRequest {}));
    let mut events = match events {
        // Runtimes before Kubernetes 1.26 have none.
        Err(status) if !RUNTIME.is_vm && status.code() == Code::Unimplemented => return,
        events => events.unwrap().into_inner(),
    };
    let container = Pod::shared().start("event", |config| {
        config.command = strings(&["sh", "-c", "exit 5"]);
    });
    let mut kinds = Vec::new();
    while kinds.last() != Some(&ContainerEventType::ContainerStoppedEvent) {
        let next =
            crate::client::wait(async { tokio::time::timeout(PATIENCE, events.next()).await });
        let event = next.expect("no event came").unwrap().unwrap();
        if event.container_id == container.id {
            kinds.push(event.container_event_type());
            let statuses = event.containers_statuses;
            assert!(statuses.iter().any(|status| status.id == container.id));
        }
    }
    use ContainerEventType as E;
    let expected = [E::ContainerCreatedEvent, E::ContainerStartedEvent];
    assert_eq!(kinds[..2], expected);
    container.remove();
}

#[test]
fn guest_exit_codes_and_the_reasons_for_them_are_told() {
    let pod = Pod::shared();
    let (status, _) = pod.script("exit 0", |_| {});
    assert_eq!((status.exit_code, status.reason.as_str()), (0, "Completed"));
    let (status, _) = pod.script("exit 42", |_| {});
    assert_eq!((status.exit_code, status.reason.as_str()), (42, "Error"));
}

#[test]
fn guest_a_command_that_cannot_be_run_is_told_when_it_is_to_start() {
    let pod = Pod::shared();
    for command in ["no-such-command", "/etc"] {
        let container = pod.create("no-command", |config| {
            config.command = strings(&[command]);
        });
        assert_eq!(container.state(), ContainerState::ContainerCreated);
        let refused = ask!(start_container(StartContainerRequest {
            container_id: container.id.clone(),
        }))
        .unwrap_err();
        assert!(refused.message().contains(command), "{refused}");
        // It has exited, so that the pod's restart policy applies.
        let status = container.status();
        assert_eq!(status.state(), ContainerState::ContainerExited);
        assert_eq!(
            (status.exit_code, status.reason.as_str()),
            (128, "StartError")
        );
        assert!(status.message.contains(command), "{status:?}");
        container.stop(0);
        container.remove();
    }
}

#[test]
fn guest_a_process_that_cannot_be_made_as_specified_is_told_when_it_is_to_start() {
    let pod = Pod::shared();
    let file = RUNTIME.directory("file").join("file");
    fs::write(&file, "").unwrap();
    let mount = |host: &Path, container: &str| Mount {
        container_path: container.to_owned(),
        host_path: host.display().to_string(),
        readonly: true,
        ..Default::default()
    };
    let fixed = RUNTIME.directory("fixed");
    type Change<'a> = &'a dyn Fn(&mut ContainerConfig);
    let changes: [(&str, Change<'_>); 4] = [
        ("a file over a directory", &|config| {
            config.mounts = vec![mount(&file, "/etc")];
        }),
        ("a mount point that a volume lacks", &|config| {
            config.mounts = vec![mount(&fixed, "/data"), mount(&file, "/data/new")];
        }),
        ("a value that the kernel refuses", &|config| {
            let unified = [("memory.high".to_owned(), "much".to_owned())];
            config.linux.as_mut().unwrap().resources = Some(LinuxContainerResources {
                unified: unified.into(),
                ..Default::default()
            });
        }),
        ("a limit that is too small", &|config| {
            config.linux.as_mut().unwrap().resources = Some(LinuxContainerResources {
                memory_limit_in_bytes: 16 << 10,
                ..Default::default()
            });
        }),
    ];
    for (what, change) in changes {
        let container = pod.create("not-made", change);
        assert_eq!(container.state(), ContainerState::ContainerCreated);
        assert!(!container.log().exists(), "{what}");
        let refused = ask!(start_container(StartContainerRequest {
            container_id: container.id.clone(),
        }))
        .expect_err(what);
        let status = container.status();
        println!("{what}: {refused}");
        assert_eq!(
            (status.state(), status.exit_code, status.reason.as_str()),
            (ContainerState::ContainerExited, 128, "StartError"),
            "{what}"
        );
        assert!(!status.message.is_empty(), "{what}");
        container.remove();
    }
}

#[test]
fn guest_a_container_is_shown_with_its_images_tag_though_it_was_asked_for_by_id() {
    let named = image("plain").image;
    let container = Pod::shared().start("by-id", |config| {
        let found = ask_images!(image_status(ImageStatusRequest {
            image: config.image.clone(),
            verbose: false,
        }));
        config.image = Some(ImageSpec {
            image: found.unwrap().image.unwrap().id,
            user_specified_image: named.clone(),
            ..Default::default()
        });
    });
    let status = container.status();
    assert_eq!(status.image.unwrap().image, named);
    container.stop(0);
    container.remove();
}

#[test]
fn guest_a_container_that_takes_too_much_memory_is_told_as_such() {
    let (status, _) = Pod::shared().script(
        "exec dd if=/dev/zero of=/dev/null bs=100M count=1",
        |config| {
            config.linux.as_mut().unwrap().resources = Some(LinuxContainerResources {
                memory_limit_in_bytes: 16 << 20,
                ..Default::default()
            });
        },
    );
    assert_eq!(status.reason, "OOMKilled", "{status:?}");
    assert_eq!(status.exit_code, 137);
}

#[test]
fn guest_stop_gives_a_container_its_time_to_end_by_itself() {
    let pod = Pod::shared();
    let container = pod.start("graceful", |config| {
        let script = "trap 'echo bye; exit 7' TERM; echo ready; while :; do sleep 0.1; done";
        config.command = strings(&["sh", "-c", script]);
    });
    until("the trap", || !container.lines().is_empty());
    container.stop(200);
    assert_eq!(container.status().exit_code, 7);
    assert_eq!(stdout(&container.lines()), ["ready", "bye"]);
    container.remove();
}

#[test]
fn guest_stop_sends_the_signal_that_was_asked_for() {
    if !RUNTIME.is_vm {
        return;
    }
    let pod = Pod::shared();
    let script = "trap 'exit 9' USR1; trap 'exit 7' TERM; echo ready; while :; do sleep 0.1; done";
    let config = pod.container_config("stop-signal", |config| {
        config.command = strings(&["sh", "-c", script]);
    });
    let wanted = |stop_signal| ContainerConfig {
        stop_signal,
        ..config.clone()
    };
    let refused = pod.try_create(wanted(66));
    assert_eq!(refused.err().unwrap().code(), Code::InvalidArgument);
    let container = pod.try_create(wanted(Signal::Sigusr1.into())).unwrap();
    assert_eq!(container.status().stop_signal(), Signal::Sigusr1);
    container.start();
    until("the traps", || !container.lines().is_empty());
    container.stop(200);
    assert_eq!(container.status().exit_code, 9);
    container.remove();
    let usual = pod.start("usual-signal", |_| {});
    assert_eq!(usual.status().stop_signal(), Signal::Sigterm);
    usual.remove();
}

#[test]
fn guest_a_container_is_made_again_in_the_same_sandbox() {
    let pod = Pod::shared();
    let first = pod.container_config("again", |config| {
        config.command = strings(&["sh", "-c", "echo attempt; exit 1"]);
    });
    let mut second = first.clone();
    let one = pod.try_create(first).unwrap();
    pod.try_create(second.clone())
        .err()
        .expect("the same name and attempt twice");
    one.start();
    assert_eq!(one.ended().exit_code, 1);
    second.metadata.as_mut().unwrap().attempt = 1;
    second.log_path = "again-1.log".to_owned();
    let two = pod.try_create(second).unwrap();
    two.start();
    assert_eq!(two.ended().exit_code, 1);
    assert_ne!(one.id, two.id);
    one.remove();
    two.remove();
}

#[test]
fn guest_exec_tells_output_exit_code_and_what_took_too_long() {
    let container = Pod::shared().start("exec", |_| {});
    let output = container
        .try_exec(&["sh", "-c", "echo out; echo err >&2; exit 3"], 200)
        .unwrap();
    assert_eq!(
        (output.code, output.stdout.as_str(), output.stderr.as_str()),
        (3, "out\n", "err\n")
    );
    let late = container.try_exec(&["sleep", "1000"], 1);
    assert_eq!(late.err().unwrap().code(), Code::DeadlineExceeded);
    // It has ended before that is reported.
    let all = container.sh("cat /proc/[0-9]*/cmdline 2>/dev/null; true");
    assert!(!all.contains("sleep\x001000\0"), "{all:?}");
    let missing = container.try_exec(&["/no/such/program"], 200);
    assert!(missing.is_err() || missing.unwrap().code != 0);
    let megabytes = container.try_exec(&["head", "-c", "3000000", "/dev/zero"], 0);
    assert_eq!(megabytes.unwrap().stdout.len(), 3_000_000);

    container.stop(0);
    container
        .try_exec(&["true"], 0)
        .err()
        .expect("a container that has ended executes nothing");
    container.remove();
}

#[test]
fn guest_command_arguments_directory_and_environment_come_from_image_and_request() {
    let pod = Pod::shared();
    let (status, lines) = pod.script("pwd; echo $FROM $MORE $*", |config| {
        config.image = Some(image("user"));
        config.args = strings(&["name", "one", "two"]);
        config.envs = vec![KeyValue::new("MORE", "request")];
    });
    assert_eq!(status.exit_code, 0);
    assert_eq!(stdout(&lines), ["/srv", "image request one two"]);

    let (_, lines) = pod.script("pwd; echo $FROM", |config| {
        config.image = Some(image("user"));
        config.working_dir = "/tmp".to_owned();
        config.envs = vec![KeyValue::new("FROM", "request")];
    });
    assert_eq!(stdout(&lines), ["/tmp", "request"]);

    let container = pod.start("image-command", |config| {
        config.image = Some(image("pause"));
        config.command = Vec::new();
    });
    assert_eq!(
        container.sh("tr '\\0' ' ' </proc/1/cmdline"),
        "sleep 1000000 "
    );
    // SIGPIPE is not ignored, in a container or in an exec; the shell ignores other signals.
    let ignored = container.sh("sed -n 's/^SigIgn:.//p' /proc/1/status /proc/self/status");
    let masks: Vec<_> = ignored.lines().collect();
    assert_eq!(masks.len(), 2, "{ignored}");
    for mask in masks {
        let mask = u64::from_str_radix(mask, 16).unwrap();
        assert_eq!(mask & 1 << 12, 0, "{ignored}");
    }
    if RUNTIME.is_vm {
        let processes = container.sh("grep 'Max processes' /proc/1/limits");
        let limits: Vec<&str> = processes.split_whitespace().skip(2).take(2).collect();
        assert_eq!(limits, ["unlimited"; 2]);
        let threads = container.sh("cat /proc/sys/kernel/threads-max /proc/sys/kernel/pid_max");
        assert_eq!(threads, "4194304\n4194304\n");
        let names = "vm/max_map_count net/ipv4/ip_forward net/netfilter/nf_conntrack_max \
                     net/ipv4/tcp_max_tw_buckets net/ipv4/tcp_max_orphans \
                     net/ipv4/tcp_max_syn_backlog";
        let values = container.sh(&format!("cd /proc/sys; cat {names}"));
        let values: Vec<&str> = values.lines().collect();
        let of_large_hosts = ["1048576", "1", "131072", "65536", "65536", "1024"];
        assert_eq!(values, of_large_hosts, "{names}");
    }
    container.stop(0);
    container.remove();
}

#[test]
fn guest_containers_of_two_images_share_a_pod() {
    let pod = Pod::shared();
    let one = pod.start("one", |_| {});
    let two = pod.start("two", |config| {
        config.image = Some(image("user"));
        config.command = Vec::new();
    });
    assert_eq!(one.sh("id -u"), "0\n");
    assert_eq!(two.sh("id -u"), "1000\n");
    one.sh("touch /only-in-one");
    two.sh("test ! -e /only-in-one");
    assert_eq!(one.sh("hostname"), "shared-host\n");
    assert_eq!(two.sh("hostname"), "shared-host\n");
    for container in [one, two] {
        container.stop(0);
        container.remove();
    }
}

#[test]
fn guest_an_image_that_is_not_there_is_refused() {
    let pod = Pod::shared();
    let config = pod.container_config("no-image", |config| {
        config.image = Some(ImageSpec {
            image: "127.0.0.1:1/none:1".to_owned(),
            ..Default::default()
        });
    });
    pod.try_create(config).err().expect("no such image");
    let config = pod.container_config("no-command", |config| {
        config.command = strings(&["/no/such/program"]);
    });
    // Some runtimes report it when the container is created, others when it is started.
    if let Ok(container) = pod.try_create(config) {
        ask!(start_container(StartContainerRequest {
            container_id: container.id.clone(),
        }))
        .unwrap_err();
        container.remove();
    }
}
