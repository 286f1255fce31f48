use std::collections::BTreeMap;

use serde_json::json;

use super::*;
use crate::fat;
use crate::network::{Dhcp, Network, NetworkNic, NetworkRoute};
use crate::scripts::MountSource;

const KEY: &str = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAone user@host";
const OTHER_KEY: &str = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAtwo user@host";

fn seed() -> GuestSeed {
    GuestSeed {
        instance_id: "web.shop".to_owned(),
        host_name: "web".to_owned(),
        ..GuestSeed::default()
    }
}

/// The files of a seed's volume.
fn files(seed: &GuestSeed) -> BTreeMap<String, String> {
    let volume = seed.volume().unwrap();
    let files = volume.files().map(|(path, content)| {
        let content = String::from_utf8(content.to_vec()).unwrap();
        (path.to_owned(), content)
    });
    files.collect()
}

fn document(seed: &GuestSeed, path: &str) -> Value {
    let files = files(seed);
    Node::parse(&files[path]).unwrap().to_json()
}

fn user_data(seed: &GuestSeed) -> Value {
    let text = &files(seed)["user-data"];
    assert!(text.starts_with("#cloud-config\n"), "{text}");
    Node::parse(text).unwrap().to_json()
}

fn error(seed: &GuestSeed) -> String {
    seed.volume().unwrap_err().to_string()
}

fn merged(source: &[(&str, &str)], inline: Option<&str>, overwrite: bool) -> UserData {
    let source = source.iter();
    UserData::Merged {
        source: source
            .map(|(key, text)| ((*key).to_owned(), (*text).to_owned()))
            .collect(),
        inline: inline.map(str::to_owned),
        overwrite,
    }
}

fn file(path: &str, content: &str) -> GuestFile {
    GuestFile::new(path, content.to_owned(), 0o600)
}

fn disk(path: &str) -> DeviceLink {
    DeviceLink {
        path: path.to_owned(),
        serial: "data".to_owned(),
    }
}

fn mount(source: MountSource, path: &str) -> GuestMount {
    GuestMount {
        source,
        path: path.to_owned(),
        read_only: false,
    }
}

fn of_disk(partition: u32) -> MountSource {
    let serial = "data".to_owned();
    MountSource::Disk { serial, partition }
}

fn share(tag: &str) -> MountSource {
    MountSource::Share {
        tag: tag.to_owned(),
    }
}

fn paths(config: &Value) -> Vec<&str> {
    let files = config["write_files"].as_array().unwrap();
    files
        .iter()
        .map(|file| file["path"].as_str().unwrap())
        .collect()
}

/// The content of a file of `write_files`.
fn written(config: &Value, path: &str) -> String {
    use base64::Engine as _;
    let files = config["write_files"].as_array().unwrap();
    let file = files.iter().find(|file| file["path"] == path).unwrap();
    let content = file["content"].as_str().unwrap();
    let content = base64::engine::general_purpose::STANDARD
        .decode(content)
        .unwrap();
    String::from_utf8(content).unwrap()
}

#[test]
fn a_plain_guest_gets_its_name_and_nothing_else() {
    let files = files(&seed());
    let names: Vec<&str> = files.keys().map(String::as_str).collect();
    assert_eq!(names, ["meta-data", "user-data"]);
    assert_eq!(files["user-data"], "#cloud-config\n");
    assert_eq!(
        document(&seed(), "meta-data"),
        json!({"instance-id": "web.shop", "local-hostname": "web"})
    );
}

#[test]
fn a_config_drive_has_openstacks_names() {
    let seed = GuestSeed {
        form: Form::ConfigDrive,
        ssh_keys: vec![KEY.to_owned()],
        network: NetworkConfig::Version2(Network::default()),
        ..seed()
    };
    let files = files(&seed);
    let names: Vec<&str> = files.keys().map(String::as_str).collect();
    assert_eq!(
        names,
        [
            "openstack/latest/meta_data.json",
            "openstack/latest/network_data.json",
            "openstack/latest/user_data",
        ]
    );
    let meta_data: Value = serde_json::from_str(&files[names[0]]).unwrap();
    assert_eq!(
        meta_data,
        json!({
            "instance-id": "web.shop",
            "local-hostname": "web",
            "uuid": "web.shop",
            "hostname": "web",
            "public-keys": [KEY],
            "public_keys": {"key-0": KEY},
        })
    );
}

