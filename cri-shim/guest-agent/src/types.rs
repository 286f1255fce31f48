//! What the guest says of itself. Nothing of it is checked: a guest may say what it likes.

use serde::{Deserialize, Serialize};

use crate::bounded::{List, Text};

/// All that an agent says of its guest. What it does not support is empty.
#[derive(Debug, Default, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GuestInfo {
    /// The agent's version.
    pub agent_version: String,
    /// The commands that it has and that its configuration allows.
    pub commands: Vec<String>,
    /// The operating system.
    pub os: GuestOs,
    /// The guest's name for itself.
    pub host_name: String,
    /// The name of its time zone.
    pub time_zone: String,
    /// Seconds by which its time is before (positive) or behind universal time.
    pub time_offset: i32,
    /// Who is logged in.
    pub users: Vec<GuestUser>,
    /// Its network interfaces.
    pub interfaces: Vec<GuestInterface>,
    /// Its mounted file systems.
    pub file_systems: Vec<GuestFileSystem>,
    /// Its file systems are frozen.
    pub is_frozen: bool,
}

/// A guest's operating system, as its `/etc/os-release` and kernel say.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GuestOs {
    /// Such as `debian`.
    pub id: String,
    /// Such as `Debian GNU/Linux`.
    pub name: String,
    /// Such as `Debian GNU/Linux 12 (bookworm)`.
    pub pretty_name: String,
    /// Such as `12 (bookworm)`.
    pub version: String,
    /// Such as `12`.
    pub version_id: String,
    /// The kernel's release.
    pub kernel_release: String,
    /// The kernel's version.
    pub kernel_version: String,
    /// Such as `x86_64`.
    pub machine: String,
}

/// A user who is logged in.
#[derive(Debug, Default, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GuestUser {
    /// The user's name.
    pub name: String,
    /// The domain, on Windows.
    pub domain: String,
    /// Since when, in seconds since 1970.
    pub login_time: f64,
}

/// An address of an interface.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GuestAddress {
    /// The address, IPv4 or IPv6.
    pub address: String,
    /// Bits of its prefix.
    pub prefix: u8,
}

/// A network interface.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GuestInterface {
    /// Its name.
    pub name: String,
    /// Its hardware address, if it has one.
    pub mac: String,
    /// Its addresses.
    pub addresses: Vec<GuestAddress>,
}

/// A mounted file system.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GuestFileSystem {
    /// Its device.
    pub device: String,
    /// Where it is mounted.
    pub mount_point: String,
    /// Its type.
    pub kind: String,
    /// Bytes in use, if the agent knows.
    pub used: Option<u64>,
    /// Its size in bytes, if the agent knows.
    pub total: Option<u64>,
}

/// `guest-info`.
#[derive(Debug, Deserialize)]
pub(crate) struct RawInfo {
    pub(crate) version: Text,
    #[serde(default)]
    pub(crate) supported_commands: List<RawCommand>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct RawCommand {
    pub(crate) name: Text,
    #[serde(default)]
    pub(crate) enabled: bool,
}

/// `guest-get-osinfo`.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub(crate) struct RawOs {
    id: Text,
    name: Text,
    pretty_name: Text,
    version: Text,
    version_id: Text,
    kernel_release: Text,
    kernel_version: Text,
    machine: Text,
}

impl From<RawOs> for GuestOs {
    fn from(raw: RawOs) -> Self {
        Self {
            id: raw.id.0,
            name: raw.name.0,
            pretty_name: raw.pretty_name.0,
            version: raw.version.0,
            version_id: raw.version_id.0,
            kernel_release: raw.kernel_release.0,
            kernel_version: raw.kernel_version.0,
            machine: raw.machine.0,
        }
    }
}

/// `guest-get-host-name`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct RawHostName {
    pub(crate) host_name: Text,
}

/// `guest-get-timezone`.
#[derive(Debug, Deserialize)]
pub(crate) struct RawTimeZone {
    #[serde(default)]
    pub(crate) zone: Text,
    pub(crate) offset: i32,
}

/// `guest-get-vcpus`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct RawCpu {
    pub(crate) logical_id: u32,
    #[serde(default)]
    pub(crate) online: bool,
}

/// `guest-get-users`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct RawUser {
    user: Text,
    #[serde(default)]
    domain: Text,
    #[serde(default)]
    login_time: f64,
}

impl From<RawUser> for GuestUser {
    fn from(raw: RawUser) -> Self {
        Self {
            name: raw.user.0,
            domain: raw.domain.0,
            login_time: raw.login_time,
        }
    }
}

/// `guest-network-get-interfaces`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct RawInterface {
    name: Text,
    #[serde(default)]
    hardware_address: Text,
    #[serde(default)]
    ip_addresses: List<RawAddress>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct RawAddress {
    ip_address: Text,
    #[serde(default)]
    prefix: u8,
}

impl From<RawInterface> for GuestInterface {
    fn from(raw: RawInterface) -> Self {
        let address = |raw: RawAddress| GuestAddress {
            address: raw.ip_address.0,
            prefix: raw.prefix,
        };
        Self {
            name: raw.name.0,
            mac: raw.hardware_address.0,
            addresses: raw.ip_addresses.0.into_iter().map(address).collect(),
        }
    }
}

/// `guest-get-fsinfo`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct RawFileSystem {
    name: Text,
    mountpoint: Text,
    #[serde(default, rename = "type")]
    kind: Text,
    used_bytes: Option<u64>,
    total_bytes: Option<u64>,
}

impl From<RawFileSystem> for GuestFileSystem {
    fn from(raw: RawFileSystem) -> Self {
        Self {
            device: raw.name.0,
            mount_point: raw.mountpoint.0,
            kind: raw.kind.0,
            used: raw.used_bytes,
            total: raw.total_bytes,
        }
    }
}
