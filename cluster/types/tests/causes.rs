//! Every rule of a VMI's specification, by the path that its cause names.
//!
//! A row is a change to a specification that is right, and the paths that must be refused for
//! it, in this order and no others.

use podvisor_cluster_types::{
    Cause, CauseReason, ClusterConfig, ClusterDefaults, FieldPath, vmi::VmiSpec,
};
use serde_json::{Value, json};

/// A specification that is right: two disks, a masqueraded card, a file system.
fn right() -> Value {
    json!({
        "domain": {
            "cpu": { "cores": 2 },
            "memory": { "guest": "1Gi" },
            "devices": {
                "disks": [
                    { "name": "root", "disk": { "bus": "virtio" }, "bootOrder": 1 },
                    { "name": "seed", "cdrom": {} }
                ],
                "filesystems": [{ "name": "share", "virtiofs": {} }],
                "interfaces": [{ "name": "default", "masquerade": {} }]
            }
        },
        "networks": [{ "name": "default", "pod": {} }],
        "volumes": [
            { "name": "root", "containerDisk": { "image": "registry.example/debian:13" } },
            { "name": "seed", "cloudInitNoCloud": { "userData": "#cloud-config\n" } },
            { "name": "share", "configMap": { "name": "settings" } }
        ]
    })
}

/// Sets the value at a JSON pointer; missing objects on the way are made, `-` appends.
fn set(spec: &mut Value, pointer: &str, value: Value) {
    let mut place = spec;
    for step in pointer.trim_start_matches('/').split('/') {
        place = match (step.parse::<usize>(), place) {
            (Ok(index), Value::Array(list)) => {
                while list.len() <= index {
                    list.push(json!({}));
                }
                &mut list[index]
            }
            (Ok(index), place) => {
                *place = json!([]);
                let list = place.as_array_mut().unwrap();
                list.resize(index + 1, json!({}));
                &mut list[index]
            }
            (Err(_), place) => {
                if !place.is_object() {
                    *place = json!({});
                }
                place
                    .as_object_mut()
                    .unwrap()
                    .entry(step)
                    .or_insert(Value::Null)
            }
        };
    }
    *place = value;
}

fn causes_of(spec: Value, config: &ClusterConfig) -> Vec<Cause> {
    let mut spec: VmiSpec = serde_json::from_value(spec).expect("the types take it");
    spec.apply_defaults(&ClusterDefaults::default());
    spec.validate(config, &FieldPath::new("spec"))
}

/// Asserts that the changes are refused at these paths below `spec`.
#[track_caller]
fn refused(changes: &[(&str, Value)], paths: &[&str]) -> Vec<Cause> {
    let mut spec = right();
    for (pointer, value) in changes {
        set(&mut spec, pointer, value.clone());
    }
    let causes = causes_of(spec, &ClusterConfig::default());
    let found: Vec<&str> = causes
        .iter()
        .map(|cause| cause.field.trim_start_matches("spec."))
        .collect();
    assert_eq!(found, paths, "for {changes:?}: {causes:#?}");
    for cause in &causes {
        assert!(
            cause.message.starts_with(&cause.field),
            "the message names the path: {cause:?}"
        );
        assert!(
            cause.message.len() < 600 && !cause.message.contains('\n'),
            "{cause:?}"
        );
    }
    causes
}

#[track_caller]
fn accepted(changes: &[(&str, Value)]) {
    refused(changes, &[]);
}

const DISK: &str = "/domain/devices/disks/0";
const CARD: &str = "/domain/devices/interfaces/0";

fn at(base: &str, rest: &str) -> String {
    format!("{base}/{rest}")
}

#[test]
fn what_is_right_is_accepted() {
    accepted(&[]);
    accepted(&[("/hostname", json!("web-1")), ("/subdomain", json!("a.b"))]);
    accepted(&[("/domain/machine/type", json!("pc-q35-rhel9.4.0"))]);
}

#[test]
fn names_are_dns_names() {
    for name in ["Web", "a.b", "..", "a\nb", &"x".repeat(64)] {
        refused(&[("/hostname", json!(name))], &["hostname"]);
    }
    refused(&[("/subdomain", json!("a..b"))], &["subdomain"]);
}

