//! The pod that fills a claim: `podvisor-cluster import`, with no rights anywhere.

use k8s_openapi::api::core::v1::Pod;
use podvisor_cluster_types::datavolume::GROUP;
use serde_json::{Value, json};

use super::claim::owner;
use crate::controller::claims::POD_PHASE;
use crate::controller::names;
use crate::copy;
use crate::objects::{CDI_COMPONENT_LABEL, DataVolume, IMPORTER, annotation};
use crate::upload;

/// Where its progress is asked.
pub(super) const PORT: u16 = 8080;

/// Annotation of an importer: how often earlier ones failed.
pub(super) const RESTARTS: &str = "podvisor.io/restarts";

/// The user that owns disks, as in VMs' pods.
const USER: u32 = 107;

const DIRECTORY: &str = "/data";
const DEVICE: &str = "/dev/podvisor-disk";
const CERTIFICATES: &str = "/certificates";
const CREDENTIALS: &str = "/credentials";
const SCRATCH: &str = "/scratch";
const SOURCE: &str = "/source";
const SOURCE_DEVICE: &str = "/dev/podvisor-source";

/// Returns the name of an importer: one per unique id, so that it cannot be created twice.
pub(super) fn name(volume: &DataVolume) -> String {
    name_of(IMPORTER, volume)
}

/// Returns the name of a pod for a DataVolume, by what it does.
pub(super) fn name_of(role: &str, volume: &DataVolume) -> String {
    let name = volume.metadata.name.as_deref().unwrap_or_default();
    let uid = volume.metadata.uid.as_deref().unwrap_or_default();
    // A pod's name is a host name as well.
    let room = 63 - role.len() - 2 - names::HASH;
    let short: String = name.chars().take(room).collect();
    let short = short.trim_end_matches(['-', '.']);
    format!("{role}-{short}-{}", names::hash(uid))
}

/// Returns the name of the Secret by which the upload of a claim is protected: one per claim, since
/// the certificate in it is for one.
pub(super) fn credentials_name(claim: &str) -> String {
    format!("upload-{claim}")
}

/// Returns how often the import failed, this pod's failures included.
pub(super) fn restarts(pod: &Pod) -> i32 {
    let annotations = pod.metadata.annotations.as_ref();
    let before = annotations.and_then(|annotations| annotations.get(RESTARTS)?.parse().ok());
    let status = pod.status.as_ref();
    let containers = status.and_then(|status| status.container_statuses.as_ref());
    let container = containers.and_then(|containers| containers.first());
    let failed = status.is_some_and(|status| status.phase.as_deref() == Some("Failed"));
    before
        .unwrap_or(0_i32)
        .saturating_add(container.map_or(0, |container| container.restart_count))
        .saturating_add(i32::from(failed))
}

/// Which claims are devices.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Devices {
    /// The one that is filled.
    pub(super) target: bool,
    /// The one that is copied.
    pub(super) source: bool,
}

