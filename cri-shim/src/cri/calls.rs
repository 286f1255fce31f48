//! Each call gets a number, under which the log has what was done for it, and is counted by
//! its method and code.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tonic::codegen::http::{Request, Response};
use tower_layer::Layer;
use tower_service::Service;
use tracing::{Instrument as _, debug, info_span};

use crate::request;

/// Methods that are counted apart: a client could make up any number of names.
const METHODS: usize = 128;

/// Upper bounds of the times in [`Count::within`], in milliseconds.
pub(super) const BOUNDS_MS: [u64; 9] = [5, 20, 50, 100, 250, 1000, 5000, 20_000, 60_000];

/// Calls of one method that ended with one code.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Count {
    /// How many.
    pub(super) calls: u64,
    /// How long they took together.
    pub(super) time: Duration,
    /// How many took at most as long as each of [`BOUNDS_MS`].
    pub(super) within: [u64; BOUNDS_MS.len()],
}

/// All calls since the daemon was started, by method and code.
#[derive(Debug, Default)]
pub(super) struct Calls {
    next: AtomicU64,
    counts: Mutex<BTreeMap<(String, String), Count>>,
}

impl Calls {
    pub(super) fn counts(&self) -> BTreeMap<(String, String), Count> {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.clone()
    }

    fn ended(&self, method: &str, code: &str, time: Duration) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (method.to_owned(), code.to_owned());
        if counts.len() >= METHODS && !counts.contains_key(&key) {
            return;
        }
        let count = counts.entry(key).or_default();
        count.calls += 1;
        count.time += time;
        let ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        for (within, bound) in count.within.iter_mut().zip(BOUNDS_MS) {
            *within += u64::from(ms <= bound);
        }
    }
}

/// Counts the calls of the services behind it.
#[derive(Debug, Clone)]
pub(super) struct CountCalls {
    calls: Arc<Calls>,
}

impl CountCalls {
    pub(super) fn new(calls: Arc<Calls>) -> Self {
        Self { calls }
    }
}

impl<S> Layer<S> for CountCalls {
    type Service = Counted<S>;

    fn layer(&self, inner: S) -> Counted<S> {
        Counted {
            inner,
            calls: Arc::clone(&self.calls),
        }
    }
}

/// See [`CountCalls`].
#[derive(Debug, Clone)]
pub(super) struct Counted<S> {
    inner: S,
    calls: Arc<Calls>,
}

impl<S, B, R> Service<Request<B>> for Counted<S>
where
    S: Service<Request<B>, Response = Response<R>>,
    S::Future: Send + 'static,
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
        let calls = Arc::clone(&self.calls);
        let begin = Instant::now();
        let answer = self.inner.call(request);
        let counted = async move {
            let answer = answer.await;
            // A call that fails has its code in the headers; others have it in the trailers.
            let code = answer.as_ref().map_or("14", |response| {
                let status = response.headers().get("grpc-status");
                status.and_then(|code| code.to_str().ok()).unwrap_or("0")
            });
            let time = begin.elapsed();
            debug!(code, ?time, "answered");
            calls.ended(&method, code, time);
            answer
        };
        Box::pin(request::scope(number, counted).instrument(span))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_counted_by_method_code_and_time() {
        let calls = Calls::default();
        calls.ended("Version", "0", Duration::from_millis(3));
        calls.ended("Version", "0", Duration::from_millis(30));
        calls.ended("Version", "5", Duration::from_secs(100));
        let counts = calls.counts();
        let ok = &counts[&("Version".to_owned(), "0".to_owned())];
        assert_eq!((ok.calls, ok.time), (2, Duration::from_millis(33)));
        assert_eq!(ok.within[..3], [1, 1, 2]);
        let failed = &counts[&("Version".to_owned(), "5".to_owned())];
        assert_eq!(failed.within, [0; BOUNDS_MS.len()]);
    }

    #[test]
    fn made_up_methods_cost_no_memory_without_bound() {
        let calls = Calls::default();
        for number in 0..2 * METHODS {
            calls.ended(&number.to_string(), "12", Duration::ZERO);
        }
        assert_eq!(calls.counts().len(), METHODS);
    }
}
