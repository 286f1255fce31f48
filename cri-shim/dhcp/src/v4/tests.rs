use dhcproto::Decodable as _;
use dhcproto::v4::{DhcpOption, Message, MessageType, OptionCode};
use proptest::prelude::*;

use super::*;
use crate::config::tests::{CLIENT, plain, route};
use crate::config::{Ipv4Option, SERVER_ADDRESS};
use crate::frame::{Payload, parse};

/// Options that systemd-networkd, dhclient and udhcpc ask for.
const ASKED: [u8; 9] = [1, 3, 6, 12, 15, 26, 119, 121, 42];
const OWN: [u8; 4] = [10, 1, 0, 2];
const OTHER: [u8; 4] = [10, 1, 0, 9];

/// Writes a client's message of these options.
fn answer(config: &Config, message: &[u8]) -> Result<Option<Vec<u8>>, Refusal> {
    super::answer(config, message).map(|answer| answer.map(|answer| answer.frame))
}

fn message(kind: u8, address: [u8; 4], flags: u16, options: &[(u8, &[u8])]) -> Vec<u8> {
    let mut bytes = vec![1, 1, 6, 0, 0xde, 0xad, 0xbe, 0xef, 0, 3];
    bytes.extend_from_slice(&flags.to_be_bytes());
    bytes.extend_from_slice(&address);
    bytes.extend_from_slice(&[0; 12]);
    bytes.extend_from_slice(&CLIENT.0);
    bytes.extend_from_slice(&[0; 202]);
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&[53, 1, kind]);
    for (code, value) in options {
        bytes.extend_from_slice(&[*code, value.len() as u8]);
        bytes.extend_from_slice(value);
    }
    bytes.push(255);
    bytes
}

fn discover(options: &[(u8, &[u8])]) -> Vec<u8> {
    message(1, [0; 4], 0, options)
}

/// Asks, and reads the answer with another implementation.
fn ask(config: &Config, message: &[u8]) -> Option<Message> {
    let frame = answer(config, message).unwrap()?;
    Some(read(&frame))
}

fn read(frame: &[u8]) -> Message {
    // Ethernet, IPv4 and UDP without options.
    Message::from_bytes(&frame[42..]).unwrap()
}

fn kind(message: &Message) -> MessageType {
    message.opts().msg_type().unwrap()
}

fn codes(message: &Message) -> Vec<u8> {
    message
        .opts()
        .iter()
        .map(|(code, _)| (*code).into())
        .collect()
}

fn routes(message: &Message) -> Vec<String> {
    match message.opts().get(OptionCode::ClasslessStaticRoute) {
        Some(DhcpOption::ClasslessStaticRoute(routes)) => {
            routes.iter().map(|(to, by)| format!("{to} {by}")).collect()
        }
        _ => Vec::new(),
    }
}

#[test]
fn a_client_gets_its_address_and_all_that_it_asks_for() {
    let config = plain();
    let offer = ask(&config, &discover(&[(55, &ASKED)])).unwrap();
    assert_eq!(kind(&offer), MessageType::Offer);
    assert_eq!(offer.xid(), 0xdead_beef);
    assert_eq!(offer.yiaddr().octets(), OWN);
    assert_eq!(offer.chaddr(), CLIENT.0);
    assert_eq!(
        codes(&offer),
        [1, 3, 6, 12, 15, 26, 51, 53, 54, 58, 59, 119]
    );
    for expected in [
        DhcpOption::SubnetMask([255, 255, 0, 0].into()),
        DhcpOption::Router(vec![[10, 1, 0, 1].into()]),
        DhcpOption::DomainNameServer(vec![[10, 96, 0, 10].into()]),
        DhcpOption::Hostname("web".to_owned()),
        DhcpOption::DomainName("shop.svc.cluster.local".to_owned()),
        DhcpOption::InterfaceMtu(1450),
        DhcpOption::AddressLeaseTime(86_400),
        DhcpOption::ServerIdentifier(SERVER_ADDRESS),
        DhcpOption::Renewal(43_200),
        DhcpOption::Rebinding(64_800),
    ] {
        let code = OptionCode::from(&expected);
        assert_eq!(offer.opts().get(code), Some(&expected));
    }
    match offer.opts().get(OptionCode::DomainSearch) {
        Some(DhcpOption::DomainSearch(names)) => {
            let names: Vec<String> = names.iter().map(ToString::to_string).collect();
            assert_eq!(names, ["shop.svc.cluster.local.", "svc.cluster.local."]);
        }
        other => panic!("{other:?}"),
    }
    let selected = [(50, &OWN[..]), (54, &SERVER_ADDRESS.octets()), (55, &ASKED)];
    let ack = ask(&config, &message(3, [0; 4], 0, &selected)).unwrap();
    assert_eq!(kind(&ack), MessageType::Ack);
    assert_eq!(ack.yiaddr().octets(), OWN);
    assert_eq!(codes(&ack), codes(&offer));
}

