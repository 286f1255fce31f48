//! Errors of connections, before anything is known about the content.

use std::path::PathBuf;

/// Why there is no answer. The caller knows the host.
#[derive(Debug)]
pub(crate) enum HttpError {
    /// No connection.
    Unreachable(reqwest::Error),
    /// The connection cannot be trusted.
    Tls(reqwest::Error),
    /// The server stopped sending, or the connection broke.
    Transfer(reqwest::Error),
    /// The answer breaks the protocol.
    Protocol(&'static str),
    /// A redirect, or another address that the server chose, is refused.
    Redirect {
        /// The target, without path and query.
        target: String,
        /// The reason.
        why: &'static str,
    },
    /// A certificate or key file cannot be used.
    Certificate {
        path: PathBuf,
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The client cannot be set up.
    Setup(reqwest::Error),
}

impl From<reqwest::Error> for HttpError {
    fn from(error: reqwest::Error) -> Self {
        let tls = is_tls(&error);
        let connecting = error.is_connect();
        // URLs may contain tokens.
        let source = error.without_url();
        match () {
            () if tls => Self::Tls(source),
            () if connecting => Self::Unreachable(source),
            () => Self::Transfer(source),
        }
    }
}

fn is_tls(error: &reqwest::Error) -> bool {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        // An I/O error hides the error that it was created from.
        let inner = error
            .downcast_ref::<std::io::Error>()
            .and_then(std::io::Error::get_ref);
        if error.is::<rustls::Error>() || inner.is_some_and(|inner| inner.is::<rustls::Error>()) {
            return true;
        }
        cause = match inner {
            Some(inner) => Some(inner as &(dyn std::error::Error + 'static)),
            None => error.source(),
        };
    }
    false
}
