//! Tokens that stand for requests: each is valid once, for a minute.

use std::collections::HashMap;
use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a token is valid.
const TOKEN_TTL: Duration = Duration::from_secs(60);

/// Most requests that may wait for their client.
const MAX_WAITING: usize = 1000;

/// The reason why no token was created.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TokenError {
    /// Too many requests are waiting.
    #[error(
        "{MAX_WAITING} streaming requests are already waiting for a client; try again in a minute"
    )]
    TooMany,
    /// The kernel returned no random bytes.
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

    /// Stores a request; returns the token that redeems it.
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

    /// Returns the request of a token, which is used up by this.
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
