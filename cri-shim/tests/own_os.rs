//! Sandboxes whose guest has an operating system of its own: before they have a machine, and with a
//! guest of a few instructions, which needs nothing of KVM but to be opened.

#[path = "own_os/boots.rs"]
mod boots;
#[path = "own_os/disks.rs"]
mod disks;
#[path = "own_os/dumped.rs"]
mod dumped;
#[path = "own_os/kept.rs"]
mod kept;
#[path = "own_os/saved.rs"]
mod saved;
#[path = "own_os/sizes.rs"]
mod sizes;
mod support;

use std::fs::{self, File};
use std::io::Write as _;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use podvisor_cri::machine::{DiskContents, DiskMove, MachineDisk, MachineShare};
use podvisor_cri::sandbox::{
    AfterSave, BootMachine, ContainerState, ContinueAs, CreateContainer, DumpInfo, DumpMachine,
    DumpState, Exec, KeptKernel, ReadKernel, RefusalKind, SandboxClient, SandboxExit, SaveMachine,
    SavedMachine, StdioFds, SupplementalGroups, Unplugged, exit_record, oci,
};
use podvisor_dhcp::{Config as DhcpConfig, Ipv4Lease, MacAddress, open_socket};
use podvisor_network::cni::DhcpServer;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use support::own_os::{attach, config, info_of, kernel_that_ends, kernel_that_says, machine, says};
use support::pod::{Pod, eventually, launch};

#[tokio::test]
async fn a_sandbox_without_a_machine_is_found_again_and_ends_when_asked() {
    let pod = Pod::default();
    let sandbox = launch(config(&pod)).await.unwrap();
    drop(sandbox);
    let sandbox = SandboxClient::connect(&pod.dir()).await.unwrap();
    assert_eq!(sandbox.list().await.unwrap(), []);
    let begin = Instant::now();
    sandbox.shutdown(Duration::from_secs(60)).await.unwrap();
    // Nothing runs that would have to be waited for.
    assert!(begin.elapsed() < Duration::from_secs(30), "{begin:?}");
    assert_eq!(sandbox.ended().await, SandboxExit::PoweredOff);
    let record = exit_record(&pod.dir()).unwrap();
    assert_eq!(record.exit, SandboxExit::PoweredOff);
}

#[tokio::test]
async fn what_needs_an_agent_is_refused_by_what_was_asked() {
    let pod = Pod::default();
    let sandbox = launch(config(&pod)).await.unwrap();
    let image: OwnedFd = fs::File::open("/dev/null").unwrap().into();
    let container = CreateContainer::new("c", image, "sha256:0", Default::default());
    let create = sandbox.create_container(container).await.unwrap_err();
    let exec = Exec {
        exec_id: "e".to_owned(),
        process: oci::Process::default(),
        user: String::new(),
        supplemental_groups: SupplementalGroups::Default,
        tty: None,
        stdio: StdioFds::default(),
    };
    sandbox.boot_machine(machine(&pod, "vm")).await.unwrap();
    let exec = sandbox.exec("vm", exec).await.unwrap_err();
    let info = sandbox.guest_info("vm").await.unwrap_err();
    let freeze = sandbox.freeze_guest("vm", Duration::from_secs(1)).await;
    let freeze = freeze.unwrap_err();
    let resources = oci::LinuxResources::default();
    let update = sandbox.update_resources("vm", &resources).await;
    let update = update.unwrap_err();
    for (error, named) in [
        (create, "create a container"),
        (exec, "qemu-guest-agent"),
        (info, "qemu-guest-agent"),
        (freeze, "qemu-guest-agent"),
        (update, "change a container's resources"),
    ] {
        assert_eq!(error.kind(), Some(RefusalKind::NoAgent), "{error}");
        let said = error.to_string();
        assert!(said.contains(named) && said.contains("agent"), "{said}");
    }
    // It goes on.
    says(&pod, "vm", 1).await;
    assert_eq!(info_of(&sandbox, "vm").await.state, ContainerState::Running);
    sandbox.shutdown(Duration::ZERO).await.unwrap();
}

