//! Notifies systemd about a service of `Type=notify` (sd_notify(3)).

use std::env;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use tracing::debug;

/// The variable with systemd's socket, if there is one.
const SOCKET_VARIABLE: &str = "NOTIFY_SOCKET";

/// Sends a state such as `READY=1`. Without systemd, this does nothing.
pub(super) fn tell(state: &str) {
    let Some(socket) = env::var_os(SOCKET_VARIABLE) else {
        return;
    };
    if let Err(error) = send(socket.as_bytes(), state) {
        debug!(%error, state, "systemd does not hear of the service's state");
    }
}

fn send(socket: &[u8], state: &str) -> io::Result<()> {
    // A name with a leading at sign is in the abstract namespace.
    let address = match socket {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        path => SocketAddr::from_pathname(std::ffi::OsStr::from_bytes(path))?,
    };
    let sender = UnixDatagram::unbound()?;
    sender.send_to_addr(state.as_bytes(), &address)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_arrives_by_path_and_by_abstract_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let listener = UnixDatagram::bind(&path).unwrap();
        send(path.as_os_str().as_bytes(), "READY=1").unwrap();
        let mut buffer = [0; 32];
        let count = listener.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..count], b"READY=1");

        let name = format!("podvisor-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let listener = UnixDatagram::bind_addr(&address).unwrap();
        send(format!("@{name}").as_bytes(), "STOPPING=1").unwrap();
        let count = listener.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..count], b"STOPPING=1");
    }
}
