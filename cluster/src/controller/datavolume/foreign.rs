//! The other side of a copy from another namespace: the source, and the pod beside it that sends
//! its data to the importer.
//!
//! Nothing in the source's namespace can be owned by the DataVolume, so a finalizer of the
//! DataVolume keeps it until the pod is gone. All is asked for when it is needed and nothing is
//! watched: it is needed while a copy goes on.

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Secret};
use kube::Api;
use kube::api::{DeleteParams, PostParams, Preconditions};
use podvisor_cluster_types::datavolume::ForeignSource;
use podvisor_cluster_types::names::is_dns_label;
use serde_json::json;

use super::pod;
use crate::controller::error::{Error, code, is_gone};
use crate::controller::{Context, patch};
use crate::objects::{CDI_COMPONENT_LABEL, DataVolume};
use crate::upload;

/// Finalizer of a DataVolume: a pod in another namespace may be its own.
pub(super) const FINALIZER: &str = "podvisor.io/clone-source";

/// The name of the container that sends.
pub(super) const SENDER: &str = "source";

/// Annotation of the pod that sends: where to.
const ADDRESS: &str = "podvisor.io/clone-address";

/// Annotation of the pod that sends: for which DataVolume, for people.
const FOR: &str = "podvisor.io/clone-for";

/// The value of the label of such pods.
const COMPONENT: &str = "clone-source";

/// What is known of the other side.
#[derive(Debug)]
pub(super) struct Facts {
    pub(super) namespace: String,
    pub(super) is_granted: bool,
    pub(super) pod: Option<Pod>,
}

impl Facts {
    /// Finds out whether a DataVolume may have its copy, and how far that is. Nothing is asked of
    /// the other namespace before it is known that it may.
    pub(super) async fn of(
        volume: &DataVolume,
        source: &ForeignSource,
        context: &Context,
    ) -> Result<Self, Error> {
        let is_granted = context.importers().is_granted(volume, source).await?;
        let pod = if is_granted {
            let pods: Api<Pod> = context.world.api(&source.namespace);
            let found = pods.get_opt(&name(volume)).await;
            found.map_err(|source| Error::request("look for the source pod of", volume, source))?
        } else {
            None
        };
        Ok(Self {
            namespace: source.namespace.clone(),
            is_granted,
            pod,
        })
    }
}

/// Returns whether something in another namespace may have to go before the DataVolume.
pub(super) fn is_held(volume: &DataVolume) -> bool {
    let finalizers = volume.metadata.finalizers.iter().flatten();
    finalizers.into_iter().any(|name| name == FINALIZER)
}

/// Returns the name of the pod that sends: one per DataVolume.
pub(super) fn name(volume: &DataVolume) -> String {
    pod::name_of(SENDER, volume)
}

/// Returns the name of the Secret that it sends with.
pub(super) fn credentials_name(sender: &Pod) -> String {
    sender.metadata.name.clone().unwrap_or_default()
}

/// Returns whether a pod sends to this address.
pub(super) fn sends_to(sender: &Pod, address: &str) -> bool {
    let annotations = sender.metadata.annotations.as_ref();
    let given = annotations.and_then(|annotations| annotations.get(ADDRESS));
    given.is_some_and(|given| given == address)
}

/// What a pod that sends is made of.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sender<'a> {
    /// The source's namespace.
    pub(super) namespace: &'a str,
    /// The source's name.
    pub(super) claim: &'a str,
    /// Whether it is a device.
    pub(super) is_block: bool,
    /// The unique id of the claim that is filled.
    pub(super) target: &'a str,
    /// The importer's address.
    pub(super) address: &'a str,
    /// The program's image.
    pub(super) image: &'a str,
    /// How often earlier ones failed.
    pub(super) restarts: i32,
}

/// Returns the pod that sends: it may read the source, and has no rights.
pub(super) fn pod(volume: &DataVolume, of: Sender<'_>) -> Result<Pod, serde_json::Error> {
    const CREDENTIALS: &str = "/credentials";
    const SOURCE: &str = "/source";
    const DEVICE: &str = "/dev/podvisor-source";
    let name = name(volume);
    let to = match of.address.contains(':') {
        true => format!("[{}]:{}", of.address, upload::PORT),
        false => format!("{}:{}", of.address, upload::PORT),
    };
    let file = match of.is_block {
        true => DEVICE.to_owned(),
        false => format!("{SOURCE}/disk.img"),
    };
    let mut mounts = vec![json!({
        "name": "credentials", "mountPath": CREDENTIALS, "readOnly": true,
    })];
    let mut devices = Vec::new();
    match of.is_block {
        true => devices.push(json!({"name": "source", "devicePath": DEVICE})),
        false => mounts.push(json!({"name": "source", "mountPath": SOURCE, "readOnly": true})),
    }
    let container = json!({
        "name": SENDER,
        "image": of.image,
        "args": [
            "send",
            format!("--file={file}"),
            format!("--to={to}"),
            format!("--name={}", upload::server_name(of.target)),
            format!("--credentials={CREDENTIALS}"),
        ],
        "volumeMounts": mounts,
        "volumeDevices": devices,
    });
    let volumes = vec![
        json!({
            "name": "source",
            "persistentVolumeClaim": {"claimName": of.claim, "readOnly": true},
        }),
        json!({"name": "credentials", "secret": {"secretName": name, "defaultMode": 0o440}}),
    ];
    let meta = &volume.metadata;
    let of_volume = format!(
        "{}/{}",
        meta.namespace.as_deref().unwrap_or_default(),
        meta.name.as_deref().unwrap_or_default()
    );
    serde_json::from_value(json!({
        "metadata": {
            "name": name,
            "namespace": of.namespace,
            "labels": {"app": "containerized-data-importer", CDI_COMPONENT_LABEL: COMPONENT},
            "annotations": {
                pod::RESTARTS: of.restarts.to_string(), ADDRESS: of.address, FOR: of_volume,
            },
        },
        "spec": pod::confined(container, volumes),
    }))
}

