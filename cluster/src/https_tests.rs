//! A server whose connections are all taken.

use rcgen::{CertificateParams, KeyPair};
use rustls::client::ResolvesClientCert;
use rustls::crypto::ring;
use rustls::pki_types::{PrivateKeyDer, ServerName};
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, SignatureScheme};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio_rustls::{TlsConnector, rustls};

use super::*;
use crate::api::node::pinned;
use crate::contact::digest;

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

#[tokio::test]
async fn a_server_that_is_full_ends_when_it_is_told_to() {
    let (server, client) = both_ends();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (ends, stop) = oneshot::channel();
    let (asked, mut requests) = tokio::sync::mpsc::channel(1);
    let handle = move |_, _| {
        let asked = asked.clone();
        async move {
            asked.send(()).await.unwrap();
            std::future::pending::<Answer>().await
        }
    };
    let stop = async { stop.await.unwrap() };
    let served = tokio::spawn(serve_within(1, listener, server, handle, stop));
    let stream = TcpStream::connect(address).await.unwrap();
    let name = ServerName::try_from("a.example").unwrap();
    let connector = TlsConnector::from(Arc::new(client));
    let mut stream = connector.connect(name, stream).await.unwrap();
    let request = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n";
    stream.write_all(request).await.unwrap();
    requests.recv().await.unwrap();
    ends.send(()).unwrap();
    let closed = async { while TcpStream::connect(address).await.is_ok() {} };
    let closed = tokio::time::timeout(READ_TIMEOUT, closed).await;
    closed.expect("it waits for a place");
    served.abort();
}