#[test]
fn requests_stay_within_limits() {
    let requests = "domain.resources.requests";
    let limits = "domain.resources.limits";
    let at = |list: &str, name: &str| format!("{list}.{name}");
    let set = |list: &str, name: &str, text: &str| {
        (format!("/{}/{name}", list.replace('.', "/")), json!(text))
    };
    for (changes, paths) in [
        (
            vec![set(requests, "memory", "-1Gi")],
            vec![at(requests, "memory")],
        ),
        (
            vec![set(requests, "memory", "64")],
            vec![at(requests, "memory")],
        ),
        (
            vec![set(requests, "memory", "1e30Gi")],
            vec![at(requests, "memory")],
        ),
        (
            vec![set(limits, "memory", "-1")],
            vec![at(limits, "memory")],
        ),
        (
            vec![set(limits, "cpu", "lots")],
            vec![at(limits, "cpu"), at(requests, "cpu")],
        ),
        (
            vec![set(requests, "memory", "2Gi"), set(limits, "memory", "1Gi")],
            vec![at(requests, "memory")],
        ),
        (
            vec![set(requests, "cpu", "2"), set(limits, "cpu", "1500m")],
            vec![at(requests, "cpu")],
        ),
    ] {
        let changes: Vec<_> = changes
            .iter()
            .map(|(p, v)| (p.as_str(), v.clone()))
            .collect();
        let causes = {
            let mut spec = right();
            for (pointer, value) in &changes {
                self::set(&mut spec, pointer, value.clone());
            }
            causes_of(spec, &ClusterConfig::default())
        };
        let mut found: Vec<_> = causes
            .iter()
            .map(|c| c.field.replace("spec.", ""))
            .collect();
        let mut paths = paths;
        found.sort();
        paths.sort();
        assert_eq!(found, paths, "{changes:?}");
    }
}

#[test]
fn guest_memory_is_whole_huge_pages() {
    let pages = "/domain/memory/hugepages/pageSize";
    accepted(&[(pages, json!("2Mi"))]);
    refused(
        &[(pages, json!("2Mb"))],
        &["domain.memory.hugepages.pageSize"],
    );
    refused(
        &[(pages, json!("4Mi"))],
        &["domain.memory.hugepages.pageSize"],
    );
    refused(
        &[
            (pages, json!("1Gi")),
            ("/domain/memory/guest", json!("1536Mi")),
        ],
        &["domain.resources.requests.memory"],
    );
}

#[test]
fn guest_memory_is_within_the_limit_unless_it_is_updated_live() {
    let changes = [("/domain/resources/limits/memory", json!("512Mi"))];
    refused(&changes, &["domain.memory.guest"]);
    let mut spec = right();
    set(&mut spec, changes[0].0, changes[0].1.clone());
    let mut config = ClusterConfig::default();
    config.live_update = true;
    assert_eq!(causes_of(spec, &config), []);
}

#[test]
fn some_memory_is_required() {
    let causes = refused(&[("/domain/memory", json!({}))], &["domain.memory.guest"]);
    assert_eq!(causes[0].reason, CauseReason::Required);
    accepted(&[
        ("/domain/memory", json!({})),
        ("/domain/resources/requests/memory", json!("128Mi")),
    ]);
}

#[test]
fn machine_and_architecture_are_known() {
    let causes = refused(
        &[("/domain/machine/type", json!("i440fx"))],
        &["domain.machine.type"],
    );
    assert!(
        causes[0].message.contains("pc-q35*"),
        "the message lists them: {causes:?}"
    );
    refused(&[("/architecture", json!("arm64"))], &["architecture"]);
}

#[test]
fn dedicated_cpus_are_whole_and_guaranteed() {
    let dedicated = ("/domain/cpu/dedicatedCpuPlacement", json!(true));
    accepted(std::slice::from_ref(&dedicated));
    refused(
        &[dedicated.clone(), ("/domain/cpu/threads", json!(4))],
        &["domain.cpu.threads"],
    );
    refused(
        &[
            dedicated.clone(),
            ("/domain/resources/limits/cpu", json!("1500m")),
            ("/domain/resources/requests/cpu", json!("1500m")),
        ],
        &[
            "domain.resources.requests.cpu",
            "domain.resources.limits.cpu",
        ],
    );
    refused(
        &[
            dedicated,
            ("/domain/cpu/cores", json!(4)),
            ("/domain/resources/limits/cpu", json!("3")),
        ],
        &[
            "domain.resources.requests.cpu",
            "domain.resources.limits.cpu",
        ],
    );
}

