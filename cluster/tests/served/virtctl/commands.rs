//! What is asked of a VM: by whom it is heard, and what the client prints.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;

use k8s_openapi::api::core::v1::{Pod, Service};
use kube::{Api, api::ListParams};
use podvisor_node_api::messages::VmPhase;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UdpSocket};

use super::super::nodes::{self, eventually, running};
use super::super::{migrations, served, vm};
use super::{Scene, Virtctl};

#[tokio::test]
async fn virtctl_says_which_versions_there_are() {
    let admin = served().admin();
    let virtctl = Virtctl::new(&admin).await;
    virtctl
        .all(&[
            (
                "version",
                Ok("Server Version: version.Info{GitVersion:\"v1.7.0+podvisor."),
            ),
            ("version --client", Ok("GitVersion:\"v1.7.0\"")),
            ("permitted-devices", Err("no KubeVirt resource in")),
        ])
        .await;
    let _controller = migrations::start_controller(&virtctl.namespace);
    let virtctl = virtctl.of_admin();
    eventually("there is a configuration", async || {
        let said = virtctl.run("permitted-devices -n podvisor").await;
        said.succeeded.then_some(())
    })
    .await;
    virtctl
        .all(&[
            ("permitted-devices -n podvisor", Ok("Host Devices:")),
            ("adm log-verbosity --all", Ok("virt-api=2")),
            (
                "adm log-verbosity --virt-api=5",
                Err("spec.configuration.developerConfiguration.logVerbosity.virtAPI"),
            ),
        ])
        .await;
}

#[tokio::test]
async fn virtctl_starts_stops_and_restarts_a_vm() {
    let scene = Scene::new("virtctl-life").await;
    let virtctl = &scene.virtctl;
    scene.make(&vm("v", "Halted")).await;
    virtctl
        .all(&[
            (
                "start nothing",
                Err("virtualmachine.kubevirt.io \"nothing\" not found"),
            ),
            ("stop v", Err("VM is not running")),
            (
                "restart v",
                Err("Halted does not support manual restart requests"),
            ),
            ("migrate v", Err("VM is not running")),
            ("pause vm v", Err("VirtualMachine v is not set to run")),
            (
                "unpause vm v",
                Err("virtualmachineinstance.kubevirt.io \"v\" not found"),
            ),
            (
                "reset v",
                Err("virtualmachineinstance.kubevirt.io \"v\" not found"),
            ),
            (
                "console v --timeout=1",
                Err("virtualmachineinstance.kubevirt.io \"v\" not found"),
            ),
            ("start v --dry-run", Ok("Dry Run execution")),
            ("start v --paused", Ok("VM v was scheduled to start")),
        ])
        .await;
    let first = scene.runs("v", None).await;
    virtctl
        .all(&[
            ("start v", Err("VM is already running")),
            ("restart v --dry-run", Ok("VM v was scheduled to restart")),
            (
                "restart v --force --grace-period=1",
                Err("only gracePeriodSeconds=0"),
            ),
            (
                "stop v --force --grace-period=5 --dry-run",
                Ok("VM v was scheduled to stop"),
            ),
            ("restart v", Ok("VM v was scheduled to restart")),
        ])
        .await;
    let second = scene.runs("v", Some(&first)).await;
    let force = "--force --grace-period=0";
    let (restart, stop) = (format!("restart v {force}"), format!("stop v {force}"));
    virtctl
        .all(&[(&restart, Ok("VM v was scheduled to restart"))])
        .await;
    scene.runs("v", Some(&second)).await;
    virtctl
        .all(&[(&stop, Ok("VM v was scheduled to stop"))])
        .await;
    scene.is_gone("v").await;
    virtctl
        .all(&[
            ("expand --vm v", Ok("kind: VirtualMachine")),
            ("evacuate-cancel vm v", Err("\"v\" not found")),
            (
                "migrate-cancel v",
                Err("Found no migration to cancel for v"),
            ),
        ])
        .await;
}

