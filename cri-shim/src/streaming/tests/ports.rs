//! Connections to ports.

use std::time::Duration;

use tokio_tungstenite::tungstenite::protocol::frame::coding::{CloseCode, Data, OpCode};
use tokio_tungstenite::tungstenite::protocol::frame::{CloseFrame, Frame};
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream};

use super::*;

/// The time limit of things that must happen by themselves.
const SOON: Duration = Duration::from_secs(120);

/// A port where each connection gets a greeting, without a request, and is closed.
async fn greeter() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            stream.write_all(b"hello").await.unwrap();
        }
    });
    port
}

fn forward_url(streaming: &Streaming, ports: &[u16]) -> String {
    let request = PortForwardRequest {
        pod: "p".to_owned(),
        ports: ports.to_vec(),
    };
    streaming.port_forward(request).unwrap()
}

/// Opens the error and data streams of one connection.
async fn open(client: &mut Client, port: u16, number: &str) -> [u32; 2] {
    let port = port.to_string();
    let with = |kind| {
        [
            ("streamtype", kind),
            ("port", port.as_str()),
            ("requestid", number),
        ]
    };
    let error = client.open(&with("error")).await;
    [error, client.open(&with("data")).await]
}

/// Waits until the server has finished `count` streams; returns the data of each.
async fn finished(client: Client, count: usize) -> HashMap<u32, Vec<u8>> {
    let Client {
        write,
        streams,
        mut finished,
        ..
    } = client;
    let waited = tokio::time::timeout(SOON, finished.wait_for(|seen| *seen == count)).await;
    waited.expect("streams go on").unwrap();
    drop(write);
    streams.await.unwrap()
}

/// A port that echoes its input.
async fn echo() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut read, mut write) = stream.split();
                let _ = tokio::io::copy(&mut read, &mut write).await;
            });
        }
    });
    port
}

/// Opens a WebSocket for a SPDY connection.
async fn tunnel(url: &str) -> WebSocketStream<MaybeTlsStream<TcpStream>> {
    const PROTOCOL: &str = "SPDY/3.1+portforward.k8s.io";
    let mut request = url
        .replace("http://", "ws://")
        .into_client_request()
        .unwrap();
    request
        .headers_mut()
        .insert("Sec-WebSocket-Protocol", PROTOCOL.parse().unwrap());
    let (socket, response) = tokio_tungstenite::connect_async(request).await.unwrap();
    assert_eq!(response.headers()["Sec-WebSocket-Protocol"], PROTOCOL);
    socket
}

/// Like client-go, but with arbitrary message boundaries, some messages in two frames, and pings
/// between them. Also returns the frame with which the server closes.
async fn tunnelled(url: &str) -> (Client, tokio::task::JoinHandle<Option<CloseFrame>>) {
    let (mut sink, mut source) = tunnel(url).await.split();
    let (write, mut sent) = tokio::io::duplex(64 << 10);
    let (mut came, read) = tokio::io::duplex(64 << 10);
    tokio::spawn(async move {
        let mut buffer = [0; 9973];
        loop {
            let count = sent.read(&mut buffer).await.unwrap();
            if count == 0 {
                break;
            }
            let (first, second) = buffer[..count].split_at(count / 3);
            let frame = |bytes: &[u8], code, is_final| {
                let bytes = Bytes::copy_from_slice(bytes);
                Message::Frame(Frame::message(bytes, OpCode::Data(code), is_final))
            };
            for message in [
                frame(first, Data::Binary, false),
                Message::Ping("there?".into()),
                frame(second, Data::Continue, true),
            ] {
                sink.send(message).await.unwrap();
            }
        }
        let end = CloseFrame {
            code: CloseCode::Normal,
            reason: "".into(),
        };
        // The server may have closed before.
        let _ = sink.send(Message::Close(Some(end))).await;
    });
    let closed = tokio::spawn(async move {
        while let Some(Ok(message)) = source.next().await {
            match message {
                Message::Binary(bytes) => came.write_all(&bytes).await.unwrap(),
                Message::Close(frame) => return frame,
                _ => {}
            }
        }
        None
    });
    (Client::over(read, write), closed)
}

