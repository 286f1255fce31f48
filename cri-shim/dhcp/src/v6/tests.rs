use dhcproto::Decodable as _;
use dhcproto::v6::{DhcpOption, DhcpOptions, IANA, Message, MessageType, OptionCode, Status};
use proptest::prelude::*;

use super::*;
use crate::config::tests::{CLIENT, SERVER, plain};

const CLIENT_ID: [u8; 10] = [0, 3, 0, 1, 2, 0, 0, 0, 0, 2];
const OWN: &str = "fd00::2";

fn message(kind: u8, options: &[(u16, &[u8])]) -> Vec<u8> {
    let mut bytes = vec![kind, 0xab, 0xcd, 0xef];
    for (code, value) in options {
        push_option(&mut bytes, *code, value);
    }
    bytes
}

fn association(id: u32, addresses: &[&str]) -> Vec<u8> {
    let mut value = id.to_be_bytes().to_vec();
    value.extend_from_slice(&[0; 8]);
    for address in addresses {
        push_address(&mut value, address.parse().unwrap(), 77);
    }
    value
}

fn ask(config: &Config, message: &[u8]) -> Message {
    let frame = answer(config, CLIENT.link_local(), message).unwrap();
    assert_eq!(frame[..6], CLIENT.0);
    Message::from_bytes(&frame[62..]).unwrap()
}

fn ids() -> (Vec<u8>, Vec<u8>) {
    (CLIENT_ID.to_vec(), server_id(SERVER))
}

fn addresses(options: &DhcpOptions) -> Vec<(String, u32)> {
    let of = |option: &DhcpOption| match option {
        DhcpOption::IAAddr(one) => Some((one.addr.to_string(), one.valid_life)),
        _ => None,
    };
    options.iter().filter_map(of).collect()
}

fn first(message: &Message) -> &IANA {
    match message.opts().get(OptionCode::IANA) {
        Some(DhcpOption::IANA(association)) => association,
        other => panic!("{other:?}"),
    }
}

fn status(options: &DhcpOptions) -> Option<Status> {
    match options.get(OptionCode::StatusCode) {
        Some(DhcpOption::StatusCode(status)) => Some(status.status),
        _ => None,
    }
}

#[test]
fn a_client_gets_its_addresses_in_four_messages_or_in_two() {
    let config = plain();
    let (client, server) = ids();
    let asked = [0, 23, 0, 24, 0, 82];
    let wanted = association(9, &[]);
    let solicit = [(1, &client[..]), (3, &wanted), (6, &asked)];
    let advertise = ask(&config, &message(1, &solicit));
    assert_eq!(advertise.msg_type(), MessageType::Advertise);
    assert_eq!(advertise.xid(), [0xab, 0xcd, 0xef]);
    assert_eq!(
        addresses(&first(&advertise).opts),
        [(OWN.to_owned(), 86_400)]
    );
    let selected = [(1, &client[..]), (2, &server), (3, &wanted), (6, &asked)];
    let reply = ask(&config, &message(3, &selected));
    assert_eq!(reply.msg_type(), MessageType::Reply);
    let given = first(&reply);
    assert_eq!((given.id, given.t1, given.t2), (9, 43_200, 64_800));
    assert_eq!(addresses(&given.opts), [(OWN.to_owned(), 86_400)]);
    let servers = DhcpOption::DomainNameServers(vec!["fd00::a".parse().unwrap()]);
    assert_eq!(
        reply.opts().get(OptionCode::DomainNameServers),
        Some(&servers)
    );
    match reply.opts().get(OptionCode::DomainSearchList) {
        Some(DhcpOption::DomainSearchList(names)) => {
            assert_eq!(names[1].to_string(), "svc.cluster.local.");
        }
        other => panic!("{other:?}"),
    }
    let fast = [(1, &client[..]), (3, &wanted), (14, &[])];
    let reply = ask(&config, &message(1, &fast));
    assert_eq!(reply.msg_type(), MessageType::Reply);
    assert_eq!(
        reply.opts().get(OptionCode::RapidCommit),
        Some(&DhcpOption::RapidCommit)
    );
    assert_eq!(reply.opts().get(OptionCode::DomainNameServers), None);
}

#[test]
fn foreign_addresses_end_and_own_ones_go_on() {
    let config = plain();
    let (client, server) = ids();
    let both = association(9, &["fd00::99", OWN]);
    let renew = message(5, &[(1, &client), (2, &server), (3, &both)]);
    let rebind = message(6, &[(1, &client), (3, &both)]);
    for request in [renew, rebind] {
        let reply = ask(&config, &request);
        let expected = [(OWN.to_owned(), 86_400), ("fd00::99".to_owned(), 0)];
        assert_eq!(addresses(&first(&reply).opts), expected);
    }
    for (address, expected) in [(OWN, Status::Success), ("fd00::99", Status::NotOnLink)] {
        let confirm = message(4, &[(1, &client), (3, &association(9, &[address]))]);
        assert_eq!(status(ask(&config, &confirm).opts()), Some(expected));
    }
    for kind in [8, 9] {
        let end = message(kind, &[(1, &client), (2, &server), (3, &both)]);
        assert_eq!(status(ask(&config, &end).opts()), Some(Status::Success));
    }
}

