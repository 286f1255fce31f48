//! What a URL stands for: a token is good for one connection, for a minute.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use k8s_cri::v1::{AttachRequest, ExecRequest};

/// How long a URL is good for.
const LIFETIME: Duration = Duration::from_secs(60);
/// URLs that nobody has used yet.
const UNUSED: usize = 1000;

/// What a client that comes with a token gets.
#[derive(Debug, Clone)]
pub(in crate::cri) enum Target {
    /// A new process in a container.
    Exec(ExecRequest),
    /// The container's own process.
    Attach(AttachRequest),
    /// Ports of a pod.
    PortForward {
        /// The pod.
        pod: String,
    },
}

/// URLs that are good for something.
#[derive(Debug, Default)]
pub(super) struct Tokens(Mutex<HashMap<String, (Instant, Target)>>);

impl Tokens {
    /// Takes up `token` for `target`; `false` when too many are unused.
    pub(super) fn add(&self, token: String, target: Target) -> bool {
        let mut tokens = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        tokens.retain(|_, (since, _)| since.elapsed() < LIFETIME);
        if tokens.len() >= UNUSED {
            return false;
        }
        tokens.insert(token, (Instant::now(), target));
        true
    }

    /// What `token` is good for, once.
    pub(super) fn take(&self, token: &str) -> Option<Target> {
        let mut tokens = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (since, target) = tokens.remove(token)?;
        (since.elapsed() < LIFETIME).then_some(target)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target() -> Target {
        Target::PortForward {
            pod: "p".to_owned(),
        }
    }

    #[test]
    fn a_token_is_good_once() {
        let tokens = Tokens::default();
        assert!(tokens.add("a".to_owned(), target()));
        assert!(tokens.take("b").is_none());
        assert!(tokens.take("a").is_some());
        assert!(tokens.take("a").is_none());
    }

    #[test]
    fn unused_tokens_are_bounded() {
        let tokens = Tokens::default();
        for number in 0..UNUSED {
            assert!(tokens.add(number.to_string(), target()));
        }
        assert!(!tokens.add("more".to_owned(), target()));
        tokens.take("0").unwrap();
        assert!(tokens.add("more".to_owned(), target()));
    }
}
