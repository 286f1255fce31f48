//! Starts a machine while its network is set up.

use std::net::IpAddr;

use podvisor_network::cni::{Capabilities, Cni, CniError, Dns, PodIdentity, Prepared};
use podvisor_network::guest::{GuestNetwork, NicConfig};
use podvisor_sandbox::{LaunchConfig, Launching, SandboxError, provisional_nics};
use tracing::debug;

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

/// As [`Cni::attach`], while the machine of `config`, which gets its cards, starts to run. It
/// is started again if the cards differ from the prepared ones.
///
/// If this fails, no machine runs. What was set up of a network is undone by [`Cni::detach`].
pub(crate) async fn begin(
    cni: &Cni,
    pod: &PodIdentity,
    capabilities: Capabilities,
    prepared: Prepared,
    config: impl Fn(Vec<NicConfig>) -> LaunchConfig,
) -> Result<StartingMachine, BeginError> {
    let taps = prepared.taps()?;
    // The plugins take longer than a clone. Both are waited for, whatever the other's result
    // is: a half-finished plugin could not be undone.
    let (attached, begun) = tokio::join!(
        cni.attach(pod, capabilities, prepared),
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
#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;
    use std::time::Duration;

    use podvisor_network::cni::CniOptions;
    use serde_json::json;

    use super::*;

    #[test]
    fn plugins_that_began_beside_a_machine_get_done_though_it_fails() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| {
            let path = dir.path().join(name);
            fs::create_dir_all(&path).unwrap();
            path
        };
        let plugin = path("bin").join("loopback-only");
        let script = |text: &str| {
            fs::write(&plugin, format!("#!/bin/sh\n{text}\n")).unwrap();
            fs::set_permissions(&plugin, fs::Permissions::from_mode(0o755)).unwrap();
        };
        let list = json!({
            "cniVersion": "1.0.0", "name": "test", "plugins": [{"type": "loopback-only"}],
        });
        fs::write(path("net.d").join("10-test.conflist"), list.to_string()).unwrap();
        let cni = Cni::open(CniOptions {
            config_dir: path("net.d"),
            plugin_dirs: vec![path("bin")],
            cache_dir: path("cache"),
            netns_dir: path("netns"),
            public_netns_dir: None,
            plugin_timeout: Duration::from_secs(60),
        })
        .unwrap();
        let pod = PodIdentity {
            id: "pod0".to_owned(),
            name: "web".to_owned(),
            namespace: "default".to_owned(),
            uid: "u-1".to_owned(),
        };
        let begin = async || {
            let prepared = cni.prepare("pod0").unwrap();
            // The sandbox's directory is invalid: nothing is started.
            let config = |nics| LaunchConfig {
                nics,
                ..LaunchConfig::new("pod0", "relative", "kernel", "initramfs")
            };
            let begun = begin(&cni, &pod, Capabilities::new(), prepared, config);
            begun.await.unwrap_err()
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.unwrap().block_on(async {
            // Its interface is in the pod's namespace, as a plugin would make it.
            script(
                "[ $CNI_COMMAND = ADD ] || exit 0\n\
                 in_pod=\"nsenter --net=$CNI_NETNS\"\n\
                 $in_pod ip link add $CNI_IFNAME type veth peer name net1 || exit\n\
                 $in_pod ip link set $CNI_IFNAME up\n\
                 $in_pod ip address add 10.0.0.7/8 dev $CNI_IFNAME\n\
                 echo '{\"cniVersion\":\"1.0.0\",\"ips\":[{\"address\":\"10.0.0.7/8\"}]}'",
            );
            let error = begin().await;
            let BeginError::Machine(SandboxError::Dir { .. }) = error else {
                panic!("{error:?}");
            };
            let endpoint = cni.endpoint("pod0").unwrap().unwrap();
            assert_eq!(endpoint.addresses.len(), 1);
            cni.detach("pod0").await.unwrap();
            assert!(cni.known().unwrap().is_empty());

            // The other way round, nothing is left to undo.
            script("[ $CNI_COMMAND = DEL ]");
            let error = begin().await;
            assert!(matches!(error, BeginError::Network(_)), "{error}");
            assert!(cni.known().unwrap().is_empty());
        });
    }
}