#[tokio::test]
async fn virtctl_pauses_resets_and_asks_the_guest() {
    let scene = Scene::new("virtctl-guest").await;
    let virtctl = &scene.virtctl;
    scene.make(&vm("v", "Always")).await;
    let machine = scene.runs("v", None).await;
    virtctl
        .all(&[
            (
                "pause vm nothing",
                Err("virtualmachines.kubevirt.io \"nothing\" not found"),
            ),
            ("unpause vm v", Err("VMI is not paused")),
            ("pause vm v --dry-run", Ok("VMI v was scheduled to pause")),
            ("pause vm v", Ok("VMI v was scheduled to pause")),
        ])
        .await;
    assert_eq!(scene.node.machine(&machine).phase, VmPhase::Paused);
    eventually("the pause is reported", async || {
        let said = virtctl.run("pause vmi v").await;
        said.text.contains("VMI is already paused").then_some(())
    })
    .await;
    virtctl
        .all(&[
            ("unpause vm v", Ok("VMI v was scheduled to unpause")),
            ("reset v", Ok("VMI v was scheduled to reset")),
            ("soft-reboot v", Ok("VMI v was scheduled to soft-reboot")),
            ("evacuate-cancel vm v", Ok("was canceled evacuation")),
        ])
        .await;
    let done = scene.node.machine(&machine).done;
    assert_eq!(done, ["pause", "unpause", "reset", "soft reboot"]);
    eventually("the guest's agent is known", async || {
        let said = virtctl.run("guestosinfo v").await;
        said.text.contains("Debian GNU/Linux 13").then_some(())
    })
    .await;
    virtctl
        .all(&[
            ("userlist v", Ok("\"userName\": \"root\"")),
            ("fslist v", Ok("\"items\": []")),
            (
                "userlist nothing",
                Err("virtualmachineinstance.kubevirt.io \"nothing\" not found"),
            ),
        ])
        .await;
}

#[tokio::test]
async fn virtctl_talks_with_the_console_and_with_ports() {
    let admin = served().admin();
    let virtctl = Virtctl::new(&admin).await;
    let machines = nodes::serve("virtctl-streams").await;
    let key = running("virtctl-streams", &virtctl.namespace, "a", json!({})).await;
    machines.start(&key, None);
    let mut console = virtctl.begin("console a");
    console.hears("console").await;
    console.say(b"ls\n");
    console.hears("ls\n").await;
    // The escape that ends a session.
    console.say(b"\x1d");
    assert!(console.ends().await.success());

    for (arguments, greeting) in [
        ("port-forward --stdio vmi/a 22", "Tcp 22"),
        ("port-forward --stdio vmi/a udp/53", "Udp 53"),
    ] {
        let mut port = virtctl.begin(arguments);
        port.hears(greeting).await;
        port.say(b"hello");
        port.hears("hello").await;
        port.say(b"exit");
        assert!(port.ends().await.success(), "{arguments}");
    }
    let ports = ports();
    let arguments = format!("port-forward vmi/a {}:80 udp/{}:53", ports[0], ports[1]);
    let _forwards = virtctl.begin(&arguments);
    let mut stream = eventually("it listens", async || {
        TcpStream::connect(("127.0.0.1", ports[0])).await.ok()
    })
    .await;
    let mut greeting = [0; 6];
    stream.read_exact(&mut greeting).await.unwrap();
    stream.write_all(b"hello").await.unwrap();
    let mut echo = [0; 5];
    stream.read_exact(&mut echo).await.unwrap();
    assert_eq!((&greeting, &echo), (b"Tcp 80", b"hello"));
    // A datagram is a message, both ways.
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    socket.connect(("127.0.0.1", ports[1])).await.unwrap();
    for (said, heard) in [("one", "Udp 53"), ("two", "one"), ("three", "two")] {
        socket.send(said.as_bytes()).await.unwrap();
        let mut datagram = [0; 64];
        let count = socket.recv(&mut datagram).await.unwrap();
        assert_eq!(&datagram[..count], heard.as_bytes());
    }

    virtctl
        .all(&[
            (
                "console nothing",
                Err("virtualmachineinstance.kubevirt.io \"nothing\" not found"),
            ),
            (
                "port-forward --stdio vmi/a 23",
                Err("nothing listens there"),
            ),
            (
                "vnc a --proxy-only",
                Err("No graphics devices are present."),
            ),
            (
                "vnc screenshot a --file=/dev/null",
                Err("No graphics devices are present."),
            ),
            (
                "usbredir --no-launch a",
                Err("Not configured with USB Redirection"),
            ),
            ("guestfs a", Err("could not get guestfs image info")),
        ])
        .await;
}

/// Free ports of the loopback interface, of TCP and of UDP.
fn ports() -> [u16; 2] {
    let stream = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let datagrams = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let port = |address: std::io::Result<SocketAddr>| address.unwrap().port();
    [port(stream.local_addr()), port(datagrams.local_addr())]
}

