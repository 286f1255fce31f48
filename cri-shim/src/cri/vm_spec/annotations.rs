//! Virtlet's annotations of a pod: `VirtletVCPUCount` and others. Each is checked, and all that is
//! wrong with them is reported together.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use podvisor_cloud_init::{Form, UserData, check_ignition, ssh_keys};

use super::spec::{Booter, DEFAULT_VCPUS, VmSpec};
use crate::cri::limits::parse_quantity;

/// What their names begin with.
const PREFIX: &str = "Virtlet";

/// A configuration of Ignition, in place of cloud-init's.
const IGNITION: &str = "podvisor.io/ignition";

/// What starts the system: `uefi`, in place of the loader.
pub(in crate::cri) const FIRMWARE: &str = "podvisor.io/firmware";

/// `install`: podvisor's guest agent is installed by cloud-init.
pub(in crate::cri) const GUEST_AGENT: &str = "podvisor.io/guest-agent";

/// Longest part of a value that an error quotes, in characters.
const QUOTED: usize = 64;

/// Most bytes of one value.
const MAX_VALUE: usize = 1 << 20;

/// Annotations that cannot be followed, with the reason.
const REFUSED: &[(&str, &str)] = &[
    (
        "VirtletLibvirtCPUSetting",
        "there is no libvirt; take VirtletVCPUCount",
    ),
    ("VirtletCloudInitUserDataSource", NEEDS_API),
    ("VirtletCloudInitUserDataSourceKey", NEEDS_API),
    ("VirtletCloudInitUserDataSourceEncoding", NEEDS_API),
    ("VirtletSSHKeySource", NEEDS_API),
    ("VirtletFilesFromDataSource", NEEDS_API),
];

const NEEDS_API: &str = "it names an object of the API server, which the node's runtime does not \
     read; mount the ConfigMap or Secret as a volume, or give the value itself in \
     VirtletCloudInitUserData or VirtletSSHKeys";

/// Everything that is wrong with a pod's annotations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AnnotationErrors(Vec<String>);

impl std::error::Error for AnnotationErrors {}

impl fmt::Display for AnnotationErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("; "))
    }
}

/// Reads annotations, and collects what is wrong.
struct Reader<'a> {
    all: BTreeMap<&'a str, &'a str>,
    errors: Vec<String>,
}