/// Returns the importer of a DataVolume after `restarts` failures. `None` if nothing is known to
/// import. `claim` is the unique id of the claim that is filled.
pub(super) fn pod(
    volume: &DataVolume,
    of: Devices,
    claim: &str,
    image: &str,
    restarts: i32,
) -> Option<Result<Pod, serde_json::Error>> {
    let spec = &volume.spec;
    let source = spec.source.as_ref()?;
    let size = spec.disk_size()?;
    let uid = volume.metadata.uid.clone().unwrap_or_default();
    let mut args = vec![
        "import".to_owned(),
        format!("--size={size}"),
        format!("--progress=[::]:{PORT}"),
        format!("--owner={uid}"),
    ];
    let (mut secret, mut certificates) = (None, None);
    let is_block = of.target;
    let mut scratch = is_block;
    if let Some(http) = &source.http {
        args.push(format!("--url={}", http.url));
        let checksum = http.checksum.as_ref().filter(|text| !text.is_empty());
        args.extend(checksum.map(|checksum| format!("--checksum={checksum}")));
        (secret, certificates) = (http.secret_ref.clone(), http.cert_config_map.clone());
    } else if let Some(registry) = &source.registry {
        args.push(format!("--image={}", registry.image()?));
        scratch = true;
        secret.clone_from(&registry.secret_ref);
        certificates.clone_from(&registry.cert_config_map);
    } else if source.blank.is_some() {
        args.push("--blank".to_owned());
    } else if source.upload.is_some() {
        args.push(format!("--upload=[::]:{}", upload::PORT));
        args.push(format!("--credentials={CREDENTIALS}"));
    } else if is_foreign(volume) {
        // Its claim cannot be mounted here: a pod beside it sends its data.
        args.push(format!("--upload=[::]:{}", upload::PORT));
        args.push(format!("--sender={}", copy::sender_name(claim)));
        args.push(format!("--credentials={CREDENTIALS}"));
    } else {
        spec.cloned_claim()?;
        args.push(match of.source {
            true => format!("--file={SOURCE_DEVICE}"),
            false => format!("--file={SOURCE}/disk.img"),
        });
    }
    let name_of_claim = volume.metadata.name.clone().unwrap_or_default();
    let mut volumes = vec![json!({
        "name": "disk", "persistentVolumeClaim": {"claimName": name_of_claim},
    })];
    let (mut mounts, mut devices) = (Vec::new(), Vec::new());
    if is_block {
        args.push(format!("--device={DEVICE}"));
        devices.push(json!({"name": "disk", "devicePath": DEVICE}));
    } else {
        args.push(format!("--directory={DIRECTORY}"));
        mounts.push(json!({"name": "disk", "mountPath": DIRECTORY}));
        if spec.pvc.is_some() {
            args.push("--leave-overhead".to_owned());
        }
    }
    if let Some((_, source)) = spec.cloned_claim().filter(|_| !is_foreign(volume)) {
        volumes.push(json!({
            "name": "source",
            "persistentVolumeClaim": {"claimName": source, "readOnly": true},
        }));
        match of.source {
            true => devices.push(json!({"name": "source", "devicePath": SOURCE_DEVICE})),
            false => mounts.push(json!({
                "name": "source", "mountPath": SOURCE, "readOnly": true,
            })),
        }
    }
    if scratch {
        args.push(format!("--scratch={SCRATCH}"));
        volumes.push(json!({"name": "scratch", "emptyDir": {}}));
        mounts.push(json!({"name": "scratch", "mountPath": SCRATCH}));
    }
    let mut ports = vec![json!({"name": "metrics", "containerPort": PORT})];
    let mut probe = Value::Null;
    if is_connected_to(volume) {
        ports.push(json!({"name": "upload", "containerPort": upload::PORT}));
        probe = json!({"tcpSocket": {"port": upload::PORT}, "periodSeconds": 2});
        volumes.push(json!({
            "name": "credentials",
            "secret": {"secretName": credentials_name(claim), "defaultMode": 0o440},
        }));
        mounts.push(json!({
            "name": "credentials", "mountPath": CREDENTIALS, "readOnly": true,
        }));
    }
    if spec.preallocation == Some(true) {
        args.push("--preallocate".to_owned());
    }
    if let Some(map) = certificates.filter(|name| !name.is_empty()) {
        args.push(format!("--certificates={CERTIFICATES}"));
        volumes.push(json!({"name": "certificates", "configMap": {"name": map}}));
        mounts.push(json!({
            "name": "certificates", "mountPath": CERTIFICATES, "readOnly": true,
        }));
    }
    let secret = secret.filter(|name| !name.is_empty());
    let env: Vec<Value> = secret
        .iter()
        .flat_map(|secret| credentials(secret))
        .collect();
    let container = json!({
        "name": IMPORTER,
        "image": image,
        "args": args,
        "env": env,
        "ports": ports,
        "readinessProbe": probe,
        "volumeMounts": mounts,
        "volumeDevices": devices,
    });
    let mut spec = confined(container, volumes);
    for (field, value) in [
        ("priorityClassName", &volume.spec.priority_class_name),
        ("serviceAccountName", &volume.spec.service_account_name),
    ] {
        if let Some(value) = value.as_deref().filter(|value| !value.is_empty()) {
            spec[field] = value.into();
        }
    }
    let pod = json!({
        "metadata": {
            "name": name(volume),
            "namespace": volume.metadata.namespace,
            "labels": {"app": "containerized-data-importer", CDI_COMPONENT_LABEL: IMPORTER},
            "annotations": {RESTARTS: restarts.to_string()},
            "ownerReferences": [owner(volume)],
        },
        "spec": spec,
    });
    Some(serde_json::from_value(pod))
}

