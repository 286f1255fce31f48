//! Answers scrapers of Prometheus by plain HTTP: bounded in their number and their time.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context as _;
use bytes::Bytes;
use http::{Response, StatusCode, header};
use http_body_util::Full;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;

use crate::https::places::Places;

/// Scrapers at the same time.
const CONNECTIONS: usize = 16;

/// How long a scraper may take to ask, and how long its connection lasts.
const ASK_TIMEOUT: Duration = Duration::from_secs(10);
const TIMEOUT: Duration = Duration::from_secs(60);

/// Listens for scrapers.
pub(crate) async fn listen(address: SocketAddr) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address)
        .await
        .with_context(|| format!("failed to listen on {address} for metrics"))
}

/// Answers `/metrics` by what `render` returns, until it is dropped.
pub(crate) async fn serve(
    listener: TcpListener,
    render: impl Fn() -> String + Clone + Send + Sync + 'static,
) -> anyhow::Result<()> {
    serve_later(listener, move || std::future::ready(render())).await
}

/// Like [`serve`], where `render` has to ask somebody.
pub(crate) async fn serve_later<R, T>(listener: TcpListener, render: R) -> anyhow::Result<()>
where
    R: Fn() -> T + Clone + Send + Sync + 'static,
    T: Future<Output = String> + Send,
{
    // Nobody is known here: all have the same rights.
    let places = Places::new(CONNECTIONS, 0);
    loop {
        let Ok((stream, address)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let (place, loss) = places.enter(address.ip());
        let render = render.clone();
        tokio::spawn(async move {
            let service = service_fn(move |request: http::Request<_>| {
                let (render, is_there) = (render.clone(), request.uri().path() == "/metrics");
                async move {
                    let text = match is_there {
                        true => Some(render().await),
                        false => None,
                    };
                    Ok::<_, std::convert::Infallible>(answer(text))
                }
            });
            let served = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(ASK_TIMEOUT)
                .keep_alive(false)
                .serve_connection(TokioIo::new(stream), service);
            let served = tokio::select! {
                served = served => served,
                () = loss.wait(TIMEOUT) => Ok(()),
            };
            if let Err(error) = served {
                tracing::debug!(%error, "a scraper's connection failed");
            }
            drop(place);
        });
    }
}

/// The answer with this text; without, that there is none.
fn answer(text: Option<String>) -> Response<Full<Bytes>> {
    let (status, text) = match text {
        Some(text) => (StatusCode::OK, text),
        None => {
            let text = "only /metrics is served\n".to_owned();
            (StatusCode::NOT_FOUND, text)
        }
    };
    let mut answer = Response::new(Full::new(Bytes::from(text)));
    *answer.status_mut() = status;
    answer.headers_mut().insert(
        header::CONTENT_TYPE,
        header::HeaderValue::from_static("text/plain; version=0.0.4"),
    );
    answer
}
