//! Metrics in Prometheus' text format, and whoever asks for them by HTTP.

use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use bytes::Bytes;
use http::{Response, StatusCode, header};
use http_body_util::Full;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

/// Scrapers at the same time.
const CONNECTIONS: usize = 16;

/// How long a scraper may take to ask.
const ASK_TIMEOUT: Duration = Duration::from_secs(10);

/// How long to wait after a connection that could not be accepted.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// A metric: its name, and what it says. Names that end in `_total` are counters, others gauges.
pub(crate) type Metric = (&'static str, &'static str);

/// Samples by name, as `{labels} value`.
#[derive(Debug, Default)]
pub(crate) struct Samples(BTreeMap<&'static str, String>);

impl Samples {
    pub(crate) fn add(&mut self, name: &'static str, labels: &[(&str, &str)], value: impl Display) {
        let text = self.0.entry(name).or_default();
        text.push_str(name);
        for (index, (label, value)) in labels.iter().enumerate() {
            let opens = if index == 0 { '{' } else { ',' };
            let _ = write!(text, "{opens}{label}=\"");
            for letter in value.chars() {
                match letter {
                    '\\' => text.push_str("\\\\"),
                    '"' => text.push_str("\\\""),
                    '\n' => text.push_str("\\n"),
                    letter => text.push(letter),
                }
            }
            text.push('"');
        }
        if !labels.is_empty() {
            text.push('}');
        }
        let _ = writeln!(text, " {value}");
    }

    /// The text of those that have samples, in the order of the list.
    pub(crate) fn text(mut self, metrics: &[Metric]) -> String {
        let mut text = String::new();
        for (name, help) in metrics {
            if let Some(samples) = self.0.remove(name) {
                let kind = match name.ends_with("_total") {
                    true => "counter",
                    false => "gauge",
                };
                let _ = write!(
                    text,
                    "# HELP {name} {help}\n# TYPE {name} {kind}\n{samples}"
                );
            }
        }
        text
    }
}

/// Answers scrapers with what `render` says, until it is dropped.
///
/// # Errors
///
/// The address is taken.
pub(crate) async fn serve<R, T>(address: SocketAddr, render: R) -> anyhow::Result<()>
where
    R: Fn() -> T + Clone + Send + Sync + 'static,
    T: Future<Output = String> + Send,
{
    let listener = TcpListener::bind(address)
        .await
        .with_context(|| format!("failed to listen on {address} for metrics"))?;
    let connections = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let permit = Arc::clone(&connections).acquire_owned().await?;
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(ACCEPT_AGAIN).await;
            continue;
        };
        let render = render.clone();
        tokio::spawn(async move {
            let service = service_fn(move |request: http::Request<_>| {
                let (render, is_there) = (render.clone(), request.uri().path() == "/metrics");
                async move {
                    let text = match is_there {
                        true => (StatusCode::OK, render().await),
                        false => {
                            let text = "only /metrics is served\n".to_owned();
                            (StatusCode::NOT_FOUND, text)
                        }
                    };
                    Ok::<_, std::convert::Infallible>(answer(text))
                }
            });
            let served = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(ASK_TIMEOUT)
                .keep_alive(false)
                .serve_connection(TokioIo::new(stream), service);
            if let Err(error) = served.await {
                tracing::debug!(%error, "a scraper's connection failed");
            }
            drop(permit);
        });
    }
}

fn answer((status, text): (StatusCode, String)) -> Response<Full<Bytes>> {
    let mut answer = Response::new(Full::new(Bytes::from(text)));
    *answer.status_mut() = status;
    answer.headers_mut().insert(
        header::CONTENT_TYPE,
        header::HeaderValue::from_static("text/plain; version=0.0.4"),
    );
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_counts_is_a_counter_and_what_has_no_samples_is_left_out() {
        let mut samples = Samples::default();
        samples.add("a_total", &[("b", "c\"d")], 1.5);
        let text = samples.text(&[("a_total", "Of a."), ("e", "Of e.")]);
        let expected = "# HELP a_total Of a.\n# TYPE a_total counter\na_total{b=\"c\\\"d\"} 1.5\n";
        assert_eq!(text, expected);
    }
}