#[test]
fn the_four_images_have_their_labels_and_files() {
    for (form, label) in [(Form::NoCloud, "CIDATA"), (Form::ConfigDrive, "config-2")] {
        for network in [
            NetworkConfig::None,
            NetworkConfig::Version1(Network::default()),
        ] {
            // A root that stays has its network already.
            let expected = 2 + usize::from(network != NetworkConfig::None);
            let seed = GuestSeed {
                form,
                network,
                ..seed()
            };
            let mut image = Vec::new();
            seed.volume().unwrap().write(&mut image).unwrap();
            let (found, files) = fat::read::read(&image).unwrap();
            assert_eq!((found.as_str(), files.len()), (label, expected));
        }
    }
}

#[test]
fn keys_are_in_the_meta_data_and_the_users_own_win() {
    let mut seed = seed();
    seed.ssh_keys = vec![KEY.to_owned(), OTHER_KEY.to_owned()];
    let meta_data = document(&seed, "meta-data");
    assert_eq!(meta_data["public-keys"], json!([KEY, OTHER_KEY]));
    seed.meta_data = Some("local-hostname: other\npublic-keys: []\nx: {y: 0644}".to_owned());
    let meta_data = document(&seed, "meta-data");
    assert_eq!(meta_data["local-hostname"], "other");
    assert_eq!(meta_data["public-keys"], json!([]));
    assert!(files(&seed)["meta-data"].contains("y: 0644"));
}

#[test]
fn user_data_is_merged_or_replaced() {
    let source = [("users", "[{name: a}]"), ("package_update", "yes")];
    let inline = "users: [{name: b}]\nntp: {enabled: true}";
    let mut seed = seed();
    seed.user_data = merged(&source, None, false);
    assert_eq!(
        user_data(&seed),
        json!({"users": [{"name": "a"}], "package_update": "yes"})
    );
    assert!(files(&seed)["user-data"].contains("package_update\": yes"));
    seed.user_data = merged(&source, Some(inline), false);
    let users = json!([{"name": "a"}, {"name": "b"}]);
    assert_eq!(user_data(&seed)["users"], users);
    assert_eq!(user_data(&seed)["ntp"], json!({"enabled": true}));
    seed.user_data = merged(&source, Some(inline), true);
    assert_eq!(
        user_data(&seed),
        json!({"users": [{"name": "b"}], "ntp": {"enabled": true}})
    );
}

#[test]
fn the_environment_is_a_file_of_its_own() {
    let mut seed = seed();
    seed.environment = vec![
        ("B".to_owned(), "two = 2".to_owned()),
        ("A".to_owned(), String::new()),
    ];
    let config = user_data(&seed);
    assert_eq!(written(&config, ENVIRONMENT), "B=two = 2\nA=\n");
    assert_eq!(config["write_files"][0]["permissions"], "0644");
    seed.user_data = merged(&[("runcmd", "[[ls]]")], None, false);
    let config = user_data(&seed);
    assert_eq!(config["runcmd"], json!([["ls"]]));
    assert_eq!(paths(&config), [ENVIRONMENT]);
}

#[test]
fn files_are_written_in_their_order() {
    let mut seed = seed();
    seed.files = vec![
        file("/secret", "s"),
        file("/config", "c"),
        file("/one", "1"),
    ];
    seed.environment = vec![("A".to_owned(), "1".to_owned())];
    seed.devices = vec![disk("/dev/data")];
    seed.mounts = vec![mount(of_disk(1), "/mnt")];
    seed.user_data = merged(&[("write_files", "[{path: /own}]")], None, false);
    let config = user_data(&seed);
    assert_eq!(
        paths(&config),
        [
            "/own",
            "/secret",
            "/config",
            "/one",
            "/etc/cloud/symlink-devs.sh",
            "/var/lib/cloud/scripts/per-boot/50-podvisor-symlink-devs",
            "/etc/cloud/mount-volumes.sh",
            "/var/lib/cloud/scripts/per-boot/51-podvisor-mount-volumes",
            ENVIRONMENT,
        ]
    );
    assert_eq!(written(&config, "/secret"), "s");
    assert_eq!(config["write_files"][1]["permissions"], "0600");
    assert_eq!(config["write_files"][1]["encoding"], "b64");
}

