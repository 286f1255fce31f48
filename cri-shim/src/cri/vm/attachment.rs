//! Pods that keep a claim on the node of a VM, into which it is plugged while the VM runs.
//!
//! Such a pod has no machine: its container runs until it is stopped. What it keeps is in an
//! annotation, which in a cluster only the controller may write (docs/adr/0055-hotplug.md).

use std::collections::HashMap;
use std::fs::File;

use podvisor_cri_messages::ContainerConfig;
use serde::Deserialize;

use super::dump_files::DumpDirectory;
use super::vmi::Sources;
use super::{honour, images, migration, vmi};
use crate::cri::error::{CriError, Result};
use crate::cri::node::Pod;
use crate::cri::state::{GuestSize, NodeFile};
use crate::cri::vm_spec::{MAX_SERIAL, MEMORY_UNIT, VMI};

/// The annotation that makes a pod one that keeps a claim.
const ANNOTATION: &str = "podvisor.io/attachment";

/// Most bytes of it.
const MAX_BYTES: usize = 4096;

/// What a pod keeps.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(in crate::cri) struct Attachment {
    /// Unique id of the instance that gets it.
    pub(in crate::cri) instance: String,
    /// The name of the volume.
    pub(in crate::cri) volume: String,
    /// The serial number by which the guest finds it.
    pub(in crate::cri) serial: String,
    /// The guest cannot write it.
    #[serde(default)]
    read_only: bool,
    /// The claim is for dumps of the guest's memory, and is no disk.
    #[serde(default)]
    memory_dump: bool,
}

/// A claim, opened.
#[derive(Debug)]
pub(in crate::cri) struct OpenClaim {
    pub(in crate::cri) file: File,
    pub(in crate::cri) is_read_only: bool,
}

impl Attachment {
    /// Returns what a pod with these annotations keeps, if it is such a pod.
    ///
    /// # Errors
    /// The annotation is malformed, or the pod is a machine as well.
    pub(in crate::cri) fn of_annotations(
        annotations: &HashMap<String, String>,
    ) -> Result<Option<Self>> {
        let Some(text) = annotations.get(ANNOTATION) else {
            return Ok(None);
        };
        let invalid = |reason: String| {
            CriError::invalid("config.annotations", format!("{ANNOTATION}: {reason}"))
        };
        if text.len() > MAX_BYTES {
            let bytes = text.len();
            return Err(invalid(format!("{bytes} bytes, but at most {MAX_BYTES}")));
        }
        let read: Self = serde_json::from_str(text)
            .map_err(|error| invalid(format!("it is not what a pod keeps: {error}")))?;
        if annotations.contains_key(VMI) || migration::incoming(annotations)?.is_some() {
            return Err(invalid("a pod that keeps a claim is no machine".to_owned()));
        }
        let is_serial = (1..=MAX_SERIAL).contains(&read.serial.len())
            && read.serial.bytes().all(|byte| byte.is_ascii_graphic());
        if !is_serial || read.instance.is_empty() || read.volume.is_empty() {
            return Err(invalid(format!(
                "it needs an instance, a volume, and a serial number of 1 to {MAX_SERIAL} \
                 printable characters"
            )));
        }
        Ok(Some(read))
    }

    /// Checks the container of such a pod before anything is created.
    pub(super) fn check_container(&self, config: &ContainerConfig) -> Result<()> {
        honour::check_container(config, true)?;
        vmi::check_container(config)?;
        let image = config.image.as_ref();
        if !images::is_none(image.map_or("", |image| image.image.as_str())) {
            let reason = "a pod that keeps a claim runs no image";
            return Err(CriError::invalid("config.image", reason));
        }
        Sources(config)
            .claim(ANNOTATION, &self.volume)
            .map(drop)
            .map_err(CriError::Vmi)
    }

    /// Opens the claim among the mounts and devices of the pod's container. It blocks.
    ///
    /// # Errors
    /// It is not there, or is not a disk.
    pub(in crate::cri) fn open(&self, config: &ContainerConfig) -> Result<OpenClaim> {
        if self.memory_dump {
            let reason = "the claim is kept for memory dumps: it is not plugged in";
            return Err(self.invalid(reason));
        }
        let place = Sources(config).claim(ANNOTATION, &self.volume);
        let place = place.map_err(CriError::Vmi)?;
        let is_read_only = self.read_only || place.is_read_only;
        let opened = place.file.open(is_read_only);
        let file = opened.map_err(CriError::io("open the disk", place.file.path()))?;
        Ok(OpenClaim { file, is_read_only })
    }

    /// Opens the directory of the claim among the mounts of the pod's container, for dumps of the
    /// guest's memory. It blocks.
    ///
    /// # Errors
    /// The claim is not kept for that, is not there, is a block device, or cannot be written.
    pub(in crate::cri) fn open_for_dumps(&self, config: &ContainerConfig) -> Result<DumpDirectory> {
        if !self.memory_dump {
            return Err(self.invalid("the claim is kept as a disk, and not for memory dumps"));
        }
        let place = Sources(config).claim(ANNOTATION, &self.volume);
        let place = place.map_err(CriError::Vmi)?;
        let directory = match (&place.file, place.is_read_only) {
            (_, true) => return Err(self.invalid("the pod may not write the claim")),
            (NodeFile::Device(_), _) => {
                let reason = "memory dumps take a claim with volumeMode Filesystem";
                return Err(self.invalid(reason));
            }
            (NodeFile::File(disk), false) => disk.parent().unwrap_or(disk),
        };
        let security = config
            .linux
            .as_ref()
            .and_then(|linux| linux.security_context.as_ref());
        let user = security.and_then(|security| security.run_as_user);
        let user = user.and_then(|user| u32::try_from(user.value).ok());
        DumpDirectory::open(directory, user)
    }