#[tokio::test]
async fn a_reset_replaces_the_machine_and_the_container_stays() {
    let pod = Pod::default();
    let sandbox = launch(config(&pod)).await.unwrap();
    sandbox.boot_machine(machine(&pod, "vm")).await.unwrap();
    for times in 1..=3 {
        says(&pod, "vm", times).await;
        sandbox.reset_machine("vm").await.unwrap();
    }
    says(&pod, "vm", 4).await;
    assert_eq!(info_of(&sandbox, "vm").await.state, ContainerState::Running);
    let unknown = sandbox.reset_machine("other").await.unwrap_err();
    assert_eq!(unknown.kind(), Some(RefusalKind::NotFound));
    attach(&sandbox, "vm").await.write_all(b"p").unwrap();
    assert_eq!(sandbox.wait("vm", None).await.unwrap().code, 0);
    let ended = sandbox.reset_machine("vm").await.unwrap_err();
    assert_eq!(ended.kind(), Some(RefusalKind::WrongState));
    sandbox.shutdown(Duration::ZERO).await.unwrap();
}

#[tokio::test]
async fn a_guest_without_an_agent_is_rebooted_by_its_power_button() {
    let pod = Pod::default();
    let sandbox = launch(config(&pod)).await.unwrap();
    sandbox.boot_machine(machine(&pod, "vm")).await.unwrap();
    let mut typing = attach(&sandbox, "vm").await;
    for times in 1..=2 {
        says(&pod, "vm", times).await;
        sandbox.reboot_guest("vm").await.unwrap();
        // As a system does when its button is pressed.
        typing.write_all(b"p").unwrap();
    }
    says(&pod, "vm", 3).await;
    assert_eq!(info_of(&sandbox, "vm").await.state, ContainerState::Running);
    // One that powers itself off by itself has ended.
    typing.write_all(b"p").unwrap();
    assert_eq!(sandbox.wait("vm", None).await.unwrap().code, 0);
    sandbox.shutdown(Duration::ZERO).await.unwrap();
}

#[tokio::test]
async fn a_guest_that_is_not_to_reboot_has_ended_when_it_does() {
    let pod = Pod::default();
    let sandbox = launch(config(&pod)).await.unwrap();
    let boot = BootMachine {
        ends_at_reboot: true,
        ..machine(&pod, "vm")
    };
    sandbox.boot_machine(boot).await.unwrap();
    says(&pod, "vm", 1).await;
    // Somebody else may boot it again.
    sandbox.reset_machine("vm").await.unwrap();
    says(&pod, "vm", 2).await;
    attach(&sandbox, "vm").await.write_all(b"r").unwrap();
    assert_eq!(sandbox.wait("vm", None).await.unwrap().code, 0);
    assert_eq!(info_of(&sandbox, "vm").await.message, None);
    sandbox.shutdown(Duration::ZERO).await.unwrap();
}

#[tokio::test]
async fn a_reboot_stays_in_the_container_and_a_power_off_ends_it_alone() {
    let pod = Pod::default();
    let sandbox = launch(config(&pod)).await.unwrap();
    sandbox.boot_machine(machine(&pod, "one")).await.unwrap();
    says(&pod, "one", 1).await;
    // Whoever launched it may end: nothing depends on that.
    drop(sandbox);
    let sandbox = SandboxClient::connect(&pod.dir()).await.unwrap();
    let mut typing = attach(&sandbox, "one").await;
    typing.write_all(b"hello\nr").unwrap();
    says(&pod, "one", 2).await;
    assert!(pod.log("one").contains("stdout F hello\n"));
    assert_eq!(
        info_of(&sandbox, "one").await.state,
        ContainerState::Running
    );
    let stats = sandbox.stats("one").await.unwrap();
    assert!(
        stats.cpu_usage_us > 0 && stats.memory_usage_bytes > 0,
        "{stats:?}"
    );
    typing.write_all(b"p").unwrap();
    let exit = sandbox.wait("one", None).await.unwrap();
    assert_eq!((exit.code, exit.of_machine), (0, false));
    assert_eq!(info_of(&sandbox, "one").await.message, None);
    // Another attempt in the same pod.
    sandbox.boot_machine(machine(&pod, "two")).await.unwrap();
    says(&pod, "two", 1).await;
    sandbox.delete_container("one").await.unwrap();
    attach(&sandbox, "two").await.write_all(b"p").unwrap();
    assert_eq!(sandbox.wait("two", None).await.unwrap().code, 0);
    sandbox.shutdown(Duration::from_secs(60)).await.unwrap();
    assert_eq!(sandbox.ended().await, SandboxExit::PoweredOff);
    let record = exit_record(&pod.dir()).unwrap();
    let ended: Vec<_> = record.containers.iter().map(|info| info.exit).collect();
    assert_eq!(ended.len(), 1);
    assert_eq!(ended[0].map(|exit| exit.code), Some(0));
}