#[test]
fn cpus_are_counted_and_their_features_known() {
    refused(&[("/domain/cpu/cores", json!(-1))], &["domain.cpu.cores"]);
    refused(
        &[
            ("/domain/cpu/cores", json!(i64::MAX)),
            ("/domain/cpu/sockets", json!(i64::MAX)),
        ],
        &["domain.cpu.cores", "domain.cpu.sockets", "domain.cpu"],
    );
    refused(
        &[
            ("/domain/cpu/cores", json!(64)),
            ("/domain/cpu/sockets", json!(64)),
        ],
        &["domain.cpu"],
    );
    refused(
        &[
            ("/domain/cpu/sockets", json!(3)),
            ("/domain/cpu/maxSockets", json!(2)),
        ],
        &["domain.cpu.sockets"],
    );
    refused(
        &[(
            "/domain/cpu/features",
            json!([{ "name": "aes", "policy": "maybe" }, {}]),
        )],
        &[
            "domain.cpu.features[0].policy",
            "domain.cpu.features[1].name",
        ],
    );
    refused(
        &[("/domain/cpu/model", json!("Skylake"))],
        &["domain.cpu.model"],
    );
}

#[test]
fn a_vm_that_starts_paused_has_no_liveness_probe() {
    accepted(&[("/startStrategy", json!("Paused"))]);
    refused(&[("/startStrategy", json!("Later"))], &["startStrategy"]);
    let probe = json!({ "tcpSocket": { "port": 22 } });
    refused(
        &[
            ("/startStrategy", json!("Paused")),
            ("/livenessProbe", probe),
        ],
        &["startStrategy"],
    );
}

#[test]
fn disks_and_volumes_belong_together() {
    refused(
        &[(&at(DISK, "name"), json!("other"))],
        &["domain.devices.disks[0].name"],
    );
    refused(
        &[(&at(DISK, "name"), json!("seed"))],
        &["domain.devices.disks[1].name"],
    );
    // A volume that nothing shows gets a disk by default; without defaults it is refused.
    let mut spec = right();
    set(&mut spec, "/domain/devices/filesystems", json!([]));
    let spec: VmiSpec = serde_json::from_value(spec).unwrap();
    let causes = spec.validate(&ClusterConfig::default(), &FieldPath::new("spec"));
    assert_eq!(causes[0].field, "spec.volumes[2].name");
}

#[test]
fn a_disk_is_one_kind() {
    refused(
        &[(&at(DISK, "cdrom"), json!({}))],
        &["domain.devices.disks[0]"],
    );
    refused(
        &[
            (&at(DISK, "disk"), Value::Null),
            (&at(DISK, "lun"), json!({ "bus": "scsi" })),
        ],
        &["domain.devices.disks[0].lun", "domain.devices.disks[0].lun"],
    );
}

#[test]
fn an_order_of_boot_stands_once_over_disks_and_cards() {
    let order = "domain.devices.disks[1].bootOrder";
    refused(&[("/domain/devices/disks/1/bootOrder", json!(1))], &[order]);
    refused(&[("/domain/devices/disks/1/bootOrder", json!(0))], &[order]);
    refused(
        &[(&at(CARD, "bootOrder"), json!(1))],
        &["domain.devices.interfaces[0].bootOrder"],
    );
}

#[test]
fn every_disk_is_on_virtio() {
    for bus in ["sata", "scsi", "usb", "ide"] {
        let causes = refused(
            &[(&at(DISK, "disk/bus"), json!(bus))],
            &["domain.devices.disks[0].disk.bus"],
        );
        assert_eq!(causes[0].reason, CauseReason::NotSupported);
        assert!(causes[0].message.contains("leave the bus out"));
    }
    refused(
        &[("/domain/devices/disks/1/cdrom/bus", json!("scsi"))],
        &["domain.devices.disks[1].cdrom.bus"],
    );
    refused(
        &[("/domain/devices/disks/1/cdrom/readonly", json!(false))],
        &["domain.devices.disks[1].cdrom.readonly"],
    );
}