    fn invalid(&self, reason: &str) -> CriError {
        let volume: String = self.volume.chars().take(64).collect();
        CriError::invalid("pod_uid", format!("the volume {volume:?}: {reason}"))
    }
}

/// Whether a pod keeps a claim, and is no machine.
pub(in crate::cri) fn is_attachment(pod: &Pod) -> bool {
    pod.with_record(|record| has_annotation(&record.config.annotations))
}

pub(super) fn has_annotation(annotations: &HashMap<String, String>) -> bool {
    annotations.contains_key(ANNOTATION)
}

/// The size of a machine that is never built.
pub(super) fn size() -> GuestSize {
    GuestSize {
        memory: MEMORY_UNIT,
        growth: 0,
        vcpus: 1,
        max_vcpus: 1,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use podvisor_cri_messages::{Device, ImageSpec, Mount};

    use super::*;

    fn annotations(text: &str) -> HashMap<String, String> {
        HashMap::from([(ANNOTATION.to_owned(), text.to_owned())])
    }

    const KEPT: &str = r#"{"instance": "u", "volume": "data", "serial": "s", "later": 1}"#;

    fn config(host_path: &str, name: &str, readonly: bool) -> ContainerConfig {
        ContainerConfig {
            image: Some(ImageSpec {
                image: "podvisor.io/boot-from-volume:v1".to_owned(),
                ..ImageSpec::default()
            }),
            mounts: vec![Mount {
                host_path: host_path.to_owned(),
                container_path: format!("/podvisor/volumes/{name}"),
                readonly,
                ..Mount::default()
            }],
            ..ContainerConfig::default()
        }
    }

    #[test]
    fn a_pod_keeps_a_claim_only_if_it_is_told_which_and_for_whom() {
        assert_eq!(Attachment::of_annotations(&HashMap::new()).unwrap(), None);
        let kept = Attachment::of_annotations(&annotations(KEPT)).unwrap();
        let kept = kept.unwrap();
        assert_eq!((&*kept.instance, &*kept.volume), ("u", "data"));
        let long = "s".repeat(21);
        for text in [
            "",
            "{}",
            r#"{"instance": "", "volume": "data", "serial": "s"}"#,
            r#"{"instance": "u", "volume": "", "serial": "s"}"#,
            r#"{"instance": "u", "volume": "data", "serial": ""}"#,
            r#"{"instance": "u", "volume": "data", "serial": "a b"}"#,
            &format!(r#"{{"instance": "u", "volume": "data", "serial": "{long}"}}"#),
            &" ".repeat(MAX_BYTES + 1),
        ] {
            let refused = Attachment::of_annotations(&annotations(text));
            let error = refused.unwrap_err().to_string();
            assert!(error.contains(ANNOTATION), "{error}");
        }
        let mut machine = annotations(KEPT);
        machine.insert(VMI.to_owned(), "{}".to_owned());
        assert!(Attachment::of_annotations(&machine).is_err());
    }

    #[test]
    fn what_is_kept_is_a_volume_of_the_pod_and_a_disk() {
        let kept = Attachment::of_annotations(&annotations(KEPT)).unwrap();
        let kept = kept.unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_str().unwrap();
        kept.check_container(&config(path, "data", false)).unwrap();
        let error = kept.check_container(&config(path, "other", false));
        let error = error.unwrap_err().to_string();
        assert!(error.contains("is not mounted"), "{error}");
        let mut runs = config(path, "data", false);
        runs.image = Some(ImageSpec {
            image: "busybox".to_owned(),
            ..ImageSpec::default()
        });
        let error = kept.check_container(&runs).unwrap_err().to_string();
        assert!(error.contains("runs no image"), "{error}");
        let error = kept.open(&config(path, "data", false)).unwrap_err();
        assert!(error.to_string().contains("disk.img"), "{error}");
        fs::write(dir.path().join("disk.img"), "disk").unwrap();
        let opened = kept.open(&config(path, "data", false)).unwrap();
        assert!(!opened.is_read_only);
        assert!(kept.open(&config(path, "data", true)).unwrap().is_read_only);
    }

    #[test]
    fn a_claim_is_a_disk_or_for_dumps() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_str().unwrap();
        fs::write(dir.path().join("disk.img"), "disk").unwrap();
        let disk = Attachment::of_annotations(&annotations(KEPT)).unwrap();
        let refused = disk.unwrap().open_for_dumps(&config(path, "data", false));
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("as a disk"), "{refused}");
        let text = KEPT.replace("\"later\": 1", "\"memoryDump\": true");
        let dumps = Attachment::of_annotations(&annotations(&text)).unwrap();
        let dumps = dumps.unwrap();
        dumps.open_for_dumps(&config(path, "data", false)).unwrap();
        let refused = dumps.open(&config(path, "data", false)).unwrap_err();
        assert!(refused.to_string().contains("memory dumps"), "{refused}");
        let refused = dumps.open_for_dumps(&config(path, "data", true));
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("may not write"), "{refused}");
        let mut block = config(path, "other", false);
        block.devices = vec![Device {
            container_path: "/podvisor/devices/data".to_owned(),
            host_path: "/dev/null".to_owned(),
            permissions: "rw".to_owned(),
        }];
        let refused = dumps.open_for_dumps(&block).unwrap_err().to_string();
        assert!(refused.contains("volumeMode Filesystem"), "{refused}");
    }
}