impl<'a> Reader<'a> {
    fn take(&mut self, key: &str) -> Option<&'a str> {
        let value = self.all.remove(key)?;
        if value.len() > MAX_VALUE {
            self.errors
                .push(format!("{key} is longer than {MAX_VALUE} bytes"));
            return None;
        }
        Some(value)
    }

    fn wrong(&mut self, key: &str, value: &str, wanted: &str) {
        let quoted: String = value.chars().take(QUOTED).collect();
        self.errors.push(format!("{key} is {quoted:?}: {wanted}"));
    }

    /// Exactly `true`; anything else is false.
    fn flag(&mut self, key: &str) -> bool {
        self.take(key) == Some("true")
    }

    /// One of some words, which `fold` makes comparable; the first one is the default.
    fn word<T: Copy>(&mut self, key: &str, words: &[(&str, T)], fold: bool) -> Option<T> {
        let value = self.take(key)?;
        let compared = match fold {
            true => value.to_ascii_lowercase(),
            false => value.to_owned(),
        };
        let found = words.iter().find(|(word, _)| *word == compared);
        if found.is_none() {
            let known: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
            self.wrong(key, value, &format!("write one of {}", known.join(", ")));
        }
        found.map(|(_, meaning)| *meaning)
    }

    fn vcpus(&mut self) -> u8 {
        let key = "VirtletVCPUCount";
        let Some(value) = self.take(key) else {
            return DEFAULT_VCPUS;
        };
        match value.trim().parse::<i64>() {
            Ok(count) if count <= 0 => DEFAULT_VCPUS,
            Ok(count) => u8::try_from(count).unwrap_or_else(|_| {
                self.wrong(key, value, "a machine has at most 255 virtual CPUs");
                DEFAULT_VCPUS
            }),
            Err(_) => {
                self.wrong(key, value, "it is not a whole number");
                DEFAULT_VCPUS
            }
        }
    }

    fn root_size(&mut self) -> Option<u64> {
        let key = "VirtletRootVolumeSize";
        let value = self.take(key)?.trim();
        if value.starts_with('-') {
            // The image's own size.
            return None;
        }
        let size = parse_quantity(value);
        if size.is_none() {
            self.wrong(key, value, "it is not a size such as 4Gi");
        }
        size
    }

    fn uuid(&mut self) -> Option<[u8; 16]> {
        let key = "VirtletSystemUUID";
        let value = self.take(key)?;
        let uuid = parse_uuid(value);
        if uuid.is_none() {
            self.wrong(key, value, "it is not a UUID");
        }
        uuid
    }

    fn ignition(&mut self) -> Option<Vec<u8>> {
        let text = self.take(IGNITION)?.as_bytes();
        match check_ignition(text) {
            Ok(()) => Some(text.to_vec()),
            Err(error) => {
                self.errors.push(format!("{IGNITION}: {error}"));
                None
            }
        }
    }

    fn user_data(&mut self) -> UserData {
        let inline = self.take("VirtletCloudInitUserData");
        let overwrite = self.flag("VirtletCloudInitUserDataOverwrite");
        let script = self.take("VirtletCloudInitUserDataScript");
        match (inline, script) {
            (Some(_), Some(_)) => {
                self.errors.push(
                    "VirtletCloudInitUserData and VirtletCloudInitUserDataScript are both there: \
                     give one of them"
                        .to_owned(),
                );
                UserData::None
            }
            (_, Some(script)) => UserData::Script(script.to_owned()),
            (Some(inline), None) => UserData::Merged {
                source: BTreeMap::new(),
                inline: Some(inline.to_owned()),
                overwrite,
            },
            (None, None) => UserData::None,
        }
    }
}

impl VmSpec {
    /// Reads what a pod's annotations say.
    ///
    /// # Errors
    /// Everything that is wrong with them.
    pub(crate) fn of_annotations(
        annotations: &HashMap<String, String>,
    ) -> Result<Self, AnnotationErrors> {
        let all = annotations.iter();
        let all = all.filter(|(key, _)| {
            key.starts_with(PREFIX) || [IGNITION, FIRMWARE, GUEST_AGENT].contains(&key.as_str())
        });
        let mut reader = Reader {
            all: all
                .map(|(key, value)| (key.as_str(), value.as_str()))
                .collect(),
            errors: Vec::new(),
        };
        for (key, reason) in REFUSED {
            if reader.all.remove(key).is_some() {
                reader
                    .errors
                    .push(format!("{key} is not supported: {reason}"));
            }
        }
        // Both are virtio-blk.
        reader.word("VirtletDiskDriver", &[("scsi", ()), ("virtio", ())], false);
        if reader.word(
            "VirtletCPUModel",
            &[("", false), ("host-model", true)],
            false,
        ) == Some(true)
        {
            reader.errors.push(
                "VirtletCPUModel host-model is not supported: guests have no nested virtualisation"
                    .to_owned(),
            );
        }
        // Directories have no owners of their own to change.
        reader.take("VirtletChown9pfsMounts");
        let forms = [
            ("nocloud", Form::NoCloud),
            ("configdrive", Form::ConfigDrive),
        ];
        let ignition = reader.ignition();
        let installs_agent = reader.word(GUEST_AGENT, &[("install", true)], false);
        if installs_agent.is_some() && ignition.is_some() {
            reader.errors.push(format!(
                "{GUEST_AGENT} and {IGNITION} are both there: the agent is installed by \
                 cloud-init, which an image with Ignition has not"
            ));
        }
        let spec = Self {
            vcpus: reader.vcpus(),
            root_size: reader.root_size(),
            booter: reader
                .word(FIRMWARE, &[("uefi", Booter::Firmware)], false)
                .unwrap_or_default(),
            uuid: reader.uuid(),
            form: match (
                reader.word("VirtletCloudInitImageType", &forms, true),
                &ignition,
            ) {
                (Some(Form::NoCloud), Some(_)) => {
                    reader.errors.push(format!(
                        "{IGNITION} needs VirtletCloudInitImageType configdrive, or none"
                    ));
                    Form::ConfigDrive
                }
                (_, Some(_)) => Form::ConfigDrive,
                (form, None) => form.unwrap_or_default(),
            },
            meta_data: reader.take("VirtletCloudInitMetaData").map(str::to_owned),
            user_data: match (reader.user_data(), ignition) {
                (UserData::None, Some(ignition)) => UserData::Document(ignition),
                (user_data, None) => user_data,
                (user_data, Some(_)) => {
                    reader.errors.push(format!(
                        "{IGNITION} and user-data for cloud-init are both there: an image reads \
                         one of them"
                    ));
                    user_data
                }
            },
            ssh_keys: reader
                .take("VirtletSSHKeys")
                .map(ssh_keys)
                .unwrap_or_default(),
            force_dhcp: reader.flag("VirtletForceDHCPNetworkConfig"),
            installs_agent: installs_agent.unwrap_or_default(),
        };
        for key in reader.all.keys() {
            reader.errors.push(format!("{key} is unknown"));
        }
        match reader.errors.is_empty() {
            true => Ok(spec),
            false => Err(AnnotationErrors(reader.errors)),
        }
    }
}

