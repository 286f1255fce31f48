//! A server whose places for connections are all taken.

use rcgen::{CertificateParams, KeyPair};
use rustls::client::ResolvesClientCert;
use rustls::crypto::ring;
use rustls::pki_types::{PrivateKeyDer, ServerName};
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, SignatureScheme};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio_rustls::{TlsConnector, rustls};

use super::*;
use crate::contact::digest;
use crate::node_client::pinned;

#[derive(Debug)]
struct NoCertificate;

impl ResolvesClientCert for NoCertificate {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        None
    }

    fn has_certs(&self) -> bool {
        false
    }
}

fn both_ends() -> (ServerConfig, ClientConfig) {
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(["a.example".to_owned()]).unwrap();
    let certificate = params.self_signed(&key).unwrap();
    let digest = digest(certificate.der());
    let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let server = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], key)
        .unwrap();
    (
        server,
        pinned::config(&digest, Arc::new(NoCertificate)).unwrap(),
    )
}

/// A server whose handler recognizes everybody, or nobody, and the end of it.
async fn server(recognizes: bool) -> (std::net::SocketAddr, ClientConfig, oneshot::Sender<()>) {
    let (server, client) = both_ends();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (ends, stop) = oneshot::channel();
    let handle = move |request: Request<Incoming>, peer: Peer| {
        if recognizes {
            peer.recognize();
        }
        async move {
            if request.uri().path() == "/never" {
                return std::future::pending::<Answer>().await;
            }
            text(StatusCode::OK, "here")
        }
    };
    let stop = async {
        let _ = stop.await;
    };
    tokio::spawn(serve(listener, server, handle, stop));
    (address, client, ends)
}

type Connection = tokio_rustls::client::TlsStream<TcpStream>;

async fn connect(address: std::net::SocketAddr, client: &ClientConfig) -> Connection {
    let stream = TcpStream::connect(address).await.unwrap();
    let name = ServerName::try_from("a.example").unwrap();
    let connector = TlsConnector::from(Arc::new(client.clone()));
    connector.connect(name, stream).await.unwrap()
}

/// Whether a request on a connection is answered.
async fn is_answered(connection: &mut Connection) -> bool {
    let request = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n";
    if connection.write_all(request).await.is_err() {
        return false;
    }
    let mut answer = Vec::new();
    while !answer.ends_with(b"here") {
        let read = connection.read_buf(&mut answer);
        let read = tokio::time::timeout(READ_TIMEOUT, read).await;
        if !matches!(read.expect("an answer, or an end"), Ok(1..)) {
            return false;
        }
    }
    true
}

#[tokio::test]
async fn connections_that_say_nothing_give_way_to_others() {
    let (address, client, _ends) = server(false).await;
    let mut silent = Vec::new();
    for _ in 0..MAX_UNKNOWN {
        silent.push(TcpStream::connect(address).await.unwrap());
    }
    let mut last = connect(address, &client).await;
    assert!(is_answered(&mut last).await);
    let mut nothing = [0];
    let closed = silent[0].read(&mut nothing);
    let closed = tokio::time::timeout(READ_TIMEOUT, closed).await;
    assert!(!matches!(closed.expect("the oldest is closed"), Ok(1..)));
}

#[tokio::test]
async fn only_who_is_recognized_keeps_the_connection() {
    for recognizes in [true, false] {
        let (address, client, _ends) = server(recognizes).await;
        let mut first = connect(address, &client).await;
        assert!(is_answered(&mut first).await);
        let mut others = Vec::new();
        for _ in 0..=MAX_UNKNOWN {
            others.push(TcpStream::connect(address).await.unwrap());
        }
        // The server has seen them all once it answers.
        assert!(is_answered(&mut connect(address, &client).await).await);
        assert_eq!(is_answered(&mut first).await, recognizes);
    }
}

#[tokio::test]
async fn a_server_ends_when_it_is_told_to_though_a_request_is_not_answered() {
    let (address, client, ends) = server(true).await;
    let mut connection = connect(address, &client).await;
    let request = b"GET /never HTTP/1.1\r\nhost: a\r\n\r\n";
    connection.write_all(request).await.unwrap();
    ends.send(()).unwrap();
    let closed = async { while TcpStream::connect(address).await.is_ok() {} };
    let closed = tokio::time::timeout(READ_TIMEOUT, closed).await;
    closed.expect("nobody is accepted any longer");
}
