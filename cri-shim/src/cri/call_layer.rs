//! What is done with every call, around the services: calls are numbered, so that log lines can be
//! related to their call, and counted by method and code. They end at their caller's deadline, and
//! those that nobody serves are [named](unimplemented).

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::time::timeout_at;
use tonic::Status;
use tonic::codegen::http::{HeaderMap, Request, Response};
use tower_layer::Layer;
use tower_service::Service;
use tracing::{Instrument as _, debug, info_span};

use super::unimplemented;
use crate::request;

/// Maximum number of methods that are counted separately: a client could invent any number of
/// names. Each ends with one of gRPC's 17 codes.
const MAX_METHODS: usize = 128;

/// Upper bounds of the times in [`Count::within`], in milliseconds.
pub(super) const BOUNDS_MS: [u64; 9] = [5, 20, 50, 100, 250, 1000, 5000, 20_000, 60_000];

/// Calls of one method that ended with one code.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Count {
    /// How many.
    pub(super) calls: u64,
    /// Their total duration.
    pub(super) time: Duration,
    /// The number of calls that took at most the time of each of [`BOUNDS_MS`].
    pub(super) within: [u64; BOUNDS_MS.len()],
}

/// Calls by method, and by the gRPC code that they ended with.
type Counts = BTreeMap<String, BTreeMap<String, Count>>;

/// All calls since the daemon was started.
#[derive(Debug, Default)]
pub(super) struct Calls {
    next: AtomicU64,
    counts: Mutex<Counts>,
}

impl Calls {
    pub(super) fn counts(&self) -> Counts {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.clone()
    }

    fn ended(&self, method: &str, code: &str, time: Duration) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        if counts.len() >= MAX_METHODS && !counts.contains_key(method) {
            return;
        }
        let of_method = counts.entry(method.to_owned()).or_default();
        let count = of_method.entry(code.to_owned()).or_default();
        count.calls += 1;
        count.time += time;
        let ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        for (within, bound) in count.within.iter_mut().zip(BOUNDS_MS) {
            *within += u64::from(ms <= bound);
        }
    }
}

/// A tower layer around the services.
#[derive(Debug, Clone)]
pub(super) struct AroundCalls {
    calls: Arc<Calls>,
}

impl AroundCalls {
    pub(super) fn new(calls: Arc<Calls>) -> Self {
        Self { calls }
    }
}

impl<S> Layer<S> for AroundCalls {
    type Service = Around<S>;

    fn layer(&self, inner: S) -> Around<S> {
        Around {
            inner,
            calls: Arc::clone(&self.calls),
        }
    }
}

/// A running call.
#[derive(Debug)]
struct Call {
    calls: Arc<Calls>,
    method: String,
    begin: Instant,
    has_ended: bool,
}

impl Call {
    fn ended(&mut self, code: &str) {
        let time = self.begin.elapsed();
        debug!(code, ?time, "answered");
        self.calls.ended(&self.method, code, time);
        self.has_ended = true;
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        const CANCELLED: &str = "1";
        if !self.has_ended {
            let time = self.begin.elapsed();
            debug!(?time, "cancelled by the caller");
            self.calls.ended(&self.method, CANCELLED, time);
        }
    }
}

/// Returns the call's timeout from its `grpc-timeout` header: at most eight digits, and a unit.
fn patience(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.len() > 8 || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    let count = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(count * 3600)),
        "M" => Some(Duration::from_secs(count * 60)),
        "S" => Some(Duration::from_secs(count)),
        "m" => Some(Duration::from_millis(count)),
        "u" => Some(Duration::from_micros(count)),
        "n" => Some(Duration::from_nanos(count)),
        _ => None,
    }
}

/// See [`AroundCalls`].
#[derive(Debug, Clone)]
pub(super) struct Around<S> {
    inner: S,
    calls: Arc<Calls>,
}

