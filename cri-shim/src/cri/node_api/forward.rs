//! Connections to the ports of a guest: over its network, and by vsock.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use podvisor_node_api::messages::{
    Data, PortForwardInput, PortForwardMessage, PortForwardOpen, PortProtocol, VmName, VsockInput,
    VsockMessage,
};
use podvisor_node_api::{AnswerStream, MAX_CHUNK_BYTES};
use tokio::net::{UdpSocket, UnixStream};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Status, Streaming};

use super::control::{status, wrong_state};
use super::pipe::{Answers, bytes_of, joined};
use super::{STREAM_QUEUE, first, not_open};
use crate::cri::error::CriError;
use crate::cri::node::{Node, Pod};
use crate::cri::vm::Way;

/// Answers a client that connects to a port.
pub(super) async fn stream(
    node: &Arc<Node>,
    mut input: Streaming<PortForwardInput>,
) -> Result<AnswerStream<Data>, Status> {
    let Some(PortForwardMessage::Open(open)) = first(&mut input).await?.message else {
        return Err(not_open());
    };
    let (port, protocol) = checked(&open)?;
    let pod = reachable(node, &open.vm.unwrap_or_default()).await?;
    let way = Way::to(&pod, port).map_err(|error| refusal(&error))?;
    let input = bytes_of(input, |message| match message.message {
        Some(PortForwardMessage::Data(data)) => Some(data),
        _ => None,
    });
    match protocol {
        PortProtocol::Tcp => {
            let connection = way.tcp(node).await.map_err(|error| refusal(&error))?;
            Ok(joined(connection, input))
        }
        PortProtocol::Udp => {
            let socket = way.udp(node).await.map_err(|error| refusal(&error))?;
            let (answers, stream) = mpsc::channel(STREAM_QUEUE);
            tokio::spawn(async move { udp(&socket, input, &answers).await });
            Ok(AnswerStream::new(ReceiverStream::new(stream)))
        }
    }
}

/// Answers a client that connects to a vsock port.
pub(super) async fn vsock(
    node: &Arc<Node>,
    mut input: Streaming<VsockInput>,
) -> Result<AnswerStream<Data>, Status> {
    let Some(VsockMessage::Open(open)) = first(&mut input).await?.message else {
        return Err(not_open());
    };
    if open.port == u32::MAX {
        return Err(Status::invalid_argument("port: it means any, and not one"));
    }
    let pod = reachable(node, &open.vm.unwrap_or_default()).await?;
    let connected = pod.client()?.vsock(open.port).await.map_err(status)?;
    let failed = |error| Status::internal(format!("failed to use the connection: {error}"));
    let connection = std::os::unix::net::UnixStream::from(connected);
    connection.set_nonblocking(true).map_err(failed)?;
    let connection = UnixStream::from_std(connection).map_err(failed)?;
    let input = bytes_of(input, |message| match message.message {
        Some(VsockMessage::Data(data)) => Some(data),
        _ => None,
    });
    Ok(joined(connection, input))
}

/// Returns the pod of a VM whose guest runs.
async fn reachable(node: &Node, vm: &VmName) -> Result<Arc<Pod>, Status> {
    let (pod, _) = node.running_vm(vm).await?;
    match pod.client()?.is_paused().await.map_err(status)? {
        true => Err(wrong_state(vm, "is paused")),
        false => Ok(pod),
    }
}

fn refusal(error: &CriError) -> Status {
    let text = match std::error::Error::source(error) {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    };
    match error {
        CriError::NoAddress => Status::failed_precondition(text),
        _ => Status::unavailable(text),
    }
}

/// Returns the port and protocol of a request.
fn checked(open: &PortForwardOpen) -> Result<(u16, PortProtocol), Status> {
    let port = u16::try_from(open.port).ok().filter(|port| *port > 0);
    let port = port.ok_or_else(|| {
        Status::invalid_argument(format!("port: {} is not from 1 to 65535", open.port))
    })?;
    let protocol = PortProtocol::try_from(open.protocol)
        .map_err(|_| Status::invalid_argument("protocol: it is neither TCP nor UDP"))?;
    Ok((port, protocol))
}

/// Copies datagrams until the client goes. Those that nobody takes are lost, as on a network.
async fn udp(socket: &UdpSocket, input: impl Stream<Item = Bytes>, answers: &Answers) {
    let sending = async {
        tokio::pin!(input);
        while let Some(data) = input.next().await {
            let _ = socket.send(&data).await;
        }
    };
    let receiving = async {
        let mut data = Bytes::new();
        loop {
            if answers.send(Ok(Data { data })).await.is_err() {
                return;
            }
            let mut buffer = BytesMut::with_capacity(MAX_CHUNK_BYTES);
            loop {
                match socket.recv_buf(&mut buffer).await {
                    Ok(_) => break,
                    // Nobody listens at the moment.
                    Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {}
                    Err(_) => return,
                }
            }
            data = buffer.freeze();
        }
    };
    tokio::select! {
        () = sending => {}
        () = receiving => {}
        () = answers.closed() => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_and_a_protocol_are_what_there_are() {
        let open = |port, protocol| PortForwardOpen {
            vm: None,
            port,
            protocol,
        };
        assert_eq!(checked(&open(80, 0)).unwrap(), (80, PortProtocol::Tcp));
        assert_eq!(checked(&open(53, 1)).unwrap(), (53, PortProtocol::Udp));
        for (port, protocol) in [(0, 0), (65_536, 0), (80, 2)] {
            assert!(checked(&open(port, protocol)).is_err(), "{port} {protocol}");
        }
    }
}
