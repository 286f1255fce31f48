//! `-p [[IP:][HOST]:]GUEST[/tcp|/udp]`: ports of the host that are forwarded to a container.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, UdpSocket};

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize};

/// The protocol of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(in crate::cli) enum Protocol {
    Tcp,
    Udp,
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        })
    }
}

/// A port of the host that is forwarded to one of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(in crate::cli) struct Port {
    /// The host's address; `None` for all.
    pub(in crate::cli) host_ip: Option<IpAddr>,
    /// 0 until a free one is [chosen](choose_free).
    pub(in crate::cli) host_port: u16,
    pub(in crate::cli) guest_port: u16,
    pub(in crate::cli) protocol: Protocol,
}

/// The ports of one `-p`: several if it names ranges.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::cli) struct Published(pub(in crate::cli) Vec<Port>);

const USAGE: &str = "write GUEST, [IP:]HOST:GUEST or [IP:]HOST:GUEST/udp, ports from 1 to 65535 \
                     or ranges of as many such as 8000-8005:80-85";

/// Parses `[[IP:][HOST]:]GUEST[/tcp|/udp]`; without HOST, the port of the host is 0.
pub(in crate::cli) fn parse(text: &str) -> Result<Published, String> {
    let (rest, protocol) = match text.rsplit_once('/') {
        None => (text, Protocol::Tcp),
        Some((rest, "tcp")) => (rest, Protocol::Tcp),
        Some((rest, "udp")) => (rest, Protocol::Udp),
        Some((_, other)) => {
            return Err(format!("unknown protocol `{other}`: there are tcp and udp"));
        }
    };
    let (address, host, guest) = match rest.rsplit_once(':') {
        None => (None, "", rest),
        Some((rest, guest)) => match rest.rsplit_once(':') {
            Some((address, host)) => (Some(address), host, guest),
            None if rest.is_empty() => return Err(USAGE.to_owned()),
            None => (None, rest, guest),
        },
    };
    let host_ip = address.map(parse_address).transpose()?;
    let guest = parse_range(guest)?;
    if host.is_empty() {
        let ports = guest.map(|guest_port| Port {
            host_ip,
            host_port: 0,
            guest_port,
            protocol,
        });
        return Ok(Published(ports.collect()));
    }
    let host = parse_range(host)?;
    if host.len() != guest.len() {
        return Err(format!(
            "{} ports of the host cannot lead to {} of the guest",
            host.len(),
            guest.len()
        ));
    }
    let pairs = host.zip(guest);
    let ports = pairs.map(|(host_port, guest_port)| Port {
        host_ip,
        host_port,
        guest_port,
        protocol,
    });
    Ok(Published(ports.collect()))
}

/// Parses an address of the host. An unspecified one means all addresses, like `None`.
fn parse_address(text: &str) -> Result<IpAddr, String> {
    let inner = text
        .strip_prefix('[')
        .and_then(|text| text.strip_suffix(']'));
    let address = match inner {
        Some(inner) => inner.parse().ok().map(IpAddr::V6),
        None => text.parse().ok().map(IpAddr::V4),
    };
    address
        .ok_or_else(|| format!("`{text}` is not an IP address: write 192.0.2.1, or [2001:db8::1]"))
}

fn parse_range(text: &str) -> Result<std::ops::RangeInclusive<u16>, String> {
    let port = |text: &str| {
        let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
        let port = is_number.then(|| text.parse().ok()).flatten();
        port.filter(|port: &u16| *port > 0).ok_or(USAGE)
    };
    let (first, last) = match text.split_once('-') {
        Some((first, last)) => (port(first)?, port(last)?),
        None => (port(text)?, port(text)?),
    };
    match first <= last {
        true => Ok(first..=last),
        false => Err(format!("the range {text} runs backwards")),
    }
}

impl Port {
    /// Returns the address that the host's side is bound to.
    pub(in crate::cli) fn host(&self) -> SocketAddr {
        let any = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        SocketAddr::new(self.host_ip.unwrap_or(any), self.host_port)
    }

