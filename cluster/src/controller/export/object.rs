//! What is made for an export: a pod, a Service, a token, and the claims of a snapshot.

use std::collections::BTreeMap;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Secret, Service};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use podvisor_cluster_types::export::{GROUP, VERSIONS};
use podvisor_cluster_types::names::is_dns_label;
use serde_json::json;

use super::source::{Content, Volume};
use crate::controller::{datavolume, names, restore};
use crate::export::{PORT, TOKEN};
use crate::objects::{
    COMPONENT_LABEL, EXPORTER, VirtualMachineExport, VolumeBackup, VolumeSnapshot,
};

/// Label of a pod: the unique id of its export, which the Service selects.
const EXPORT_LABEL: &str = "kubevirt.io.virt-export-service";

/// What names of pods and Services begin with.
const PREFIX: &str = "virt-export";

const CREDENTIALS: &str = "/credentials";
const TOKENS: &str = "/token";

/// Returns a name that begins with `prefix`, and has the export's in it.
fn named(prefix: &str, name: &str, suffix: Option<&str>) -> String {
    let plain = name.replace('.', "-");
    let whole = match suffix {
        None => format!("{prefix}-{plain}"),
        Some(suffix) => format!("{prefix}-{plain}-{suffix}"),
    };
    if is_dns_label(&whole) {
        return whole;
    }
    let hash = suffix.map_or_else(|| names::hash(name), str::to_owned);
    let room = 63_usize.saturating_sub(prefix.len() + 2 + hash.len());
    let short: String = plain.chars().take(room).collect();
    format!("{prefix}-{}-{hash}", short.trim_end_matches('-'))
}

fn name_of(export: &VirtualMachineExport) -> &str {
    export.metadata.name.as_deref().unwrap_or_default()
}

fn uid(export: &VirtualMachineExport) -> &str {
    export.metadata.uid.as_deref().unwrap_or_default()
}

/// The name of an export's Service, as `virtctl` looks for it.
pub(super) fn service_name(export: &VirtualMachineExport) -> String {
    named(PREFIX, name_of(export), None)
}

/// The name of its pod, and of the Secret with that one's certificate: one per unique id, so that
/// it cannot be created twice.
pub(super) fn pod_name(export: &VirtualMachineExport) -> String {
    named(PREFIX, name_of(export), Some(&names::hash(uid(export))))
}

/// The name of the Secret with its token: the one that it asks for, or its own.
pub(super) fn token_name(export: &VirtualMachineExport) -> String {
    let given = export.spec.token_secret_ref.clone();
    given.unwrap_or_else(|| named("export-token", name_of(export), None))
}

/// The name of the claim that is made of a volume of a snapshot.
pub(super) fn claim_name(export: &VirtualMachineExport, backup: &VolumeBackup) -> String {
    let claim = &backup.persistent_volume_claim.metadata.name;
    format!(
        "{}-{}",
        name_of(export),
        claim.as_deref().unwrap_or_default()
    )
}

/// Whether an object was made for an export.
pub(super) fn owns(export: &VirtualMachineExport, meta: &ObjectMeta) -> bool {
    let mut owners = meta.owner_references.iter().flatten();
    owners.any(|owner| owner.controller == Some(true) && owner.uid == uid(export))
}

/// What was made for an export goes with it.
fn owner(export: &VirtualMachineExport) -> OwnerReference {
    OwnerReference {
        api_version: format!("{GROUP}/{}", VERSIONS[0]),
        kind: "VirtualMachineExport".to_owned(),
        name: name_of(export).to_owned(),
        uid: uid(export).to_owned(),
        controller: Some(true),
        block_owner_deletion: None,
    }
}

/// The labels of what is made: the export's own, without those that mean something to controllers.
fn labels(export: &VirtualMachineExport) -> BTreeMap<String, String> {
    let mut labels = export.metadata.labels.clone().unwrap_or_default();
    labels.retain(|key, _| !key.contains("kubevirt.io") && !key.contains("podvisor.io"));
    labels.insert(COMPONENT_LABEL.to_owned(), EXPORTER.to_owned());
    labels
}

fn metadata(export: &VirtualMachineExport, name: String) -> ObjectMeta {
    ObjectMeta {
        name: Some(name),
        namespace: export.metadata.namespace.clone(),
        labels: Some(labels(export)),
        owner_references: Some(vec![owner(export)]),
        ..ObjectMeta::default()
    }
}