#[test]
fn a_cdrom_on_sata_is_accepted_with_a_warning() {
    let mut spec = right();
    set(
        &mut spec,
        "/domain/devices/disks/1/cdrom/bus",
        json!("sata"),
    );
    assert_eq!(causes_of(spec.clone(), &ClusterConfig::default()), []);
    let spec: VmiSpec = serde_json::from_value(spec).unwrap();
    let warnings = spec.warnings(&FieldPath::new("spec"));
    assert_eq!(warnings.len(), 1);
    assert!(
        warnings[0].starts_with("spec.domain.devices.disks[1].cdrom.bus"),
        "{warnings:?}"
    );
}

#[test]
fn serials_and_words_of_disks_are_known() {
    accepted(&[(&at(DISK, "serial"), json!("a_B.1+-"))]);
    for serial in ["a b", "a\n", &"x".repeat(300)] {
        refused(
            &[(&at(DISK, "serial"), json!(serial))],
            &["domain.devices.disks[0].serial"],
        );
    }
    for word in ["cache", "io", "errorPolicy"] {
        let path = format!("domain.devices.disks[0].{word}");
        refused(&[(&at(DISK, word), json!("sometimes"))], &[&path]);
    }
}

#[test]
fn block_sizes_are_powers_of_two() {
    let custom = |logical: i64, physical: i64| json!({ "custom": { "logical": logical, "physical": physical } });
    let path = |name: &str| format!("domain.devices.disks[0].blockSize.custom.{name}");
    accepted(&[(&at(DISK, "blockSize"), custom(512, 4096))]);
    refused(
        &[(&at(DISK, "blockSize"), custom(4096, 512))],
        &[&path("logical")],
    );
    refused(
        &[(&at(DISK, "blockSize"), custom(513, 4096))],
        &[&path("logical")],
    );
    refused(
        &[(&at(DISK, "blockSize"), custom(512, 4 << 20))],
        &[&path("physical")],
    );
    let mut both = custom(512, 512);
    both["matchVolume"] = json!({});
    refused(
        &[(&at(DISK, "blockSize"), both)],
        &["domain.devices.disks[0].blockSize"],
    );
}

#[test]
fn a_file_system_shows_a_volume_once() {
    let list = "/domain/devices/filesystems/1";
    refused(
        &[(list, json!({ "name": "share", "virtiofs": {} }))],
        &["domain.devices.filesystems[1].name"],
    );
    refused(
        &[(list, json!({ "name": "none", "virtiofs": {} }))],
        &["domain.devices.filesystems[1].name"],
    );
}

#[test]
fn io_threads_have_a_known_policy() {
    accepted(&[("/domain/ioThreadsPolicy", json!("auto"))]);
    refused(
        &[("/domain/ioThreadsPolicy", json!("many"))],
        &["domain.ioThreadsPolicy"],
    );
    refused(
        &[("/domain/ioThreadsPolicy", json!("supplementalPool"))],
        &["domain.ioThreads.count"],
    );
    accepted(&[
        ("/domain/ioThreadsPolicy", json!("supplementalPool")),
        ("/domain/ioThreads/supplementalPoolThreadCount", json!(4)),
    ]);
}

#[test]
fn a_probe_has_one_handler() {
    for probe in ["readinessProbe", "livenessProbe"] {
        let pointer = format!("/{probe}");
        accepted(&[(&pointer, json!({ "exec": { "command": ["true"] } }))]);
        let causes = refused(&[(&pointer, json!({ "periodSeconds": 3 }))], &[probe]);
        assert_eq!(causes[0].reason, CauseReason::Required);
        let both = json!({ "guestAgentPing": {}, "tcpSocket": { "port": 1 } });
        let causes = refused(&[(&pointer, both)], &[probe]);
        assert_eq!(causes[0].reason, CauseReason::Invalid);
        let multus = [
            (pointer.as_str(), json!({ "tcpSocket": { "port": 1 } })),
            (
                "/networks",
                json!([{ "name": "default", "multus": { "networkName": "n" } }]),
            ),
            (CARD, json!({ "name": "default", "bridge": {} })),
        ];
        refused(&multus, &[&format!("{probe}.tcpSocket")]);
    }
}

