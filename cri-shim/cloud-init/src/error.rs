//! What is wrong with a seed.

use crate::fat::FatError;
use crate::yaml::YamlError;

/// Most keys, files, links, mounts or variables.
pub(crate) const MAX_ENTRIES: usize = 4096;

/// What is wrong with one part of a seed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SeedError {
    /// A text that should be YAML.
    #[error("{what}: {error}")]
    Yaml {
        /// Which text.
        what: String,
        #[allow(missing_docs)]
        error: YamlError,
    },
    /// A document that should be a mapping.
    #[error("{0} is not a mapping of keys to values")]
    NotAMap(String),
    /// A configuration that is not text.
    #[error("the user-data begins with `#cloud-config`, but is not UTF-8")]
    NotText,
    /// User-data of no kind that cloud-init knows.
    #[error(
        "the user-data begins with nothing that cloud-init knows: write `#cloud-config` before \
         a configuration, or `#!/bin/sh` before a script"
    )]
    UnknownUserData,
    /// A document about the network that the form does not have.
    #[error("the network's document is not JSON, as ConfigDrive wants it: {0}")]
    NetworkJson(String),
    /// A name that cannot be one.
    #[error("invalid {1} {0:?}: it is empty, longer than 253 bytes, or has control characters")]
    Name(String, &'static str),
    /// An invalid key.
    #[error("the SSH key {0:?} is not one: {1}")]
    Key(String, &'static str),
    /// A path that cannot be one in a guest.
    #[error("the path {0:?} in the guest is not one: {1}")]
    Path(String, &'static str),
    /// Permissions that do not exist.
    #[error("the permissions {1:o} of {0:?} are more than 7777")]
    Mode(String, u32),
    /// A disk or share that cannot have that name.
    #[error("{0:?} is not the serial number of a disk or the tag of a share")]
    Source(String),
    /// A variable that does not fit into a file of lines.
    #[error(
        "the environment variable {0:?} does not fit into /etc/cloud/environment: it has a line \
         break, or its name is not one"
    )]
    Variable(String),
    /// More than a guest needs.
    #[error("{0} {1}: at most {MAX_ENTRIES} are written")]
    TooMany(usize, &'static str),
    /// The disk cannot hold it.
    #[error(transparent)]
    Disk(#[from] FatError),
}

/// All that is wrong with a seed.
#[derive(Debug, thiserror::Error)]
#[error("cloud-init: {}", list(.0))]
pub struct SeedErrors(pub Vec<SeedError>);

fn list(errors: &[SeedError]) -> String {
    let errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
    errors.join("; ")
}