    /// Returns the container's side, such as `80/tcp`.
    pub(in crate::cli) fn guest(&self) -> String {
        format!("{}/{}", self.guest_port, self.protocol)
    }

    /// Returns whether both would match the same packet.
    fn conflicts(&self, other: &Self) -> bool {
        let everywhere = |port: &Self| port.host_ip.is_none_or(|ip| ip.is_unspecified());
        let meet = self.host_ip == other.host_ip || everywhere(self) || everywhere(other);
        let is_chosen = self.host_port != 0;
        is_chosen && meet && self.host_port == other.host_port && self.protocol == other.protocol
    }
}

/// Formats a port as docker does.
impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}->{}", self.host(), self.guest())
    }
}

/// Formats the ports in one line, as docker does: consecutive ones as a range.
pub(in crate::cli) fn line(ports: &[Port]) -> String {
    let mut sorted = ports.to_vec();
    sorted.sort_by_key(|port| (port.protocol, port.host_ip, port.host_port));
    let mut runs: Vec<(Port, Port)> = Vec::new();
    for port in sorted {
        let follows = |last: &Port| {
            let is_next = |a: u16, b: u16| a.checked_add(1) == Some(b);
            (last.protocol, last.host_ip) == (port.protocol, port.host_ip)
                && is_next(last.host_port, port.host_port)
                && is_next(last.guest_port, port.guest_port)
        };
        match runs.last_mut() {
            Some((_, last)) if follows(last) => *last = port,
            _ => runs.push((port, port)),
        }
    }
    let shown = runs.iter().map(|(first, last)| match first == last {
        true => first.to_string(),
        false => format!(
            "{}-{}->{}-{}",
            first.host(),
            last.host_port,
            first.guest_port,
            last.guest()
        ),
    });
    shown.collect::<Vec<_>>().join(", ")
}

/// Returns a port that is in both lists.
pub(super) fn conflict(ports: &[Port], others: &[Port]) -> Option<Port> {
    let taken = |port: &&Port| others.iter().any(|other| other.conflicts(port));
    ports.iter().find(taken).copied()
}

/// Chooses a free port of the host for each of `ports` that names none, and none of `taken`: those
/// of other containers are not in use where packets are only led elsewhere.
pub(in crate::cli) fn choose_free(ports: &mut [Port], taken: &[Port]) -> anyhow::Result<()> {
    // Enough for a host whose free ports are nearly all published.
    const ATTEMPTS: usize = 1000;
    for number in 0..ports.len() {
        let Some(mut port) = ports
            .get(number)
            .copied()
            .filter(|port| port.host_port == 0)
        else {
            continue;
        };
        let mut is_chosen = false;
        for _ in 0..ATTEMPTS {
            // The kernel chooses another one each time.
            let free = match port.protocol {
                Protocol::Tcp => TcpListener::bind(
                    Port {
                        host_port: 0,
                        ..port
                    }
                    .host(),
                )
                .and_then(|socket| socket.local_addr()),
                Protocol::Udp => UdpSocket::bind(
                    Port {
                        host_port: 0,
                        ..port
                    }
                    .host(),
                )
                .and_then(|socket| socket.local_addr()),
            };
            port.host_port = free
                .with_context(|| format!("no port of the host is free for {}", port.guest()))?
                .port();
            if conflict(&[port], ports).is_none() && conflict(&[port], taken).is_none() {
                is_chosen = true;
                break;
            }
        }
        if !is_chosen {
            bail!(
                "--publish: no port of the host is free for {}; name one",
                port.guest()
            );
        }
        if let Some(place) = ports.get_mut(number) {
            *place = port;
        }
    }
    Ok(())
}

/// Returns an error if a port is published twice.
pub(super) fn check_distinct(ports: &[Port]) -> anyhow::Result<()> {
    for (number, port) in ports.iter().enumerate() {
        if let Some(port) = conflict(&[*port], ports.get(..number).unwrap_or_default()) {
            bail!(
                "--publish: {}/{} is published twice",
                port.host(),
                port.protocol
            );
        }
    }
    Ok(())
}

