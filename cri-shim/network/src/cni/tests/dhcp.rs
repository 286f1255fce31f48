//! DHCP servers on the taps of pods whose network Debian's plugins made.

use std::io::ErrorKind;
use std::net::UdpSocket;
use std::time::Instant;

use podvisor_dhcp::Server;

use super::*;

/// A request of a client without an address, with the header of the tap before it.
fn discover(mac: [u8; 6]) -> Vec<u8> {
    let mut message = vec![1, 1, 6, 0, 1, 2, 3, 4];
    message.resize(28, 0);
    message.extend_from_slice(&mac);
    message.resize(236, 0);
    message.extend_from_slice(&[99, 130, 83, 99, 53, 1, 1, 255]);
    let mut udp = vec![0, 68, 0, 67];
    udp.extend_from_slice(&(8 + message.len() as u16).to_be_bytes());
    udp.extend_from_slice(&[0, 0]);
    udp.extend_from_slice(&message);
    let mut ip = vec![0x45, 0];
    ip.extend_from_slice(&(20 + udp.len() as u16).to_be_bytes());
    ip.extend_from_slice(&[0, 0, 0, 0, 64, 17, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255]);
    let sum: u32 = ip
        .chunks(2)
        .map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1]))
        .sum();
    let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    let mut frame = vec![0; VNET_HEADER];
    frame.extend_from_slice(&[0xff; 6]);
    frame.extend_from_slice(&mac);
    frame.extend_from_slice(&[8, 0]);
    frame.extend(ip);
    frame.extend(udp);
    frame
}

#[test]
fn requests_reach_the_pods_own_server_and_no_other_one() {
    in_host(async || {
        let data = tempfile::tempdir().unwrap();
        let ranges = json!([[{"subnet": "10.88.7.0/24"}], [{"subnet": "fd88::/64"}]]);
        let world = World::new(&bridge(data.path().to_str().unwrap(), &ranges));
        let attachment = world.attach(Capabilities::new()).await.unwrap();
        let (mut nics, network) = attachment.into_guest();
        let nic = nics.remove(0);
        let mut tap = File::from(nic.fd);
        // Another server, on the bridge.
        let other = UdpSocket::bind("0.0.0.0:67").unwrap();
        other.set_broadcast(true).unwrap();
        other
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        let mut buffer = [0; 2048];
        tap.write_all(&discover(nic.mac)).unwrap();
        other
            .recv(&mut buffer)
            .expect("without a server of the pod it is asked");

        let names = GuestNames {
            host_name: "web".to_owned(),
            dns: Dns::default(),
        };
        let mut servers = world.cni.dhcp("pod0", &network, &names).unwrap();
        assert_eq!(servers.len(), 1);
        let DhcpServer { socket, config } = servers.remove(0);
        let gateway = config.ipv4.as_ref().unwrap().routes[0].gateway;
        assert_eq!(gateway, Some("10.88.7.1".parse().unwrap()));
        assert_eq!(config.mtu, Some(1400));
        tap.write_all(&discover(nic.mac)).unwrap();
        let mut server = Server::new(config).unwrap();
        let (count, _) =
            rustix::net::recv(&socket, &mut buffer[..], rustix::net::RecvFlags::empty()).unwrap();
        let offer = server.answer(&buffer[..count], Instant::now()).unwrap();
        rustix::net::send(&socket, offer.as_ref(), rustix::net::SendFlags::empty()).unwrap();
        // The guest reads the offer of its own address.
        let offered = loop {
            let count = tap.read(&mut buffer).unwrap();
            let frame = &buffer[VNET_HEADER..count];
            if frame[12..14] == [8, 0] && frame[34..38] == [0, 67, 0, 68] {
                break frame[58..62].to_vec();
            }
        };
        assert_eq!(offered, [10, 88, 7, 2]);
        // Another machine of the pod has another server, and the tap no more filters than before.
        let filters = || {
            let netns = world.cni.netns("pod0");
            let line = "tc filter show dev podvisor0 ingress";
            command(&format!("nsenter --net={} {line}", netns.display()))
        };
        let before = filters();
        assert_eq!(world.cni.dhcp("pod0", &network, &names).unwrap().len(), 1);
        assert_eq!(filters(), before);
        // A later frame comes through, so the request would have as well.
        other
            .set_read_timeout(Some(Duration::from_millis(200)))
            .unwrap();
        let error = other.recv(&mut buffer).unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut),
            "{error}"
        );
        world.cni.detach("pod0").await.unwrap();
        assert!(world.is_clean());
    });
}