#[test]
fn disks_and_shares_are_mounted() {
    let mut seed = seed();
    seed.mounts = vec![
        mount(of_disk(1), "/mnt/one"),
        mount(of_disk(0), "/mnt/whole"),
        GuestMount {
            read_only: true,
            ..mount(share("data-0"), "/srv/it's")
        },
    ];
    let config = user_data(&seed);
    assert_eq!(
        config["mounts"],
        json!([
            [
                "/dev/disk/by-id/virtio-data-part1",
                "/mnt/one",
                "auto",
                "defaults,nofail",
                "0",
                "0"
            ],
            [
                "/dev/disk/by-id/virtio-data",
                "/mnt/whole",
                "auto",
                "defaults,nofail",
                "0",
                "0"
            ],
            [
                "data-0",
                "/srv/it's",
                "virtiofs",
                "defaults,nofail,ro",
                "0",
                "0"
            ],
        ])
    );
    let script = written(&config, "/etc/cloud/mount-volumes.sh");
    assert!(script.starts_with("#!/bin/sh\n"), "{script}");
    let line = "mountpoint -q '/srv/it'\\''s' || { mkdir -p '/srv/it'\\''s' && \
                mount -t virtiofs -o ro 'data-0' '/srv/it'\\''s'; }\n";
    assert!(script.ends_with(line), "{script}");
}

#[test]
fn a_users_mount_of_a_disk_is_one_of_the_real_device() {
    let mut seed = seed();
    seed.devices = vec![disk("/dev/data")];
    seed.mounts = vec![mount(share("t"), "/t")];
    let own = "mounts: [[/dev/data, /mnt], [/dev/sr0, /cd], /odd, []]";
    seed.user_data = UserData::Document(format!("#cloud-config\n{own}\n").into_bytes());
    let config = user_data(&seed);
    assert_eq!(
        config["mounts"],
        json!([
            ["/dev/disk/by-id/virtio-data", "/mnt"],
            ["/dev/sr0", "/cd"],
            "/odd",
            [],
            ["t", "/t", "virtiofs", "defaults,nofail", "0", "0"],
        ])
    );
    let script = written(&config, "/etc/cloud/symlink-devs.sh");
    let line = "mkdir -p \"$(dirname '/dev/data')\" && \
                ln -sfn '/dev/disk/by-id/virtio-data' '/dev/data'\n";
    assert!(script.ends_with(line), "{script}");
}

#[test]
fn a_script_is_verbatim_but_for_the_commands_that_it_asks_for() {
    let mut seed = seed();
    let plain = "#!/bin/sh\necho \"${x:-@}\"  \n";
    seed.user_data = UserData::Script(plain.to_owned());
    assert_eq!(files(&seed)["user-data"], plain);
    seed.user_data = UserData::Script("#!/bin/sh\n@virtlet-mount-script@\ndone\n".to_owned());
    seed.mounts = vec![mount(of_disk(1), "/mnt")];
    let text = &files(&seed)["user-data"];
    let mounts = "#!/bin/sh\nmountpoint -q '/mnt' || { mkdir -p '/mnt' && mount -t auto \
                  '/dev/disk/by-id/virtio-data-part1' '/mnt'; }\ndone\n";
    assert_eq!(text, mounts);
    seed.devices = vec![disk("/dev/data")];
    let text = &files(&seed)["user-data"];
    let (link, mount) = (text.find("ln -sfn"), text.find("mountpoint"));
    assert!(link.is_some() && link < mount, "{text}");
}

