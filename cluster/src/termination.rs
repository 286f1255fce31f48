//! What a container leaves to its kubelet when it fails.

use std::path::Path;

/// The longest termination message, in characters.
const MESSAGE: usize = 1000;

/// Tells the kubelet why the container failed. That it cannot be told hinders nothing: the same is
/// in the container's log.
pub(crate) fn leave_message(path: &Path, error: &anyhow::Error) {
    let message: String = format!("{error:#}").chars().take(MESSAGE).collect();
    let file = std::fs::OpenOptions::new().write(true).open(path);
    let written =
        file.and_then(|mut file| std::io::Write::write_all(&mut file, message.as_bytes()));
    if let Err(error) = written {
        tracing::debug!(%error, path = %path.display(), "there is no termination message");
    }
}