#[test]
fn only_one_set_of_addresses_is_given() {
    let config = plain();
    let (client, _) = ids();
    let (one, two) = (association(1, &[]), association(2, &[]));
    let temporary = 3_u32.to_be_bytes();
    let wanted = [
        (1, &client[..]),
        (4, &temporary),
        (25, &one),
        (3, &one),
        (3, &two),
    ];
    let advertise = ask(&config, &message(1, &wanted));
    let options: Vec<&DhcpOption> = advertise.opts().iter().collect();
    let of = |option: &&DhcpOption| match option {
        DhcpOption::IANA(one) => Some((one.id, addresses(&one.opts).len(), status(&one.opts))),
        DhcpOption::IATA(one) => Some((one.id, addresses(&one.opts).len(), status(&one.opts))),
        DhcpOption::IAPD(one) => Some((one.id, addresses(&one.opts).len(), status(&one.opts))),
        _ => None,
    };
    let mut found: Vec<_> = options.iter().filter_map(of).collect();
    found.sort_by_key(|(id, count, _)| (*id, *count));
    assert_eq!(
        found,
        [
            (1, 0, Some(Status::NoPrefixAvail)),
            (1, 1, None),
            (2, 0, Some(Status::NoAddrsAvail)),
            (3, 0, Some(Status::NoAddrsAvail)),
        ]
    );
}

#[test]
fn configuration_alone_takes_no_identity() {
    let reply = ask(&plain(), &message(11, &[(6, &[0, 23])]));
    assert_eq!(reply.msg_type(), MessageType::Reply);
    assert_eq!(reply.opts().get(OptionCode::ClientId), None);
    assert!(reply.opts().get(OptionCode::DomainNameServers).is_some());
}

#[test]
fn messages_against_the_rules_are_refused() {
    let config = plain();
    let (client, server) = ids();
    let refused = |message: Vec<u8>| answer(&config, CLIENT.link_local(), &message).unwrap_err();
    let wanted = association(1, &[]);
    let missing = Refusal::OptionMissing;
    assert_eq!(refused(message(1, &[(3, &wanted)])), missing(1));
    assert_eq!(refused(message(3, &[(1, &client)])), missing(2));
    let forbidden = Refusal::OptionForbidden;
    assert_eq!(
        refused(message(1, &[(1, &client), (2, &server)])),
        forbidden(2)
    );
    assert_eq!(refused(message(11, &[(3, &wanted)])), forbidden(3));
    let other = message(3, &[(1, &client), (2, &client)]);
    assert_eq!(refused(other), Refusal::OtherServer);
    assert_eq!(
        refused(message(1, &[(1, &client), (1, &client)])),
        Refusal::OptionTwice(1)
    );
    for kind in [0, 2, 7, 10, 12, 13, 255] {
        assert_eq!(refused(message(kind, &[])), Refusal::MessageType(kind));
    }
    for (code, value) in [
        (1, &[1, 2][..]),
        (1, &[0; 131]),
        (3, &[0; 11]),
        (4, &[0; 3]),
        (6, &[1]),
    ] {
        let length = value.len();
        let refusal = refused(message(1, &[(code, value)]));
        assert_eq!(refusal, Refusal::OptionLength { code, length });
    }
    let mut short = association(1, &[]);
    push_option(&mut short, 5, &[0; 23]);
    let length = Refusal::OptionLength {
        code: 5,
        length: 23,
    };
    assert_eq!(refused(message(1, &[(1, &client), (3, &short)])), length);
    let good = message(1, &[(1, &client), (3, &wanted)]);
    // Between two options there is a shorter message.
    let between = message(1, &[(1, &client)]).len();
    for length in (0..good.len()).filter(|length| *length != between) {
        let cut = answer(&config, CLIENT.link_local(), &good[..length]);
        assert!(cut.is_err(), "{length}");
    }
    let global: Ipv6Addr = "fd00::2".parse().unwrap();
    assert_eq!(answer(&config, global, &good), Err(Refusal::Source(global)));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn any_options_are_answered_with_what_another_implementation_reads(
        kind in 0_u8..14,
        options in proptest::collection::vec(
            (0_u16..30, proptest::collection::vec(any::<u8>(), 0..60)),
            0..8,
        ),
    ) {
        let (client, server) = ids();
        let mut all: Vec<(u16, &[u8])> = vec![(1, &client)];
        if matches!(kind, 3 | 5 | 8 | 9) {
            all.push((2, &server));
        }
        all.extend(options.iter().map(|(code, value)| (*code, value.as_slice())));
        if let Ok(frame) = answer(&plain(), CLIENT.link_local(), &message(kind, &all)) {
            prop_assert!(frame.len() <= 14 + 1280);
            prop_assert!(Message::from_bytes(&frame[62..]).is_ok());
        }
    }

    #[test]
    fn any_bytes_are_read_without_a_panic(
        bytes in proptest::collection::vec(any::<u8>(), 0..600),
    ) {
        let _ = answer(&plain(), CLIENT.link_local(), &bytes);
    }
}