/// Reads a UUID in its usual form.
pub(super) fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let groups: Vec<&str> = text.split('-').collect();
    let lengths: Vec<usize> = groups.iter().map(|group| group.len()).collect();
    if lengths != [8, 4, 4, 4, 12] {
        return None;
    }
    let digits = groups.concat();
    if !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    Some(u128::from_str_radix(&digits, 16).ok()?.to_be_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(annotations: &[(&str, &str)]) -> Result<VmSpec, AnnotationErrors> {
        let owned = annotations.iter();
        let owned = owned.map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        VmSpec::of_annotations(&owned.collect())
    }

    #[test]
    fn without_annotations_everything_is_the_default() {
        let spec = read(&[("kubernetes.io/config.seen", "x")]).unwrap();
        assert_eq!(spec, VmSpec::default());
        assert_eq!(
            (spec.vcpus, spec.root_size, spec.form),
            (1, None, Form::NoCloud)
        );
    }

    #[test]
    fn every_annotation_is_understood() {
        let spec = read(&[
            ("VirtletVCPUCount", "2"),
            ("VirtletRootVolumeSize", "4Gi"),
            ("VirtletDiskDriver", "virtio"),
            ("VirtletCPUModel", ""),
            (FIRMWARE, "uefi"),
            (GUEST_AGENT, "install"),
            ("VirtletSystemUUID", "53008994-44c0-4017-ad44-9c49758083da"),
            ("VirtletForceDHCPNetworkConfig", "true"),
            ("VirtletChown9pfsMounts", "true"),
            ("VirtletCloudInitImageType", "ConfigDrive"),
            ("VirtletCloudInitMetaData", "a: 1"),
            ("VirtletCloudInitUserData", "users: []"),
            ("VirtletCloudInitUserDataOverwrite", "true"),
            ("VirtletSSHKeys", "ssh-ed25519 A\n\nssh-rsa B\n"),
        ]);
        let spec = spec.unwrap();
        assert_eq!((spec.vcpus, spec.root_size), (2, Some(4 << 30)));
        assert_eq!(spec.booter, Booter::Firmware);
        assert_eq!(
            spec.uuid.map(|uuid| uuid[..4].to_vec()),
            Some(vec![0x53, 0, 0x89, 0x94])
        );
        assert!(spec.force_dhcp && spec.installs_agent);
        assert_eq!(spec.form, Form::ConfigDrive);
        assert_eq!(spec.meta_data.as_deref(), Some("a: 1"));
        assert_eq!(spec.ssh_keys, ["ssh-ed25519 A", "ssh-rsa B"]);
        let UserData::Merged {
            inline, overwrite, ..
        } = spec.user_data
        else {
            panic!("{:?}", spec.user_data);
        };
        assert_eq!((inline.as_deref(), overwrite), (Some("users: []"), true));
        let script = read(&[("VirtletCloudInitUserDataScript", "#!/bin/sh")]).unwrap();
        assert_eq!(script.user_data, UserData::Script("#!/bin/sh".to_owned()));
    }

    #[test]
    fn all_errors_are_reported_at_once_and_quote_what_is_wrong() {
        let error = read(&[
            ("VirtletVCPUCount", "many"),
            ("VirtletRootVolumeSize", "big"),
            ("VirtletDiskDriver", "ide"),
            ("VirtletCPUModel", "host-model"),
            ("VirtletSystemUUID", "1234"),
            ("VirtletCloudInitImageType", "floppy"),
            (FIRMWARE, "bios"),
            (GUEST_AGENT, "yes"),
            ("VirtletCloudInitUserData", "a: 1"),
            ("VirtletCloudInitUserDataScript", "#!/bin/sh"),
            ("VirtletSSHKeySource", "secret/keys"),
            ("VirtletFilesFromDataSource", "configmap/files"),
            ("VirtletCloudInitUserDataSource", "secret/data"),
            ("VirtletLibvirtCPUSetting", "mode: x"),
            ("VirtletVcpuCount", "2"),
        ]);
        let said = error.unwrap_err().to_string();
        for part in [
            "VirtletVCPUCount is \"many\"",
            "VirtletRootVolumeSize is \"big\"",
            "VirtletDiskDriver is \"ide\": write one of scsi, virtio",
            "VirtletCPUModel",
            "VirtletSystemUUID is \"1234\"",
            "VirtletCloudInitImageType is \"floppy\"",
            "podvisor.io/firmware is \"bios\": write one of uefi",
            "podvisor.io/guest-agent is \"yes\": write one of install",
            "VirtletCloudInitUserDataScript are both",
            "VirtletSSHKeySource is not supported",
            "VirtletFilesFromDataSource is not supported",
            "VirtletCloudInitUserDataSource is not supported",
            "VirtletLibvirtCPUSetting is not supported",
            "VirtletVcpuCount is unknown",
        ] {
            assert!(said.contains(part), "{part}: {said}");
        }
    }

    #[test]
    fn a_configuration_of_ignition_stands_alone_on_a_config_drive() {
        let text = r#"{"ignition": {"version": "3.4.0"}}"#;
        let spec = read(&[(IGNITION, text), ("VirtletSSHKeys", "ssh-ed25519 A")]).unwrap();
        assert_eq!(spec.form, Form::ConfigDrive);
        assert_eq!(spec.user_data, UserData::Document(text.into()));
        for (others, named) in [
            (&[(IGNITION, "ignition: 3")][..], "butane"),
            (
                &[(IGNITION, text), ("VirtletCloudInitUserData", "a: 1")],
                "both",
            ),
            (
                &[(IGNITION, text), ("VirtletCloudInitImageType", "nocloud")],
                "configdrive",
            ),
            (&[(IGNITION, text), (GUEST_AGENT, "install")], "cloud-init"),
        ] {
            let said = read(others).unwrap_err().to_string();
            assert!(said.contains(named) && said.contains(IGNITION), "{said}");
        }
    }

    #[test]
    fn counts_and_sizes_without_meaning_are_the_default() {
        for count in ["0", "-3"] {
            assert_eq!(read(&[("VirtletVCPUCount", count)]).unwrap().vcpus, 1);
        }
        assert!(read(&[("VirtletVCPUCount", "256")]).is_err());
        assert_eq!(
            read(&[("VirtletRootVolumeSize", "-1")]).unwrap().root_size,
            None
        );
        let flag = read(&[("VirtletForceDHCPNetworkConfig", "yes")]).unwrap();
        assert!(!flag.force_dhcp);
    }
}
