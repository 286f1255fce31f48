//! One call to the guest's agent, by one ttrpc message in each direction.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

/// The host's vsock port where the agent reports that it is ready.
pub(crate) const READY_PORT: u32 = 1024;
/// The guest's vsock port where it accepts calls.
pub(crate) const RPC_PORT: u32 = 1025;

/// Asks the agent for its containers.
pub(crate) fn call(stream: &mut UnixStream) -> io::Result<()> {
    const REQUEST: u8 = 1;
    const RESPONSE: u8 = 2;
    const STREAM: u32 = 1;
    let mut payload = Vec::new();
    for (field, text) in [(1u8, "podvisor.agent.v1.Agent"), (2, "ListContainers")] {
        payload.push(field << 3 | 2);
        payload.push(u8::try_from(text.len()).map_err(io::Error::other)?);
        payload.extend(text.as_bytes());
    }
    let len = u32::try_from(payload.len()).map_err(io::Error::other)?;
    let mut message = len.to_be_bytes().to_vec();
    message.extend(STREAM.to_be_bytes());
    message.extend([REQUEST, 0]);
    message.extend(payload);
    stream.write_all(&message)?;
    let mut header = [0; 10];
    stream.read_exact(&mut header)?;
    let [a, b, c, d, _, _, _, _, kind, _] = header;
    let len = u32::from_be_bytes([a, b, c, d]);
    io::copy(&mut stream.take(u64::from(len)), &mut io::sink())?;
    if kind != RESPONSE {
        let what = format!("the agent answered with a message of type {kind}");
        return Err(io::Error::other(what));
    }
    Ok(())
}