/// Returns the Service by which an export is reached.
pub(super) fn service(export: &VirtualMachineExport) -> Result<Service, serde_json::Error> {
    serde_json::from_value(json!({
        "metadata": metadata(export, service_name(export)),
        "spec": {
            "selector": {EXPORT_LABEL: uid(export)},
            "ports": [{"name": "https", "port": 443, "targetPort": PORT}],
        },
    }))
}

/// Returns the Secret with a token.
pub(super) fn token(export: &VirtualMachineExport, token: String) -> Secret {
    Secret {
        metadata: metadata(export, token_name(export)),
        type_: Some("Opaque".to_owned()),
        data: Some([(TOKEN.to_owned(), ByteString(token.into()))].into()),
        ..Secret::default()
    }
}

/// Returns the pod that serves volumes until a time: it may read them, and has no rights.
pub(super) fn pod(
    export: &VirtualMachineExport,
    volumes: &[Volume],
    image: &str,
    until: i64,
) -> Result<Pod, serde_json::Error> {
    let name = pod_name(export);
    let mut args = vec![
        "export".to_owned(),
        format!("--listen=[::]:{PORT}"),
        format!("--token={TOKENS}/{TOKEN}"),
        format!("--credentials={CREDENTIALS}"),
        format!("--until={until}"),
    ];
    let read_only =
        |name: &str, path: &str| json!({"name": name, "mountPath": path, "readOnly": true});
    let mut mounts = vec![
        read_only("credentials", CREDENTIALS),
        read_only("token", TOKENS),
    ];
    let mut devices = Vec::new();
    let items = json!([{"key": TOKEN, "path": TOKEN}]);
    let mut mounted = vec![
        json!({"name": "credentials", "secret": {"secretName": name, "defaultMode": 0o440}}),
        json!({"name": "token", "secret": {
            "secretName": token_name(export), "defaultMode": 0o440, "items": items,
        }}),
    ];
    for (index, volume) in volumes.iter().enumerate() {
        let of = format!("volume-{index}");
        let mounted_at = format!("/volumes/{index}");
        let argument = match volume.content {
            Content::Device => {
                let path = format!("/dev/podvisor-export-{index}");
                devices.push(json!({"name": of, "devicePath": path}));
                format!("--volume={}={path}", volume.name)
            }
            Content::Disk => {
                mounts.push(read_only(&of, &mounted_at));
                format!("--volume={}={mounted_at}/disk.img", volume.name)
            }
            Content::Files => {
                mounts.push(read_only(&of, &mounted_at));
                format!("--files={}={mounted_at}", volume.name)
            }
        };
        args.push(argument);
        mounted.push(json!({
            "name": of,
            "persistentVolumeClaim": {"claimName": volume.claim, "readOnly": true},
        }));
    }
    let container = json!({
        "name": "exporter",
        "image": image,
        "args": args,
        "ports": [{"name": "https", "containerPort": PORT}],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 2},
        "volumeMounts": mounts,
        "volumeDevices": devices,
    });
    let mut metadata = metadata(export, name);
    let labels = metadata.labels.get_or_insert_default();
    labels.insert(EXPORT_LABEL.to_owned(), uid(export).to_owned());
    serde_json::from_value(json!({
        "metadata": metadata,
        "spec": datavolume::confined(container, mounted),
    }))
}