/// Plays the local `ssh` and `scp`: says what it was called with, and what it hears first of the
/// program that virtctl gives it as a way to the guest.
const SSH: &str = r#"#!/bin/sh
for argument; do
    case $argument in ProxyCommand=*) proxy=${argument#ProxyCommand=} ;; esac
done
echo "called with $@"
mkfifo "$0.input" && exec 3<>"$0.input" && printf exit >&3 && sh -c "$proxy" <"$0.input"
"#;

#[tokio::test]
async fn virtctl_gives_ssh_a_way_to_the_guest() {
    let admin = served().admin();
    let virtctl = Virtctl::new(&admin).await;
    let machines = nodes::serve("virtctl-ssh").await;
    let key = running("virtctl-ssh", &virtctl.namespace, "a", json!({})).await;
    machines.start(&key, None);
    let target = format!("ann@vmi.a.{}", virtctl.namespace);
    for (program, arguments, expected) in [
        (
            "ssh",
            "ssh ann@vmi/a --command=uptime",
            format!("{target} uptime"),
        ),
        (
            "scp",
            "scp file ann@vmi/a:copy",
            format!("file {target}:copy"),
        ),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(program);
        fs::write(&path, SSH).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        let search = format!(
            "{}:{}",
            directory.path().display(),
            std::env::var("PATH").unwrap_or_default()
        );
        let said = virtctl.run_with(arguments, |command| {
            command.env("PATH", search);
        });
        let said = said.await;
        let is_right = said.text.contains(&expected) && said.text.contains("Tcp 22");
        assert!(said.succeeded && is_right, "{said:?}");
    }
}

#[tokio::test]
async fn virtctl_moves_a_vm_and_takes_it_back() {
    let scene = Scene::new("virtctl-moves").await;
    let virtctl = &scene.virtctl;
    let mut made = vm("v", "Always");
    let spec = &mut made.data["spec"]["template"]["spec"];
    spec["domain"]["devices"]["interfaces"] = json!([{ "name": "default", "masquerade": {} }]);
    spec["networks"] = json!([{ "name": "default", "pod": {} }]);
    scene.make(&made).await;
    scene.make(&vm("bridged", "Always")).await;
    scene.runs("v", None).await;
    scene.runs("bridged", None).await;
    eventually("it can move", async || {
        let said = virtctl.run("migrate v --dry-run").await;
        said.succeeded.then_some(())
    })
    .await;
    virtctl
        .all(&[
            ("migrate bridged", Err("InterfaceNotLiveMigratable")),
            (
                "migrate-cancel v",
                Err("Found no migration to cancel for v"),
            ),
            (
                "migrate v --addedNodeSelector=rack=2",
                Ok("VM v was scheduled to migrate"),
            ),
            ("migrate v", Err("in-flight migration detected")),
            (
                "migrate-cancel v",
                Ok("VM v was scheduled to migrate-cancel"),
            ),
        ])
        .await;
    eventually("nothing moves", async || {
        let said = virtctl.run("migrate-cancel v").await;
        said.text.contains("Found no migration").then_some(())
    })
    .await;
}

#[tokio::test]
async fn virtctl_exposes_a_vm_by_a_label_of_its_pod() {
    let scene = Scene::new("virtctl-exposes").await;
    let virtctl = &scene.virtctl;
    scene.make(&vm("v", "Always")).await;
    scene.runs("v", None).await;
    virtctl
        .all(&[
            (
                "expose vm v --port=80 --target-port=8080 --name=web",
                Ok("Service web successfully"),
            ),
            (
                "expose vmi v --port=22 --name=ssh --type=NodePort",
                Ok("Service ssh successfully"),
            ),
            ("expose vm v --name=none", Err("couldn't find port")),
            ("objectgraph v", Ok("\"kind\": \"VirtualMachineInstance\"")),
            ("objectgraph --vmi v", Ok("\"kind\": \"Pod\"")),
            (
                "objectgraph v --selector=kubevirt.io/dependency-type=config --output=yaml",
                Ok("kind: VirtualMachine\n"),
            ),
            (
                "objectgraph nothing",
                Err("virtualmachine.kubevirt.io \"nothing\" not found"),
            ),
        ])
        .await;
    let namespace = &virtctl.namespace;
    let services = Api::<Service>::namespaced(scene.admin.clone(), namespace);
    let pods = Api::<Pod>::namespaced(scene.admin.clone(), namespace);
    for name in ["web", "ssh"] {
        let service = services.get(name).await.unwrap();
        let selector = service.spec.unwrap().selector.unwrap();
        let selector = selector.iter().map(|(key, value)| format!("{key}={value}"));
        let selector = selector.collect::<Vec<_>>().join(",");
        let found = pods.list(&ListParams::default().labels(&selector)).await;
        assert_eq!(found.unwrap().items.len(), 1, "{name}: {selector}");
    }
}