#[tokio::test(flavor = "multi_thread")]
async fn ports_are_forwarded_by_spdy_within_a_websocket() {
    let (echo, greeter) = (echo().await, greeter().await);
    let (streaming, _) = server().await;
    let url = forward_url(&streaming, &[]);
    let (mut client, closed) = tunnelled(&url).await;
    let [error, data] = open(&mut client, echo, "0").await;
    let sent = noise(3 << 20);
    for piece in sent.chunks(16 << 10) {
        client.send(data, piece, 0).await;
    }
    client.send(data, b"", FLAG_FIN).await;
    let [other_error, greeting] = open(&mut client, greeter, "1").await;
    let streams = finished(client, 4).await;
    assert!(streams[&data] == sent, "{} bytes", streams[&data].len());
    assert_eq!(streams[&greeting], b"hello");
    assert_eq!(
        (&*streams[&error], &*streams[&other_error]),
        (&b""[..], &b""[..])
    );
    let end = tokio::time::timeout(SOON, closed)
        .await
        .expect("it is open");
    assert_eq!(end.unwrap().unwrap().code, CloseCode::Normal);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_websocket_is_closed_when_what_is_in_it_is_no_spdy() {
    let (streaming, _) = server().await;
    for message in [
        // An invalid version, and a message that is not binary.
        Message::Binary(vec![0x80, 2, 0, 1, 0, 0, 0, 0].into()),
        Message::Text("text".into()),
    ] {
        let mut socket = tunnel(&forward_url(&streaming, &[])).await;
        socket.send(message).await.unwrap();
        let closed = async {
            loop {
                match socket.next().await {
                    Some(Ok(Message::Close(frame))) => break frame,
                    Some(Ok(_)) => {}
                    end => panic!("{end:?}"),
                }
            }
        };
        let frame = tokio::time::timeout(SOON, closed)
            .await
            .expect("it is open");
        assert_eq!(frame.unwrap().code, CloseCode::Normal);
    }
}

/// Like `kubectl`, which closes its side when the error stream has ended.
#[tokio::test(flavor = "multi_thread")]
async fn a_connection_ends_when_its_server_has_closed_first() {
    let port = greeter().await;
    let (streaming, _) = server().await;
    let url = forward_url(&streaming, &[]);
    let mut client = Client::connect(&url, "portforward.k8s.io").await;
    let [error, data] = open(&mut client, port, "0").await;
    let streams = finished(client, 2).await;
    assert_eq!(streams[&data], b"hello");
    assert_eq!(streams[&error], b"");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_ends_when_its_client_has_reset_it() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (streaming, _) = server().await;
    for is_ended_before in [false, true] {
        let url = forward_url(&streaming, &[]);
        let mut client = Client::connect(&url, "portforward.k8s.io").await;
        let [error, data] = open(&mut client, port, "0").await;
        let (mut stream, _) = listener.accept().await.unwrap();
        if is_ended_before {
            client.send(data, b"", FLAG_FIN).await;
            stream.read_to_end(&mut Vec::new()).await.unwrap();
        }
        client.reset(data).await;
        let streams = finished(client, 1).await;
        assert_eq!(streams[&error], b"");
        assert!(!streams.contains_key(&data));
        let refused = async { while stream.write_all(&[0; 1000]).await.is_ok() {} };
        let waited = tokio::time::timeout(SOON, refused).await;
        waited.expect("the server may write on");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_that_get_no_connection_are_ended() {
    let (streaming, _) = server().await;
    let url = forward_url(&streaming, &[1]);
    let mut client = Client::connect(&url, "portforward.k8s.io").await;
    let [error, _] = open(&mut client, 2, "0").await;
    client.open(&[("streamtype", "data")]).await;
    for _ in 0..2 {
        let half = [("streamtype", "data"), ("port", "1"), ("requestid", "1")];
        client.open(&half).await;
    }
    // The second of the two equal halves may still get its counterpart.
    let streams = finished(client, 4).await;
    let text = String::from_utf8_lossy(&streams[&error]);
    assert_eq!(text, "failed to forward port 2: it was not asked for");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_websocket_is_closed_when_the_servers_of_all_its_ports_have() {
    let ports = [greeter().await, greeter().await];
    let (streaming, _) = server().await;
    let url = forward_url(&streaming, &ports).replace("http://", "ws://");
    let (mut socket, _) = tokio_tungstenite::connect_async(url).await.unwrap();
    let mut channels: HashMap<u8, Vec<u8>> = HashMap::new();
    let all = async {
        loop {
            match socket.next().await.unwrap().unwrap() {
                Message::Binary(bytes) => {
                    let channel = channels.entry(bytes[0]).or_default();
                    channel.extend_from_slice(&bytes[1..]);
                }
                Message::Close(_) => break,
                _ => {}
            }
        }
    };
    tokio::time::timeout(SOON, all).await.expect("it is open");
    for (number, port) in (0..).step_by(2).zip(ports) {
        assert_eq!(
            channels[&number],
            [&port.to_le_bytes()[..], b"hello"].concat()
        );
        assert_eq!(channels[&(number + 1)], port.to_le_bytes());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_to_ports_do_not_mix() {
    let port = echo().await.to_string();
    let (streaming, _) = server().await;
    let request = PortForwardRequest {
        pod: "p".to_owned(),
        ports: Vec::new(),
    };
    let url = streaming.port_forward(request).unwrap();
    let mut client = Client::connect(&url, "portforward.k8s.io").await;
    let mut data = Vec::new();
    let mut errors = Vec::new();
    for number in ["0", "1", "2"] {
        let headers = [("port", port.as_str()), ("requestid", number)];
        let with = |kind| [("streamtype", kind), headers[0], headers[1]];
        errors.push(client.open(&with("error")).await);
        data.push(client.open(&with("data")).await);
    }
    let texts: Vec<Vec<u8>> = (1..4).map(|n| noise(n * 700_000)).collect();
    for at in (0..2_100_000).step_by(10_000) {
        for (id, text) in data.iter().zip(&texts) {
            if let Some(piece) = text.get(at..at + 10_000) {
                client.send(*id, piece, 0).await;
            }
        }
    }
    for id in &data {
        client.send(*id, b"", FLAG_FIN).await;
    }
    // A port without a listener is reported while the others continue.
    let closed = tokio::net::TcpSocket::new_v4().unwrap();
    closed.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let nobody = closed.local_addr().unwrap().port().to_string();
    let headers = [("port", nobody.as_str()), ("requestid", "3")];
    let with = |kind| [("streamtype", kind), headers[0], headers[1]];
    let error = client.open(&with("error")).await;
    client.open(&with("data")).await;
    // The data and error streams of four connections; then the client closes its side, and the
    // server follows.
    let Client {
        write,
        streams,
        mut finished,
        ..
    } = client;
    finished.wait_for(|count| *count == 8).await.unwrap();
    drop(write);
    let streams = streams.await.unwrap();
    for (id, text) in data.iter().zip(&texts) {
        assert!(streams[id] == *text, "{} bytes", streams[id].len());
    }
    assert!(
        errors
            .iter()
            .all(|id| streams.get(id).is_none_or(Vec::is_empty))
    );
    let text = String::from_utf8_lossy(&streams[&error]);
    assert!(text.contains("failed to forward port"), "{text}");
}

/// The client ends its data stream immediately and leaves the connection to the port open.
#[tokio::test(flavor = "multi_thread")]
async fn connections_to_ports_are_bounded_whatever_their_streams_say() {
    use crate::streaming::spdy::session::MAX_FORWARDS;
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = silent.local_addr().unwrap().port().to_string();
    let (accepted, mut count) = tokio::sync::watch::channel(0);
    tokio::spawn(async move {
        let mut held = Vec::new();
        while let Ok((stream, _)) = silent.accept().await {
            held.push(stream);
            accepted.send_replace(held.len());
        }
    });
    let (streaming, _) = server().await;
    let request = PortForwardRequest {
        pod: "p".to_owned(),
        ports: Vec::new(),
    };
    let url = streaming.port_forward(request).unwrap();
    let mut client = Client::connect(&url, "portforward.k8s.io").await;
    let mut errors = Vec::new();
    for number in 0..MAX_FORWARDS + 3 {
        let number = number.to_string();
        let headers = [("port", port.as_str()), ("requestid", number.as_str())];
        let with = |kind| [("streamtype", kind), headers[0], headers[1]];
        errors.push(client.open(&with("error")).await);
        let data = client.open(&with("data")).await;
        for id in [errors[errors.len() - 1], data] {
            client.send(id, b"", FLAG_FIN).await;
        }
    }
    count
        .wait_for(|count| *count == MAX_FORWARDS)
        .await
        .unwrap();
    client.finished.wait_for(|count| *count == 6).await.unwrap();
    let Client { write, streams, .. } = client;
    drop(write);
    let streams = streams.await.unwrap();
    for id in &errors[MAX_FORWARDS..] {
        let text = String::from_utf8_lossy(&streams[id]);
        assert!(text.contains("too many connections"), "{text}");
    }
    assert_eq!(*count.borrow(), MAX_FORWARDS);
}
