//! `--network user`: an unprivileged network by the program `passt`. It terminates the guest's
//! connections and opens them again as the user's own, and exits when the socket to the guest is
//! closed.

use std::env;
use std::io::{self, Write as _};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Output, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use rustix::io::{FdFlags, fcntl_setfd};
use tokio::process::Command;
use tokio::time::timeout;

use super::ports::{Port, Protocol};
use crate::cni::{Endpoint, Prefix};
use crate::machine::NicKind;
use crate::sandbox::{GuestNetwork, Interface, NicConfig, Route, STREAM_MTU};

/// The name of the program and of its package.
const PASST: &str = "passt";

/// The guest's addresses. They are only visible to the guest, so all guests have the same.
const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);
const PREFIX_LEN: u8 = 24;
const MAC: [u8; 6] = [0x52, 0x55, 10, 0, 2, 15];

/// The guest's name server, for which passt forwards queries to the host's servers.
const DNS: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 3);

const INTERFACE: &str = "eth0";

/// How long the program may take until it serves.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// The kernel's routing table.
const ROUTES: &str = "/proc/net/route";

/// Returns the path of the program.
pub(super) fn find() -> anyhow::Result<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let mut candidates = env::split_paths(&path).map(|dir| dir.join(PASST));
    candidates
        .find(|candidate| candidate.is_file())
        .context("no program `passt` in PATH; install Debian's package passt")
}

/// Checks that the host has a default route, without which the program does not start.
pub(super) fn check_host() -> anyhow::Result<()> {
    let table = std::fs::read_to_string(ROUTES).unwrap_or_default();
    match has_default_route(&table) {
        true => Ok(()),
        false => bail!("this host has no default route for IPv4"),
    }
}

/// The second word of a line is the destination, the eighth the mask.
fn has_default_route(table: &str) -> bool {
    table.lines().any(|line| {
        let mut words = line.split_whitespace();
        (words.nth(1), words.nth(5)) == (Some("00000000"), Some("00000000"))
    })
}

/// Returns the configuration of the guest's interface.
pub(super) fn endpoint() -> Endpoint {
    Endpoint {
        addresses: prefix().into_iter().collect(),
        gateway: Some(GATEWAY.into()),
        mac: MAC.map(|byte| format!("{byte:02x}")).join(":"),
    }
}

fn prefix() -> Option<Prefix> {
    Prefix::new(ADDRESS.into(), PREFIX_LEN)
}

/// Returns the guest's address.
pub(super) fn address() -> IpAddr {
    ADDRESS.into()
}

/// Returns the address of the guest's name server.
pub(super) fn name_server() -> String {
    DNS.to_string()
}

/// Starts the program, which exits when the socket that it serves is closed.
pub(super) async fn start(ports: &[Port]) -> anyhow::Result<(Vec<NicConfig>, GuestNetwork)> {
    let program = find()?;
    let (ours, theirs) = UnixStream::pair().context("cannot make a socket for passt")?;
    // Only this program inherits it: this process starts no other one meanwhile.
    fcntl_setfd(&theirs, FdFlags::empty()).context("cannot hand a socket to passt")?;
    let mut command = Command::new(&program);
    command
        .args(["--quiet", "--fd", &theirs.as_raw_fd().to_string()])
        .args(arguments(ports))
        .current_dir("/")
        .kill_on_drop(true)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    // It becomes a daemon once it serves.
    let ended = timeout(START_TIMEOUT, command.output()).await;
    drop(theirs);
    let ended = ended.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
    let Output { status, stderr, .. } =
        ended.with_context(|| format!("cannot run {}", program.display()))?;
    if !status.success() {
        bail!("passt ended with {status}: {}", words(&stderr));
    }
    // It does not know the guest before it has seen a frame from it: packets to published ports
    // until then would be lost.
    (&ours)
        .write_all(&announcement())
        .context("cannot tell passt of the guest")?;
    let nic = NicConfig {
        kind: NicKind::Stream,
        fd: OwnedFd::from(ours),
        mac: MAC,
        mtu: STREAM_MTU,
    };
    let network = GuestNetwork {
        interfaces: vec![Interface {
            name: INTERFACE.to_owned(),
            mac: MAC,
            mtu: STREAM_MTU,
            addresses: prefix().iter().map(ToString::to_string).collect(),
            no_arp: false,
            is_down: false,
        }],
        routes: vec![Route {
            destination: "0.0.0.0/0".to_owned(),
            gateway: Some(GATEWAY.to_string()),
            interface: INTERFACE.to_owned(),
            ..Route::default()
        }],
        neighbours: Vec::new(),
    };
    Ok((vec![nic], network))
}

