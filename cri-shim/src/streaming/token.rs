//! Tokens that stand for requests: each is good once, for a minute.

use std::collections::HashMap;
use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a token is good.
const TOKEN_TTL: Duration = Duration::from_secs(60);

/// Requests that may wait for their client.
const MAX_WAITING: usize = 1000;

/// Why there is no token.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TokenError {
    /// Too many are waiting.
    #[error(
        "{MAX_WAITING} streaming requests are already waiting for a client; try again in a minute"
    )]
    TooMany,
    /// The kernel gave no random bytes.
    #[error("failed to generate a token")]
    Random(#[source] io::Error),
}

#[derive(Debug)]
pub(super) struct Tokens<R> {
    waiting: Mutex<HashMap<String, (Instant, R)>>,
}

impl<R> Tokens<R> {
    pub(super) fn new() -> Self {
        Self {
            waiting: Mutex::default(),
        }
    }

    /// Keeps a request; the token that gets it back.
    pub(super) fn issue(&self, request: R) -> Result<String, TokenError> {
        self.issue_at(request, Instant::now())
    }

    fn issue_at(&self, request: R, now: Instant) -> Result<String, TokenError> {
        let token = crate::sandbox::random_id().map_err(TokenError::Random)?;
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.retain(|_, (issued, _)| now.duration_since(*issued) < TOKEN_TTL);
        if waiting.len() >= MAX_WAITING {
            return Err(TokenError::TooMany);
        }
        waiting.insert(token.clone(), (now, request));
        Ok(token)
    }

    /// The request of a token, which is used up then.
    pub(super) fn redeem(&self, token: &str) -> Option<R> {
        self.redeem_at(token, Instant::now())
    }

    fn redeem_at(&self, token: &str, now: Instant) -> Option<R> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let (issued, request) = waiting.remove(token)?;
        (now.duration_since(issued) < TOKEN_TTL).then_some(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_good_once_and_for_a_minute() {
        let tokens = Tokens::new();
        let now = Instant::now();
        let one = tokens.issue_at(1, now).unwrap();
        let two = tokens.issue_at(2, now).unwrap();
        assert_ne!(one, two);
        assert_eq!(tokens.redeem_at(&one, now + TOKEN_TTL / 2), Some(1));
        assert_eq!(tokens.redeem_at(&one, now + TOKEN_TTL / 2), None);
        assert_eq!(tokens.redeem_at(&two, now + TOKEN_TTL), None);
        assert_eq!(tokens.redeem("unknown"), None);
    }

    #[test]
    fn requests_that_nobody_fetches_do_not_pile_up() {
        let tokens = Tokens::new();
        let now = Instant::now();
        for n in 0..MAX_WAITING {
            tokens.issue_at(n, now).unwrap();
        }
        let refused = tokens.issue_at(0, now);
        assert!(matches!(refused, Err(TokenError::TooMany)));
        tokens.issue_at(0, now + TOKEN_TTL).unwrap();
    }
}
