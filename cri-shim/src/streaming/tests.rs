//! Whole connections over TCP: to real processes, with a client of each protocol.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::sync::{Arc, Mutex};

use bytes::{Bytes, BytesMut};
use futures_util::{SinkExt as _, StreamExt as _};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::tungstenite::{self, Message, client::IntoClientRequest as _};

use super::backend::*;
use super::spdy::frame::{self, FLAG_FIN, FrameHeader, FrameKind, HEADER_LEN};
use super::spdy::headers::Packer;
use super::{Streaming, StreamingError};
use crate::sandbox::{StdioFds, TerminalSize};

mod ports;

/// Runs commands as processes of this machine, and forwards to its loopback.
#[derive(Default)]
struct Machine {
    sizes: Arc<Mutex<Vec<TerminalSize>>>,
    abandoned: Arc<tokio::sync::Notify>,
}

impl Backend for Machine {
    fn exec(
        &self,
        request: ExecRequest,
        stdio: StdioFds,
    ) -> BoxFuture<'_, Result<Process, BackendError>> {
        let sizes = Arc::clone(&self.sizes);
        let abandoned = Arc::clone(&self.abandoned);
        Box::pin(async move {
            let (program, arguments) = request.command.split_first().ok_or("no command")?;
            let end = |fd: Option<OwnedFd>| fd.map_or_else(Stdio::null, Stdio::from);
            let mut child = tokio::process::Command::new(program)
                .args(arguments)
                .stdin(end(stdio.stdin))
                .stdout(end(stdio.stdout))
                .stderr(end(stdio.stderr))
                .kill_on_drop(true)
                .spawn()?;
            Ok(Process {
                exit: Box::pin(async move { Ok(child.wait().await?.code().unwrap_or(137)) }),
                resize: Box::new(move |size| {
                    sizes.lock().unwrap().push(size);
                    Box::pin(std::future::ready(()))
                }),
                abandon: Box::pin(async move { abandoned.notify_one() }),
            })
        })
    }

    fn attach(
        &self,
        _: AttachRequest,
        _: StdioFds,
    ) -> BoxFuture<'_, Result<Process, BackendError>> {
        Box::pin(std::future::ready(Err("the container has ended".into())))
    }

    fn port_forward<'a>(
        &'a self,
        _: &'a str,
        port: u16,
    ) -> BoxFuture<'a, Result<OwnedFd, BackendError>> {
        Box::pin(async move {
            let mut tcp = TcpStream::connect(("127.0.0.1", port)).await?;
            let (ours, theirs) = super::pipe::pair()?;
            tokio::spawn(async move {
                let mut ours = ours;
                let _ = tokio::io::copy_bidirectional(&mut tcp, &mut ours).await;
            });
            Ok(theirs)
        })
    }
}

async fn server() -> (Streaming, Arc<Machine>) {
    let machine = Arc::new(Machine::default());
    let address = "127.0.0.1:0".parse().unwrap();
    let streaming = Streaming::bind(address, machine.clone()).await.unwrap();
    (streaming, machine)
}

fn exec(command: &[&str]) -> ExecRequest {
    ExecRequest {
        container: "c".to_owned(),
        command: command.iter().map(|&word| word.to_owned()).collect(),
        tty: false,
        stdin: true,
        stdout: true,
        stderr: true,
    }
}

/// Splits a URL into address and path.
fn target(url: &str) -> (&str, &str) {
    let rest = url.strip_prefix("http://").unwrap();
    rest.split_at(rest.find('/').unwrap())
}