#[tokio::test]
async fn a_guest_that_ignores_its_stop_is_killed_when_its_time_is_over() {
    let pod = Pod::default();
    let sandbox = launch(config(&pod)).await.unwrap();
    sandbox.boot_machine(machine(&pod, "vm")).await.unwrap();
    says(&pod, "vm", 1).await;
    let begin = Instant::now();
    let grace = Duration::from_secs(1);
    sandbox.stop_container("vm", 15, grace).await.unwrap();
    let exit = sandbox.wait("vm", None).await.unwrap();
    assert!(begin.elapsed() >= grace);
    assert_eq!(exit.code, 137);
    let message = info_of(&sandbox, "vm").await.message.unwrap();
    assert!(message.contains("killed"), "{message}");
    // The pod's own end does not wait for a guest that does not listen either.
    sandbox.boot_machine(machine(&pod, "again")).await.unwrap();
    says(&pod, "again", 1).await;
    sandbox.shutdown(grace).await.unwrap();
    assert_eq!(sandbox.ended().await, SandboxExit::Killed);
    let record = exit_record(&pod.dir()).unwrap();
    assert!(record.containers.iter().all(|info| info.exit.is_some()));
}

#[tokio::test]
async fn a_loader_that_never_writes_a_line_is_ended_with_a_reason() {
    let pod = Pod::default();
    let sandbox = launch(config(&pod)).await.unwrap();
    let limit = Duration::from_secs(1);
    let boot = BootMachine {
        loader_limit: Some(limit),
        ..machine(&pod, "vm")
    };
    let begin = Instant::now();
    sandbox.boot_machine(boot).await.unwrap();
    let exit = sandbox.wait("vm", None).await.unwrap();
    assert!(begin.elapsed() >= limit);
    assert_eq!(exit.code, 1);
    let message = info_of(&sandbox, "vm").await.message.unwrap();
    assert!(
        message.contains("loader wrote nothing within 1 s"),
        "{message}"
    );
    // One that writes its line goes on.
    let boot = BootMachine {
        loader_limit: Some(limit),
        kernel: kernel_that_says(&pod, "podvisor-loader: disk vda\n"),
        ..machine(&pod, "again")
    };
    sandbox.boot_machine(boot).await.unwrap();
    tokio::time::sleep(2 * limit).await;
    assert_eq!(
        info_of(&sandbox, "again").await.state,
        ContainerState::Running
    );
    sandbox.shutdown(Duration::ZERO).await.unwrap();
}

