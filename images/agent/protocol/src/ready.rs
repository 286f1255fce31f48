//! The line with which an agent reports that it accepts connections.

use crate::PROTOCOL_VERSION;

const PREFIX: &str = "podvisor-agent ";
/// Prefix, the digits of a u32, and the newline.
const MAX_LEN: usize = PREFIX.len() + 10 + 1;

/// Returns the line that the agent sends to the host's [`READY_PORT`](crate::READY_PORT):
/// `podvisor-agent <protocol version>\n`.
#[must_use]
pub fn ready_line() -> String {
    format!("{PREFIX}{PROTOCOL_VERSION}\n")
}

/// The ready line is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidReadyLine {
    /// The received bytes do not have the form of a ready line.
    #[error("the guest sent something else than an agent's ready line")]
    Malformed,
    /// The agent speaks a version that this host does not support.
    #[error(
        "the guest's agent speaks protocol version {0}, this podvisor speaks {PROTOCOL_VERSION}: \
         use the initramfs that came with it"
    )]
    Version(u32),
}

/// Looks for the ready line at the start of the bytes that a guest has sent so far.
///
/// Returns `None` while more bytes are needed, which is never the case after 26 bytes.
///
/// # Errors
///
/// [`InvalidReadyLine`] as soon as the bytes cannot become a ready line of this version.
pub fn parse_ready_line(received: &[u8]) -> Result<Option<()>, InvalidReadyLine> {
    let Some(end) = received.iter().position(|&b| b == b'\n') else {
        let known = received.len().min(PREFIX.len());
        return if received.len() < MAX_LEN && received[..known] == PREFIX.as_bytes()[..known] {
            Ok(None)
        } else {
            Err(InvalidReadyLine::Malformed)
        };
    };
    let digits = received[..end]
        .strip_prefix(PREFIX.as_bytes())
        .filter(|d| !d.is_empty() && d.iter().all(u8::is_ascii_digit))
        .and_then(|d| std::str::from_utf8(d).ok())
        .ok_or(InvalidReadyLine::Malformed)?;
    match digits.parse() {
        Ok(PROTOCOL_VERSION) => Ok(Some(())),
        Ok(other) => Err(InvalidReadyLine::Version(other)),
        Err(_) => Err(InvalidReadyLine::Malformed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn each_prefix_of_the_line_asks_for_more_and_the_line_is_taken() {
        let line = ready_line();
        for end in 0..line.len() {
            assert_eq!(parse_ready_line(&line.as_bytes()[..end]), Ok(None));
        }
        assert_eq!(parse_ready_line(line.as_bytes()), Ok(Some(())));
    }

    #[test]
    fn another_version_is_named() {
        assert_eq!(
            parse_ready_line(b"podvisor-agent 77\n"),
            Err(InvalidReadyLine::Version(77))
        );
    }

    #[test]
    fn noise_is_malformed() {
        for noise in [
            &b"\n"[..],
            b"HTTP",
            b"podvisor-agent \n",
            b"podvisor-agent +1\n",
            b"podvisor-agent 1 \n",
            b"podvisor-agent 4294967296\n",
            b"podvisor-agent 11111111111111",
        ] {
            assert_eq!(
                parse_ready_line(noise),
                Err(InvalidReadyLine::Malformed),
                "{noise:?}"
            );
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_answered_and_long_ones_finally(bytes: Vec<u8>) {
            let answer = parse_ready_line(&bytes);
            prop_assert!(bytes.len() < MAX_LEN || answer != Ok(None));
        }
    }
}
