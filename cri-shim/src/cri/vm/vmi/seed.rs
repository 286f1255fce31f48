//! What cloud-init in the guest is told: what the object or its secrets say, and nothing of ours
//! but who the guest is.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use podvisor_cloud_init::{GuestSeed, NetworkConfig, UserData, ssh_keys};

use super::super::honour::FileMount;
use super::super::seed::read_files;
use super::sources::Sources;
use crate::cri::error::{CriError, Result};
use crate::cri::vm_spec::{SeedText, VmiDisk, VmiError, VmiMachine, VmiSeed};

/// Most bytes of a document in a secret, which is the most that a Secret has.
const MAX_DOCUMENT: u64 = 1 << 20;

/// Makes seeds.
#[derive(Debug)]
pub(super) struct SeedMaker<'a> {
    pub(super) machine: &'a VmiMachine,
    pub(super) sources: Sources<'a>,
    /// The guest's name.
    pub(super) host_name: &'a str,
    /// The guest agent's program, if it is to be installed.
    pub(super) agent: Option<&'a [u8]>,
}

impl SeedMaker<'_> {
    /// Puts a seed together. It blocks.
    pub(super) fn seed(&self, disk: &VmiDisk, seed: &VmiSeed) -> Result<GuestSeed> {
        let machine = self.machine;
        let user = self.text(disk, &seed.user_data, "userdata", ["userdata", "userData"])?;
        let network = self.text(
            disk,
            &seed.network_data,
            "networkdata",
            ["networkdata", "networkData"],
        )?;
        let network = match network {
            None => NetworkConfig::None,
            Some(bytes) => {
                let text = String::from_utf8(bytes);
                let not_text =
                    |_| VmiError::field(&disk.path, "has network data that is not UTF-8");
                NetworkConfig::Document(text.map_err(not_text).map_err(CriError::Vmi)?)
            }
        };
        let mut keys = Vec::new();
        for index in &seed.credentials {
            keys.extend(self.keys(*index)?);
        }
        Ok(GuestSeed {
            form: seed.form,
            instance_id: format!("{}.{}", machine.name, machine.namespace),
            host_name: match self.host_name {
                "" => machine.name.clone(),
                name => name.to_owned(),
            },
            ssh_keys: keys,
            user_data: user.map_or(UserData::None, UserData::Document),
            network,
            agent: self.agent.map(<[u8]>::to_vec),
            ..GuestSeed::default()
        })
    }

    /// Returns a document, from the object or a secret, which may have it under either name.
    fn text(
        &self,
        disk: &VmiDisk,
        text: &SeedText,
        suffix: &str,
        names: [&str; 2],
    ) -> Result<Option<Vec<u8>>> {
        match text {
            SeedText::None => Ok(None),
            SeedText::Inline(bytes) => Ok(Some(bytes.clone())),
            SeedText::Secret => {
                let name = format!("{}-{suffix}", disk.name);
                let directory = self.sources.files(&disk.path, &name);
                let directory = directory.map_err(CriError::Vmi)?;
                for name in names {
                    if let Some(bytes) = read(&directory.join(name))? {
                        return Ok(Some(bytes));
                    }
                }
                let problem = format!("has a secret without the key {}", names[0]);
                Err(CriError::Vmi(VmiError::field(&disk.path, problem)))
            }
        }
    }

    /// Returns the keys in the secret of a credential, each in a file of its own or several in one.
    fn keys(&self, index: usize) -> Result<Vec<String>> {
        let path = format!("spec.accessCredentials[{index}]");
        let name = format!("access-credential-{index}");
        let directory = self.sources.files(&path, &name).map_err(CriError::Vmi)?;
        let mount = FileMount {
            from: directory.display().to_string(),
            to: String::new(),
        };
        let files = read_files(&[mount])?.into_iter();
        Ok(files
            .flat_map(|file| ssh_keys(&String::from_utf8_lossy(&file.content)))
            .collect())
    }
}

/// Reads a document; `None` if there is none.
fn read(path: &Path) -> Result<Option<Vec<u8>>> {
    let failed = || CriError::io("read the secret's file", path);
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file.map_err(failed())?,
    };
    let mut bytes = Vec::new();
    let count = file.take(MAX_DOCUMENT + 1).read_to_end(&mut bytes);
    match count.map_err(failed())? as u64 > MAX_DOCUMENT {
        true => Err(failed()(io::ErrorKind::FileTooLarge.into())),
        false => Ok(Some(bytes)),
    }
}