#[tokio::test]
async fn a_machine_that_does_not_fit_is_refused_and_leaves_its_name_free() {
    let pod = Pod::default();
    let sandbox = launch(config(&pod)).await.unwrap();
    let disk = |serial: &str| MachineDisk {
        moves: DiskMove::default(),
        contents: DiskContents::Raw {
            file: tempfile::tempfile().unwrap(),
            is_read_only: true,
        },
        serial: serial.to_owned(),
    };
    let mut same = machine(&pod, "vm");
    same.disks = vec![disk("a"), disk("b"), disk("a")];
    let mut large = machine(&pod, "vm");
    large.memory = 1 << 40;
    let mut many = machine(&pod, "vm");
    many.disks = (0..21).map(|number| disk(&number.to_string())).collect();
    let mut broken = machine(&pod, "vm");
    broken.kernel = File::open("/etc/passwd").unwrap();
    let mut named = machine(&pod, "vm");
    named.id = "../vm".to_owned();
    for (machine, said) in [
        (same, "serial number \"a\""),
        (large, "1099511627776 bytes"),
        (many, "21 disks"),
        (broken, "kernel"),
        (named, "id"),
    ] {
        let error = sandbox.boot_machine(machine).await.unwrap_err();
        assert!(error.to_string().contains(said), "{error}");
        assert_eq!(sandbox.list().await.unwrap(), []);
    }
    sandbox.boot_machine(machine(&pod, "vm")).await.unwrap();
    let second = sandbox
        .boot_machine(machine(&pod, "second"))
        .await
        .unwrap_err();
    assert_eq!(second.kind(), Some(RefusalKind::WrongState));
    let again = sandbox.boot_machine(machine(&pod, "vm")).await.unwrap_err();
    assert!(again.kind().is_some(), "{again}");
    sandbox.shutdown(Duration::ZERO).await.unwrap();
}

/// A server for the guest's card, whose tap is one end of a pair of cards here. It needs root, as
/// does the client at the other end.
fn dhcp_server(host: &str, guest: &str) -> DhcpServer {
    for line in [
        format!("ip netns add {host}"),
        format!("ip netns add {guest}"),
        format!("ip -n {host} link add podvisor0 type veth peer name eth0 netns {guest}"),
        format!("ip -n {guest} link set eth0 address 02:00:00:00:00:02 up"),
        format!("ip -n {host} link set podvisor0 up"),
    ] {
        run(&line);
    }
    let config = DhcpConfig {
        ipv4: Some(Ipv4Lease {
            address: "10.1.0.2".parse().unwrap(),
            prefix_length: 16,
            routes: Vec::new(),
        }),
        ..DhcpConfig::new(MacAddress([2, 0, 0, 0, 0, 2]))
    };
    let namespace = File::open(format!("/run/netns/{host}")).unwrap();
    let socket = std::thread::scope(|scope| {
        let open = || {
            let kind = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(namespace.as_fd(), kind).expect("this test needs root");
            open_socket("podvisor0", &config).unwrap()
        };
        scope.spawn(open).join().unwrap()
    });
    DhcpServer { socket, config }
}

