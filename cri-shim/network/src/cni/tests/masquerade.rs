//! Cards whose addresses are translated.

use super::*;

/// Reads until a UDP packet comes, and returns its frame.
fn udp(tap: &mut File) -> Vec<u8> {
    let mut buffer = [0; 2048];
    loop {
        let count = tap.read(&mut buffer).unwrap();
        let frame = &buffer[VNET_HEADER..count];
        if frame[12..14] == [8, 0] && frame[23] == 17 {
            return frame.to_vec();
        }
    }
}

/// Sends a UDP packet back to where it came from.
fn echo(tap: &mut File, mut frame: Vec<u8>) {
    let (macs, addresses, ports) = (
        frame[..12].to_vec(),
        frame[26..34].to_vec(),
        frame[34..38].to_vec(),
    );
    for (place, bytes, half) in [(0, macs, 6), (26, addresses, 4), (34, ports, 2)] {
        frame[place..place + half].copy_from_slice(&bytes[half..]);
        frame[place + half..place + bytes.len()].copy_from_slice(&bytes[..half]);
    }
    // No sum of UDP; that of IPv4 is the same for swapped addresses.
    frame[40..42].fill(0);
    let mut sent = vec![0; VNET_HEADER];
    sent.extend(frame);
    tap.write_all(&sent).unwrap();
}

#[test]
fn the_guest_has_an_address_of_its_own_and_is_reached_by_the_pods() {
    in_host(async || {
        let data = tempfile::tempdir().unwrap();
        let ranges = json!([[{"subnet": "10.88.7.0/24"}], [{"subnet": "fd88::/64"}]]);
        let world = World::new(&bridge(data.path().to_str().unwrap(), &ranges));
        let form = CardForm::Masqueraded(vec![ForwardedPorts {
            protocol: PortProtocol::Udp,
            first: 4999,
            last: 5000,
        }]);
        let prepared = world.cni.prepare("pod0").unwrap().with_form(form);
        let pod = pod();
        let attached = world.cni.attach(&pod, Capabilities::new(), prepared);
        let attachment = attached.await.unwrap();
        // Kubernetes knows the pod by CNI's address.
        let known = attachment.addresses.iter().map(IpAddr::to_string);
        let known: Vec<String> = known.collect();
        assert_eq!(known, ["10.88.7.2", "fd88::2"]);
        let (mut nics, network) = attachment.into_guest();
        let nic = nics.remove(0);
        assert_eq!(
            network.interfaces[0].addresses,
            ["10.0.2.2/24", "fd10:0:2::2/120"]
        );
        let gateways: Vec<_> = network
            .routes
            .iter()
            .map(|one| one.gateway.as_deref())
            .collect();
        assert_eq!(gateways, [Some("10.0.2.1"), Some("fe80::ff:fe00:0")]);
        let servers = world
            .cni
            .dhcp("pod0", &network, &GuestNames::default())
            .unwrap();
        let server = &servers[0].config;
        assert_eq!(
            server.server_address,
            "10.0.2.1".parse::<std::net::Ipv4Addr>().unwrap()
        );
        assert_eq!(server.server.to_string(), "02:00:00:00:00:00");
        // By the address that the kernel has for this card.
        let router = podvisor_dhcp::Ipv6Router::Other(server.server.link_local());
        assert_eq!(server.ipv6.as_ref().unwrap().router, router);
        let netns = world.cni.netns("pod0");
        let line = "ip -6 address show dev podvisor0";
        let own = command(&format!("nsenter --net={} {line}", netns.display()));
        assert!(
            own.contains("fe80::ff:fe00:0/64") && own.contains("fd10:0:2::1/120"),
            "{own}"
        );

        let guest_tap = nic.fd.try_clone().unwrap();
        let guest = thread::spawn(move || {
            let mut tap = File::from(guest_tap.try_clone().unwrap());
            answer_arp(guest_tap, nic.mac);
            let frame = udp(&mut tap);
            echo(&mut tap, frame.clone());
            frame
        });
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        socket
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        // Not a port of the guest.
        socket.send_to(b"no", "10.88.7.2:5001").unwrap();
        socket.send_to(b"hello", "10.88.7.2:5000").unwrap();
        let mut buffer = [0; 16];
        let (count, from) = loop {
            match socket.recv_from(&mut buffer) {
                Ok(received) => break received,
                // The pod's end refuses the other port.
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {}
                Err(error) => panic!("{error}"),
            }
        };
        assert_eq!(
            (&buffer[..count], from.to_string().as_str()),
            (&b"hello"[..], "10.88.7.2:5000")
        );
        let frame = guest.join().unwrap();
        assert_eq!(frame[30..34], [10, 0, 2, 2]);
        assert_eq!(frame[42..], *b"hello");
        world.cni.detach("pod0").await.unwrap();
        assert!(world.is_clean());
    });
}
