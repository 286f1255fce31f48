//! Arguments that are one value, or none.

use serde::Deserialize;

use super::bounded::{list, some_list, text};
use super::command::{ShutdownMode, Vcpu};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Nothing {}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Id {
    pub(super) id: i64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Time {
    pub(super) time: Option<i64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Mode {
    #[serde(default)]
    pub(super) mode: ShutdownMode,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Pid {
    pub(super) pid: i64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Handle {
    pub(super) handle: i64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MountPoints {
    #[serde(default, deserialize_with = "some_list")]
    pub(super) mountpoints: Option<Vec<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Vcpus {
    #[serde(deserialize_with = "list")]
    pub(super) vcpus: Vec<Vcpu>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct User {
    #[serde(deserialize_with = "text")]
    pub(super) username: String,
}
