//! Tells a container's process, which libcontainer has created, to execute its command.

use std::env;
use std::path::PathBuf;

use libcontainer::container::Container;
use libcontainer::error::LibcontainerError;

/// Starts the container whose libcontainer state is in `state`.
///
/// # Errors
///
/// [`LibcontainerError`] for a container that cannot be started, for example because its process
/// has just ended.
pub fn notify(state: PathBuf) -> Result<(), LibcontainerError> {
    let started = Container::load(state).and_then(|mut container| container.start());
    // libcontainer changes to the directory of the socket, and stays in it if the connection
    // fails. Once the directory is removed with its container, no other container could be started:
    // getcwd(2) would fail.
    if let Err(error) = env::set_current_dir("/") {
        tracing::warn!(%error, "cannot change to the root directory");
    }
    started
}
