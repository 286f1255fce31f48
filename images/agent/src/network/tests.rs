//! Applies plans in a separate network namespace, on its only interface.

use std::fs;

use podvisor_agent_protocol::api;

use super::*;

/// Runs `work` in a new network namespace, or reports that this needs root.
fn in_namespace(work: impl AsyncFnOnce() + Send + 'static) {
    let thread = std::thread::spawn(move || {
        crate::sys::unshare_network().expect("a network namespace: run this test as root");
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
            .block_on(work());
    });
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

/// The loopback interface of the namespace stands in for the card: its address is all zero.
fn plan(name: &str, mtu: u32, addresses: &[&str], routes: &[(&str, &str)]) -> Plan {
    let interface = api::Interface {
        mac: "00:00:00:00:00:00".into(),
        name: name.into(),
        addresses: addresses.iter().map(|&text| text.into()).collect(),
        mtu,
        ..Default::default()
    };
    let route = |&(destination, gateway): &(&str, &str)| api::Route {
        destination: destination.into(),
        gateway: gateway.into(),
        interface: name.into(),
        ..Default::default()
    };
    Plan::new(&api::ConfigureRequest {
        interfaces: vec![interface],
        routes: routes.iter().map(route).collect(),
        ..Default::default()
    })
    .unwrap()
}

/// A file of the thread's own namespace.
fn table(name: &str) -> String {
    fs::read_to_string(format!("/proc/thread-self/net/{name}")).unwrap()
}

/// The card `02:00:00:00:00:0a`, which becomes `eth0` with these addresses.
fn card(addresses: &[&str]) -> api::Interface {
    api::Interface {
        mac: "02:00:00:00:00:0a".into(),
        name: "eth0".into(),
        addresses: addresses.iter().map(|&text| text.into()).collect(),
        ..Default::default()
    }
}

/// Runs ip(8) in the thread's own namespace.
fn ip(line: &str) -> String {
    let output = std::process::Command::new("ip")
        .args(line.split(' '))
        .output();
    let output = output.expect("this test needs ip(8)");
    assert!(output.status.success(), "{line}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_plan_is_carried_out_and_carrying_it_out_again_changes_nothing() {
    in_namespace(async || {
        let plan = plan(
            "eth0",
            1400,
            &["10.9.0.2/24", "fd09::2/64"],
            &[
                ("0.0.0.0/0", "10.9.0.1"),
                ("10.8.0.0/16", ""),
                ("fd08::/64", ""),
            ],
        );
        apply(&plan).await.unwrap();
        // Routes to IPv6 addresses are the kernel's, which adds them asynchronously.
        let planned_v6 = || {
            let table = table("ipv6_route");
            table
                .lines()
                .filter(|line| line.starts_with("fd08"))
                .count()
        };
        let first = table("route");
        assert_eq!(planned_v6(), 1);
        apply(&plan).await.unwrap();
        assert_eq!(table("route"), first);
        assert_eq!(planned_v6(), 1);

        let mut netlink = Netlink::open().unwrap();
        let links = links(&mut netlink).unwrap();
        assert_eq!(links.len(), 1);
        assert_eq!((links[0].index, links[0].name.as_str()), (1, "eth0"));
        // The table prints addresses in the machine's byte order.
        let routes: Vec<Vec<&str>> = first
            .lines()
            .map(|line| line.split_ascii_whitespace().collect())
            .collect();
        let has = |destination: &str, gateway: &str| {
            routes
                .iter()
                .any(|route| route[..3] == ["eth0", destination, gateway])
        };
        assert!(has("00000000", "0100090A"), "{first}");
        assert!(has("0000080A", "00000000"), "{first}");
        let addresses = table("if_inet6");
        let own = addresses.lines().find(|line| line.starts_with("fd09"));
        // No longer tentative (0x40), and without duplicate address detection (0x02).
        let flags = own.unwrap().split_ascii_whitespace().nth(4).unwrap();
        let flags = u8::from_str_radix(flags, 16).unwrap();
        assert_eq!(flags & 0x42, 0x02, "{addresses}");
        assert!(std::net::UdpSocket::bind("10.9.0.2:0").is_ok());
        assert!(std::net::UdpSocket::bind("[fd09::2]:0").is_ok());
    });
}

#[test]
fn a_gateway_outside_of_every_network_is_taken_to_be_on_the_link() {
    in_namespace(async || {
        let plan = plan("eth0", 0, &["10.9.0.2/32"], &[("0.0.0.0/0", "169.254.1.1")]);
        apply(&plan).await.unwrap();
        assert!(table("route").contains("0101FEA9"));
    });
}

#[test]
fn a_gateway_that_answers_no_question_is_a_neighbour() {
    in_namespace(async || {
        // Loopback has no neighbours.
        ip("link add card address 02:00:00:00:00:0a type veth peer name host");
        let neighbour = |address: &str, last: &str| api::Neighbour {
            address: address.into(),
            mac: format!("02:00:00:00:00:{last}"),
            interface: "eth0".into(),
            ..Default::default()
        };
        let plan = |last: &str| {
            Plan::new(&api::ConfigureRequest {
                interfaces: vec![card(&["10.9.0.2/32", "fd09::2/128"])],
                routes: vec![api::Route {
                    destination: "0.0.0.0/0".into(),
                    gateway: "169.254.1.1".into(),
                    interface: "eth0".into(),
                    ..Default::default()
                }],
                neighbours: vec![neighbour("169.254.1.1", last), neighbour("fe80::1", last)],
                ..Default::default()
            })
            .unwrap()
        };
        // Another one replaces the first.
        for last in ["0b", "0c", "0c"] {
            apply(&plan(last)).await.unwrap();
            let neighbours = ip("neighbour show nud permanent");
            for address in ["169.254.1.1", "fe80::1"] {
                let line = format!("{address} dev eth0 lladdr 02:00:00:00:00:{last} PERMANENT");
                let is_it = |found: &str| found.trim() == line;
                assert!(neighbours.lines().any(is_it), "{line}: {neighbours}");
            }
        }
    });
}

#[test]
fn an_interface_without_arp_asks_no_neighbour() {
    in_namespace(async || {
        // Loopback is without ARP anyway.
        ip("link add card address 02:00:00:00:00:0a type veth peer name host");
        let request = api::ConfigureRequest {
            interfaces: vec![api::Interface {
                no_arp: true,
                ..card(&["10.9.0.2/24"])
            }],
            ..Default::default()
        };
        apply(&Plan::new(&request).unwrap()).await.unwrap();
        let shown = ip("link show eth0");
        assert!(shown.contains("NOARP"), "{shown}");
    });
}

#[test]
fn interfaces_of_one_address_are_cards_of_their_own() {
    in_namespace(async || {
        ip("link add card0 address 02:00:00:00:00:0a type veth peer name host0");
        ip("link add card1 address 02:00:00:00:00:0a type veth peer name host1");
        let request = api::ConfigureRequest {
            interfaces: vec![
                card(&["10.9.0.2/24"]),
                api::Interface {
                    name: "net1".into(),
                    ..card(&["10.9.1.2/24"])
                },
            ],
            ..Default::default()
        };
        // Again, they are the same ones.
        for _ in 0..2 {
            apply(&Plan::new(&request).unwrap()).await.unwrap();
            for (name, address) in [("eth0", "10.9.0.2/24"), ("net1", "10.9.1.2/24")] {
                let shown = ip(&format!("-4 -o address show dev {name}"));
                assert!(shown.contains(address), "{shown}");
            }
        }
    });
}

#[test]
fn a_route_has_its_mtu_its_metric_and_its_source() {
    in_namespace(async || {
        let route = |metric, mtu, source: &str| api::Route {
            destination: "0.0.0.0/0".into(),
            gateway: "10.9.0.1".into(),
            interface: "eth0".into(),
            mtu,
            metric,
            source: source.into(),
            ..Default::default()
        };
        ip("link add card address 02:00:00:00:00:0a type veth peer name host");
        let plan = |routes| {
            Plan::new(&api::ConfigureRequest {
                interfaces: vec![card(&["10.9.0.2/24", "10.9.0.3/24"])],
                routes,
                ..Default::default()
            })
        };
        let routes = vec![route(0, 1450, ""), route(200, 0, "10.9.0.3")];
        apply(&plan(routes).unwrap()).await.unwrap();
        let shown = ip("route show default");
        let lines: Vec<&str> = shown.lines().map(str::trim).collect();
        assert_eq!(lines.len(), 2, "{shown}");
        assert!(lines[0].contains(" mtu 1450") && !lines[0].contains("metric"));
        assert!(lines[1].contains(" src 10.9.0.3 metric 200"), "{shown}");
        plan(vec![route(0, 0, "fd09::3")]).unwrap_err();
    });
}

#[test]
fn loopback_comes_up() {
    in_namespace(async || {
        let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
        assert!(socket.connect("127.0.0.1:9").is_err());
        loopback_up().unwrap();
        socket.connect("127.0.0.1:9").unwrap();
    });
}

#[tokio::test(start_paused = true)]
async fn a_card_that_never_comes_is_missing_after_the_deadline() {
    let mut plan = plan("eth7", 0, &[], &[]);
    plan.interfaces[0].mac = [2, 255, 255, 255, 255, 254];
    let error = apply(&plan).await.unwrap_err();
    assert!(matches!(error, NetworkError::Missing { .. }), "{error:?}");
}