#[test]
fn a_card_has_one_binding() {
    refused(
        &[(&at(CARD, "bridge"), json!({}))],
        &["domain.devices.interfaces[0]"],
    );
    refused(
        &[(&at(CARD, "masquerade"), Value::Null)],
        &["domain.devices.interfaces[0]"],
    );
    refused(
        &[(
            "/networks",
            json!([{ "name": "default", "multus": { "networkName": "n" } }]),
        )],
        &["domain.devices.interfaces[0].name"],
    );
    for binding in ["slirp", "passt", "macvtap", "sriov", "binding"] {
        let path = format!("domain.devices.interfaces[0].{binding}");
        refused(
            &[
                (&at(CARD, "masquerade"), Value::Null),
                (&at(CARD, binding), json!({})),
            ],
            &[&path],
        );
    }
}

#[test]
fn a_bridge_on_the_pod_network_takes_the_clusters_permission() {
    let mut spec = right();
    set(&mut spec, CARD, json!({ "name": "default", "bridge": {} }));
    assert_eq!(causes_of(spec.clone(), &ClusterConfig::default()), []);
    let mut config = ClusterConfig::default();
    config.permit_bridge_on_pod_network = false;
    let causes = causes_of(spec, &config);
    assert_eq!(causes[0].field, "spec.domain.devices.interfaces[0].name");
}

#[test]
fn cards_and_networks_belong_together() {
    let name = "domain.devices.interfaces[0].name";
    refused(
        &[(&at(CARD, "name"), json!("other"))],
        &[name, "networks[0].name"],
    );
    refused(
        &[
            (&at(CARD, "name"), json!("a b")),
            ("/networks/0/name", json!("a b")),
        ],
        &[name],
    );
    refused(
        &[(
            "/domain/devices/interfaces/1",
            json!({ "name": "default", "masquerade": {} }),
        )],
        &["domain.devices.interfaces[1].name"],
    );
    refused(
        &[("/networks/0/multus", json!({ "networkName": "n" }))],
        &["networks[0]"],
    );
    refused(
        &[("/networks/1", json!({ "name": "default", "pod": {} }))],
        &["networks[1].name", "networks"],
    );
    let second = json!({ "name": "b", "multus": { "networkName": "n", "default": true } });
    refused(
        &[
            ("/networks/1", second),
            (
                "/domain/devices/interfaces/1",
                json!({ "name": "b", "bridge": {} }),
            ),
        ],
        &["networks"],
    );
    refused(
        &[
            ("/networks/1", json!({ "name": "b", "multus": {} })),
            (
                "/domain/devices/interfaces/1",
                json!({ "name": "b", "bridge": {} }),
            ),
        ],
        &["networks[1].multus.networkName"],
    );
}

#[test]
fn addresses_models_and_states_of_cards_are_known() {
    accepted(&[(&at(CARD, "macAddress"), json!("de-ad-00-00-be-ef"))]);
    for mac in [
        "02:00:00:00:00:00",
        "de:ad:00:00:be",
        "de:ad:00:00:be:ef:00",
        "g",
        "+a:0:0:0:0:0",
    ] {
        let path = "domain.devices.interfaces[0].macAddress";
        refused(&[(&at(CARD, "macAddress"), json!(mac))], &[path]);
    }
    refused(
        &[(&at(CARD, "model"), json!("e1000"))],
        &["domain.devices.interfaces[0].model"],
    );
    let state = "domain.devices.interfaces[0].state";
    accepted(&[(&at(CARD, "state"), json!("down"))]);
    refused(&[(&at(CARD, "state"), json!("gone"))], &[state]);
    refused(&[(&at(CARD, "state"), json!("absent"))], &[state, state]);
}

#[test]
fn ports_are_numbers_with_unique_names() {
    let path = |rest: &str| format!("domain.devices.interfaces[0].ports[{rest}");
    refused(
        &[(
            &at(CARD, "ports"),
            json!([{ "port": 65536 }, {}, { "port": 1, "protocol": "SCTP" }]),
        )],
        &[&path("0].port"), &path("1].port"), &path("2].protocol")],
    );
    let twice = json!([{ "port": 1, "name": "a" }, { "port": 2, "name": "a" }]);
    refused(&[(&at(CARD, "ports"), twice)], &[&path("1].name")]);
}

