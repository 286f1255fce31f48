//! Converts a pod's network into a sandbox's configuration.

use super::join::Attachment;
use super::prefix::Prefix;
use crate::guest::{GuestNetwork, Interface, Neighbour, NicConfig, NicKind, Route};

impl Attachment {
    /// Returns the guest's cards, and their configuration for the agent.
    pub fn into_guest(self) -> (Vec<NicConfig>, GuestNetwork) {
        let mut nics = Vec::new();
        let mut network = GuestNetwork::default();
        let mut own = Vec::new();
        for nic in self.nics {
            own.extend(nic.addresses.iter().map(Prefix::address));
            nics.push(NicConfig {
                kind: NicKind::Tap,
                fd: nic.tap,
                mac: nic.mac,
                mtu: nic.mtu,
            });
            network.interfaces.push(Interface {
                name: nic.name,
                mac: nic.mac,
                mtu: nic.mtu,
                addresses: nic.addresses.iter().map(ToString::to_string).collect(),
                no_arp: nic.no_arp,
                is_down: false,
            });
        }
        let routes = self.routes.into_iter().map(|route| Route {
            destination: route.destination.to_string(),
            gateway: route.gateway.map(|gateway| gateway.to_string()),
            interface: route.interface,
            mtu: route.mtu,
            metric: route.metric,
            // The guest has not all addresses that its namespace has.
            source: (route.source.filter(|source| own.contains(source)))
                .map(|source| source.to_string()),
        });
        network.routes = routes.collect();
        let neighbours = self.neighbours.into_iter().map(|neighbour| Neighbour {
            address: neighbour.address.to_string(),
            mac: neighbour.mac,
            interface: neighbour.interface,
        });
        network.neighbours = neighbours.collect();
        (nics, network)
    }
}
