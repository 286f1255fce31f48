//! Files that cloud-init writes in the guest (its module `write_files`).

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};

use crate::yaml::Node;

/// A file that the guest is to have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuestFile {
    /// Where it is in the guest, beginning with `/`.
    pub path: String,
    /// What is in it.
    pub content: Vec<u8>,
    /// Its permissions, at most 0o7777.
    pub mode: u32,
}

impl GuestFile {
    pub(crate) fn new(path: &str, content: String, mode: u32) -> Self {
        Self {
            path: path.to_owned(),
            content: content.into_bytes(),
            mode,
        }
    }

    /// The entry in the list `write_files`.
    pub(crate) fn entry(&self) -> Node {
        Node::map([
            ("path", Node::text(&self.path)),
            ("content", Node::text(&STANDARD.encode(&self.content))),
            ("encoding", Node::text("b64")),
            ("permissions", Node::text(&format!("{:04o}", self.mode))),
        ])
    }
}

/// Tells why `path` is not one of a file in the guest.
pub(crate) fn check_path(path: &str) -> Result<(), &'static str> {
    match path {
        _ if !path.starts_with('/') => Err("it does not begin with `/`"),
        _ if path.contains(char::is_control) => Err("it has a line break or another control"),
        _ if path.len() >= 4096 => Err("it is longer than 4095 bytes"),
        _ if path.split('/').any(|part| part == "..") => Err("it has a part `..`"),
        _ => Ok(()),
    }
}