#[test]
fn ranges_of_ports_do_not_overlap() {
    let path = "domain.devices.interfaces[0].portRanges";
    let range = |start: i64, end: i64| json!({ "protocol": "TCP", "start": start, "end": end });
    let ranges = at(CARD, "portRanges");
    accepted(&[(&ranges, json!([range(1, 2), range(3, 4)]))]);
    refused(
        &[(&ranges, json!([range(1, 3), range(3, 4)]))],
        &[&format!("{path}[1]")],
    );
    refused(&[(&ranges, json!([range(4, 3)]))], &[&format!("{path}[0]")]);
    refused(&[(&ranges, Value::from(vec![range(1, 1); 11]))], &[path]);
    refused(
        &[
            (&ranges, json!([range(1, 2)])),
            (&at(CARD, "ports"), json!([{ "port": 9 }])),
        ],
        &[path],
    );
}

#[test]
fn dhcp_options_are_private_ones() {
    let options = json!({
        "ntpServers": ["10.0.0.1", "fd00::1"],
        "privateOptions": [
            { "option": 240, "value": "a" },
            { "option": 240, "value": "b" },
            { "option": 3, "value": "c" },
        ],
    });
    let path = "domain.devices.interfaces[0].dhcpOptions";
    refused(
        &[(&at(CARD, "dhcpOptions"), options)],
        &[
            &format!("{path}.ntpServers[1]"),
            &format!("{path}.privateOptions[1].option"),
            &format!("{path}.privateOptions[2].option"),
        ],
    );
}

#[test]
fn name_servers_are_as_a_pods() {
    refused(&[("/dnsPolicy", json!("Cluster"))], &["dnsPolicy"]);
    refused(&[("/dnsPolicy", json!("None"))], &["dnsConfig"]);
    refused(
        &[("/dnsPolicy", json!("None")), ("/dnsConfig", json!({}))],
        &["dnsConfig.nameservers"],
    );
    refused(
        &[(
            "/dnsConfig",
            json!({
                "nameservers": ["dns.example", "::1", "1.1.1.1", "8.8.8.8"],
                "searches": ["a", "b", "c", "d", "e", "f", "g"],
                "options": [{ "value": "1" }],
            }),
        )],
        &[
            "dnsConfig.nameservers",
            "dnsConfig.nameservers[0]",
            "dnsConfig.searches",
            "dnsConfig.options[0].name",
        ],
    );
    refused(
        &[("/dnsConfig/searches", json!(vec!["x".repeat(60); 5]))],
        &["dnsConfig.searches"],
    );
}

#[test]
fn a_volume_has_a_name_and_one_source() {
    for name in ["../a", "a\nb", "Root", ""] {
        refused(
            &[
                ("/volumes/0/name", json!(name)),
                (&at(DISK, "name"), json!(name)),
            ],
            &["volumes[0].name"],
        );
    }
    refused(
        &[("/volumes/0/emptyDisk", json!({ "capacity": "1Gi" }))],
        &["volumes[0]"],
    );
    refused(
        &[("/volumes/0/containerDisk", Value::Null)],
        &["volumes[0]"],
    );
    let same = json!({ "name": "root", "emptyDisk": { "capacity": "1Gi" } });
    refused(&[("/volumes/3", same)], &["volumes[3].name"]);
}

#[test]
fn cloud_init_has_one_source_of_each_data() {
    let path = "volumes[1].cloudInitNoCloud";
    let pointer = "/volumes/1/cloudInitNoCloud";
    refused(&[(pointer, json!({}))], &[path]);
    refused(
        &[(
            pointer,
            json!({ "userData": "a", "userDataBase64": "YQ==" }),
        )],
        &[path],
    );
    refused(
        &[(
            pointer,
            json!({ "networkData": "a", "networkDataSecretRef": { "name": "s" } }),
        )],
        &[path],
    );
    for text in ["YQ=", "Y Q=", "Y===", "é==="] {
        refused(
            &[(pointer, json!({ "userDataBase64": text }))],
            &[&format!("{path}.userDataBase64")],
        );
    }
    accepted(&[(pointer, json!({ "userData": "x".repeat(2048) }))]);
    refused(
        &[(pointer, json!({ "userData": "x".repeat(2049) }))],
        &[&format!("{path}.userData")],
    );
}