/// Sends a request; returns the response's headers, and the connection after them.
async fn request(url: &str, method: &str, headers: &str) -> (String, TcpStream) {
    let (address, path) = target(url);
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = format!("{method} {path} HTTP/1.1\r\nHost: {address}\r\n{headers}\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    (String::from_utf8(head).unwrap(), stream)
}

#[tokio::test]
async fn connections_without_a_token_are_closed_and_keep_nobody_out() {
    let (streaming, _) = server().await;
    let url = streaming.exec(exec(&["true"])).unwrap();
    let headers = "Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\n";
    // A client with a token is not a stranger.
    let (head, session) = request(&url, "POST", headers).await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    let (head, mut refused) = request(&url, "POST", headers).await;
    assert!(head.starts_with("HTTP/1.1 404 "), "{head}");
    let mut rest = Vec::new();
    refused.read_to_end(&mut rest).await.unwrap();
    assert!(rest.starts_with(b"no such stream"), "{rest:?}");
    let address = target(&url).0;
    let mut silent = Vec::new();
    for _ in 0..=super::server::MAX_UNAUTHENTICATED {
        silent.push(TcpStream::connect(address).await.unwrap());
    }
    let url = streaming.exec(exec(&["true"])).unwrap();
    let (head, _) = request(&url, "POST", headers).await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    // The oldest was evicted for others, long before its time limit.
    let mut byte = [0];
    let ended = silent.first_mut().unwrap().read(&mut byte);
    let ended = tokio::time::timeout(std::time::Duration::from_secs(2), ended).await;
    assert!(!matches!(ended.unwrap(), Ok(1..)));
    let last = silent.last_mut().unwrap().try_read(&mut byte);
    assert_eq!(last.unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    drop(session);
}

/// A client that collects the data of each stream.
struct Client {
    write: Box<dyn AsyncWrite + Send + Unpin>,
    packer: Packer,
    next: u32,
    streams: tokio::task::JoinHandle<HashMap<u32, Vec<u8>>>,
    /// How many streams the server has finished.
    finished: tokio::sync::watch::Receiver<usize>,
}

impl Client {
    async fn connect(url: &str, protocol: &str) -> Self {
        let headers = format!(
            "Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: {protocol}\r\n"
        );
        let (head, stream) = request(url, "POST", &headers).await;
        assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
        let head = head.to_ascii_lowercase();
        assert!(head.contains("upgrade: spdy/3.1\r\n"), "{head}");
        assert!(
            head.contains(&format!("x-stream-protocol-version: {protocol}\r\n")),
            "{head}"
        );
        let (read, write) = stream.into_split();
        Self::over(read, write)
    }

    /// Creates a client of an upgraded connection.
    fn over(
        mut read: impl AsyncRead + Send + Unpin + 'static,
        write: impl AsyncWrite + Send + Unpin + 'static,
    ) -> Self {
        let (count, finished) = tokio::sync::watch::channel(0);
        // Ends with the connection.
        let streams = tokio::spawn(async move {
            let mut streams: HashMap<u32, Vec<u8>> = HashMap::new();
            let mut bytes = [0; HEADER_LEN];
            while read.read_exact(&mut bytes).await.is_ok() {
                let header = FrameHeader::parse(bytes).unwrap();
                let mut payload = vec![0; header.len as usize];
                read.read_exact(&mut payload).await.unwrap();
                if let FrameKind::Data { stream } = header.kind {
                    streams.entry(stream).or_default().append(&mut payload);
                    if header.flags & FLAG_FIN != 0 {
                        count.send_modify(|count| *count += 1);
                    }
                }
            }
            streams
        });
        Self {
            write: Box::new(write),
            packer: Packer::new(),
            next: 1,
            streams,
            finished,
        }
    }

    async fn open(&mut self, headers: &[(&str, &str)]) -> u32 {
        let id = self.next;
        self.next += 2;
        let mut payload = id.to_be_bytes().to_vec();
        payload.extend_from_slice(&[0; 6]);
        payload.append(&mut self.packer.pack(headers));
        let mut out = BytesMut::new();
        frame::control(&mut out, 1, 0, &payload);
        self.write.write_all(&out).await.unwrap();
        id
    }

    async fn send(&mut self, stream: u32, data: &[u8], flags: u8) {
        let mut out = BytesMut::new();
        frame::data(&mut out, stream, flags, data.len());
        out.extend_from_slice(data);
        self.write.write_all(&out).await.unwrap();
    }

    async fn reset(&mut self, stream: u32) {
        const CANCEL: u32 = 5;
        let mut out = BytesMut::new();
        frame::rst_stream(&mut out, stream, CANCEL);
        self.write.write_all(&out).await.unwrap();
    }

    /// Returns the data of every stream, once the server has closed the connection.
    async fn ended(self) -> HashMap<u32, Vec<u8>> {
        let streams = self.streams.await.unwrap();
        drop(self.write);
        streams
    }
}

/// Bytes without a repeating pattern.
fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()[3]
        })
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn megabytes_go_through_a_command_over_spdy() {
    let (streaming, _) = server().await;
    let url = streaming.exec(exec(&["cat"])).unwrap();
    let mut client = Client::connect(&url, "v4.channel.k8s.io").await;
    let error = client.open(&[("streamtype", "error")]).await;
    let stdin = client.open(&[("streamtype", "stdin")]).await;
    let stdout = client.open(&[("streamtype", "stdout")]).await;
    let stderr = client.open(&[("streamtype", "stderr")]).await;
    let sent = noise(20 << 20);
    for piece in sent.chunks(16 << 10) {
        client.send(stdin, piece, 0).await;
    }
    client.send(stdin, b"", FLAG_FIN).await;
    let streams = client.ended().await;
    assert!(streams[&stdout] == sent, "{} bytes", streams[&stdout].len());
    assert_eq!(streams.get(&stderr).map_or(0, Vec::len), 0);
    let status: serde_json::Value = serde_json::from_slice(&streams[&error]).unwrap();
    assert_eq!(status["status"], "Success");
}

