//! Exec, attach and port-forward over the URLs that the runtime returns, as used by a kubelet's
//! client.

mod bulk;
mod spdy;
mod websocket;

use podvisor_cri_messages::*;

use crate::client::ask;
use crate::pod::{Container, Pod, strings};
use websocket::{Client, RESIZE, STDERR, STDIN, STDOUT};

fn exec_url(container: &Container, script: &str, tty: bool) -> String {
    let response = ask!(exec(ExecRequest {
        container_id: container.id.clone(),
        cmd: strings(&["sh", "-c", script]),
        tty,
        stdin: true,
        stdout: true,
        stderr: !tty,
    }))
    .unwrap();
    response.url
}

fn exec(container: &Container, script: &str, tty: bool) -> Client {
    Client::connect(&exec_url(container, script, tty))
}

fn attach_url(container: &Container, tty: bool) -> String {
    let response = ask!(attach(AttachRequest {
        container_id: container.id.clone(),
        stdin: true,
        tty,
        stdout: true,
        stderr: !tty,
    }))
    .unwrap();
    response.url
}

/// Returns the URL that forwards a port of the pod, once a program in `container` listens on it.
fn forward_url(pod: &Pod, container: &Container, port: u16) -> String {
    container.wait_for_listener(port);
    let response = ask!(port_forward(PortForwardRequest {
        pod_sandbox_id: pod.id.clone(),
        port: vec![port.into()],
    }))
    .unwrap();
    response.url
}