fn run(line: &str) -> String {
    let words: Vec<&str> = line.split(' ').collect();
    let output = Command::new(words[0]).args(&words[1..]).output().unwrap();
    assert!(output.status.success(), "{line}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test]
async fn a_machines_addresses_are_given_in_the_jail_while_nobody_else_is_there() {
    let pod = Pod::default();
    let name = format!("pv-own-os-{}", std::process::id());
    let (host, guest) = (format!("{name}-h"), format!("{name}-g"));
    let sandbox = launch(config(&pod)).await.unwrap();
    let mut boot = machine(&pod, "one");
    boot.dhcp.push(dhcp_server(&host, &guest));
    sandbox.boot_machine(boot).await.unwrap();
    says(&pod, "one", 1).await;
    drop(sandbox);
    let script = pod.path("script");
    fs::write(&script, "#!/bin/sh\necho \"$1 $ip/$mask $lease\"\n").unwrap();
    run(&format!("chmod 755 {}", script.display()));
    let client = move |namespace: String| {
        let script = script.display();
        run(&format!(
            "ip netns exec {namespace} busybox udhcpc -f -q -n -t 10 -T 1 -i eth0 -s {script}"
        ))
    };
    let bound = tokio::task::spawn_blocking(move || client(guest))
        .await
        .unwrap();
    assert!(bound.contains("bound 10.1.0.2/16 86400"), "{bound}");
    let sandbox = SandboxClient::connect(&pod.dir()).await.unwrap();
    assert_eq!(
        info_of(&sandbox, "one").await.state,
        ContainerState::Running
    );
    attach(&sandbox, "one").await.write_all(b"p").unwrap();
    assert_eq!(sandbox.wait("one", None).await.unwrap().code, 0);
    sandbox.shutdown(Duration::from_secs(60)).await.unwrap();
    for namespace in ["h", "g"] {
        run(&format!("ip netns del {name}-{namespace}"));
    }
}

#[tokio::test]
async fn a_machine_shares_the_directories_that_its_sandbox_has_and_is_not_saved_then() {
    let pod = Pod::default();
    let shared = pod.path("shared");
    fs::create_dir_all(shared.join("v0")).unwrap();
    let share = |tag: &str, name: &str| MachineShare {
        tag: tag.to_owned(),
        name: name.to_owned(),
        is_read_only: false,
    };
    let sandbox = launch(podvisor_cri::sandbox::LaunchConfig {
        shared_dir: Some(shared),
        ..config(&pod)
    });
    let sandbox = sandbox.await.unwrap();
    let with = |shares: &[MachineShare]| BootMachine {
        shares: shares.to_vec(),
        ..machine(&pod, "vm")
    };
    let many: Vec<_> = (0..9).map(|tag| share(&tag.to_string(), "v0")).collect();
    for (shares, named) in [
        (&[share("work", "../shared")][..], "\"work\""),
        (&[share("work", "none")], "\"work\""),
        (&[share("", "v0")], "tag"),
        (&[share("work", "v0"), share("work", "v0")], "two"),
        (&many, "at most 8"),
    ] {
        let error = sandbox.boot_machine(with(shares)).await.unwrap_err();
        assert!(error.to_string().contains(named), "{error}");
    }
    let shares = [share("work", "v0"), share("more", "v0")];
    sandbox.boot_machine(with(&shares)).await.unwrap();
    says(&pod, "vm", 1).await;
    // A new machine has them, too.
    sandbox.reset_machine("vm").await.unwrap();
    says(&pod, "vm", 2).await;
    let file = |name: &str| File::create(pod.path(name)).unwrap();
    let save = SaveMachine {
        plugged: Vec::new(),
        state: file("state"),
        memory: file("memory"),
        disks: Vec::new(),
        then: AfterSave::GoOn,
    };
    let error = sandbox.save_machine("vm", save).await.unwrap_err();
    assert_eq!(error.kind(), Some(RefusalKind::WrongState), "{error}");
    assert!(error.to_string().contains("work, more"), "{error}");
    sandbox.shutdown(Duration::ZERO).await.unwrap();
}

#[tokio::test]
async fn a_sandbox_without_a_directory_shares_none() {
    let pod = Pod::default();
    let sandbox = launch(config(&pod)).await.unwrap();
    let boot = BootMachine {
        shares: vec![MachineShare {
            tag: "work".to_owned(),
            name: "v0".to_owned(),
            is_read_only: true,
        }],
        ..machine(&pod, "vm")
    };
    let error = sandbox.boot_machine(boot).await.unwrap_err();
    assert!(error.to_string().contains("without a directory"), "{error}");
    sandbox.shutdown(Duration::ZERO).await.unwrap();
}

#[tokio::test]
async fn a_container_without_a_machine_runs_until_it_is_stopped() {
    let pod = Pod::default();
    let sandbox = launch(config(&pod)).await.unwrap();
    let idle = |id: &str| BootMachine {
        is_idle: true,
        memory: 1 << 20,
        ..BootMachine::new(id, File::open("/dev/null").unwrap())
    };
    for (id, grace) in [("kept", 3600), ("killed", 0)] {
        sandbox.boot_machine(idle(id)).await.unwrap();
        assert_eq!(info_of(&sandbox, id).await.state, ContainerState::Running);
        let plug = sandbox.plug_disk(id, "data", disks::disk_file(&pod, "data"), false);
        let error = plug.await.unwrap_err();
        assert_eq!(error.kind(), Some(RefusalKind::WrongState), "{error}");
        let grace = Duration::from_secs(grace);
        sandbox.stop_container(id, 15, grace).await.unwrap();
        assert_eq!(sandbox.wait(id, None).await.unwrap().code, 0);
        sandbox.delete_container(id).await.unwrap();
    }
    sandbox.boot_machine(idle("last")).await.unwrap();
    sandbox.shutdown(Duration::from_secs(60)).await.unwrap();
    assert_eq!(sandbox.ended().await, SandboxExit::PoweredOff);
}