#[test]
fn nothing_is_sent_that_was_not_asked_for() {
    let config = plain();
    let offer = ask(&config, &discover(&[(55, &[3, 3, 3, 99, 121])])).unwrap();
    assert_eq!(codes(&offer), [3, 51, 53, 54, 58, 59]);
    // Who does not say what it wants gets what every client understands.
    let offer = ask(&config, &discover(&[])).unwrap();
    assert_eq!(codes(&offer), [1, 3, 6, 12, 15, 26, 51, 53, 54, 58, 59]);
    let mut bare = plain();
    bare.name_servers.clear();
    bare.search.clear();
    (bare.mtu, bare.host_name, bare.domain) = (None, None, None);
    let offer = ask(&bare, &discover(&[(55, &ASKED)])).unwrap();
    assert_eq!(codes(&offer), [1, 3, 51, 53, 54, 58, 59]);
}

#[test]
fn another_address_than_the_guests_is_refused_aloud() {
    let config = plain();
    let server = SERVER_ADDRESS.octets();
    for (address, options) in [
        // It selects, it was started anew, it renews.
        ([0; 4], vec![(50, &OTHER[..]), (54, &server[..])]),
        ([0; 4], vec![(50, &OTHER[..])]),
        (OTHER, vec![]),
    ] {
        let request = message(3, address, 0, &options);
        let frame = answer(&config, &request).unwrap().unwrap();
        let nak = read(&frame);
        assert_eq!(kind(&nak), MessageType::Nak);
        assert!(nak.yiaddr().is_unspecified());
        assert_eq!(codes(&nak), [53, 54, 56]);
        assert_eq!(frame[..6], [0xff; 6]);
        assert_eq!(frame[30..34], [255; 4]);
    }
}

#[test]
fn a_lease_is_extended_at_its_server_and_at_any() {
    let config = plain();
    let renewal = message(3, OWN, 0, &[(55, &ASKED)]);
    let frame = answer(&config, &renewal).unwrap().unwrap();
    let ack = read(&frame);
    assert_eq!(kind(&ack), MessageType::Ack);
    assert_eq!((ack.ciaddr().octets(), ack.yiaddr().octets()), (OWN, OWN));
    // To the address that the client has.
    assert_eq!(frame[..6], CLIENT.0);
    assert_eq!(frame[30..34], OWN);
    let mut server = crate::Server::new(plain()).unwrap();
    let now = std::time::Instant::now();
    for (message, leases) in [(&discover(&[]), 0), (&renewal, 1), (&renewal, 2)] {
        let frame = crate::frame::tests::request4(message);
        assert!(server.answer(&frame, now).is_some());
        assert_eq!(server.counters().leases, leases);
    }
    // After a reboot it names its old address.
    let again = ask(&config, &message(3, [0; 4], 0, &[(50, &OWN)])).unwrap();
    assert_eq!(kind(&again), MessageType::Ack);
}