#[test]
fn what_cannot_be_put_into_a_script_stands_beside_it() {
    let mut seed = seed();
    seed.files = vec![file("/secret", "s")];
    for user_data in [
        UserData::Script("#!/bin/sh\n".to_owned()),
        UserData::Document(b"## template: jinja\n#cloud-config\n".to_vec()),
        UserData::Document(b"#include\nhttp://x/\n".to_vec()),
        UserData::Document(b"Content-Type: multipart/mixed; boundary=x\n\n--x--\n".to_vec()),
    ] {
        seed.user_data = user_data;
        seed.form = Form::NoCloud;
        let own = files(&seed);
        assert!(!own["user-data"].contains("write_files"));
        assert!(own["vendor-data"].starts_with("#cloud-config\n"));
        let vendor = Node::parse(&own["vendor-data"]).unwrap().to_json();
        assert_eq!(paths(&vendor), ["/secret"]);
        seed.form = Form::ConfigDrive;
        let drive = files(&seed);
        let json: Value =
            serde_json::from_str(&drive["openstack/latest/vendor_data.json"]).unwrap();
        assert_eq!(json["cloud-init"], own["vendor-data"].as_str());
        assert_eq!(drive["openstack/latest/user_data"], own["user-data"]);
    }
}

#[test]
fn a_document_to_which_nothing_is_added_stays_as_it_was() {
    let text = "#cloud-config \n# a comment\nusers:\n  - default # one more\n";
    let mut seed = seed();
    seed.user_data = UserData::Document(text.as_bytes().to_vec());
    assert_eq!(files(&seed)["user-data"], text);
    seed.files = vec![file("/a", "")];
    assert_eq!(user_data(&seed)["users"], json!(["default"]));
    let gzip = vec![0x1f, 0x8b, 8, 0];
    seed.user_data = UserData::Document(gzip.clone());
    let volume = seed.volume().unwrap();
    assert!(
        volume
            .files()
            .any(|(path, bytes)| path == "user-data" && bytes == gzip)
    );
}