/// Makes the pod that sends, and then the Secret that goes with it.
pub(super) async fn create(
    volume: &DataVolume,
    sender: &Pod,
    target: &PersistentVolumeClaim,
    context: &Context,
) -> Result<(), Error> {
    let namespace = sender.metadata.namespace.as_deref().unwrap_or_default();
    let pods: Api<Pod> = context.world.api(namespace);
    match pods.create(&PostParams::default(), sender).await {
        Ok(made) => {
            let note = format!("Created the source pod {namespace}/{}", name(volume));
            context.event(volume, "CloneScheduled", "Clone", note).await;
            create_credentials(volume, &made, target, context).await
        }
        // Made before this controller was killed: its Secret is looked after while it waits.
        Err(error) if code(&error) == Some(409) => Ok(()),
        Err(error) => {
            let note = format!("the API server refused the source pod in {namespace}: {error}");
            context.warn(volume, "Error", "Clone", note).await;
            Err(Error::request("make the source pod of", volume, error))
        }
    }
}

/// Makes the Secret of a pod that waits for it.
pub(super) async fn create_credentials(
    volume: &DataVolume,
    sender: &Pod,
    target: &PersistentVolumeClaim,
    context: &Context,
) -> Result<(), Error> {
    let namespace = sender.metadata.namespace.as_deref().unwrap_or_default();
    let secrets: Api<Secret> = context.world.api(namespace);
    let importers = context.importers();
    importers
        .make_sender_credentials(volume, target, sender, &secrets)
        .await
}

/// Deletes the pod that sends; returns whether it is gone.
pub(super) async fn delete(
    volume: &DataVolume,
    namespace: &str,
    uid: Option<String>,
    context: &Context,
) -> Result<bool, Error> {
    let pods: Api<Pod> = context.world.api(namespace);
    let mut params = DeleteParams::background();
    if uid.is_some() {
        params = params.preconditions(Preconditions {
            uid,
            resource_version: None,
        });
    }
    match pods.delete(&name(volume), &params).await {
        Ok(_) => Ok(false),
        Err(error) if is_gone(&error) => Ok(true),
        Err(error) => Err(Error::request("delete the source pod of", volume, error)),
    }
}

/// Deletes the pod that sends, and lets the DataVolume go when there is none.
pub(super) async fn release(volume: &DataVolume, context: &Context) -> Result<(), Error> {
    let own = volume.metadata.namespace.as_deref().unwrap_or_default();
    // A specification does not change, and nobody but its own controller sets the finalizer.
    let source = volume.spec.foreign_source(own);
    let source = source.filter(|source| is_dns_label(&source.namespace));
    let is_gone = match &source {
        Some(source) => delete(volume, &source.namespace, None, context).await?,
        None => true,
    };
    if is_gone {
        let api: Api<DataVolume> = context.world.api(own);
        patch::object(&api, volume, patch::finalizer(volume, FINALIZER, false)).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(address: &str, is_block: bool) -> Pod {
        let volume: DataVolume = serde_json::from_value(json!({
            "metadata": {"name": "a", "namespace": "n", "uid": "u"},
        }))
        .unwrap();
        let of = Sender {
            namespace: "golden",
            claim: "debian",
            is_block,
            target: "c",
            address,
            image: "image",
            restarts: 2,
        };
        pod(&volume, of).unwrap()
    }

    #[test]
    fn a_source_pod_reads_its_source_and_has_no_rights() {
        for is_block in [false, true] {
            let pod = made("10.0.0.1", is_block);
            assert_eq!(pod.metadata.namespace.as_deref(), Some("golden"));
            assert_eq!(pod::restarts(&pod), 2);
            assert!(sends_to(&pod, "10.0.0.1") && !sends_to(&pod, "10.0.0.2"));
            let spec = pod.spec.as_ref().unwrap();
            assert_eq!(spec.automount_service_account_token, Some(false));
            let volumes = spec.volumes.as_ref().unwrap();
            let claims: Vec<_> = volumes
                .iter()
                .filter_map(|volume| volume.persistent_volume_claim.as_ref())
                .map(|claim| (claim.claim_name.as_str(), claim.read_only))
                .collect();
            assert_eq!(claims, [("debian", Some(true))]);
            let context = spec.containers[0].security_context.as_ref().unwrap();
            assert_eq!(context.allow_privilege_escalation, Some(false));
            assert_eq!(context.read_only_root_filesystem, Some(true));
        }
    }

    #[test]
    fn its_arguments_are_those_of_the_program() {
        #[derive(clap::Parser)]
        struct Cli {
            #[command(flatten)]
            options: crate::copy::Options,
        }
        for address in ["10.0.0.1", "fd00::1"] {
            let pod = made(address, false);
            let args = pod.spec.unwrap().containers[0].args.clone().unwrap();
            let parsed = <Cli as clap::Parser>::try_parse_from(&args).map(|cli| cli.options);
            let options = parsed
                .map_err(|error| format!("{args:?}: {error}"))
                .unwrap();
            assert_eq!(options.to.ip().to_string(), address);
            assert_eq!(options.name, "c.upload.podvisor.internal");
        }
    }
}
