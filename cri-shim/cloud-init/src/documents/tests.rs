use std::collections::BTreeMap;

use serde_json::json;

use super::*;
use crate::fat;
use crate::network::Network;
use crate::scripts::MountSource;

mod agent;
mod nics;
use nics::network;

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

#[test]
fn a_seed_is_the_same_after_its_way_through_a_file() {
    let mut seed = seed();
    seed.network = NetworkConfig::Version2(network());
    seed.mounts = vec![mount(of_disk(1), "/mnt")];
    seed.user_data = merged(&[("a", "b")], Some("c: d"), true);
    let text = serde_json::to_string(&seed).unwrap();
    assert_eq!(serde_json::from_str::<GuestSeed>(&text).unwrap(), seed);
}