#[tokio::test(flavor = "multi_thread")]
async fn exit_code_and_both_outputs_arrive_whole_before_the_end() {
    let (streaming, _) = server().await;
    let script = "echo out; echo err >&2; exit 42";
    let url = streaming.exec(exec(&["sh", "-c", script])).unwrap();
    let mut client = Client::connect(&url, "v4.channel.k8s.io").await;
    let mut ids = Vec::new();
    for kind in ["error", "stdin", "stdout", "stderr"] {
        ids.push(client.open(&[("streamtype", kind)]).await);
    }
    let streams = client.ended().await;
    assert_eq!(streams[&ids[2]], b"out\n");
    assert_eq!(streams[&ids[3]], b"err\n");
    let status: serde_json::Value = serde_json::from_slice(&streams[&ids[0]]).unwrap();
    assert_eq!(status["details"]["causes"][0]["message"], "42");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_run_is_told_on_the_error_stream() {
    let (streaming, _) = server().await;
    let url = streaming.exec(exec(&["/no/such/program"])).unwrap();
    let mut client = Client::connect(&url, "v4.channel.k8s.io").await;
    let error = client.open(&[("streamtype", "error")]).await;
    for kind in ["stdin", "stdout", "stderr"] {
        client.open(&[("streamtype", kind)]).await;
    }
    let streams = client.ended().await;
    let status: serde_json::Value = serde_json::from_slice(&streams[&error]).unwrap();
    assert_eq!(status["status"], "Failure");
    assert_ne!(status["reason"], "NonZeroExitCode");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_is_gone_abandons_its_command() {
    let (streaming, machine) = server().await;
    let url = streaming.exec(exec(&["sleep", "100000"])).unwrap();
    let mut client = Client::connect(&url, "v4.channel.k8s.io").await;
    for kind in ["error", "stdin", "stdout", "stderr"] {
        client.open(&[("streamtype", kind)]).await;
    }
    client.streams.abort();
    drop(client);
    machine.abandoned.notified().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_websocket_closes_its_input_and_gets_the_rest() {
    let (streaming, _) = server().await;
    let url = streaming.exec(exec(&["sh", "-c", "cat; exit 3"])).unwrap();
    let mut request = url
        .replace("http://", "ws://")
        .into_client_request()
        .unwrap();
    let offers = "v5.channel.k8s.io, v4.channel.k8s.io".parse().unwrap();
    request
        .headers_mut()
        .insert("Sec-WebSocket-Protocol", offers);
    let (socket, response) = tokio_tungstenite::connect_async(request).await.unwrap();
    assert_eq!(
        response.headers()["Sec-WebSocket-Protocol"],
        "v5.channel.k8s.io"
    );
    let (mut sink, mut source) = socket.split();
    let sent = noise(3 << 20);
    let pieces = sent.clone();
    let sending = tokio::spawn(async move {
        for piece in pieces.chunks(30_000) {
            let mut message = vec![0];
            message.extend_from_slice(piece);
            sink.send(Message::Binary(message.into())).await.unwrap();
        }
        sink.send(Message::Binary(vec![255, 0].into()))
            .await
            .unwrap();
        sink
    });
    let mut channels: HashMap<u8, Vec<u8>> = HashMap::new();
    while let Some(Ok(message)) = source.next().await {
        if let Message::Binary(bytes) = message {
            channels
                .entry(bytes[0])
                .or_default()
                .extend_from_slice(&bytes[1..]);
        }
    }
    drop(sending.await.unwrap());
    assert!(channels[&1] == sent, "{} bytes", channels[&1].len());
    let status: serde_json::Value = serde_json::from_slice(&channels[&3]).unwrap();
    assert_eq!(status["details"]["causes"][0]["message"], "3");
}

/// The window is small: the server's last data is still in flight when the server closes.
#[tokio::test(flavor = "multi_thread")]
async fn a_websocket_whose_input_nobody_reads_gets_all_output_and_the_status() {
    let (streaming, _) = server().await;
    let script = "head -c 1000000 /dev/zero; exit 3";
    let url = streaming.exec(exec(&["sh", "-c", script])).unwrap();
    let tcp = tokio::net::TcpSocket::new_v4().unwrap();
    tcp.set_recv_buffer_size(8 << 10).unwrap();
    let stream = tcp.connect(target(&url).0.parse().unwrap()).await.unwrap();
    let mut request = url
        .replace("http://", "ws://")
        .into_client_request()
        .unwrap();
    let offer = "v4.channel.k8s.io".parse().unwrap();
    request
        .headers_mut()
        .insert("Sec-WebSocket-Protocol", offer);
    let (socket, _) = tokio_tungstenite::client_async(request, stream)
        .await
        .unwrap();
    let (mut sink, mut source) = socket.split();
    let sending = tokio::spawn(async move {
        let message = Message::Binary(vec![0; 30_000].into());
        while sink.send(message.clone()).await.is_ok() {}
    });
    let mut channels: HashMap<u8, Vec<u8>> = HashMap::new();
    let end = loop {
        match source.next().await {
            Some(Ok(Message::Binary(bytes))) => {
                let channel = channels.entry(bytes[0]).or_default();
                channel.extend_from_slice(&bytes[1..]);
            }
            end => break end,
        }
    };
    let seen = channels.get(&1).map_or(0, Vec::len);
    assert_eq!(seen, 1_000_000, "{end:?}");
    let status: serde_json::Value = serde_json::from_slice(&channels[&3]).unwrap();
    assert_eq!(status["details"]["causes"][0]["message"], "3");
    let Some(Ok(Message::Close(Some(frame)))) = end else {
        panic!("{end:?}")
    };
    assert_eq!(u16::from(frame.code), 1000);
    sending.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_websocket_of_text_carries_base64() {
    let (streaming, machine) = server().await;
    let mut wanted = exec(&["head", "-c", "5"]);
    (wanted.tty, wanted.stderr) = (true, false);
    let url = streaming.exec(wanted).unwrap();
    let mut request = url
        .replace("http://", "ws://")
        .into_client_request()
        .unwrap();
    let offer = "v4.base64.channel.k8s.io".parse().unwrap();
    request
        .headers_mut()
        .insert("Sec-WebSocket-Protocol", offer);
    let (mut socket, _) = tokio_tungstenite::connect_async(request).await.unwrap();
    // {"Width":10,"Height":5}, then "hello".
    for text in ["4eyJXaWR0aCI6MTAsIkhlaWdodCI6NX0=", "0aGVsbG8="] {
        socket.send(Message::Text(text.into())).await.unwrap();
    }
    let mut texts = Vec::new();
    while let Some(Ok(message)) = socket.next().await {
        if let Message::Text(text) = message {
            texts.push(text.to_string());
        }
    }
    assert!(texts.contains(&"1aGVsbG8=".to_owned()), "{texts:?}");
    let sizes = machine.sizes.lock().unwrap().clone();
    let size = TerminalSize {
        rows: 5,
        columns: 10,
    };
    assert_eq!(sizes, [size]);
}

#[tokio::test]
async fn a_url_is_good_once_and_only_for_what_it_was_made_for() {
    let (streaming, _) = server().await;
    let spdy = "Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\n";
    let url = streaming.exec(exec(&["true"])).unwrap();
    let (head, _) = request(&url, "POST", "").await;
    assert!(head.starts_with("HTTP/1.1 400 "), "{head}");
    let (head, _) = request(&url, "PUT", spdy).await;
    assert!(head.starts_with("HTTP/1.1 405 "), "{head}");
    let (head, _) = request(&url, "GET", spdy).await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    let (head, _) = request(&url, "GET", spdy).await;
    assert!(head.starts_with("HTTP/1.1 404 "), "{head}");

    let url = streaming.exec(exec(&["true"])).unwrap();
    let other = url.replace("/exec/", "/portforward/");
    let (head, _) = request(&other, "POST", spdy).await;
    assert!(head.starts_with("HTTP/1.1 404 "), "{head}");

    let url = streaming.exec(exec(&["true"])).unwrap();
    let unknown = format!("{spdy}X-Stream-Protocol-Version: v9.channel.k8s.io\r\n");
    let (head, _) = request(&url, "POST", &unknown).await;
    assert!(head.starts_with("HTTP/1.1 403 "), "{head}");
    assert!(head.contains("v4.channel.k8s.io"), "{head}");
}

#[tokio::test]
async fn contradictory_requests_are_refused() {
    let (streaming, _) = server().await;
    let refused = |change: fn(&mut ExecRequest)| {
        let mut request = exec(&["true"]);
        change(&mut request);
        matches!(streaming.exec(request), Err(StreamingError::Invalid(_)))
    };
    assert!(refused(|request| request.tty = true));
    assert!(refused(|request| request.command.clear()));
    assert!(refused(|request| {
        (request.stdin, request.stdout, request.stderr) = (false, false, false);
    }));
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_after_the_upgrade_ends_the_connection() {
    let (streaming, _) = server().await;
    for garbage in [
        // Version 2; a control frame that is too large; a stream whose headers are not a zlib
        // stream.
        Bytes::from_static(&[0x80, 2, 0, 1, 0, 0, 0, 0]),
        Bytes::from_static(&[0x80, 3, 0, 1, 0, 0xff, 0xff, 0xff]),
        Bytes::from_static(&[
            0x80, 3, 0, 1, 0, 0, 0, 12, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 9, 9,
        ]),
    ] {
        let url = streaming.exec(exec(&["true"])).unwrap();
        let headers = "Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\n";
        let (_, mut stream) = request(&url, "POST", headers).await;
        stream.write_all(&garbage).await.unwrap();
        let mut rest = Vec::new();
        // It ends, in whatever way: it does not hang.
        let _ = stream.read_to_end(&mut rest).await;
    }
    let url = streaming.attach(AttachRequest {
        container: "c".to_owned(),
        tty: false,
        stdin: false,
        stdout: true,
        stderr: false,
    });
    let request = url.unwrap().replace("http://", "ws://");
    let (mut socket, _) = tokio_tungstenite::connect_async(request).await.unwrap();
    let mut seen = Vec::new();
    while let Some(message) = socket.next().await {
        match message {
            Ok(Message::Binary(bytes)) => seen.push(bytes),
            Ok(_) => {}
            Err(tungstenite::Error::ConnectionClosed) => break,
            Err(error) => panic!("{error}"),
        }
    }
    let text = String::from_utf8_lossy(&seen.concat()).into_owned();
    assert!(text.contains("the container has ended"), "{text}");
}
