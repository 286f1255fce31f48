//! Starts a machine while its network is set up.

use std::net::IpAddr;

use tracing::debug;

use super::{Capabilities, Cni, CniError, Dns, PodIdentity, Prepared};
use crate::sandbox::{
    GuestNetwork, LaunchConfig, Launching, NicConfig, SandboxError, provisional_nics,
};

/// The reason why a machine with a network was not started.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BeginError {
    #[error(transparent)]
    Network(#[from] CniError),
    #[error(transparent)]
    Machine(#[from] SandboxError),
}

/// A machine whose guest starts to run, and the network that it is to get.
#[derive(Debug)]
pub(crate) struct StartingMachine {
    pub(crate) launching: Launching,
    pub(crate) network: GuestNetwork,
    /// The pod's addresses by the CNI result, starting with the first one.
    pub(crate) addresses: Vec<IpAddr>,
    /// The name servers of the network.
    pub(crate) dns: Dns,
}

impl Cni {
    /// As [`Self::attach`], while the machine of `config`, which gets its cards, starts to run. It
    /// is started again if the cards differ from the prepared ones.
    ///
    /// If this fails, no machine runs. What was set up of a network is undone by [`Self::detach`].
    pub(crate) async fn begin(
        &self,
        pod: &PodIdentity,
        capabilities: Capabilities,
        prepared: Prepared,
        config: impl Fn(Vec<NicConfig>) -> LaunchConfig,
    ) -> Result<StartingMachine, BeginError> {
        let taps = prepared.taps()?;
        // The plugins take longer than a clone. Both are waited for, whatever the other's result
        // is: a half-finished plugin could not be undone.
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
        Ok(StartingMachine {
            launching,
            network,
            addresses,
            dns,
        })
    }
}
