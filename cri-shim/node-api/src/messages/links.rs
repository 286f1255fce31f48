//! Links of a VM's cards that come and go while it runs.

use prost::Message;

use super::VmName;

/// Takes the link from cards of a VM, and gives all others one.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct SetLinksRequest {
    /// Which VM.
    #[prost(message, optional, tag = "1")]
    pub vm: Option<VmName>,
    /// The cards that are to have no link, by their names in the instance's specification, or by
    /// those of the pod's interfaces if it was made of none.
    #[prost(string, repeated, tag = "2")]
    pub down: Vec<String>,
}