/// The specification of a pod with one container of this program, an ordinary user's, without
/// rights or privileges.
pub(in crate::controller) fn confined(mut container: Value, volumes: Vec<Value>) -> Value {
    container["terminationMessagePolicy"] = json!("FallbackToLogsOnError");
    container["resources"] = json!({
        "requests": {"cpu": "100m", "memory": "64Mi"},
        "limits": {"cpu": "1", "memory": "640Mi"},
    });
    container["securityContext"] = json!({
        "allowPrivilegeEscalation": false,
        "readOnlyRootFilesystem": true,
        "capabilities": {"drop": ["ALL"]},
    });
    json!({
        "containers": [container],
        "volumes": volumes,
        "restartPolicy": "OnFailure",
        "automountServiceAccountToken": false,
        "enableServiceLinks": false,
        "terminationGracePeriodSeconds": 10,
        "securityContext": {
            "runAsNonRoot": true,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    })
}

/// Returns whether the claim is a copy of another namespace's.
pub(super) fn is_foreign(volume: &DataVolume) -> bool {
    let own = volume.metadata.namespace.as_deref().unwrap_or_default();
    volume.spec.foreign_source(own).is_some()
}

/// Returns whether the importer waits for somebody who sends the disk.
pub(super) fn is_connected_to(volume: &DataVolume) -> bool {
    volume.spec.is_upload() || is_foreign(volume)
}

/// The user and the password of a secret: its container reads them, and nobody else.
fn credentials(secret: &str) -> [Value; 2] {
    let variable = |name: &str, key: &str| {
        let key = json!({"name": secret, "key": key});
        json!({"name": name, "valueFrom": {"secretKeyRef": key}})
    };
    [
        variable("IMPORTER_ACCESS_KEY_ID", "accessKeyId"),
        variable("IMPORTER_SECRET_KEY", "secretKey"),
    ]
}

/// Returns whether the pod is to stay when it is done.
pub(super) fn is_retained(volume: &DataVolume) -> bool {
    annotation(&volume.metadata, "storage.pod.retainAfterCompletion") == Some("true")
}

/// The annotations by which a claim tells who fills it.
pub(super) fn marks(volume: &DataVolume) -> Value {
    if volume.spec.is_upload() {
        return upload_marks(volume, "Succeeded", None);
    }
    json!({
        format!("{GROUP}/{}", POD_PHASE): "Succeeded",
        format!("{GROUP}/storage.import.importPodName"): name(volume),
    })
}

/// The annotations by which a claim tells where its upload is taken, if it is now.
pub(super) fn upload_marks(volume: &DataVolume, phase: &str, address: Option<&str>) -> Value {
    json!({
        upload::PHASE: phase,
        upload::READY: address.is_some().to_string(),
        upload::POD: name(volume),
        upload::ADDRESS: address,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(source: Value, claim: Value) -> DataVolume {
        let mut spec = claim;
        spec["source"] = source;
        serde_json::from_value(json!({
            "metadata": {"name": "a.b", "namespace": "n", "uid": "u"}, "spec": spec,
        }))
        .unwrap()
    }

    fn storage() -> Value {
        json!({"storage": {"resources": {"requests": {"storage": "1Gi"}}}})
    }

    fn made(volume: &DataVolume, is_block: bool) -> Pod {
        let of = Devices {
            target: is_block,
            source: !is_block,
        };
        pod(volume, of, "claim", "image", 3).unwrap().unwrap()
    }

    fn args(pod: &Pod) -> Vec<String> {
        pod.spec.clone().unwrap().containers[0]
            .args
            .clone()
            .unwrap()
    }

    #[test]
    fn an_importer_has_no_rights_and_no_privileges() {
        let pod = made(&volume(json!({"blank": {}}), storage()), false);
        let spec = pod.spec.as_ref().unwrap();
        assert_eq!(spec.automount_service_account_token, Some(false));
        let of_pod = spec.security_context.as_ref().unwrap();
        assert_eq!(of_pod.run_as_non_root, Some(true));
        let context = spec.containers[0].security_context.as_ref().unwrap();
        assert_eq!(context.allow_privilege_escalation, Some(false));
        assert_eq!(context.read_only_root_filesystem, Some(true));
        let dropped = context
            .capabilities
            .as_ref()
            .unwrap()
            .drop
            .as_ref()
            .unwrap();
        assert_eq!(dropped, &["ALL"]);
        assert_eq!(spec.runtime_class_name, None);
        assert_eq!(restarts(&pod), 3);
    }

    #[test]
    fn secrets_are_named_and_never_read() {
        let source = json!({"http": {
            "url": "https://h/x", "secretRef": "s", "certConfigMap": "c", "checksum": "",
        }});
        let pod = made(&volume(source, storage()), false);
        let spec = pod.spec.as_ref().unwrap();
        let env = spec.containers[0].env.as_ref().unwrap();
        let from = env[1].value_from.as_ref().unwrap();
        let key = from.secret_key_ref.as_ref().unwrap();
        assert_eq!((key.name.as_str(), key.key.as_str()), ("s", "secretKey"));
        let args = args(&pod);
        assert!(args.contains(&"--url=https://h/x".to_owned()), "{args:?}");
        assert!(args.contains(&"--certificates=/certificates".to_owned()));
        assert!(!args.iter().any(|arg| arg.starts_with("--checksum")));
    }

    #[test]
    fn the_key_of_an_upload_is_in_the_secret_of_its_claim() {
        let pod = made(&volume(json!({"upload": {}}), storage()), false);
        let spec = pod.spec.as_ref().unwrap();
        let volumes = spec.volumes.as_ref().unwrap();
        let secret = volumes.iter().find_map(|volume| volume.secret.as_ref());
        let secret = secret.unwrap();
        assert_eq!(secret.secret_name.as_deref(), Some("upload-claim"));
        assert_eq!(secret.default_mode, Some(0o440));
        let probe = spec.containers[0].readiness_probe.as_ref().unwrap();
        assert!(probe.tcp_socket.is_some());
        let other = made(&volume(json!({"blank": {}}), storage()), false);
        assert_eq!(other.spec.unwrap().containers[0].readiness_probe, None);
    }

    #[test]
    fn the_arguments_are_those_of_the_program() {
        #[derive(clap::Parser)]
        struct Cli {
            #[command(flatten)]
            options: crate::import::Options,
        }
        let pvc = json!({"pvc": {"resources": {"requests": {"storage": "1G"}}}});
        let http = json!({"http": {"url": "http://h/--x", "checksum": "sha256:00"}});
        for (source, claim, is_block) in [
            (json!({"blank": {}}), storage(), true),
            (json!({"upload": {}}), storage(), true),
            (json!({"upload": {}}), pvc.clone(), false),
            (json!({"pvc": {"name": "x"}}), storage(), true),
            (
                json!({"pvc": {"name": "x", "namespace": "other"}}),
                storage(),
                true,
            ),
            (
                json!({"pvc": {"name": "x", "namespace": "n"}}),
                storage(),
                false,
            ),
            (
                json!({"registry": {"url": "docker://h/x:1"}}),
                storage(),
                false,
            ),
            (
                json!({"registry": {"url": "docker://h/x:1"}}),
                pvc.clone(),
                true,
            ),
            (http, pvc, false),
        ] {
            let args = args(&made(&volume(source, claim), is_block));
            let parsed = <Cli as clap::Parser>::try_parse_from(&args);
            let options = parsed.map_err(|error| format!("{args:?}: {error}"));
            let options = options.unwrap().options;
            assert_eq!(options.device.is_some(), is_block);
            assert_eq!(options.owner, "u");
        }
    }

    #[test]
    fn what_is_not_supported_has_no_importer() {
        for source in [
            json!({}),
            json!({"s3": {}}),
            json!({"registry": {"url": "x"}}),
        ] {
            let volume = volume(source, storage());
            let made = pod(&volume, Devices::default(), "", "image", 0);
            assert!(made.is_none());
        }
    }

    #[test]
    fn a_name_is_a_host_name_and_no_others() {
        let mut long = volume(json!({"blank": {}}), storage());
        long.metadata.name = Some(format!("{}.x", "y".repeat(200)));
        assert!(name(&long).len() <= 63);
        let other = {
            let mut other = long.clone();
            other.metadata.uid = Some("v".into());
            other
        };
        assert_ne!(name(&long), name(&other));
    }
}