/// Returns an error if a program of the host uses a port: packets would not reach it any more.
pub(super) fn check_free(ports: &[Port]) -> anyhow::Result<()> {
    for port in ports {
        let bound = match port.protocol {
            Protocol::Tcp => TcpListener::bind(port.host()).map(drop),
            Protocol::Udp => UdpSocket::bind(port.host()).map(drop),
        };
        bound.with_context(|| {
            let (host, protocol) = (port.host(), port.protocol);
            format!("cannot publish {host}/{protocol}; choose another port, or end what has it")
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ports(text: &str) -> Vec<Port> {
        parse(text).unwrap().0
    }

    #[test]
    fn a_published_port_is_shown_as_docker_does() {
        for (text, shown) in [
            ("8080:80", "0.0.0.0:8080->80/tcp"),
            ("127.0.0.1:53:5353/udp", "127.0.0.1:53->5353/udp"),
            ("[::1]:80:80/tcp", "[::1]:80->80/tcp"),
            ("8000-8002:80-82", "0.0.0.0:8000-8002->80-82/tcp"),
        ] {
            assert_eq!(line(&ports(text)), shown, "{text}");
        }
        let several = [ports("81:1"), ports("80:1"), ports("80:1/udp")].concat();
        let shown = "0.0.0.0:80->1/tcp, 0.0.0.0:81->1/tcp, 0.0.0.0:80->1/udp";
        assert_eq!(line(&several), shown);
        assert_eq!(ports("8000-8002:80-82").len(), 3);
    }

    #[test]
    fn what_is_no_port_is_refused() {
        for bad in [
            "",
            ":80",
            "127.0.0.1:80:",
            "::80",
            "80:",
            "0:80",
            "80:65536",
            "80:80/sctp",
            "+1:80",
            "1-2:80",
            "2-1:1-2",
            "localhost:80:80",
            "::1:80:80",
            "1.2.3:80:80",
            "80:80:80:80",
            "1-:1-2",
            "80 :80",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_port_of_all_addresses_is_one_of_each() {
        let meet = |a, b| conflict(&ports(a), &ports(b)).is_some();
        assert!(meet("80:1", "80:2"));
        assert!(meet("80:1", "127.0.0.1:80:2"));
        assert!(meet("0.0.0.0:80:1", "127.0.0.1:80:2"));
        assert!(meet("79-81:1-3", "80:2"));
        assert!(!meet("127.0.0.2:80:1", "127.0.0.1:80:2"));
        assert!(!meet("80:1", "80:2/udp"));
        assert!(check_distinct(&[ports("80:1"), ports("80:2")].concat()).is_err());
        assert!(check_distinct(&[ports("80:1"), ports("81:1")].concat()).is_ok());
    }

    #[test]
    fn a_port_of_the_host_that_is_not_named_is_chosen() {
        let mut wanted = [ports("80"), ports("81-82/udp"), ports("127.0.0.1::83")].concat();
        assert!(wanted.iter().all(|port| port.host_port == 0));
        check_distinct(&wanted).unwrap();
        choose_free(&mut wanted, &[]).unwrap();
        assert!(wanted.iter().all(|port| port.host_port > 0), "{wanted:?}");
        check_distinct(&wanted).unwrap();
        assert_eq!(wanted[3].host_ip, Some(Ipv4Addr::LOCALHOST.into()));
        let mut named = ports("8080:80");
        choose_free(&mut named, &[]).unwrap();
        assert_eq!(named, ports("8080:80"));
        let all = ports("1-65535:1-65535");
        let error = choose_free(&mut ports("80"), &all).unwrap_err();
        assert!(error.to_string().contains("80/tcp"), "{error}");
    }

    #[test]
    fn a_port_that_a_program_has_is_not_published() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let error = check_free(&ports(&format!("127.0.0.1:{port}:80"))).unwrap_err();
        assert!(error.to_string().contains(&port.to_string()), "{error}");
        drop(taken);
        check_free(&ports(&format!("127.0.0.1:{port}:80"))).unwrap();
    }
}