impl<S, B, R> Service<Request<B>> for Around<S>
where
    S: Service<Request<B>, Response = Response<R>>,
    S::Future: Send + 'static,
    R: Default,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let method = request.uri().path().rsplit('/').next().unwrap_or_default();
        let method: String = method.chars().take(64).collect();
        let number = self.calls.next.fetch_add(1, Ordering::Relaxed);
        let span = info_span!("call", number, method);
        let mut call = Call {
            calls: Arc::clone(&self.calls),
            method,
            begin: Instant::now(),
            has_ended: false,
        };
        let patience = patience(request.headers());
        let uri = request.uri().clone();
        let deadline = patience.and_then(|time| tokio::time::Instant::now().checked_add(time));
        let answer = self.inner.call(request);
        let counted = async move {
            // Tonic knows the deadline, too, but would answer that the call was cancelled.
            let answer = match deadline {
                None => answer.await,
                Some(deadline) => timeout_at(deadline, answer).await.unwrap_or_else(|_| {
                    let late = "the call did not end before its caller's deadline";
                    Ok(Status::deadline_exceeded(late).into_http())
                }),
            };
            let answer = answer.map(|answer| unimplemented::named(uri.path(), answer));
            // A call that fails has its code in the headers; others have it in the trailers.
            let code = answer.as_ref().map_or("14", |response| {
                let status = response.headers().get("grpc-status");
                status.and_then(|code| code.to_str().ok()).unwrap_or("0")
            });
            call.ended(code);
            answer
        };
        Box::pin(request::scope(number, counted).instrument(span))
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::future::{Pending, Ready};

    use futures_util::future::Either;

    use super::*;

    #[test]
    fn calls_are_counted_by_method_code_and_time() {
        let calls = Calls::default();
        calls.ended("Version", "0", Duration::from_millis(3));
        calls.ended("Version", "0", Duration::from_millis(30));
        calls.ended("Version", "5", Duration::from_secs(100));
        let counts = calls.counts();
        let ok = &counts["Version"]["0"];
        assert_eq!((ok.calls, ok.time), (2, Duration::from_millis(33)));
        assert_eq!(ok.within[..3], [1, 1, 2]);
        let failed = &counts["Version"]["5"];
        assert_eq!(failed.within, [0; BOUNDS_MS.len()]);
    }

    #[test]
    fn all_codes_of_a_method_are_counted_and_no_more_methods_than_there_may_be() {
        let calls = Calls::default();
        for method in 0..=MAX_METHODS {
            for code in ["0", "5"] {
                calls.ended(&format!("Made{method}"), code, Duration::ZERO);
            }
        }
        calls.ended("Made0", "14", Duration::ZERO);
        let counts = calls.counts();
        assert_eq!(counts.len(), MAX_METHODS);
        assert_eq!(counts["Made0"].len(), 3);
    }

    /// A service without methods; with `is_silent`, it never answers.
    struct Nothing {
        is_silent: bool,
    }

    impl Service<Request<()>> for Nothing {
        type Response = Response<String>;
        type Error = Infallible;
        type Future = Either<Pending<Answer>, Ready<Answer>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, _: Request<()>) -> Self::Future {
            match self.is_silent {
                true => Either::Left(std::future::pending()),
                false => {
                    let answer = Status::unimplemented("").into_http();
                    Either::Right(std::future::ready(Ok(answer)))
                }
            }
        }
    }

    type Answer = Result<Response<String>, Infallible>;

    fn around(calls: &Arc<Calls>, is_silent: bool) -> Around<Nothing> {
        AroundCalls::new(Arc::clone(calls)).layer(Nothing { is_silent })
    }

    fn request(timeout: &str) -> Request<()> {
        let request = Request::builder()
            .uri("/runtime.v1.RuntimeService/Version")
            .header("grpc-timeout", timeout);
        request.body(()).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_beyond_its_callers_deadline_is_answered_and_counted_as_that() {
        let calls = Arc::new(Calls::default());
        let mut service = around(&calls, true);
        let begin = tokio::time::Instant::now();
        let response = service.call(request("1m")).await.unwrap();
        assert_eq!(response.headers()["grpc-status"], "4");
        assert!(begin.elapsed() < Duration::from_secs(1));
        assert_eq!(calls.counts()["Version"]["4"].calls, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_nobody_waits_for_any_more_is_counted_as_cancelled() {
        let calls = Arc::new(Calls::default());
        let mut service = around(&calls, true);
        let left = tokio::time::timeout(Duration::from_secs(60), service.call(request("1H")));
        assert!(left.await.is_err());
        assert_eq!(calls.counts()["Version"]["1"].calls, 1);
    }

    #[tokio::test]
    async fn a_call_that_nobody_serves_is_named_and_counted() {
        let calls = Arc::new(Calls::default());
        let response = around(&calls, false).call(request("1H")).await.unwrap();
        let status = Status::from_header_map(response.headers()).unwrap();
        let name = "unknown method Version for service runtime.v1.RuntimeService";
        assert_eq!(status.message(), name);
        assert_eq!(calls.counts()["Version"]["12"].calls, 1);
    }

    #[test]
    fn deadlines_are_read_in_each_unit() {
        for (text, patience_ns) in [
            ("2H", Some(7_200_000_000_000)),
            ("2M", Some(120_000_000_000)),
            ("2S", Some(2_000_000_000)),
            ("2m", Some(2_000_000)),
            ("2u", Some(2_000)),
            ("99999999n", Some(99_999_999)),
            ("0S", Some(0)),
            ("", None),
            ("S", None),
            ("2", None),
            ("+2S", None),
            ("2s", None),
            ("100000000S", None),
        ] {
            let read = patience(request(text).headers());
            assert_eq!(read, patience_ns.map(Duration::from_nanos), "{text}");
        }
        let longest = patience(request("99999999H").headers());
        assert_eq!(longest, Some(Duration::from_secs(99_999_999 * 3600)));
    }

    #[test]
    fn made_up_methods_cost_no_memory_without_bound() {
        let calls = Calls::default();
        for number in 0..2 * MAX_METHODS {
            calls.ended(&number.to_string(), "12", Duration::ZERO);
        }
        assert_eq!(calls.counts().len(), MAX_METHODS);
    }
}