#[test]
fn sources_name_what_they_come_from() {
    for (source, path) in [
        (json!({ "configMap": {} }), "configMap.name"),
        (json!({ "secret": {} }), "secret.secretName"),
        (
            json!({ "serviceAccount": {} }),
            "serviceAccount.serviceAccountName",
        ),
        (json!({ "dataVolume": {} }), "dataVolume.name"),
        (
            json!({ "persistentVolumeClaim": {} }),
            "persistentVolumeClaim.claimName",
        ),
        (
            json!({ "ephemeral": {} }),
            "ephemeral.persistentVolumeClaim.claimName",
        ),
        (json!({ "containerDisk": {} }), "containerDisk.image"),
        (json!({ "emptyDisk": {} }), "emptyDisk.capacity"),
        (
            json!({ "persistentVolumeClaim": { "claimName": "../x" } }),
            "persistentVolumeClaim.claimName",
        ),
        (
            json!({ "containerDisk": { "image": "a", "path": "/disk/../etc" } }),
            "containerDisk.path",
        ),
        (
            json!({ "containerDisk": { "image": "a", "path": "disk/a" } }),
            "containerDisk.path",
        ),
    ] {
        let mut volume = source;
        volume["name"] = json!("root");
        refused(&[("/volumes/0", volume)], &[&format!("volumes[0].{path}")]);
    }
    let account =
        |name: &str| json!({ "name": name, "serviceAccount": { "serviceAccountName": "s" } });
    refused(
        &[("/volumes/3", account("a")), ("/volumes/4", account("b"))],
        &["volumes"],
    );
}

#[test]
fn credentials_have_one_kind_source_and_way() {
    let source = json!({ "secret": { "secretName": "keys" } });
    let key = |method: Value| {
        json!([{ "sshPublicKey": {
        "source": source, "propagationMethod": method,
    } }])
    };
    accepted(&[("/accessCredentials", key(json!({ "noCloud": {} })))]);
    let path = "accessCredentials[0].sshPublicKey.propagationMethod";
    for (method, paths) in [
        (json!({}), vec![path.to_owned()]),
        (
            json!({ "configDrive": {} }),
            vec![format!("{path}.configDrive")],
        ),
        (
            json!({ "qemuGuestAgent": {} }),
            vec![format!("{path}.qemuGuestAgent.users")],
        ),
    ] {
        let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
        refused(&[("/accessCredentials", key(method))], &paths);
    }
    refused(
        &[("/accessCredentials", json!([{}]))],
        &["accessCredentials[0]"],
    );
    refused(
        &[("/accessCredentials", json!([{ "userPassword": {} }]))],
        &[
            "accessCredentials[0].userPassword.source",
            "accessCredentials[0].userPassword.propagationMethod",
        ],
    );
}

#[test]
fn a_kernel_comes_from_a_clean_path_of_an_image() {
    let boot = "/domain/firmware/kernelBoot";
    let path = "domain.firmware.kernelBoot";
    accepted(&[(
        boot,
        json!({
            "kernelArgs": "console=ttyS0",
            "container": { "image": "a", "kernelPath": "/boot/vmlinuz" },
        }),
    )]);
    refused(
        &[(boot, json!({ "kernelArgs": "quiet" }))],
        &[&format!("{path}.kernelArgs")],
    );
    refused(
        &[(boot, json!({ "container": {} }))],
        &[
            &format!("{path}.container.image"),
            &format!("{path}.container"),
        ],
    );
    for kernel in ["boot/vmlinuz", "/boot/../../etc/shadow"] {
        refused(
            &[(
                boot,
                json!({ "container": { "image": "a", "kernelPath": kernel } }),
            )],
            &[&format!("{path}.container.kernelPath")],
        );
    }
}

#[test]
fn the_loader_is_ours() {
    let loader = "/domain/firmware/bootloader";
    accepted(&[(loader, json!({ "bios": { "useSerial": true } }))]);
    refused(
        &[(loader, json!({ "efi": {} }))],
        &["domain.firmware.bootloader.efi"],
    );
    refused(
        &[(loader, json!({ "efi": {}, "bios": {} }))],
        &["domain.firmware.bootloader"],
    );
}

#[test]
fn strategies_and_accounts_are_known() {
    accepted(&[("/evictionStrategy", json!("LiveMigrateIfPossible"))]);
    refused(
        &[("/evictionStrategy", json!("Kill"))],
        &["evictionStrategy"],
    );
    refused(
        &[("/serviceAccountName", json!("A b"))],
        &["serviceAccountName"],
    );
    let volume = json!({ "name": "a", "serviceAccount": { "serviceAccountName": "other" } });
    refused(
        &[
            ("/serviceAccountName", json!("mine")),
            ("/volumes/3", volume),
        ],
        &["serviceAccountName"],
    );
    refused(
        &[("/domain/rebootPolicy", json!("Halt"))],
        &["domain.rebootPolicy"],
    );
    refused(
        &[("/terminationGracePeriodSeconds", json!(-1))],
        &["terminationGracePeriodSeconds"],
    );
}

