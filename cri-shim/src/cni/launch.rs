//! A machine that starts while its network is made.

use std::net::IpAddr;

use tracing::debug;

use super::{Capabilities, Cni, CniError, Dns, PodIdentity, Prepared};
use crate::sandbox::{
    GuestNetwork, LaunchConfig, Launching, NicConfig, SandboxError, provisional_nics,
};

/// No machine with a network.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BeginError {
    #[error(transparent)]
    Network(#[from] CniError),
    #[error(transparent)]
    Machine(#[from] SandboxError),
}

/// A machine whose guest begins to run, and its network, of which it is to be told.
#[derive(Debug)]
pub(crate) struct Begun {
    pub(crate) launching: Launching,
    pub(crate) network: GuestNetwork,
    /// The pod's addresses as CNI tells them, the first one first.
    pub(crate) addresses: Vec<IpAddr>,
    /// What the network says of name servers.
    pub(crate) dns: Dns,
}

impl Cni {
    /// As [`Self::attach`], while the machine that `config` gives for its cards begins to run. It
    /// begins anew when the cards are others than was prepared for.
    ///
    /// When that fails no machine runs. What there is of a network is undone by [`Self::detach`].
    pub(crate) async fn begin(
        &self,
        pod: &PodIdentity,
        capabilities: Capabilities,
        prepared: Prepared,
        config: impl Fn(Vec<NicConfig>) -> LaunchConfig,
    ) -> Result<Begun, BeginError> {
        let taps = prepared.taps()?;
        // The plugins take longer than a clone. Each of the two is waited for whatever becomes of
        // the other: what a plugin has half done could not be undone.
        let (attached, begun) = tokio::join!(
            self.attach(pod, capabilities, prepared),
            Launching::begin(config(provisional_nics(taps))),
        );
        let (attachment, launching) = match (attached, begun) {
            (Ok(attachment), Ok(launching)) => (attachment, launching),
            (Ok(_), Err(error)) => return Err(error.into()),
            (Err(error), Ok(launching)) => {
                launching.cancel().await;
                return Err(error.into());
            }
            (Err(error), Err(other)) => {
                debug!(pod = pod.id, error = %other, "the machine has not begun either");
                return Err(error.into());
            }
        };
        let (addresses, dns) = (attachment.addresses.clone(), attachment.dns.clone());
        let is_as_prepared = attachment.is_as_prepared;
        let (nics, network) = attachment.into_guest();
        let launching = match is_as_prepared {
            true => launching,
            false => {
                debug!(pod = pod.id, cards = nics.len(), "the machine starts anew");
                launching.cancel().await;
                Launching::begin(config(nics)).await?
            }
        };
        Ok(Begun {
            launching,
            network,
            addresses,
            dns,
        })
    }
}
