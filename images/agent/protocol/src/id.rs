//! Names of containers, processes and streams.

use std::fmt;

use crate::limits;

/// The id is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{id:?} is no id: use 1 to 128 letters, digits, '_', '.' or '-', the first a letter or digit"
)]
pub struct InvalidId {
    id: String,
}

/// Checks the id of a container or of an exec: `[A-Za-z0-9][A-Za-z0-9_.-]{0,127}`.
///
/// A valid id is safe as a file name and as the name of a control group.
///
/// # Errors
///
/// [`InvalidId`], which quotes at most the first 64 characters.
pub fn validate_id(id: &str) -> Result<(), InvalidId> {
    let mut bytes = id.bytes();
    let first = bytes.next().is_some_and(|b| b.is_ascii_alphanumeric());
    let rest = bytes.all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-'));
    if first && rest && id.len() <= limits::ID_BYTES {
        Ok(())
    } else {
        Err(InvalidId {
            id: id.chars().take(64).collect(),
        })
    }
}

/// Name of one stdio connection: 16 bytes that the host chooses at random, never all zero.
///
/// Randomness keeps a container process that can reach the agent's port from
/// claiming another's stream.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct StreamId([u8; 16]);

/// The bytes are not a stream id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a stream id is 16 bytes, not all zero")]
pub struct InvalidStreamId;

impl StreamId {
    /// Length on the wire, in bytes.
    pub const LEN: usize = 16;

    /// # Errors
    ///
    /// [`InvalidStreamId`] if all bytes are zero.
    pub fn new(bytes: [u8; 16]) -> Result<Self, InvalidStreamId> {
        if bytes == [0; 16] {
            Err(InvalidStreamId)
        } else {
            Ok(Self(bytes))
        }
    }

    /// Reads a field of [`Stdio`](crate::api::Stdio): empty means that there is no stream.
    ///
    /// # Errors
    ///
    /// [`InvalidStreamId`] for a length other than 0 and 16, and for zeros.
    pub fn from_field(field: &[u8]) -> Result<Option<Self>, InvalidStreamId> {
        if field.is_empty() {
            return Ok(None);
        }
        let bytes: [u8; 16] = field.try_into().map_err(|_| InvalidStreamId)?;
        Self::new(bytes).map(Some)
    }

    /// Returns the bytes to send first on the connection.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl fmt::Debug for StreamId {
    /// Shows only a prefix: a reader of the log must not be able to claim a stream.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StreamId({:02x}{:02x}…)", self.0[0], self.0[1])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ids_that_container_engines_make_up_pass() {
        for id in ["a", "0", "web-1", "k8s_POD.v2", &"f".repeat(128)] {
            assert_eq!(validate_id(id), Ok(()), "{id}");
        }
    }

    #[test]
    fn ids_that_could_leave_a_directory_are_refused() {
        for id in [
            "",
            ".",
            "..",
            "-rf",
            "a/b",
            "a\0",
            "ä",
            "a b",
            "_x",
            "a\n",
            &"f".repeat(129),
        ] {
            assert!(validate_id(id).is_err(), "{id:?}");
        }
    }

    proptest! {
        #[test]
        fn a_valid_id_is_one_path_component(id in "\\PC{0,140}") {
            if validate_id(&id).is_ok() {
                let path = std::path::Path::new(&id);
                prop_assert_eq!(path.components().count(), 1);
                prop_assert_eq!(path.file_name().and_then(|n| n.to_str()), Some(id.as_str()));
            }
        }

        #[test]
        fn a_refused_id_is_quoted_in_bounded_length(id in "[ -~]{129,4000}") {
            let text = validate_id(&id).unwrap_err().to_string();
            prop_assert!(text.len() < 300);
        }

        #[test]
        fn stream_fields_of_other_lengths_are_refused(field in proptest::collection::vec(1u8.., 0..64)) {
            match StreamId::from_field(&field) {
                Ok(None) => prop_assert!(field.is_empty()),
                Ok(Some(id)) => prop_assert_eq!(&id.as_bytes()[..], &field[..]),
                Err(InvalidStreamId) => prop_assert!(!field.is_empty() && field.len() != 16),
            }
        }
    }

    #[test]
    fn a_stream_id_of_zeros_is_refused() {
        assert_eq!(StreamId::from_field(&[0; 16]), Err(InvalidStreamId));
    }
}
