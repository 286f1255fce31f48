//! A real client at the other end of a pair of virtual cards. These tests need root, iproute2 and
//! busybox, but no guest.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::Ipv6Addr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use podvisor_dhcp::{
    Config, Ipv4Lease, Ipv4Route, Ipv6Address, Ipv6Lease, Ipv6Router, MacAddress, Server,
    open_socket, serve,
};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

const CLIENT: MacAddress = MacAddress([2, 0, 0, 0, 0, 2]);
const TIMEOUT: Duration = Duration::from_secs(30);

/// Two namespaces, with one end of a pair of cards in each: `tap` and `eth0`.
struct Link {
    host: String,
    guest: String,
    dir: tempfile::TempDir,
}

impl Link {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("pv-dhcp-{}-{number}", std::process::id());
        let link = Self {
            host: format!("{name}-host"),
            guest: format!("{name}-guest"),
            dir: tempfile::tempdir().unwrap(),
        };
        for namespace in [&link.host, &link.guest] {
            run(&format!("ip netns add {namespace}"));
        }
        let (host, guest) = (&link.host, &link.guest);
        run(&format!(
            "ip -n {host} link add tap type veth peer name eth0 netns {guest}"
        ));
        run(&format!("ip -n {guest} link set eth0 address {CLIENT}"));
        run(&format!("ip -n {host} link set tap up"));
        link
    }

    fn up(&self) {
        run(&format!("ip -n {} link set eth0 up", self.guest));
    }

    /// Serves in a thread that lives as long as the test.
    fn serve(&self, config: Config) {
        let socket = self.socket(&config);
        let server = Server::new(config).unwrap();
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread();
            let runtime = { runtime }.enable_all().build().unwrap();
            panic!("{}", runtime.block_on(serve(socket, server, |_| {})));
        });
    }

    fn socket(&self, config: &Config) -> OwnedFd {
        let namespace = File::open(Path::new("/run/netns").join(&self.host)).unwrap();
        thread::scope(|scope| {
            let open = || {
                let kind = Some(LinkNameSpaceType::Network);
                move_into_link_name_space(namespace.as_fd(), kind).expect("this test needs root");
                open_socket("tap", config).unwrap()
            };
            scope.spawn(open).join().unwrap()
        })
    }

    fn in_guest(&self, line: &str) -> String {
        run(&format!("ip netns exec {} {line}", self.guest))
    }

    /// Starts a client of DHCP, whose events can be read.
    fn client(&self, options: &[&str]) -> Client {
        let script = self.dir.path().join("script");
        let pipe = self.dir.path().join("events");
        run(&format!("mkfifo {}", pipe.display()));
        let text = format!(
            "#!/bin/sh\necho \"$1 $ip/$mask router=$router dns=$dns name=$hostname \
             domain=$domain mtu=$mtu search=$search routes=$staticroutes lease=$lease \
             server=$serverid\" >{}\n",
            pipe.display()
        );
        let mut file = File::create(&script).unwrap();
        file.write_all(text.as_bytes()).unwrap();
        drop(file);
        run(&format!("chmod 755 {}", script.display()));
        let child = Command::new("ip")
            .args(["netns", "exec", &self.guest, "busybox", "udhcpc"])
            .args(["-f", "-i", "eth0", "-t", "10", "-T", "1"])
            .arg("-s")
            .arg(&script)
            .args(options)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Client { child, pipe }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        for namespace in [&self.host, &self.guest] {
            let _ = Command::new("ip")
                .args(["netns", "del", namespace])
                .status();
        }
    }
}

struct Client {
    child: Child,
    pipe: std::path::PathBuf,
}

impl Client {
    /// Waits for an event of this name, and returns its line.
    fn wait(&self, event: &str) -> String {
        loop {
            // Opening waits for the script.
            let mut line = String::new();
            BufReader::new(File::open(&self.pipe).unwrap())
                .read_line(&mut line)
                .unwrap();
            if line.starts_with(event) {
                return line;
            }
        }
    }

