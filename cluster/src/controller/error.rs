//! Why an object could not be brought into its state this time.

use kube::Resource;

/// Why an object could not be brought into its state this time. It is tried again.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The API server did not do it.
    #[error("failed to {what} {object}")]
    Request {
        /// What was tried.
        what: &'static str,
        /// On what.
        object: String,
        /// The server's answer.
        #[source]
        source: Box<kube::Error>,
    },
    /// The instance type or the preference cannot be had, or does not fit.
    #[error("failed to apply the instance type of {object}")]
    #[non_exhaustive]
    Expand {
        /// Of what.
        object: String,
        /// What does not fit, by its path.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The pod that a running instance would move to cannot be described.
    #[error("failed to describe the pod that {object} would move to")]
    #[non_exhaustive]
    Target {
        /// The instance.
        object: String,
        /// What is wrong with its specification.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The pod that takes an upload, or serves an export, gets no certificate.
    #[error("failed to make the certificate by which the pod of {object} is known")]
    #[non_exhaustive]
    Credentials {
        /// The DataVolume, or the export.
        object: String,
        /// What is wrong with the authority.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Whether a copy was allowed cannot be found out.
    #[error("failed to check the clone token of {object}")]
    #[non_exhaustive]
    Token {
        /// The DataVolume.
        object: String,
        /// Why there is no key.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// An export gets no token.
    #[error("failed to make a token for {object}")]
    #[non_exhaustive]
    NewToken {
        /// The export.
        object: String,
        /// Why there is none.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// An object has no JSON.
    #[error("failed to write a {what} as JSON")]
    Serialize {
        /// What.
        what: &'static str,
        /// What JSON cannot say.
        #[source]
        source: serde_json::Error,
    },
    /// Another replica is the leader by now.
    #[error("another replica leads; this one does nothing")]
    NotLeading,
    /// The watches have ended: the controllers are shutting down.
    #[error("the watches have ended; the controllers shut down")]
    Ended,
}

fn name_of<K: Resource>(object: &K) -> String {
    let meta = object.meta();
    format!(
        "{}/{}",
        meta.namespace.as_deref().unwrap_or_default(),
        meta.name.as_deref().unwrap_or_default()
    )
}

impl Error {
    pub(super) fn credentials<K: Resource>(
        object: &K,
        source: impl std::error::Error + Send + Sync + 'static,
    ) -> Self {
        Self::Credentials {
            object: name_of(object),
            source: Box::new(source),
        }
    }

    pub(super) fn token<K: Resource>(
        object: &K,
        source: impl std::error::Error + Send + Sync + 'static,
    ) -> Self {
        Self::Token {
            object: name_of(object),
            source: Box::new(source),
        }
    }

    pub(super) fn new_token<K: Resource>(
        object: &K,
        source: impl std::error::Error + Send + Sync + 'static,
    ) -> Self {
        Self::NewToken {
            object: name_of(object),
            source: Box::new(source),
        }
    }

    pub(super) fn request<K: Resource>(
        what: &'static str,
        object: &K,
        source: kube::Error,
    ) -> Self {
        Self::Request {
            what,
            object: name_of(object),
            source: Box::new(source),
        }
    }

    pub(super) fn expand<K: Resource>(
        object: &K,
        source: impl std::error::Error + Send + Sync + 'static,
    ) -> Self {
        let meta = object.meta();
        Self::Expand {
            object: format!(
                "{}/{}",
                meta.namespace.as_deref().unwrap_or_default(),
                meta.name.as_deref().unwrap_or_default()
            ),
            source: Box::new(source),
        }
    }

    /// Returns the HTTP status with which the API server refused.
    #[must_use]
    pub fn code(&self) -> Option<u16> {
        match self {
            Self::Request { source, .. } => code(source),
            _ => None,
        }
    }

    /// Whether the object was changed, or went away, since it was observed. The change itself
    /// leads to the next attempt.
    #[must_use]
    pub fn is_conflict(&self) -> bool {
        matches!(self.code(), Some(404 | 409))
    }
}

/// Returns the HTTP status with which the API server refused a request.
pub(super) fn code(error: &kube::Error) -> Option<u16> {
    match error {
        kube::Error::Api(status) => Some(status.code),
        _ => None,
    }
}

/// Returns whether what was to be deleted is gone, or is another object.
pub(super) fn is_gone(error: &kube::Error) -> bool {
    matches!(code(error), Some(404 | 409))
}
