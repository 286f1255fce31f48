//! Errors in the protocol's form.

use std::io;

/// Why a command was not carried out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{desc}")]
pub struct Fault {
    /// `GenericError` or `CommandNotFound`.
    pub class: &'static str,
    /// What went wrong, in words.
    pub desc: String,
}

impl Fault {
    /// Something went wrong.
    pub fn new(desc: impl Into<String>) -> Self {
        Self {
            class: "GenericError",
            desc: desc.into(),
        }
    }

    /// The command does not exist, or not now.
    pub(super) fn not_found(desc: String) -> Self {
        Self {
            class: "CommandNotFound",
            desc,
        }
    }

    /// A system call failed: what was tried, on what, and the C library's words, which hosts look
    /// for.
    pub fn io(tried: &str, what: &str, error: &io::Error) -> Self {
        let shown: String = what.chars().take(256).collect();
        Self::new(format!("failed to {tried} '{shown}': {}", words(error)))
    }
}

/// What the C library says of an error: without the number that Rust adds.
pub(crate) fn words(error: &io::Error) -> String {
    let text = error.to_string();
    match text.rfind(" (os error ") {
        Some(at) => text.get(..at).unwrap_or(&text).to_owned(),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_system_calls_error_is_the_c_librarys() {
        let error = io::Error::from_raw_os_error(libc::ENOENT);
        let fault = Fault::io("open file", "/x", &error);
        assert_eq!(
            fault.desc,
            "failed to open file '/x': No such file or directory"
        );
    }
}