#[test]
fn answers_go_where_the_client_can_receive_them() {
    let config = plain();
    let frame = answer(&config, &discover(&[])).unwrap().unwrap();
    assert_eq!((&frame[..6], &frame[30..34]), (&CLIENT.0[..], &OWN[..]));
    let frame = answer(&config, &message(1, [0; 4], 0x8000, &[]))
        .unwrap()
        .unwrap();
    assert_eq!(
        (&frame[..6], &frame[30..34]),
        (&[0xff; 6][..], &[255; 4][..])
    );
    assert!(read(&frame).flags().broadcast());
    assert!(frame.len() >= 14 + 28 + MIN_MESSAGE);
}

#[test]
fn who_has_an_address_gets_the_rest_without_a_lease() {
    let config = plain();
    let frame = answer(&config, &message(8, OTHER, 0, &[(55, &ASKED)]))
        .unwrap()
        .unwrap();
    let ack = read(&frame);
    assert_eq!(kind(&ack), MessageType::Ack);
    assert!(ack.yiaddr().is_unspecified());
    assert_eq!(codes(&ack), [1, 3, 6, 12, 15, 26, 53, 54, 119]);
    assert_eq!(frame[30..34], OTHER);
}

#[test]
fn releases_and_declines_change_nothing() {
    let config = plain();
    let server = SERVER_ADDRESS.octets();
    assert_eq!(ask(&config, &message(7, OWN, 0, &[(54, &server)])), None);
    assert_eq!(
        ask(
            &config,
            &message(4, [0; 4], 0, &[(50, &OWN), (54, &server)])
        ),
        None
    );
    assert!(ask(&config, &discover(&[])).is_some());
}

#[test]
fn identities_of_the_client_are_echoed() {
    let uuid = [7; 17];
    let options: [(u8, &[u8]); 3] = [(61, &[1, 2, 3]), (97, &uuid), (55, &[1])];
    let offer = ask(&plain(), &discover(&options)).unwrap();
    let id = DhcpOption::ClientIdentifier(vec![1, 2, 3]);
    assert_eq!(offer.opts().get(OptionCode::ClientIdentifier), Some(&id));
    let uuid = DhcpOption::ClientMachineIdentifier(uuid.to_vec());
    assert_eq!(
        offer.opts().get(OptionCode::ClientMachineIdentifier),
        Some(&uuid)
    );
}

#[test]
fn options_that_the_user_chose_are_sent_to_who_asks_and_first_left_out() {
    let other = |code, value: &[u8]| Ipv4Option {
        code,
        value: value.to_vec(),
    };
    let mut config = plain();
    config.others = vec![
        other(Ipv4Option::TIME_SERVERS, &[10, 1, 0, 9]),
        other(Ipv4Option::BOOT_FILE, b"pxe"),
        other(240, &[7; 255]),
        other(241, &[8; 255]),
    ];
    config.validate().unwrap();
    let offer = ask(&config, &discover(&[(55, &[1, 42, 240])])).unwrap();
    let servers = DhcpOption::NtpServers(vec![[10, 1, 0, 9].into()]);
    assert_eq!(offer.opts().get(OptionCode::NtpServers), Some(&servers));
    assert!(codes(&offer).contains(&240) && !codes(&offer).contains(&67));
    // Who asks for nothing gets what fits: both private ones do not.
    let offer = ask(&config, &discover(&[])).unwrap();
    let got = codes(&offer);
    assert!(got.contains(&1) && got.contains(&3), "{got:?}");
    assert!(!(got.contains(&240) && got.contains(&241)), "{got:?}");

    for (code, value) in [(6, &b"a"[..]), (255, b"a"), (240, b""), (240, &[1; 256])] {
        config.others = vec![other(code, value)];
        assert!(config.validate().is_err(), "{code}");
    }
}