#[test]
fn what_podvisor_does_not_have_is_refused_by_its_path() {
    let rows = [
        ("domain.cpu.isolateEmulatorThread", json!(true)),
        ("domain.cpu.realtime", json!({})),
        ("domain.cpu.numa", json!({ "guestMappingPassthrough": {} })),
        ("domain.memory.reservedOverhead", json!({})),
        ("domain.firmware.acpi", json!({ "slicNameRef": "a" })),
        ("domain.features.smm", json!({})),
        ("domain.features.hyperv", json!({ "relaxed": {} })),
        (
            "domain.features.hypervPassthrough",
            json!({ "enabled": true }),
        ),
        ("domain.features.kvm.hidden", json!(true)),
        ("domain.launchSecurity", json!({ "sev": {} })),
        ("domain.devices.autoattachGraphicsDevice", json!(true)),
        ("domain.devices.autoattachInputDevice", json!(true)),
        ("domain.devices.useVirtioTransitional", json!(true)),
        (
            "domain.devices.watchdog",
            json!({ "name": "w", "i6300esb": {} }),
        ),
        (
            "domain.devices.panicDevices",
            json!([{ "model": "pvpanic" }]),
        ),
        (
            "domain.devices.inputs",
            json!([{ "type": "tablet", "bus": "usb" }]),
        ),
        ("domain.devices.sound", json!({ "name": "s" })),
        ("domain.devices.video", json!({ "type": "vga" })),
        ("domain.devices.tpm", json!({})),
        ("domain.devices.gpus", json!([{}])),
        ("domain.devices.hostDevices", json!([{}])),
        ("domain.devices.clientPassthrough", json!({})),
        ("domain.devices.downwardMetrics", json!({})),
        ("domain.clock.timer.hpet.present", json!(true)),
        ("domain.clock.timezone", json!("Europe/Paris")),
        ("resourceClaims", json!([{}])),
        ("utilityVolumes", json!([{}])),
    ];
    for (path, value) in rows {
        let causes = refused(&[(&format!("/{}", path.replace('.', "/")), value)], &[path]);
        assert_eq!(causes[0].reason, CauseReason::NotSupported, "{path}");
    }
    for source in [
        "hostDisk",
        "sysprep",
        "downwardMetrics",
        "memoryDump",
        "containerPath",
    ] {
        let volume = json!({ "name": "root", source: {} });
        refused(
            &[("/volumes/0", volume)],
            &[&format!("volumes[0].{source}")],
        );
    }
}

#[test]
fn what_asks_for_nothing_is_accepted() {
    accepted(&[
        ("/domain/devices/autoattachGraphicsDevice", json!(false)),
        ("/domain/devices/inputs", json!([])),
        ("/domain/features/smm", json!({ "enabled": false })),
        (
            "/domain/clock/timer",
            json!({ "hpet": { "present": false }, "kvm": {} }),
        ),
        ("/domain/clock/utc", json!({})),
        ("/domain/cpu/isolateEmulatorThread", json!(false)),
    ]);
}

#[test]
fn all_causes_are_told_at_once() {
    refused(
        &[
            ("/hostname", json!("A")),
            ("/domain/cpu/cores", json!(-3)),
            (&at(DISK, "serial"), json!(" ")),
            ("/dnsPolicy", json!("x")),
            ("/volumes/1/cloudInitNoCloud", json!({})),
            ("/domain/devices/tpm", json!({})),
        ],
        &[
            "hostname",
            "domain.cpu.cores",
            "domain.devices.disks[0].serial",
            "dnsPolicy",
            "volumes[1].cloudInitNoCloud",
            "domain.devices.tpm",
        ],
    );
}

#[test]
fn a_hostile_specification_ends_in_few_causes() {
    let mut spec = right();
    let volumes: Vec<_> = (0..20_000)
        .map(|_| json!({ "name": "a\n".repeat(20) }))
        .collect();
    set(&mut spec, "/volumes", volumes.into());
    let causes = causes_of(spec, &ClusterConfig::default());
    assert!(!causes.is_empty() && causes.len() <= 64);
}