#[test]
fn guest_a_program_gets_input_and_tells_outputs_and_exit_code() {
    let container = Pod::shared().start("streams", |_| {});
    let mut client = exec(&container, "head -c 5; echo; echo e >&2; exit 7", false);
    client.send(STDIN, b"hello, there");
    assert_eq!(client.exit_code(), 7);
    assert_eq!(client.text(STDOUT), "hello\n");
    assert_eq!(client.text(STDERR), "e\n");

    let mut client = exec(&container, "head -c 1000000 | busybox sha256sum", false);
    for piece in vec![b'x'; 1_000_000].chunks(32_000) {
        client.send(STDIN, piece);
    }
    assert_eq!(client.exit_code(), 0);
    let sum: [u8; 32] = sha2::Digest::finalize(sha2::Digest::chain_update(
        <sha2::Sha256 as sha2::Digest>::new(),
        vec![b'x'; 1_000_000],
    ))
    .into();
    let hex: String = sum.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(client.text(STDOUT), format!("{hex}  -\n"));

    // Sizes are sent in parallel to the input: the program sees its new one at some time.
    let script = "read line; until [ \"$(stty size)\" = '40 100' ]; do sleep 0.1; done; echo $line";
    let mut client = exec(&container, script, true);
    client.send(RESIZE, br#"{"Width":100,"Height":40}"#);
    client.send(STDIN, b"typed\n");
    assert_eq!(client.exit_code(), 0);
    let shown = client.text(STDOUT);
    assert!(shown.ends_with("typed\r\n"), "{shown:?}");
    container.stop(0);
    container.remove();
}

#[test]
fn guest_programs_that_start_at_once_have_terminals_of_their_own() {
    let container = Pod::shared().start("terminals", |_| {});
    std::thread::scope(|scope| {
        for number in 0..6 {
            let container = &container;
            scope.spawn(move || {
                let mut client = exec(container, &format!("echo {number}; read end"), true);
                client.until(STDOUT, |text| text.contains('\n'));
                client.send(STDIN, b"end\n");
                assert_eq!(client.exit_code(), 0);
                assert_eq!(client.text(STDOUT), format!("{number}\r\nend\r\n"));
            });
        }
    });
    container.stop(0);
    container.remove();
}

#[test]
fn guest_clients_attach_to_the_containers_own_program() {
    let container = Pod::shared().start("attached", |config| {
        config.stdin = true;
        let script = "while read line; do echo got $line; [ $line = end ] && exit 4; done";
        config.command = strings(&["sh", "-c", script]);
    });
    let attach = || Client::connect(&attach_url(&container, false));
    let mut first = attach();
    first.send(STDIN, b"one\n");
    first.until(STDOUT, |text| text.contains("got one\n"));
    drop(first);
    // The container continues without its client, and accepts another one.
    let mut second = attach();
    second.send(STDIN, b"two\n");
    second.until(STDOUT, |text| text.contains("got two\n"));
    assert!(!second.text(STDOUT).contains("got one"));
    second.send(STDIN, b"end\n");
    while second.receive() {}
    assert!(second.text(STDOUT).ends_with("got end\n"));
    assert_eq!(container.ended().exit_code, 4);
    let lines = container.lines();
    assert_eq!(
        crate::pod::stdout(&lines),
        ["got one", "got two", "got end"]
    );
    container.remove();
}

#[test]
fn guest_who_leaves_a_terminal_for_one_client_can_come_back_to_it() {
    let container = Pod::shared().start("left", |config| {
        (config.stdin, config.stdin_once, config.tty) = (true, true, true);
        let script = "while read line; do [ $line = end ] && exit 4; echo got $line; done; exit 5";
        config.command = strings(&["sh", "-c", script]);
    });
    for line in ["one", "two"] {
        let mut client = Client::connect(&attach_url(&container, true));
        client.send(STDIN, format!("{line}\n").as_bytes());
        client.until(STDOUT, |text| text.contains(&format!("got {line}\r\n")));
        // As when its connection breaks.
    }
    let mut last = Client::connect(&attach_url(&container, true));
    last.send(STDIN, b"end\n");
    assert_eq!(container.ended().exit_code, 4);
    container.remove();
}

#[test]
fn guest_a_client_that_ends_its_input_has_attached_and_its_program_goes_on() {
    let container = Pod::shared().start("let-go", |config| {
        config.stdin = true;
        config.command = strings(&["cat"]);
    });
    for line in ["one\n", "two\n"] {
        let mut client = spdy::Client::connect(&attach_url(&container, false), "v4.channel.k8s.io");
        let [_, stdin, stdout, _] =
            ["error", "stdin", "stdout", "stderr"].map(|kind| client.open(&[("streamtype", kind)]));
        client.send(stdin, line.as_bytes());
        while client.streams.get(&stdout).map(Vec::as_slice) != Some(line.as_bytes()) {
            assert!(client.receive(), "{:?}", client.streams);
        }
        client.finish(stdin);
        while client.receive() {}
        assert!(client.ended.contains(&stdout));
    }
    assert_eq!(container.state(), ContainerState::ContainerRunning);
    assert_eq!(crate::pod::stdout(&container.lines()), ["one", "two"]);
    container.stop(0);
    container.remove();
}

/// A server that echoes its input on a port of the pod's loopback.
pub(crate) const ECHO_SERVER: &str =
    "busybox mkfifo /tmp/f; busybox nc -l -p 7070 </tmp/f | cat >/tmp/f";

/// Checks such a server over a forwarded port.
pub(crate) fn check_forward(pod: &Pod, server: &Container) {
    let mut client = Client::connect(&forward_url(pod, server, 7070));
    // Each channel, of data and of errors, starts with the number of its port.
    let port = 7070_u16.to_le_bytes();
    let is_there = |client: &Client, channel| {
        let bytes = client.channels.get(&channel);
        bytes.is_some_and(|bytes| bytes.len() >= 2)
    };
    while !is_there(&client, 0) || !is_there(&client, 1) {
        assert!(client.receive());
    }
    assert_eq!(client.channels[&0][..2], port);
    assert_eq!(client.channels[&1][..2], port);
    client.send(0, b"there and back");
    while client.channels[&0].len() < 2 + 14 {
        assert!(client.receive(), "{:?}", client.channels);
    }
    assert_eq!(&client.channels[&0][2..], b"there and back");
}

#[test]
fn guest_a_port_of_the_pods_loopback_is_forwarded() {
    let pod = Pod::shared();
    let container = pod.start("forwarded", |config| {
        config.command = strings(&["sh", "-c", ECHO_SERVER]);
    });
    check_forward(pod, &container);
    container.stop(0);
    container.remove();
}
