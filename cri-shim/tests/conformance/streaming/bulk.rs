//! Transfers much data through exec, attach and port-forward, by both protocols: nothing is lost,
//! duplicated or stuck. `PODVISOR_CONFORMANCE_MIB` sets the amount, 1 MiB each by default.

use std::io::Write as _;
use std::sync::LazyLock;

use podvisor_cri_messages::Mount;
use sha2::{Digest as _, Sha256};

use super::websocket::{self, STDIN, STDOUT};
use super::{attach_url, exec_url, forward_url, spdy};
use crate::fixture::RUNTIME;
use crate::pod::{Container, Pod, strings};

/// Size of the pieces that clients send.
const PIECE: usize = 32_000;

/// The client's end of a command that reads and prints.
trait Command {
    fn connect(url: &str) -> Self;
    fn send(&mut self, bytes: &[u8]);
    /// Returns all output until its end, which must be a success.
    fn output(self) -> String;
}

/// The client's end of a connection to a port.
trait Forward {
    fn connect(url: &str, port: u16) -> Self;
    fn send(&mut self, bytes: &[u8]);
    /// Returns the next data; nothing at the end.
    fn receive(&mut self) -> Vec<u8>;
}

impl Command for websocket::Client {
    fn connect(url: &str) -> Self {
        Self::connect(url)
    }

    fn send(&mut self, bytes: &[u8]) {
        self.send(STDIN, bytes);
    }

    fn output(mut self) -> String {
        assert_eq!(self.exit_code(), 0);
        self.text(STDOUT)
    }
}

struct SpdyCommand {
    client: spdy::Client,
    error: u32,
    stdin: u32,
    stdout: u32,
}

impl Command for SpdyCommand {
    fn connect(url: &str) -> Self {
        let mut client = spdy::Client::connect(url, "v4.channel.k8s.io");
        let [error, stdin, stdout, _] =
            ["error", "stdin", "stdout", "stderr"].map(|kind| client.open(&[("streamtype", kind)]));
        Self {
            client,
            error,
            stdin,
            stdout,
        }
    }

    fn send(&mut self, bytes: &[u8]) {
        self.client.send(self.stdin, bytes);
    }

    fn output(mut self) -> String {
        self.client.finish(self.stdin);
        while self.client.receive() {}
        let mut text = |stream| {
            let bytes = self.client.streams.remove(&stream).unwrap_or_default();
            String::from_utf8(bytes).unwrap()
        };
        // An attacher that disconnects before its container's end gets no status.
        let status = text(self.error);
        assert!(status.is_empty() || status.contains("Success"), "{status}");
        text(self.stdout)
    }
}

struct SocketForward(websocket::Client);

impl SocketForward {
    /// Returns the contents of the data channel. Each channel starts with the number of its port.
    fn data(&mut self) -> &mut Vec<u8> {
        self.0.channels.entry(0).or_default()
    }
}

impl Forward for SocketForward {
    fn connect(url: &str, port: u16) -> Self {
        let mut forward = Self(websocket::Client::connect(url));
        while forward.data().len() < 2 {
            assert!(forward.0.receive());
        }
        assert_eq!(forward.data()[..2], port.to_le_bytes());
        forward.data().drain(..2);
        forward
    }

    fn send(&mut self, bytes: &[u8]) {
        self.0.send(0, bytes);
    }

    fn receive(&mut self) -> Vec<u8> {
        while self.data().is_empty() && self.0.receive() {}
        std::mem::take(self.data())
    }
}

struct SpdyForward {
    client: spdy::Client,
    data: u32,
}

impl Forward for SpdyForward {
    fn connect(url: &str, port: u16) -> Self {
        let mut client = spdy::Client::connect(url, "portforward.k8s.io");
        let port = port.to_string();
        let [error, data] = ["error", "data"]
            .map(|kind| client.open(&[("streamtype", kind), ("port", &port), ("requestid", "0")]));
        client.finish(error);
        Self { client, data }
    }

    fn send(&mut self, bytes: &[u8]) {
        self.client.send(self.data, bytes);
    }

    fn receive(&mut self) -> Vec<u8> {
        loop {
            let came = self.client.streams.remove(&self.data).unwrap_or_default();
            let is_over = self.client.ended.contains(&self.data);
            if !came.is_empty() || is_over || !self.client.receive() {
                return came;
            }
        }
    }
}

