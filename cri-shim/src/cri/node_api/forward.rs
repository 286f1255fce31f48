//! Connections to the ports of a guest, over its network.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use podvisor_node_api::messages::{
    Data, PortForwardInput, PortForwardMessage, PortForwardOpen, PortProtocol,
};
use podvisor_node_api::{AnswerStream, MAX_CHUNK_BYTES};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use super::{STREAM_QUEUE, first, not_open};
use crate::cri::node::{Node, Pod};

/// How long a guest may take to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

type Answers = mpsc::Sender<Result<Data, Status>>;

/// Answers a client that connects to a port.
pub(super) async fn stream(
    node: &Arc<Node>,
    mut input: Streaming<PortForwardInput>,
) -> Result<AnswerStream<Data>, Status> {
    let Some(PortForwardMessage::Open(open)) = first(&mut input).await?.message else {
        return Err(not_open());
    };
    let target = Target::of(node, &open).await?;
    let (answers, stream) = mpsc::channel(STREAM_QUEUE);
    match target.protocol {
        PortProtocol::Tcp => {
            let connection = connect(target.address).await?;
            tokio::spawn(async move { tcp(connection, input, &answers).await });
        }
        PortProtocol::Udp => {
            let socket = udp_socket(target.address).await;
            let socket = socket.map_err(|error| unreachable(target.address, &error))?;
            tokio::spawn(async move { udp(&socket, input, &answers).await });
        }
    }
    Ok(AnswerStream::new(ReceiverStream::new(stream)))
}

/// Where a connection goes.
#[derive(Debug, PartialEq, Eq)]
struct Target {
    address: SocketAddr,
    protocol: PortProtocol,
}

impl Target {
    async fn of(node: &Node, open: &PortForwardOpen) -> Result<Self, Status> {
        let (port, protocol) = checked(open)?;
        let vm = open.vm.clone().unwrap_or_default();
        let (pod, container) = node.running_vm(&vm).await?;
        let client = pod.client()?;
        if client.is_paused().await.map_err(super::control::status)? {
            return Err(Status::failed_precondition(format!(
                "the virtual machine {}/{} is paused",
                vm.namespace, vm.name
            )));
        }
        drop(container);
        Ok(Self {
            address: SocketAddr::new(address_of(&pod)?, port),
            protocol,
        })
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

/// The pod's first address, which a node reaches like each of its pods'.
fn address_of(pod: &Pod) -> Result<IpAddr, Status> {
    let address = pod.with_record(|record| record.addresses.first().copied());
    address.ok_or_else(|| Status::failed_precondition("the virtual machine has no address"))
}

fn unreachable(address: SocketAddr, error: &std::io::Error) -> Status {
    Status::unavailable(format!(
        "failed to connect to the guest at {address}: {error}"
    ))
}

async fn connect(address: SocketAddr) -> Result<TcpStream, Status> {
    let connected = timeout(CONNECT_TIMEOUT, TcpStream::connect(address)).await;
    let timed_out = |_| std::io::ErrorKind::TimedOut.into();
    let connected = connected.map_err(timed_out).and_then(|stream| stream);
    connected.map_err(|error| unreachable(address, &error))
}

async fn udp_socket(address: SocketAddr) -> std::io::Result<UdpSocket> {
    let own: IpAddr = match address {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((own, 0)).await?;
    socket.connect(address).await?;
    Ok(socket)
}

/// Copies in both directions until the guest's ends, or the client goes.
async fn tcp(stream: TcpStream, mut input: Streaming<PortForwardInput>, answers: &Answers) {
    let (mut reader, mut writer) = stream.into_split();
    let sending = async {
        while let Ok(Some(message)) = input.message().await {
            if let Some(PortForwardMessage::Data(data)) = message.message
                && writer.write_all(&data).await.is_err()
            {
                return;
            }
        }
        // The client has sent all, and may wait for the answer.
        let _ = writer.shutdown().await;
    };
    let receiving = async {
        let mut data = bytes::Bytes::new();
        loop {
            if answers.send(Ok(Data { data })).await.is_err() {
                return;
            }
            let mut buffer = BytesMut::with_capacity(MAX_CHUNK_BYTES);
            match reader.read_buf(&mut buffer).await {
                Ok(1..) => data = buffer.freeze(),
                Ok(0) => return,
                Err(error) => {
                    let status = Status::unavailable(format!("the connection broke: {error}"));
                    let _ = answers.send(Err(status)).await;
                    return;
                }
            }
        }
    };
    let both = async {
        tokio::pin!(sending, receiving);
        tokio::select! {
            () = &mut receiving => {}
            () = &mut sending => receiving.await,
        }
    };
    tokio::select! {
        () = both => {}
        () = answers.closed() => {}
    }
}

/// Copies datagrams until the client goes. Those that nobody takes are lost, as on a network.
async fn udp(socket: &UdpSocket, mut input: Streaming<PortForwardInput>, answers: &Answers) {
    let sending = async {
        while let Ok(Some(message)) = input.message().await {
            if let Some(PortForwardMessage::Data(data)) = message.message {
                let _ = socket.send(&data).await;
            }
        }
    };
    let receiving = async {
        let mut data = bytes::Bytes::new();
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
