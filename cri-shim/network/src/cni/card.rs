//! How a guest's first card is connected, as the caller chooses.

/// How a guest's first card is connected.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum CardForm {
    /// The guest has the addresses of the pod's interface.
    #[default]
    Joined,
    /// The guest has addresses of its own, and the pod's are translated to them: for these ports
    /// only, or for all if there are none.
    Masqueraded(Vec<ForwardedPorts>),
}

/// Ports of the pod that lead to the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForwardedPorts {
    /// The protocol.
    pub protocol: PortProtocol,
    /// The first port, of both.
    pub first: u16,
    /// The last one.
    pub last: u16,
}

/// A protocol with ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortProtocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

impl PortProtocol {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Sctp => "sctp",
        }
    }
}
