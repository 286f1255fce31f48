use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use podvisor_cri_messages::{CdiDevice, ContainerConfig, Device, KeyValue};
use proptest::prelude::*;
use rustix::fs::{CWD, FileType, Mode, StatVfsMountFlags, makedev, mkfifoat, mknodat};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::document::{Document, Format};
use super::names::{is_kind, is_qualified};
use super::{CdiError, WithDevices, add_devices};
use crate::cri::error::CriError;

/// The directories of a node.
struct Node {
    dir: TempDir,
}

impl Node {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for name in ["etc", "run"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        Self { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, document: &Value) {
        fs::write(self.path(name), document.to_string()).unwrap();
    }

    fn add(&self, config: ContainerConfig) -> Result<WithDevices, CdiError> {
        add_devices(&["etc", "run", "none"].map(|name| self.path(name)), config)
    }

    /// Returns why a container with this device is refused, as its kubelet sees it.
    fn refusal(&self, device: &str) -> String {
        let refused = self.add(asking(&[device])).unwrap_err();
        tonic::Status::from(CriError::from(refused))
            .message()
            .to_owned()
    }
}

/// A document with one device `vendor.com/net=one`.
fn document(edits: Value) -> Value {
    json!({
        "cdiVersion": "0.3.0", "kind": "vendor.com/net",
        "devices": [{ "name": "one", "containerEdits": edits }],
    })
}

fn variable(value: &str) -> Value {
    json!({ "env": [format!("V={value}")] })
}

/// A container that names devices by the field.
fn asking(devices: &[&str]) -> ContainerConfig {
    let devices = devices.iter().map(|&name| CdiDevice {
        name: name.to_owned(),
    });
    ContainerConfig {
        cdi_devices: devices.collect(),
        ..ContainerConfig::default()
    }
}

fn variables(config: &ContainerConfig) -> Vec<(&str, &str)> {
    let variables = config.envs.iter();
    let shown = variables.map(|one| (&*one.key, str::from_utf8(&one.value).unwrap()));
    shown.collect()
}

#[test]
fn names_are_qualified_by_vendor_and_class() {
    for name in ["vendor.com/gpu=0", "a/b=c", "v-1/c_2.x=n:1-2_3.4"] {
        assert!(is_qualified(name), "{name}");
    }
    for name in [
        "",
        "0",
        "gpu=0",
        "/gpu=0",
        "vendor.com/=0",
        "vendor.com/gpu=",
        "1vendor/gpu=0",
        "vendor.com/gpu-=0",
        "vendor.com/gpu=0:",
        "vendor.com/a/b=0",
        "vendor.com/gpu=ä",
        "vendor.com/gpu=a b",
        "vendor.com/g:pu=0",
    ] {
        assert!(!is_qualified(name), "{name}");
    }
    assert!(!is_kind("vendor.com"));
}

#[test]
fn a_document_is_json_or_yaml() {
    let yaml = "\
cdiVersion: 0.6.0
kind: vendor.com/net
annotations: {a: b}
containerEdits:
  additionalGids: [7]
devices:
# A comment.
- name: one
  containerEdits:
    env:
    - V=1 # another
    deviceNodes:
    - {path: /dev/x, hostPath: /dev/fuse, fileMode: 0660, major: 10}
    hooks: null
";
    let read = Document::parse(yaml.as_bytes(), Format::Yaml).unwrap();
    let edits = &read.devices[0].container_edits;
    assert_eq!(edits.env.as_deref().unwrap(), ["V=1"]);
    let node = &edits.device_nodes.as_ref().unwrap()[0];
    assert_eq!((node.file_mode, node.major), (Some(0o660), Some(10)));
    let edits = read.container_edits.unwrap();
    assert_eq!(edits.additional_gids.unwrap(), [7]);
    let json = document(variable("1")).to_string();
    // JSON is YAML, too.
    for format in [Format::Json, Format::Yaml] {
        Document::parse(json.as_bytes(), format).unwrap();
    }
}

#[test]
fn a_document_that_the_specification_does_not_allow_is_refused() {
    let with = |key: &str, value: Value| {
        let mut document = document(variable("1"));
        document[key] = value;
        document
    };
    let device = |name: &str| json!({ "name": name, "containerEdits": variable("1") });
    for (document, reason) in [
        (with("cdiVersion", json!("0.9.0")), "cdiVersion"),
        (with("cdiVersion", json!(1)), "JSON"),
        (with("kind", json!("net")), "VENDOR/CLASS"),
        (with("devices", json!([])), "no devices"),
        (with("devices", json!([device("a=b")])), "\"a=b\""),
        (
            with("devices", json!([device("a"), device("a")])),
            "two devices",
        ),
        (with("device", json!([])), "JSON"),
        (with("containerEdits", variable("\0")), "NUL"),
        (document(json!({})), "no containerEdits"),
        (document(json!({ "env": [] })), "no containerEdits"),
        (document(json!({ "env": ["V"] })), "NAME=VALUE"),
        (document(json!({ "env": ["=1"] })), "NAME=VALUE"),
        (document(json!({ "environment": ["V=1"] })), "JSON"),
        (document(json!({ "additionalGids": [-1] })), "JSON"),
    ] {
        let text = document.to_string();
        let refused = Document::parse(text.as_bytes(), Format::Json).unwrap_err();
        assert!(refused.to_string().contains(reason), "{text}: {refused}");
        Document::parse(text.as_bytes(), Format::Yaml).unwrap_err();
    }
    let twice = "cdiVersion: 0.3.0\nkind: a/b\nkind: a/c\ndevices: []\n";
    Document::parse(twice.as_bytes(), Format::Yaml).unwrap_err();
}

#[test]
fn a_container_gets_what_its_devices_say_each_once() {
    let node = Node::new();
    let lib = node.path("lib");
    fs::create_dir(&lib).unwrap();
    let at = "/lib/vendor";
    let mount = |list: &[&str]| json!({ "hostPath": lib, "containerPath": at, "options": list });
    let document = json!({
        "cdiVersion": "0.7.0", "kind": "vendor.com/net",
        "devices": [
            { "name": "one", "containerEdits": {
                "env": ["V=1", "ONE=a=b"], "additionalGids": [0, 7, 7],
                "mounts": [mount(&["rw"])],
                "deviceNodes": [{ "path": "/dev/mine", "hostPath": "/dev/fuse", "type": "c" }],
            } },
            { "name": "two", "containerEdits": {
                "env": ["V=2"], "mounts": [mount(&["ro", "nosuid", "rbind", "rslave"])],
                "deviceNodes": [
                    { "path": "/dev/mine", "hostPath": "/dev/fuse", "permissions": "rw" },
                    { "path": "/dev/null" },
                ],
            } },
            { "name": "three", "containerEdits": variable("3") },
        ],
        "containerEdits": { "env": ["ALL=yes"] },
    });
    node.write("etc/vendor.json", &document);
    let mut config = asking(&["vendor.com/net=one"]);
    config.envs.push(KeyValue::new("V", "0"));
    config.devices.push(Device {
        container_path: "/dev/mine".to_owned(),
        host_path: "/dev/zero".to_owned(),
        permissions: "r".to_owned(),
    });
    let names = "vendor.com/net=one,vendor.com/net=two";
    for (key, value) in [
        ("cdi.k8s.io/net", names),
        ("other/net", "vendor.com/net=three"),
    ] {
        config.annotations.insert(key.to_owned(), value.to_owned());
    }
    let WithDevices {
        config,
        mount_flags,
    } = node.add(config).unwrap();
    let expected = [
        ("V", "0"),
        ("ALL", "yes"),
        ("V", "1"),
        ("ONE", "a=b"),
        ("V", "2"),
    ];
    assert_eq!(variables(&config), expected);
    let security = config.linux.unwrap().security_context.unwrap();
    assert_eq!(security.supplemental_groups, [7]);
    let devices = config.devices.iter();
    let devices: Vec<_> = devices
        .map(|one| (&*one.container_path, &*one.host_path, &*one.permissions))
        .collect();
    let expected = [
        ("/dev/mine", "/dev/fuse", "rw"),
        ("/dev/null", "/dev/null", "rwm"),
    ];
    assert_eq!(devices, expected);
    assert_eq!(config.mounts.len(), 1);
    let mount = &config.mounts[0];
    assert_eq!(mount.container_path, "/lib/vendor");
    assert_eq!(mount.host_path, lib.to_str().unwrap());
    assert!(mount.readonly && mount.propagation == 1);
    assert_eq!(mount_flags, [StatVfsMountFlags::NOSUID]);
}

#[test]
fn a_later_directory_goes_first_and_files_of_one_must_not_contradict() {
    let node = Node::new();
    let name = "vendor.com/net=one";
    let value = |node: &Node| {
        let added = node.add(asking(&[name])).unwrap();
        added.config.envs[0].text()
    };
    node.write("etc/a.json", &document(variable("etc")));
    assert_eq!(value(&node), "etc");
    node.write("etc/b.json", &document(variable("etc, too")));
    let refused = node.refusal(name);
    let reason = "CDI device injection failed: unresolvable CDI devices vendor.com/net=one; ";
    assert!(refused.starts_with(reason), "{refused}");
    for file in ["etc/a.json", "etc/b.json"] {
        assert!(
            refused.contains(node.path(file).to_str().unwrap()),
            "{refused}"
        );
    }
    node.write("run/a.json", &document(variable("run")));
    assert_eq!(value(&node), "run");
}

#[test]
fn a_file_that_cannot_be_used_disturbs_no_other() {
    let node = Node::new();
    node.write("run/good.json", &document(variable("good")));
    let other = |name: &str| {
        let mut document = document(variable(name));
        document["kind"] = json!("vendor.com/other");
        document
    };
    fs::write(node.path("run/bad.json"), "{").unwrap();
    fs::write(node.path("run/bad.yaml"), "a: [\n").unwrap();
    mkfifoat(CWD, node.path("run/fifo.json"), Mode::RUSR).unwrap();
    fs::create_dir(node.path("run/directory.json")).unwrap();
    node.write("run/backup.json.bak", &other("backup"));
    let mut large = other("large").to_string();
    large.extend(std::iter::repeat_n(' ', 1 << 20));
    fs::write(node.path("run/large.json"), large).unwrap();
    node.add(asking(&["vendor.com/net=one"])).unwrap();
    let refused = node.refusal("vendor.com/other=one");
    for part in [
        "unresolvable CDI devices vendor.com/other=one: no specification in ",
        "bad.json is not used: it is not the JSON",
        "bad.yaml is not used: it is not the YAML",
        "fifo.json is not used: it is not a file",
    ] {
        assert!(refused.contains(part), "{part}: {refused}");
    }
    for name in ["bad.json", "bad.yaml", "fifo.json"] {
        fs::remove_file(node.path(&format!("run/{name}"))).unwrap();
    }
    let refused = node.refusal("vendor.com/other=one");
    let part = "large.json is not used: it has more than 1048576 bytes";
    assert!(refused.contains(part), "{refused}");
}

#[test]
fn too_many_files_are_an_error() {
    let node = Node::new();
    for number in 0..=super::error::MAX_FILES {
        fs::write(node.path(&format!("run/{number}.json")), "").unwrap();
    }
    let refused = node.refusal("vendor.com/net=one");
    assert!(refused.contains("more than 4096"), "{refused}");
}

#[test]
fn what_no_guest_can_have_is_refused_with_file_device_and_field() {
    let node = Node::new();
    let dir = node.dir.path();
    let mount = |path: &str, kind: &str, option: &str| {
        json!({ "mounts": [
            { "hostPath": dir, "containerPath": path, "type": kind, "options": [option] },
        ] })
    };
    let device = |key: &str, value: Value| {
        let mut device = json!({ "path": "/dev/null" });
        device[key] = value;
        json!({ "deviceNodes": [{ "path": "/dev/zero" }, device] })
    };
    let hook = json!([{ "hookName": "createRuntime", "path": "/bin/true" }]);
    let missing = json!({ "mounts": [{ "hostPath": "/no/such", "containerPath": "/x" }] });
    for (edits, field) in [
        (json!({ "hooks": hook }), "hooks is not supported"),
        (
            json!({ "netDevices": [{ "name": "a" }] }),
            "netDevices is not supported",
        ),
        (json!({ "intelRdt": {} }), "intelRdt is not supported"),
        (
            mount("/x", "tmpfs", "ro"),
            "mounts[0].type is not supported: \"tmpfs\"",
        ),
        (
            mount("/x", "bind", "noatime"),
            "mounts[0].options is not supported: \"noatime\"",
        ),
        (
            mount("/x", "none", "rshared"),
            "mounts[0]: mounts.propagation (Bidirectional)",
        ),
        (
            mount("/dev/null", "", "ro"),
            "mounts[0]: mounts.container_path (/dev)",
        ),
        (missing, "mounts[0].hostPath: cannot look at /no/such"),
        (
            device("hostPath", json!("/dev/ptmx")),
            "deviceNodes[1] is not supported",
        ),
        (
            device("hostPath", json!("/no/such")),
            "deviceNodes[1].hostPath: cannot look at",
        ),
        (
            device("hostPath", json!("null")),
            "deviceNodes[1]: invalid config.devices.host_path",
        ),
        (
            device("fileMode", json!(438)),
            "deviceNodes[1].fileMode is not supported",
        ),
        (
            device("uid", json!(0)),
            "deviceNodes[1].uid is not supported",
        ),
        (
            device("type", json!("b")),
            "deviceNodes[1].type is not supported",
        ),
        (
            device("permissions", json!("none")),
            "deviceNodes[1].permissions is not supported",
        ),
        (
            device("permissions", json!("x")),
            "deviceNodes[1]: invalid config.devices.permissions",
        ),
    ] {
        node.write("run/vendor.json", &document(edits));
        let refused = node.refusal("vendor.com/net=one");
        let file = node.path("run/vendor.json");
        let begin = format!(
            "CDI device injection failed: {}, CDI device vendor.com/net=one: \
             containerEdits.{field}",
            file.display()
        );
        assert!(refused.starts_with(&begin), "{begin}: {refused}");
    }
    let mut all = document(variable("1"));
    all["containerEdits"] = json!({ "hooks": [{}] });
    node.write("run/vendor.json", &all);
    let refused = node.refusal("vendor.com/net=one");
    assert!(
        refused.contains("for all of its CDI devices: containerEdits.hooks"),
        "{refused}"
    );
}

#[test]
fn block_devices_of_the_node_are_given_by_their_numbers() {
    let node = Node::new();
    let path = node.path("disk");
    let number = makedev(7, 200);
    mknodat(CWD, &path, FileType::BlockDevice, Mode::RUSR, number).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().rdev(), number);
    let with = |minor: i64| {
        let device = json!({
            "path": "/dev/vendor", "hostPath": path, "type": "b", "major": 7, "minor": minor,
        });
        node.write(
            "run/vendor.json",
            &document(json!({ "deviceNodes": [device] })),
        );
        node.add(asking(&["vendor.com/net=one"]))
    };
    let added = with(200).unwrap().config;
    assert_eq!(added.devices[0].container_path, "/dev/vendor");
    assert_eq!(added.devices[0].host_path, path.to_str().unwrap());
    let refused = with(201).unwrap_err().to_string();
    assert!(refused.contains("is the device 7:200 now"), "{refused}");
}

