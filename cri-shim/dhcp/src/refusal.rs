//! Why a frame gets no answer.

use std::net::{Ipv4Addr, Ipv6Addr};

/// Why a frame of the guest gets no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// It is longer than any message of a client.
    #[error("a frame of {0} bytes, more than a client of DHCP sends")]
    TooLong(usize),
    /// A header or an option ends after the frame does.
    #[error("{0} is cut off")]
    Truncated(&'static str),
    /// A field of a header has a value that the protocol does not have.
    #[error("invalid {0}")]
    Invalid(&'static str),
    /// It is for nobody that lives here.
    #[error("a frame of another protocol")]
    OtherProtocol,
    /// It is not from the guest's card.
    #[error("the hardware address in {0} is not the guest's")]
    OtherClient(&'static str),
    /// It came through a relay agent, which a virtual machine does not have.
    #[error("a request by the relay agent {0}")]
    Relayed(Ipv4Addr),
    /// Its options go on in the fields for names, which would let them overlap.
    #[error("options in the fields `sname` and `file` (option 52)")]
    Overload,
    /// An option has a length that it cannot have.
    #[error("option {code} has {length} bytes")]
    OptionLength {
        /// Number of the option.
        code: u16,
        /// Its length in bytes.
        length: usize,
    },
    /// An option is there twice.
    #[error("option {0} is there twice")]
    OptionTwice(u16),
    /// An option that the message needs is missing.
    #[error("option {0} is missing")]
    OptionMissing(u16),
    /// An option that the message must not have.
    #[error("option {0} does not belong into this message")]
    OptionForbidden(u16),
    /// The client answers the offer of another server.
    #[error("a message for another server")]
    OtherServer,
    /// A message that only servers send, or an unknown one.
    #[error("message type {0} is not one of a client's")]
    MessageType(u8),
    /// The guest has no lease of this protocol.
    #[error("there is no {0} address to give")]
    NoLease(&'static str),
    /// The source of an IPv6 message is not an address of the link.
    #[error("the source {0} is not an address of the link")]
    Source(Ipv6Addr),
    /// More than the server answers in that time.
    #[error("more requests than are answered in this time")]
    Rate,
}
