//! Addresses of pods and what is reached by them.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::thread;
use std::time::Duration;

use k8s_cri::v1::*;

use crate::pod::{Container, Pod, strings};

const SERVER: &str = "while :; do echo hello from the pod | busybox nc -l -p 8080; done";

fn server(pod: &Pod) -> Container {
    let container = pod.start("server", |config| {
        config.command = strings(&["sh", "-c", SERVER]);
    });
    // It listens when the kernel says so.
    while !container
        .sh("cat /proc/net/tcp /proc/net/tcp6")
        .contains(":1F90")
    {
        thread::sleep(Duration::from_millis(50));
    }
    container
}

/// What a server says. Netcat serves one client at a time: a refusal is tried again.
fn said(address: SocketAddr) -> String {
    for _ in 0..10 {
        if let Ok(mut stream) = TcpStream::connect_timeout(&address, Duration::from_secs(5)) {
            let _ = stream.set_read_timeout(Some(Duration::from_secs(5)));
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
    // By an address of the host: portmap leaves the loopback alone unless told otherwise.
    let host: IpAddr = "10.213.7.1".parse().unwrap();
    assert_eq!(said(SocketAddr::new(host, 18080)), "hello from the pod\n");

    for extra in &network.additional_ips {
        let ip: IpAddr = extra.ip.parse().unwrap();
        assert!(ip.is_ipv6(), "{ip}");
    }
    let addresses = container.sh("busybox ip addr show eth0");
    assert!(addresses.contains(&network.ip), "{addresses}");
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
    let answer = neighbour.sh(&format!("echo x | busybox nc -w 20 {ip} 8080"));
    assert_eq!(answer, "hello from the pod\n");
    neighbour.stop(0);
    neighbour.remove();
}

#[test]
fn guest_containers_of_a_pod_meet_on_its_loopback() {
    let pod = Pod::shared();
    let container = server(pod);
    let other = pod.start("client", |_| {});
    let answer = other.sh("echo x | busybox nc -w 20 127.0.0.1 8080");
    assert_eq!(answer, "hello from the pod\n");
    for container in [container, other] {
        container.stop(0);
        container.remove();
    }
}