#[test]
fn a_gateway_outside_the_network_gets_a_route_of_its_own_first() {
    let mut config = plain();
    let lease = config.ipv4.as_mut().unwrap();
    lease.prefix_length = 32;
    lease.routes = vec![route("0.0.0.0", 0, Some("169.254.1.1"))];
    let offer = ask(&config, &discover(&[(55, &ASKED)])).unwrap();
    assert_eq!(
        routes(&offer),
        ["169.254.1.1/32 0.0.0.0", "0.0.0.0/0 169.254.1.1"]
    );
    assert_eq!(offer.opts().get(OptionCode::Router), None);
    // Clients that read no routes add one to the router when the mask is that of a host.
    let offer = ask(&config, &discover(&[(55, &[1, 3])])).unwrap();
    let router = DhcpOption::Router(vec![[169, 254, 1, 1].into()]);
    assert_eq!(offer.opts().get(OptionCode::Router), Some(&router));
}

#[test]
fn all_routes_are_sent_in_an_order_in_which_they_can_be_added() {
    let mut config = plain();
    config.ipv4.as_mut().unwrap().routes = vec![
        route("0.0.0.0", 0, Some("10.1.0.1")),
        route("10.96.0.0", 12, Some("10.1.0.3")),
        route("192.168.7.77", 25, Some("172.16.0.1")),
        route("172.16.0.0", 24, None),
    ];
    let offer = ask(&config, &discover(&[(55, &ASKED)])).unwrap();
    assert_eq!(
        routes(&offer),
        [
            "172.16.0.0/24 0.0.0.0",
            "192.168.7.0/25 172.16.0.1",
            "10.96.0.0/12 10.1.0.3",
            "0.0.0.0/0 10.1.0.1",
        ]
    );
    let offer = ask(&config, &discover(&[(55, &[1, 249])])).unwrap();
    assert!(codes(&offer).contains(&249));
}

#[test]
fn an_answer_is_as_small_as_the_client_wants_it() {
    let mut config = plain();
    config.search = (0..32)
        .map(|n| format!("{n}.{}.example", "long".repeat(9)))
        .collect();
    let routes = (0..40).map(|n| route(&format!("10.{n}.0.0"), 16, Some("10.1.0.3")));
    let lease = config.ipv4.as_mut().unwrap();
    lease.routes.extend(routes);
    let small = answer(&config, &discover(&[(55, &ASKED)]))
        .unwrap()
        .unwrap();
    assert!(small.len() <= 14 + 576, "{}", small.len());
    let offer = read(&small);
    // The default route is there, although the others are not.
    assert!(!codes(&offer).contains(&121), "{offer:?}");
    assert!(codes(&offer).contains(&3), "{offer:?}");
    assert!(codes(&offer).contains(&6), "{offer:?}");
    let large = discover(&[(55, &ASKED), (57, &1500_u16.to_be_bytes())]);
    let large = answer(&config, &large).unwrap().unwrap();
    assert!(
        large.len() > 14 + 576 && large.len() <= 14 + 1450,
        "{}",
        large.len()
    );
    assert!(codes(&read(&large)).contains(&121));
}

#[test]
fn messages_that_are_not_the_guests_get_no_answer() {
    let config = plain();
    let refused = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut message = discover(&[(55, &ASKED)]);
        change(&mut message);
        answer(&config, &message).unwrap_err()
    };
    let other = Refusal::OtherClient("a DHCP message");
    assert_eq!(refused(&|m| m[33] = 9), other);
    let relay = Refusal::Relayed([10, 1, 0, 7].into());
    assert_eq!(
        refused(&|m| m[24..28].copy_from_slice(&[10, 1, 0, 7])),
        relay
    );
    let operation = Refusal::Invalid("operation or hardware type");
    for (place, value) in [(0, 2), (1, 6), (2, 16)] {
        assert_eq!(refused(&|m| m[place] = value), operation);
    }
    assert_eq!(refused(&|m| m[236] = 0), Refusal::Invalid("magic number"));
    for kind in [0, 2, 5, 6, 9, 255] {
        assert_eq!(refused(&|m| m[242] = kind), Refusal::MessageType(kind));
    }
    let mut other = plain();
    other.ipv4 = None;
    assert_eq!(
        answer(&other, &discover(&[])),
        Err(Refusal::NoLease("IPv4"))
    );
}

