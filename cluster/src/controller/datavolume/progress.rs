//! Asks an importer how far it is. What it answers is shown to people, and decides nothing.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use crate::import::PROGRESS_METRIC;

/// An importer that does not answer within this is not waited for.
const LIMIT: Duration = Duration::from_secs(2);

/// The longest answer.
const MOST: usize = 16 << 10;

/// Returns what an importer says of its progress, in per cent.
pub(super) async fn ask(address: IpAddr, port: u16) -> Option<f64> {
    let asked = tokio::time::timeout(LIMIT, get(SocketAddr::new(address, port)));
    let text = asked.await.ok()??;
    read(&text)
}

async fn get(address: SocketAddr) -> Option<String> {
    let stream = TcpStream::connect(address).await.ok()?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.ok()?;
    let request = http::Request::get("/metrics")
        .header(http::header::HOST, address.to_string())
        .body(Empty::<Bytes>::new())
        .ok()?;
    let connection = tokio::spawn(connection);
    let answered = async move {
        let answer = sender.send_request(request).await.ok()?;
        let body = Limited::new(answer.into_body(), MOST);
        let bytes = body.collect().await.ok()?.to_bytes();
        String::from_utf8(bytes.into()).ok()
    };
    let text = answered.await;
    connection.abort();
    text
}

fn read(text: &str) -> Option<f64> {
    let sample = text
        .lines()
        .find_map(|line| line.strip_prefix(PROGRESS_METRIC))?;
    let value: f64 = sample.rsplit(' ').next()?.parse().ok()?;
    value.is_finite().then_some(value)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::scrape;

    #[test]
    fn an_answer_of_any_kind_is_read_or_left() {
        let line = |value: &str| format!("# TYPE x\n{PROGRESS_METRIC}{{ownerUID=\"a\"}} {value}\n");
        assert_eq!(read(&line("12.34")), Some(12.34));
        for text in ["", "x", &line("NaN"), &line("inf"), &line("")] {
            assert_eq!(read(text), None, "{text}");
        }
    }

    #[tokio::test]
    async fn an_importer_is_asked_by_http() {
        let listener = scrape::listen((Ipv4Addr::LOCALHOST, 0).into())
            .await
            .unwrap();
        let port = listener.local_addr().unwrap().port();
        let served = scrape::serve(listener, || format!("{PROGRESS_METRIC}{{}} 7\n"));
        let asked = ask(Ipv4Addr::LOCALHOST.into(), port);
        tokio::select! {
            progress = asked => assert_eq!(progress, Some(7.0)),
            _ = served => panic!("it ended"),
        }
        assert_eq!(ask(Ipv4Addr::LOCALHOST.into(), port).await, None);
    }
}
