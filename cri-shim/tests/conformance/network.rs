//! Addresses of pods and their connectivity.

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use podvisor_cri_messages::*;

use crate::fixture::NEIGHBOUR;
use crate::many::count;
use crate::pod::{Container, Pod, strings};
use crate::support::PATIENCE;

fn server(pod: &Pod) -> Container {
    server_of(pod, "hello from the pod")
}

/// Requests without an answer are repeated after this time.
const LOST: Duration = Duration::from_secs(60);

/// Starts a container that sends `text` to every client.
fn server_of(pod: &Pod, text: &str) -> Container {
    let script = format!("while :; do echo {text} | busybox nc -l -p 8080; done");
    let container = pod.start("server", |config| {
        config.command = strings(&["sh", "-c", &script]);
    });
    container.wait_for_listener(8080);
    container
}

/// Returns a script that prints a server's answer; the server may just be about to listen again.
fn asks(address: &str) -> String {
    format!("until echo x | busybox nc -w 60 {address} 8080 2>/dev/null; do :; done")
}

/// Returns a server's answer. Netcat serves one client at a time: a refused connection is retried.
fn said(address: SocketAddr) -> String {
    let begin = Instant::now();
    while begin.elapsed() < PATIENCE {
        if let Ok(mut stream) = TcpStream::connect_timeout(&address, LOST) {
            let _ = stream.set_read_timeout(Some(LOST));
            let _ = stream.write_all(b"x\n");
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let mut text = String::new();
            if stream.read_to_string(&mut text).is_ok() && !text.is_empty() {
                return text;
            }
        }
        thread::sleep(Duration::from_millis(100));
    }
    panic!("nothing from {address}");
}

/// Returns the network interfaces of this host, by name.
fn interfaces() -> BTreeSet<String> {
    let text = std::fs::read_to_string("/proc/net/dev").unwrap();
    let names = text.lines().filter_map(|line| line.split_once(':'));
    names.map(|(name, _)| name.trim().to_owned()).collect()
}

/// Returns the number of pods that start at the same time.
pub(crate) fn crowd() -> usize {
    count("PODVISOR_CONFORMANCE_PODS", 4)
}

#[test]
fn guest_long_pods_that_begin_at_once_answer_over_addresses_of_their_own() {
    // Including the bridge, which stays.
    Pod::shared();
    let before = interfaces();
    let crowd = crowd();
    let begin = |number: usize| {
        let pod = Pod::run(&format!("crowd{number}"), |_| {});
        let container = server_of(&pod, &format!("pod {number}"));
        let ip: IpAddr = pod.status().unwrap().network.unwrap().ip.parse().unwrap();
        (pod, container, ip)
    };
    let pods: Vec<_> = thread::scope(|scope| {
        let begun: Vec<_> = (0..crowd)
            .map(|number| scope.spawn(move || begin(number)))
            .collect();
        begun.into_iter().map(|pod| pod.join().unwrap()).collect()
    });
    let addresses: BTreeSet<_> = pods.iter().map(|(_, _, ip)| ip).collect();
    assert_eq!(addresses.len(), crowd);
    for (number, (_, _, ip)) in pods.iter().enumerate() {
        let expected = format!("pod {number}\n");
        assert_eq!(said(SocketAddr::new(*ip, 8080)), expected);
    }
    thread::scope(|scope| {
        for (pod, _, _) in &pods {
            scope.spawn(move || {
                pod.stop();
                pod.remove();
                assert!(pod.status().is_err());
            });
        }
    });
    assert_eq!(interfaces(), before);
}

#[test]
fn guest_a_pod_is_reached_by_its_address_and_by_a_port_of_the_host() {
    let pod = Pod::run("net", |config| {
        config.port_mappings = vec![PortMapping {
            protocol: Protocol::Tcp as i32,
            container_port: 8080,
            host_port: 18080,
            host_ip: String::new(),
        }];
        config.dns_config = Some(DnsConfig {
            servers: vec!["10.9.8.7".to_owned()],
            searches: vec!["svc.example".to_owned()],
            options: vec!["ndots:3".to_owned()],
        });
    });
    let network = pod.status().unwrap().network.unwrap();
    let ip: IpAddr = network.ip.parse().unwrap();
    let container = server(&pod);
    assert_eq!(said(SocketAddr::new(ip, 8080)), "hello from the pod\n");
    for host in ["10.213.7.1", "127.0.0.1"] {
        let host: IpAddr = host.parse().unwrap();
        assert_eq!(said(SocketAddr::new(host, 18080)), "hello from the pod\n");
    }

    for extra in &network.additional_ips {
        let ip: IpAddr = extra.ip.parse().unwrap();
        assert!(ip.is_ipv6(), "{ip}");
    }
    let addresses = container.sh("busybox ip addr show eth0");
    assert!(addresses.contains(&network.ip), "{addresses}");
    let neighbours = container.sh("cat /proc/net/arp");
    let [address, mac] = NEIGHBOUR;
    // ATF_COM and ATF_PERM of linux/if_arp.h: it is permanent.
    let whole = [address, "0x1", "0x6", mac, "*", "eth0"];
    let is_it = |line: &str| line.split_whitespace().eq(whole);
    assert!(neighbours.lines().any(is_it), "{neighbours}");
    let resolv = container.sh("cat /etc/resolv.conf");
    for line in [
        "nameserver 10.9.8.7",
        "search svc.example",
        "options ndots:3",
    ] {
        assert!(resolv.contains(line), "{resolv}");
    }
    assert_eq!(container.sh("hostname"), "net-host\n");
    let neighbour = Pod::shared().start("neighbour", |_| {});
    let answer = neighbour.sh(&asks(&ip.to_string()));
    assert_eq!(answer, "hello from the pod\n");
    neighbour.stop(0);
    neighbour.remove();
}

#[test]
fn guest_containers_of_a_pod_meet_on_its_loopback() {
    let pod = Pod::shared();
    let container = server(pod);
    let other = pod.start("client", |_| {});
    let answer = other.sh(&asks("127.0.0.1"));
    assert_eq!(answer, "hello from the pod\n");
    for container in [container, other] {
        container.stop(0);
        container.remove();
    }
}