#[test]
fn names_that_are_none_are_refused() {
    let node = Node::new();
    let mut config = ContainerConfig::default();
    let key = "cdi.k8s.io/net".to_owned();
    let names = "vendor.com/net=one, vendor.com/net=two".to_owned();
    config.annotations.insert(key, names);
    let refused = node.add(config).unwrap_err().to_string();
    assert!(
        refused.contains("invalid CDI device name \" vendor.com/net=two\""),
        "{refused}"
    );
    let refused = node.refusal("two");
    assert!(
        refused.contains("unresolvable CDI devices two: "),
        "{refused}"
    );
    let names: Vec<String> = (0..257).map(|number| format!("v/c={number}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let refused = node.add(asking(&names)).unwrap_err().to_string();
    assert!(refused.contains("more than 256"), "{refused}");
}

proptest! {
    #[test]
    fn any_bytes_are_read_without_panic(bytes: Vec<u8>) {
        for format in [Format::Json, Format::Yaml] {
            let _ = Document::parse(&bytes, format);
        }
    }

    #[test]
    fn a_document_with_a_change_is_read_or_refused(
        position: usize,
        text in "[\\[\\]{}:,&*!|>'\"%@`#a-z0-9 \n\t-]{0,6}",
        removed in 0..6usize,
    ) {
        let yaml = "\
cdiVersion: \"0.6.0\"
kind: vendor.com/net
devices:
  - name: one
    containerEdits:
      env: [V=1, 'W=2']
      mounts:
        - {hostPath: /lib, containerPath: /lib, options: [ro]}
";
        let at = position % yaml.len();
        let end = (at + removed).min(yaml.len());
        let changed = format!("{}{text}{}", &yaml[..at], &yaml[end..]);
        if let Ok(read) = Document::parse(changed.as_bytes(), Format::Yaml) {
            prop_assert!(is_kind(&read.kind) && !read.devices.is_empty());
        }
    }
}