#[test]
fn options_of_wrong_lengths_and_repeated_ones_are_refused() {
    let config = plain();
    let refused = |options: &[(u8, &[u8])]| answer(&config, &discover(options)).unwrap_err();
    for (code, value) in [
        (50, &[10, 1, 0][..]),
        (50, &[10, 1, 0, 2, 0]),
        (50, &[]),
        (53, &[]),
        (53, &[1, 1]),
        (54, &[1]),
        (55, &[]),
        (57, &[1, 2, 3]),
        (61, &[1]),
        (97, &[1; 16]),
    ] {
        let length = value.len();
        let code_16 = code.into();
        let expected = Refusal::OptionLength {
            code: code_16,
            length,
        };
        assert_eq!(refused(&[(code, value)]), expected);
    }
    assert_eq!(refused(&[(50, &OWN), (50, &OWN)]), Refusal::OptionTwice(50));
    assert_eq!(refused(&[(53, &[1])]), Refusal::OptionTwice(53));
    assert_eq!(refused(&[(52, &[3])]), Refusal::Overload);
    let other = [(54, &[10, 1, 0, 1][..])];
    assert_eq!(refused(&other), Refusal::OtherServer);
    let nothing = message(3, [0; 4], 0, &[]);
    assert_eq!(answer(&config, &nothing), Err(Refusal::OptionMissing(50)));
    // Unknown options may come as often as they like.
    assert!(ask(&config, &discover(&[(60, b"x"), (60, b"y"), (0, b"")])).is_some());
}

#[test]
fn every_cut_of_a_message_gets_an_answer_or_is_refused() {
    let config = plain();
    let uuid = [7; 17];
    let whole = discover(&[(55, &ASKED), (61, &[1, 2, 3]), (97, &uuid), (50, &OWN)]);
    for length in 0..whole.len() {
        let cut = answer(&config, &whole[..length]);
        assert!(length >= 243 || cut.is_err(), "{length}: {cut:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn any_options_are_answered_with_what_another_implementation_reads(
        kind in 0_u8..10,
        address: [u8; 4],
        flags: u16,
        options in proptest::collection::vec(
            (any::<u8>(), proptest::collection::vec(any::<u8>(), 0..40)),
            0..8,
        ),
    ) {
        let options: Vec<(u8, &[u8])> =
            options.iter().map(|(code, value)| (*code, value.as_slice())).collect();
        let message = message(kind, address, flags, &options);
        if let Ok(Some(frame)) = answer(&plain(), &message) {
            let Ok(parsed) = Message::from_bytes(&frame[42..]) else {
                return Err(TestCaseError::fail("unreadable"));
            };
            prop_assert!(parsed.opts().msg_type().is_some());
            prop_assert!(parsed.yiaddr().is_unspecified() || parsed.yiaddr().octets() == OWN);
            prop_assert!(frame.len() <= 14 + 1450);
            // It is for the client's port, so that no server takes it.
            prop_assert!(!matches!(
                parse(&frame).map(|frame| frame.payload),
                Ok(Payload::Dhcp4(_))
            ));
        }
    }

    #[test]
    fn any_bytes_are_read_without_a_panic(
        bytes in proptest::collection::vec(any::<u8>(), 0..600),
    ) {
        let mut message = discover(&[]);
        message.truncate(240);
        message.extend_from_slice(&bytes);
        let _ = answer(&plain(), &message);
        let _ = answer(&plain(), &bytes);
    }
}