    fn signal(&self, name: &str) {
        run(&format!("kill -s {name} {}", self.child.id()));
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn run(line: &str) -> String {
    let words: Vec<&str> = line.split(' ').collect();
    let output = Command::new(words[0]).args(&words[1..]).output().unwrap();
    assert!(output.status.success(), "{line}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn config() -> Config {
    Config {
        server: MacAddress([2, 0, 0, 0, 0, 1]),
        mtu: Some(1450),
        host_name: Some("web".to_owned()),
        domain: Some("shop.example".to_owned()),
        search: vec!["shop.example".to_owned(), "example".to_owned()],
        name_servers: vec!["10.96.0.10".parse().unwrap()],
        others: Vec::new(),
        ipv4: Some(Ipv4Lease {
            address: "10.1.0.2".parse().unwrap(),
            prefix_length: 16,
            routes: vec![default_route("10.1.0.1")],
        }),
        ..Config::new(CLIENT)
    }
}

fn default_route(gateway: &str) -> Ipv4Route {
    Ipv4Route {
        destination: "0.0.0.0".parse().unwrap(),
        prefix_length: 0,
        gateway: Some(gateway.parse().unwrap()),
    }
}

#[test]
fn a_client_is_bound_renews_and_releases() {
    let link = Link::new();
    link.serve(config());
    link.up();
    let client = link.client(&["-O", "mtu", "-O", "search", "-R"]);
    let bound = client.wait("bound");
    for part in [
        " 10.1.0.2/16 ",
        " router=10.1.0.1 ",
        " dns=10.96.0.10 ",
        " name=web ",
        " domain=shop.example ",
        " mtu=1450 ",
        " search=shop.example example ",
        " lease=86400 ",
        " server=169.254.67.68",
    ] {
        assert!(bound.contains(part), "{part}: {bound}");
    }
    // With an address and a way to the server, as after the script of a distribution: the request
    // goes to the server's card, which the client asks for by ARP.
    link.in_guest("ip address add 10.1.0.2/16 dev eth0");
    link.in_guest("ip route add 169.254.0.0/16 dev eth0");
    client.signal("USR1");
    client.wait("renew");
    let neighbours = link.in_guest("ip neighbour show 169.254.67.68");
    assert!(neighbours.contains("02:00:00:00:00:01"), "{neighbours}");
    client.signal("USR2");
    client.wait("deconfig");
}

#[test]
fn a_client_of_a_network_of_hosts_gets_a_route_to_its_gateway_first() {
    let link = Link::new();
    let mut config = config();
    config.ipv4 = Some(Ipv4Lease {
        address: "10.244.7.3".parse().unwrap(),
        prefix_length: 32,
        routes: vec![default_route("169.254.1.1")],
    });
    link.serve(config);
    link.up();
    let bound = link.client(&["-O", "staticroutes"]).wait("bound");
    assert!(bound.contains(" 10.244.7.3/32 router= "), "{bound}");
    let routes = " routes=169.254.1.1/32 0.0.0.0 0.0.0.0/0 169.254.1.1 ";
    assert!(bound.contains(routes), "{bound}");
    // A client that reads no routes gets the gateway.
    let other = Link::new();
    let mut config = self::config();
    config.ipv4.as_mut().unwrap().routes = vec![default_route("169.254.1.1")];
    other.serve(config);
    other.up();
    let bound = other
        .client(&["-o", "-O", "router", "-O", "subnet"])
        .wait("bound");
    assert!(bound.contains(" router=169.254.1.1 "), "{bound}");
}

#[test]
fn a_card_that_is_not_the_guests_gets_no_address() {
    let link = Link::new();
    link.serve(config());
    run(&format!(
        "ip -n {} link set eth0 address 02:00:00:00:00:09",
        link.guest
    ));
    link.up();
    let failed = link.client(&["-n", "-t", "2"]).wait("leasefail");
    assert!(failed.starts_with("leasefail"), "{failed}");
}

#[test]
fn the_kernel_takes_its_router_and_the_link_from_advertisements() {
    let link = Link::new();
    let mut config = config();
    config.name_servers = vec!["fd00:7::a".parse().unwrap()];
    config.ipv6 = Some(Ipv6Lease {
        addresses: vec![Ipv6Address {
            address: "fd00:7::2".parse().unwrap(),
            prefix_length: 64,
        }],
        router: Ipv6Router::Server,
    });
    let router: Ipv6Addr = config.server.link_local();
    link.serve(config);
    link.in_guest("sysctl -qw net.ipv6.conf.eth0.accept_ra=2");
    link.up();
    let expected = format!("default via {router} dev eth0 proto ra");
    let deadline = Instant::now() + TIMEOUT;
    // The kernel asks when its address on the link has been checked.
    let routes = loop {
        let routes = link.in_guest("ip -6 route");
        if routes.contains(&expected) {
            break routes;
        }
        assert!(Instant::now() < deadline, "{routes}");
        thread::sleep(Duration::from_millis(100));
    };
    assert!(
        routes.contains("fd00:7::/64 dev eth0 proto kernel"),
        "{routes}"
    );
    assert!(routes.contains("mtu 1450"), "{routes}");
    // Addresses come by DHCPv6 alone.
    let addresses = link.in_guest("ip -6 address show dev eth0");
    assert!(!addresses.contains("fd00:7::"), "{addresses}");
}

#[test]
fn frames_that_are_for_others_wake_nobody() {
    let link = Link::new();
    let socket = link.socket(&config());
    link.up();
    run(&format!(
        "ip -n {} address add 10.1.0.1/16 dev tap",
        link.host
    ));
    link.in_guest("ip address add 10.1.0.2/16 dev eth0");
    // Echo requests, their answers and ARP in both directions.
    link.in_guest("busybox ping -c 2 10.1.0.1");
    let mut buffer = [0; 2000];
    let read = rustix::net::recv(&socket, &mut buffer, rustix::net::RecvFlags::empty());
    assert_eq!(read.unwrap_err(), rustix::io::Errno::AGAIN);
}