/// Returns the claim of a volume of a snapshot.
pub(super) fn claim(
    export: &VirtualMachineExport,
    backup: &VolumeBackup,
    taken: &VolumeSnapshot,
) -> PersistentVolumeClaim {
    let mut metadata = metadata(export, claim_name(export, backup));
    metadata.labels = None;
    PersistentVolumeClaim {
        metadata,
        spec: Some(restore::claim_spec(backup, taken)),
        ..PersistentVolumeClaim::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn export(name: &str) -> VirtualMachineExport {
        serde_json::from_value(json!({
            "metadata": {
                "name": name, "namespace": "n", "uid": "u",
                "labels": {
                    "team": "a", "kubevirt.io": "virt-launcher", "cdi.kubevirt.io": "importer",
                    "podvisor.io/x": "y", "vm.kubevirt.io/name": "z",
                },
                "annotations": {"podvisor.io/vmi": "{}"},
            },
            "spec": {"source": {"kind": "PersistentVolumeClaim", "name": "a"}},
        }))
        .unwrap()
    }

    fn volumes() -> Vec<Volume> {
        let volumes = [
            ("a.b", Content::Disk),
            ("c", Content::Device),
            ("d", Content::Files),
        ];
        volumes
            .map(|(name, content)| Volume {
                name: name.to_owned(),
                claim: format!("x-{name}"),
                content,
            })
            .into()
    }

    #[test]
    fn names_are_those_of_hosts_whatever_the_export_is_called() {
        assert_eq!(service_name(&export("a")), "virt-export-a");
        assert_eq!(token_name(&export("a")), "export-token-a");
        for name in ["a", "a.b", "9", &"x".repeat(253), &"x.".repeat(100)] {
            let export = export(name);
            for name in [
                service_name(&export),
                pod_name(&export),
                token_name(&export),
            ] {
                assert!(is_dns_label(&name), "{name}");
            }
        }
        let long = "x".repeat(100);
        let other = format!("{long}y");
        assert_ne!(service_name(&export(&long)), service_name(&export(&other)));
    }

    #[test]
    fn an_exporter_reads_its_claims_and_has_no_rights() {
        let pod = pod(&export("e"), &volumes(), "image", 5).unwrap();
        let spec = pod.spec.as_ref().unwrap();
        assert_eq!(spec.automount_service_account_token, Some(false));
        let volumes = spec.volumes.as_ref().unwrap();
        let claims: Vec<_> = volumes
            .iter()
            .filter_map(|volume| volume.persistent_volume_claim.as_ref())
            .map(|claim| (claim.claim_name.as_str(), claim.read_only))
            .collect();
        let read_only = ["x-a.b", "x-c", "x-d"].map(|claim| (claim, Some(true)));
        assert_eq!(claims, read_only);
        let tokens = volumes.iter().find(|volume| volume.name == "token");
        let tokens = tokens.unwrap().secret.as_ref().unwrap();
        assert_eq!(
            tokens.items.as_ref().unwrap()[0].key,
            "token",
            "and no other key"
        );
        let mounts = spec.containers[0].volume_mounts.as_ref().unwrap();
        assert!(mounts.iter().all(|mount| mount.read_only == Some(true)));
    }

    #[test]
    fn what_is_made_has_no_label_or_annotation_that_a_controller_heeds() {
        let pod = pod(&export("e"), &volumes(), "image", 5).unwrap();
        let service = service(&export("e")).unwrap();
        assert_eq!(pod.metadata.annotations, None);
        let labels = pod.metadata.labels.unwrap();
        let labels: Vec<_> = labels
            .iter()
            .map(|(k, v)| (k.as_str(), v.as_str()))
            .collect();
        let expected = [
            ("kubevirt.io", "virt-exporter"),
            ("kubevirt.io.virt-export-service", "u"),
            ("team", "a"),
        ];
        assert_eq!(labels, expected);
        let selector = service.spec.unwrap().selector.unwrap();
        assert_eq!(selector, [(EXPORT_LABEL.to_owned(), "u".to_owned())].into());
    }

    #[test]
    fn its_arguments_are_those_of_the_program() {
        #[derive(clap::Parser)]
        struct Cli {
            #[command(flatten)]
            options: crate::export::Options,
        }
        let pod = pod(&export("e"), &volumes(), "image", 5).unwrap();
        let args = pod.spec.unwrap().containers[0].args.clone().unwrap();
        let parsed = <Cli as clap::Parser>::try_parse_from(&args).map(|cli| cli.options);
        let options = parsed
            .map_err(|error| format!("{args:?}: {error}"))
            .unwrap();
        let paths: Vec<_> = options
            .volumes
            .iter()
            .map(|volume| (volume.name.as_str(), volume.path.to_str().unwrap()))
            .collect();
        let expected = [
            ("a.b", "/volumes/0/disk.img"),
            ("c", "/dev/podvisor-export-1"),
        ];
        assert_eq!((paths.as_slice(), options.until), (&expected[..], 5));
        let files = &options.files[0];
        assert_eq!(
            (&*files.name, files.path.to_str()),
            ("d", Some("/volumes/2"))
        );
    }
}
