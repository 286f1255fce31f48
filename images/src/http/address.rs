//! Classification of addresses: loopback gets plain HTTP, and public servers must not refer to
//! private ones.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use reqwest::dns::{Addrs, Name, Resolve, Resolving};

/// Host name without port and brackets.
pub(crate) fn host_name(host: &str) -> &str {
    if let Some(rest) = host.strip_prefix('[') {
        return rest.split(']').next().unwrap_or_default();
    }
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    }
}

/// Whether `host[:port]` can only be this machine.
pub(crate) fn is_loopback(host: &str) -> bool {
    let name = host_name(host);
    name == "localhost"
        || name
            .parse::<IpAddr>()
            .is_ok_and(|address| address.is_loopback())
}

/// Returns whether an address is reachable from anywhere, so that nothing is gained by making us
/// request it.
pub(crate) fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => {
            let [a, b, ..] = v4.octets();
            let shared = a == 100 && (64..128).contains(&b);
            !(v4.is_private()
                || v4.is_loopback()
                || v4.is_link_local()
                || v4.is_broadcast()
                || v4.is_multicast()
                || a == 0
                || shared)
        }
        IpAddr::V6(v6) => match embedded_v4(v6) {
            Some(v4) => is_public(v4),
            None => {
                !(v6.is_loopback()
                    || v6.is_unspecified()
                    || v6.is_multicast()
                    || v6.is_unique_local()
                    || v6.is_unicast_link_local())
            }
        },
    }
}

/// The IPv4 address within a mapped or translated one (RFC 4291, RFC 6052).
fn embedded_v4(v6: Ipv6Addr) -> Option<IpAddr> {
    if let Some(v4) = v6.to_ipv4_mapped() {
        return Some(v4.into());
    }
    match v6.octets() {
        [0, 0x64, 0xff, 0x9b, 0, 0, 0, 0, 0, 0, 0, 0, a, b, c, d] => {
            Some(IpAddr::from([a, b, c, d]))
        }
        _ => None,
    }
}

/// Resolves names to public addresses only.
#[derive(Debug)]
pub(crate) struct PublicOnly;

impl Resolve for PublicOnly {
    fn resolve(&self, name: Name) -> Resolving {
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let public: Vec<SocketAddr> = found.filter(|address| is_public(address.ip())).collect();
            if public.is_empty() {
                return Err("the name has no public address".into());
            }
            Ok(Box::new(public.into_iter()) as Addrs)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_told_by_name_and_number() {
        for host in [
            "localhost",
            "localhost:5000",
            "127.0.0.1:80",
            "127.9.9.9",
            "[::1]:5000",
        ] {
            assert!(is_loopback(host), "{host}");
        }
        for host in [
            "localhost.example.com",
            "128.0.0.1",
            "docker.io",
            "10.0.0.1:5000",
        ] {
            assert!(!is_loopback(host), "{host}");
        }
    }

    #[test]
    fn private_addresses_stay_private_in_every_disguise() {
        for address in [
            "8.8.8.8",
            "2606:4700::1111",
            "64:ff9b::808:808",
            "172.32.0.1",
        ] {
            assert!(is_public(address.parse().unwrap()), "{address}");
        }
        for address in [
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "127.0.0.1",
            "0.0.0.0",
            "100.64.0.1",
            "::1",
            "fe80::1",
            "fd00::1",
            "::ffff:169.254.169.254",
            "64:ff9b::a00:1",
            "::",
        ] {
            assert!(!is_public(address.parse().unwrap()), "{address}");
        }
    }
}
