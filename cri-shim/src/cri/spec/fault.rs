//! What is wrong with the request for a container, or cannot be done for it.

/// Error of a container's specification.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SpecFault {
    /// A field of the request is invalid.
    #[error("invalid {field}: {reason}")]
    Invalid {
        /// Its path in the request.
        field: &'static str,
        /// What is wrong, and what would be right.
        reason: String,
    },
    /// A field asks for what a pod in a virtual machine does not have.
    #[error("{field} is not supported: {reason}")]
    Refused {
        /// Its path in the request.
        field: &'static str,
        /// Why, and what to do instead.
        reason: &'static str,
    },
    /// A part of the specification does not fit together.
    #[error("cannot build the container's runtime specification")]
    Build(#[from] oci_spec::OciSpecError),
}

impl SpecFault {
    pub(in crate::cri) fn invalid(field: &'static str, reason: impl Into<String>) -> Self {
        let reason = reason.into();
        Self::Invalid { field, reason }
    }
}