#[test]
fn all_that_is_wrong_is_told_at_once() {
    let mut seed = seed();
    seed.instance_id = String::new();
    seed.host_name = "a\nb".to_owned();
    seed.ssh_keys = vec!["none".to_owned(), format!("{KEY}\n{KEY}")];
    seed.meta_data = Some("- list".to_owned());
    seed.user_data = merged(&[("users", "a: [")], Some("x: 1\nx: 2"), false);
    seed.network = NetworkConfig::Document("[1]".to_owned());
    seed.files = vec![
        file("relative", ""),
        GuestFile::new("/m", String::new(), 0o10000),
    ];
    seed.environment = vec![("A".to_owned(), "1\n2".to_owned())];
    seed.devices = vec![DeviceLink {
        serial: "much-too-long-a-serial".to_owned(),
        ..disk("/x/../y")
    }];
    seed.mounts = vec![mount(share("a b"), "/t")];
    let text = error(&seed);
    for part in [
        "invalid instance \"\"",
        "invalid host name \"a\\nb\"",
        "\"none\" is not one",
        "line break",
        "the meta-data is not a mapping",
        "the key \"users\" of the user-data: line",
        "the user-data: line 2: the key \"x\" is there twice",
        "the network's document is not a mapping",
        "\"relative\"",
        "10000",
        "\"A\" does not fit",
        "much-too-long-a-serial",
        "\"/x/../y\"",
        "\"a b\"",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn user_data_of_no_kind_is_refused_with_what_is_missing() {
    let mut seed = seed();
    for (text, part) in [
        (&b"users: [a]\n"[..], "write `#cloud-config` before"),
        (b"#cloud-config\n- a\n", "not a mapping"),
        (b"#cloud-config\na: [\n", "line"),
        (b"#cloud-config\na: \xff\n", "not UTF-8"),
        (b"#cloud-config\na: &a [*a]\n", "refers to itself"),
    ] {
        seed.user_data = UserData::Document(text.to_vec());
        let text = error(&seed);
        assert!(text.contains(part), "{part}: {text}");
    }
}

fn route(to: &str, length: u8, gateway: Option<&str>) -> NetworkRoute {
    NetworkRoute {
        destination: (to.parse().unwrap(), length),
        gateway: gateway.map(|gateway| gateway.parse().unwrap()),
        metric: None,
    }
}

/// Two cards with addresses of both families, and one without any.
fn network() -> Network {
    let nic = |number: u8, addresses: &[(&str, u8)], routes: Vec<NetworkRoute>| NetworkNic {
        name: format!("eth{number}"),
        mac: [2, 0, 0, 0, 0, number],
        mtu: (number == 0).then_some(1450),
        addresses: addresses
            .iter()
            .map(|(one, length)| (one.parse().unwrap(), *length))
            .collect(),
        routes,
        dhcp: Dhcp::No,
    };
    Network {
        nics: vec![
            nic(
                0,
                &[("10.1.0.2", 16), ("fd00::2", 64)],
                vec![
                    route("0.0.0.0", 0, Some("10.1.0.1")),
                    route("10.96.0.0", 12, Some("10.1.0.3")),
                    route("::", 0, Some("fd00::1")),
                ],
            ),
            nic(
                1,
                &[("192.168.7.2", 24)],
                vec![
                    route("0.0.0.0", 0, Some("192.168.7.1")),
                    route("172.16.0.0", 12, None),
                ],
            ),
            nic(2, &[], vec![]),
        ],
        name_servers: vec!["10.96.0.10".parse().unwrap(), "fd00::a".parse().unwrap()],
        search: vec!["svc.cluster.local".to_owned()],
    }
}

#[test]
fn version_1_names_every_card_and_one_default_route() {
    let seed = GuestSeed {
        network: NetworkConfig::Version1(network()),
        ..seed()
    };
    assert_eq!(
        document(&seed, "network-config"),
        json!({
            "version": 1,
            "config": [
                {
                    "type": "physical", "name": "eth0", "mac_address": "02:00:00:00:00:00",
                    "mtu": 1450,
                    "subnets": [
                        {
                            "type": "static", "address": "10.1.0.2/16", "gateway": "10.1.0.1",
                            "routes": [{
                                "network": "10.96.0.0", "netmask": "255.240.0.0",
                                "gateway": "10.1.0.3",
                            }],
                        },
                        {"type": "static6", "address": "fd00::2/64", "gateway": "fd00::1"},
                    ],
                },
                {
                    "type": "physical", "name": "eth1", "mac_address": "02:00:00:00:00:01",
                    "subnets": [{
                        "type": "static", "address": "192.168.7.2/24",
                        "routes": [{
                            "network": "172.16.0.0", "netmask": "255.240.0.0",
                            "gateway": "0.0.0.0",
                        }],
                    }],
                },
                {
                    "type": "physical", "name": "eth2", "mac_address": "02:00:00:00:00:02",
                    "subnets": [{"type": "dhcp4"}],
                },
                {
                    "type": "nameserver", "address": ["10.96.0.10", "fd00::a"],
                    "search": ["svc.cluster.local"],
                },
            ],
        })
    );
}

#[test]
fn version_2_finds_cards_by_their_addresses() {
    let seed = GuestSeed {
        network: NetworkConfig::Version2(network()),
        ..seed()
    };
    let servers = json!({
        "addresses": ["10.96.0.10", "fd00::a"], "search": ["svc.cluster.local"],
    });
    assert_eq!(
        document(&seed, "network-config"),
        json!({
            "version": 2,
            "ethernets": {
                "eth0": {
                    "match": {"macaddress": "02:00:00:00:00:00"},
                    "mtu": 1450, "dhcp4": false, "dhcp6": false,
                    "addresses": ["10.1.0.2/16", "fd00::2/64"],
                    "routes": [
                        {"to": "0.0.0.0/0", "via": "10.1.0.1"},
                        {"to": "10.96.0.0/12", "via": "10.1.0.3"},
                        {"to": "::/0", "via": "fd00::1"},
                    ],
                    "nameservers": servers,
                },
                "eth1": {
                    "match": {"macaddress": "02:00:00:00:00:01"},
                    "dhcp4": false, "dhcp6": false,
                    "addresses": ["192.168.7.2/24"],
                    "routes": [{"to": "172.16.0.0/12", "scope": "link"}],
                    "nameservers": servers,
                },
                "eth2": {
                    "match": {"macaddress": "02:00:00:00:00:02"},
                    "dhcp4": true, "dhcp6": false,
                    "nameservers": servers,
                },
            },
        })
    );
}

#[test]
fn a_gateway_outside_the_network_is_on_the_link() {
    let mut network = network();
    network.nics.truncate(1);
    network.nics[0].addresses = vec![
        ("10.244.7.3".parse().unwrap(), 32),
        ("fd00::2".parse().unwrap(), 128),
    ];
    network.nics[0].routes = vec![
        route("0.0.0.0", 0, Some("169.254.1.1")),
        route("::", 0, Some("fe80::1")),
    ];
    let seed = GuestSeed {
        network: NetworkConfig::Version2(network),
        ..seed()
    };
    assert_eq!(
        document(&seed, "network-config")["ethernets"]["eth0"]["routes"],
        json!([
            {"to": "0.0.0.0/0", "via": "169.254.1.1", "on-link": true},
            {"to": "::/0", "via": "fe80::1"},
        ])
    );
}

#[test]
fn openstacks_form_says_the_same() {
    let seed = GuestSeed {
        form: Form::ConfigDrive,
        network: NetworkConfig::Version1(network()),
        ..seed()
    };
    let data = document(&seed, "openstack/latest/network_data.json");
    assert_eq!(
        data["links"][0],
        json!({
            "id": "link-0", "type": "phy", "ethernet_mac_address": "02:00:00:00:00:00",
            "mtu": 1450,
        })
    );
    assert_eq!(
        data["networks"],
        json!([
            {
                "id": "net-0", "type": "ipv4", "link": "link-0", "ip_address": "10.1.0.2",
                "netmask": "255.255.0.0",
                "routes": [
                    {"network": "0.0.0.0", "netmask": "0.0.0.0", "gateway": "10.1.0.1"},
                    {"network": "10.96.0.0", "netmask": "255.240.0.0", "gateway": "10.1.0.3"},
                ],
            },
            {
                "id": "net-1", "type": "ipv6", "link": "link-0", "ip_address": "fd00::2",
                "netmask": "ffff:ffff:ffff:ffff::",
                "routes": [{"network": "::", "netmask": "::", "gateway": "fd00::1"}],
            },
            {
                "id": "net-2", "type": "ipv4", "link": "link-1", "ip_address": "192.168.7.2",
                "netmask": "255.255.255.0",
                "routes": [
                    {"network": "172.16.0.0", "netmask": "255.240.0.0", "gateway": "0.0.0.0"},
                ],
            },
            {"id": "net-3", "type": "ipv4_dhcp", "link": "link-2"},
        ])
    );
    assert_eq!(
        data["services"],
        json!([
            {"type": "dns", "address": "10.96.0.10"},
            {"type": "dns", "address": "fd00::a"},
        ])
    );
}

#[test]
fn the_users_own_network_is_taken_as_it_is() {
    let mut seed = seed();
    let text = "version: 2 # mine\n";
    seed.network = NetworkConfig::Document(text.to_owned());
    assert_eq!(files(&seed)["network-config"], text);
    seed.form = Form::ConfigDrive;
    assert!(error(&seed).contains("not JSON"));
    seed.network = NetworkConfig::Document("{\"links\": []}".to_owned());
    assert_eq!(
        files(&seed)["openstack/latest/network_data.json"],
        "{\"links\": []}"
    );
}

#[test]
fn a_seed_is_the_same_after_its_way_through_a_file() {
    let mut seed = seed();
    seed.network = NetworkConfig::Version2(network());
    seed.mounts = vec![mount(of_disk(1), "/mnt")];
    seed.user_data = merged(&[("a", "b")], Some("c: d"), true);
    let text = serde_json::to_string(&seed).unwrap();
    assert_eq!(serde_json::from_str::<GuestSeed>(&text).unwrap(), seed);
}
