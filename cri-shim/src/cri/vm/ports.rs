//! Connections to the ports of a guest, over its network: no agent in it connects them.
//!
//! A guest that has its pod's address is connected to from the node, which reaches it like each of
//! its pods: inside of the pod's network namespace that address is the namespace's own. A
//! masqueraded guest is connected to from inside, so that ports are reached that are not translated
//! and networks that the node does not reach.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::time::Duration;

use podvisor_network::cni::PortProtocol;
use tokio::net::{TcpSocket, TcpStream, UdpSocket};
use tokio::time::timeout;

use super::network::card_form;
use crate::cri::error::{CriError, Result};
use crate::cri::node::{Node, Pod};

/// How long a guest may take to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Connects to a TCP port of a pod's guest, for a stream that is not this runtime's.
pub(in crate::cri) async fn connect(node: &Node, pod: &Pod, port: u16) -> Result<OwnedFd> {
    let way = Way::to(pod, port)?;
    let stream = way.tcp(node).await?.into_std().and_then(|stream| {
        stream.set_nonblocking(false)?;
        Ok(stream)
    });
    Ok(stream.map_err(|error| way.failed(error))?.into())
}

/// Where a port of a guest is, and from where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::cri) struct Way {
    address: SocketAddr,
    /// The pod in whose network namespace the connection begins, or the node's.
    inside: Option<String>,
}

impl Way {
    /// The way to a port of a pod's guest.
    ///
    /// # Errors
    /// The pod has no address yet.
    pub(in crate::cri) fn to(pod: &Pod, port: u16) -> Result<Self> {
        pod.with_record(|record| {
            let address = record.addresses.first().copied();
            let address = address.ok_or(CriError::NoAddress)?;
            let form = card_form(&record.config.annotations)?;
            let inside = form.guest_address(address);
            Ok(Self {
                address: SocketAddr::new(inside.unwrap_or(address), port),
                inside: inside.map(|_| record.id.clone()),
            })
        })
    }

    /// Connects by TCP.
    ///
    /// # Errors
    /// The guest does not accept in time.
    pub(in crate::cri) async fn tcp(&self, node: &Node) -> Result<TcpStream> {
        let connect = async {
            match &self.inside {
                Some(id) => {
                    let socket = node.cni.socket(id, self.address.ip(), PortProtocol::Tcp);
                    let socket = socket.map_err(io::Error::other)?;
                    let socket = TcpSocket::from_std_stream(socket.into());
                    socket.connect(self.address).await
                }
                None => TcpStream::connect(self.address).await,
            }
        };
        let connected = timeout(CONNECT_TIMEOUT, connect).await;
        let timed_out = |_| io::ErrorKind::TimedOut.into();
        let connected = connected.map_err(timed_out).and_then(|stream| stream);
        connected.map_err(|error| self.failed(error))
    }

    /// Opens a UDP socket whose peer is the guest's port.
    ///
    /// # Errors
    /// The node or the pod has no such socket.
    pub(in crate::cri) async fn udp(&self, node: &Node) -> Result<UdpSocket> {
        let open = async {
            let socket = match &self.inside {
                Some(id) => {
                    let socket = node.cni.socket(id, self.address.ip(), PortProtocol::Udp);
                    UdpSocket::from_std(socket.map_err(io::Error::other)?.into())?
                }
                None => {
                    let own: IpAddr = match self.address {
                        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
                        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
                    };
                    UdpSocket::bind((own, 0)).await?
                }
            };
            socket.connect(self.address).await?;
            Ok(socket)
        };
        open.await.map_err(|error| self.failed(error))
    }

    fn failed(&self, source: io::Error) -> CriError {
        CriError::GuestPort {
            address: self.address,
            source,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::cri::state::pod_record;

    fn way(interface: &serde_json::Value) -> Result<Way> {
        let object = json!({"spec": {"domain": {"devices": {"interfaces": [interface]}}}});
        let mut record = pod_record("a");
        record.addresses = vec![Ipv4Addr::new(10, 7, 0, 2).into()];
        record.config.annotations = [("podvisor.io/vmi".to_owned(), object.to_string())].into();
        Way::to(&Pod::new(record), 80)
    }

    #[test]
    fn a_masqueraded_guest_is_reached_from_inside_its_pods_network() {
        let bridged = way(&json!({"name": "a", "bridge": {}})).unwrap();
        assert_eq!(bridged.address.to_string(), "10.7.0.2:80");
        assert_eq!(bridged.inside, None);
        let masqueraded = way(&json!({"name": "a", "masquerade": {}, "ports": [{"port": 22}]}));
        let masqueraded = masqueraded.unwrap();
        assert_eq!(masqueraded.address.to_string(), "10.0.2.2:80");
        assert_eq!(masqueraded.inside.as_deref(), Some("a"));
    }

    #[test]
    fn a_pod_without_an_address_is_not_reached() {
        let mut record = pod_record("a");
        record.addresses.clear();
        let pod = Pod::new(record);
        assert!(matches!(Way::to(&pod, 80), Err(CriError::NoAddress)));
    }
}