fn amount() -> usize {
    let mib = std::env::var("PODVISOR_CONFORMANCE_MIB");
    mib.map_or(1, |mib| mib.parse().unwrap()) << 20
}

/// Numbers from 1 on, one per line: every position is unique.
static DATA: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut data = Vec::with_capacity(amount() + 21);
    let mut number = 0_u64;
    while data.len() < amount() {
        number += 1;
        writeln!(data, "{number}").unwrap();
    }
    data.truncate(amount());
    data
});

static SUM: LazyLock<String> = LazyLock::new(|| sum([&*DATA]));

fn sum(pieces: impl IntoIterator<Item = impl AsRef<[u8]>>) -> String {
    let pieces = pieces.into_iter();
    let digest = pieces.fold(Sha256::new(), |sum, piece| sum.chain_update(piece));
    let digest = digest.finalize();
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns a command that prints the sum of its input, without needing its end.
fn summing() -> String {
    format!("head -c {} | busybox sha256sum", amount())
}

fn send_all(mut send: impl FnMut(&[u8])) {
    DATA.chunks(PIECE).for_each(&mut send);
}

fn exec<C: Command>(container: &Container) {
    let mut client = C::connect(&exec_url(container, &summing(), false));
    send_all(|piece| client.send(piece));
    assert_eq!(client.output(), format!("{}  -\n", *SUM));
}

#[test]
fn guest_much_input_reaches_a_command() {
    let container = Pod::shared().start("much-input", |_| {});
    exec::<websocket::Client>(&container);
    exec::<SpdyCommand>(&container);
    container.stop(0);
    container.remove();
}

fn attach<C: Command>() {
    let container = Pod::shared().start("much-attached", |config| {
        config.stdin = true;
        config.command = strings(&["sh", "-c", &summing()]);
    });
    let mut client = C::connect(&attach_url(&container, false));
    send_all(|piece| client.send(piece));
    assert_eq!(container.ended().exit_code, 0);
    let expected = format!("{}  -", *SUM);
    assert_eq!(crate::pod::stdout(&container.lines()), [expected]);
    drop(client);
    container.remove();
}

#[test]
fn guest_long_much_input_reaches_a_container() {
    attach::<websocket::Client>();
    attach::<SpdyCommand>();
}

fn forward<F: Forward>(container: &Container, script: &str, port: u16) -> F {
    container.sh(&format!("({script}) >/dev/null 2>&1 &"));
    F::connect(&forward_url(Pod::shared(), container, port), port)
}

fn forward_both_ways<F: Forward>(container: &Container, port: u16) {
    // Forward: a server that answers with the sum of its input.
    let fifo = format!("/tmp/{port}");
    let summing = summing();
    let script =
        format!("busybox mkfifo {fifo}; busybox nc -l -p {port} <{fifo} | ({summing}) >{fifo}");
    let mut client: F = forward(container, &script, port);
    send_all(|piece| client.send(piece));
    let mut answer = Vec::new();
    while answer.len() < 64 {
        let came = client.receive();
        assert!(!came.is_empty(), "only {} bytes came", answer.len());
        answer.extend(came);
    }
    assert_eq!(String::from_utf8_lossy(&answer[..64]), *SUM);
    drop(client);

    // Backward, to a slow reader: other connections are served meanwhile.
    let port = port + 1;
    let amount = amount();
    let script = format!("busybox nc -l -p {port} </data/numbers");
    let mut client: F = forward(container, &script, port);
    assert_eq!(container.sh("echo served"), "served\n");
    let mut came = 0;
    let pieces = std::iter::from_fn(|| {
        if came >= amount {
            return None;
        }
        let piece = client.receive();
        came += piece.len();
        (!piece.is_empty()).then_some(piece)
    });
    let got = sum(pieces);
    assert_eq!((came, got.as_str()), (amount, SUM.as_str()));
}

#[test]
fn guest_long_much_goes_through_a_forwarded_port_both_ways() {
    let dir = RUNTIME.directory("much-forwarded");
    std::fs::write(dir.join("numbers"), DATA.as_slice()).unwrap();
    let container = Pod::shared().start("much-forwarded", |config| {
        config.mounts.push(Mount {
            container_path: "/data".to_owned(),
            host_path: dir.display().to_string(),
            ..Default::default()
        });
    });
    forward_both_ways::<SocketForward>(&container, 7100);
    forward_both_ways::<SpdyForward>(&container, 7110);
    container.stop(0);
    container.remove();
}