/// Returns a gratuitous ARP request of the guest (RFC 5227 §1.1), prefixed with its length.
fn announcement() -> Vec<u8> {
    // Ethernet: broadcast, ARP. ARP: Ethernet and IPv4, a request.
    let ethernet = [&[0xff; 6][..], &MAC, &[0x08, 0x06]].concat();
    let kind = [0, 1, 0x08, 0, 6, 4, 0, 1];
    let address = ADDRESS.octets();
    let arp = [&kind[..], &MAC, &address, &[0; 6], &address].concat();
    let frame = [ethernet, arp].concat();
    let length = u32::try_from(frame.len()).unwrap_or(0).to_be_bytes();
    [&length[..], &frame].concat()
}

/// Returns the arguments for addresses and published ports.
fn arguments(ports: &[Port]) -> Vec<String> {
    let mut arguments: Vec<String> = ["--ipv4-only", "--no-map-gw"].map(str::to_owned).into();
    for (flag, value) in [
        ("--address", ADDRESS.to_string()),
        ("--netmask", PREFIX_LEN.to_string()),
        ("--gateway", GATEWAY.to_string()),
        ("--dns-forward", DNS.to_string()),
        ("--mtu", STREAM_MTU.to_string()),
    ] {
        arguments.extend([flag.to_owned(), value]);
    }
    for port in ports {
        let flag = match port.protocol {
            Protocol::Tcp => "--tcp-ports",
            Protocol::Udp => "--udp-ports",
        };
        let from = port.host_ip.map(|ip| format!("{ip}/")).unwrap_or_default();
        let spec = format!("{from}{}:{}", port.host_port, port.guest_port);
        arguments.extend([flag.to_owned(), spec]);
    }
    arguments
}

/// Returns the program's own messages, in one line.
fn words(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    let noise = ["Failed to send", "Don't run as root"];
    let lines = text.lines().map(str::trim);
    let lines =
        lines.filter(|line| !line.is_empty() && !noise.iter().any(|noise| line.starts_with(noise)));
    lines.collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::container::ports::parse;

    #[test]
    fn ports_are_told_as_passt_reads_them() {
        let ports = ["8080:80", "127.0.0.1:53:5353/udp"].map(|text| parse(text).unwrap().0);
        let arguments = arguments(&ports.concat()).join(" ");
        let told = "--tcp-ports 8080:80 --udp-ports 127.0.0.1/53:5353";
        assert!(arguments.ends_with(told), "{arguments}");
    }

    #[test]
    fn a_guest_is_announced_by_one_frame() {
        let bytes = announcement();
        assert_eq!(bytes.len(), 4 + 14 + 28);
        assert_eq!(bytes[..4], [0, 0, 0, 42]);
        assert_eq!(bytes[10..16], MAC);
    }

    #[test]
    fn a_host_with_a_way_out_has_a_default_route() {
        let head = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n";
        let local = "eth0\t0002000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n";
        let out = "eth0\t00000000\t0202000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n";
        assert!(has_default_route(&format!("{head}{local}{out}")));
        assert!(!has_default_route(&format!("{head}{local}")));
        assert!(!has_default_route(""));
    }

    #[test]
    fn what_passt_complains_of_is_one_line() {
        let text = b"Failed to send 4 bytes to syslog\nNo interface\n\n  usable\n";
        assert_eq!(words(text), "No interface; usable");
    }
}
