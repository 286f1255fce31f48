//! Why an instance cannot have a pod.

/// Why an instance cannot have a pod yet.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PodError {
    /// The specification is not one.
    #[error("failed to read {field}: {problem}; correct the specification")]
    Malformed {
        /// Where.
        field: String,
        /// What is wrong.
        problem: String,
    },
    /// A claim does not exist.
    #[error("PersistentVolumeClaim {claim} of volume {volume} does not exist; create it")]
    NoClaim {
        /// The claim.
        claim: String,
        /// The volume that names it.
        volume: String,
    },
    /// The API server does not take the pod.
    #[error("the API server refused the pod: {message}")]
    Refused {
        /// What it says.
        message: String,
    },
    /// What is asked for cannot be had.
    #[error("{field} is not supported; remove it")]
    Unsupported {
        /// What is asked for.
        field: String,
    },
}

impl PodError {
    /// Returns the reason of the condition `Synchronized`.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NoClaim { .. } => "FailedPvcNotFound",
            _ => "FailedCreate",
        }
    }
}
