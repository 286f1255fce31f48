//! CPUs, memory, the kernel and the loader, probes.

use podvisor_cluster_types::{CauseReason, ClusterConfig};
use serde_json::json;

use super::{CARD, accepted, causes_of, refused, right, set};

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
fn memory_is_whole_huge_pages() {
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
fn memory_is_within_the_limit_unless_it_is_updated_live() {
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
fn the_loader_is_ours_or_a_firmware_that_checks_no_signatures_and_keeps_nothing() {
    let loader = "/domain/firmware/bootloader";
    accepted(&[(loader, json!({ "bios": { "useSerial": true } }))]);
    let efi = |efi| json!({ "efi": efi });
    accepted(&[(loader, efi(json!({ "secureBoot": false })))]);
    let unkept = json!({ "secureBoot": false, "persistent": false });
    accepted(&[(loader, efi(unkept))]);
    for on in [json!({}), json!({ "secureBoot": true })] {
        refused(
            &[(loader, efi(on))],
            &["domain.firmware.bootloader.efi.secureBoot"],
        );
    }
    let kept = json!({ "secureBoot": false, "persistent": true });
    refused(
        &[(loader, efi(kept))],
        &["domain.firmware.bootloader.efi.persistent"],
    );
    refused(
        &[(loader, json!({ "efi": {}, "bios": {} }))],
        &["domain.firmware.bootloader"],
    );
    let boot = json!({ "container": { "image": "a", "kernelPath": "/vmlinuz" } });
    refused(
        &[
            (loader, efi(json!({ "secureBoot": false }))),
            ("/domain/firmware/kernelBoot", boot),
        ],
        &["domain.firmware.bootloader.efi"],
    );
}
