//! What a guest's agent says of its guest, and how KubeVirt's clients want to read it.
//!
//! A guest says what it likes: every text and every list is cut.

use podvisor_cluster_types::vmi::GuestOsInfo;
use podvisor_node_api::messages::GuestInfo;
use serde_json::{Value, json};

/// The longest text, and the longest list, that is passed on.
const MAX_TEXT: usize = 256;
const MAX_ITEMS: usize = 128;

/// A text of at most [`MAX_TEXT`] characters, without control characters.
pub(super) fn cut(text: &str) -> String {
    let readable = text.chars().filter(|c| !c.is_control());
    readable.take(MAX_TEXT).collect()
}

fn some(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| cut(text))
}

/// The part of an instance's status.
pub(super) fn os_info(guest: &GuestInfo) -> GuestOsInfo {
    let os = guest.os.clone().unwrap_or_default();
    GuestOsInfo {
        id: some(&os.id),
        name: some(&os.name),
        pretty_name: some(&os.pretty_name),
        version: some(&os.version),
        version_id: some(&os.version_id),
        kernel_release: some(&os.kernel_release),
        kernel_version: some(&os.kernel_version),
        machine: some(&os.machine),
    }
}

fn user_items(guest: &GuestInfo) -> Vec<Value> {
    let users = guest.users.iter().take(MAX_ITEMS);
    users
        .map(|user| {
            let mut item = json!({ "userName": cut(&user.name), "loginTime": user.login_time });
            if let Some(domain) = some(&user.domain) {
                item["domain"] = json!(domain);
            }
            item
        })
        .collect()
}

fn filesystem_items(guest: &GuestInfo) -> Vec<Value> {
    let filesystems = guest.file_systems.iter().take(MAX_ITEMS);
    // Clients read signed numbers.
    let number = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
    filesystems
        .map(|filesystem| {
            json!({
                "diskName": cut(&filesystem.disk),
                "mountPoint": cut(&filesystem.mount_point),
                "fileSystemType": cut(&filesystem.kind),
                "usedBytes": number(filesystem.used_bytes),
                "totalBytes": number(filesystem.total_bytes),
            })
        })
        .collect()
}

fn list(kind: &str, items: Vec<Value>) -> Value {
    json!({
        "apiVersion": "subresources.kubevirt.io/v1",
        "kind": kind,
        "metadata": {},
        "items": items,
    })
}

/// The list of users.
pub(super) fn user_list(guest: &GuestInfo) -> Value {
    list("VirtualMachineInstanceGuestOSUserList", user_items(guest))
}

/// The list of file systems.
pub(super) fn filesystem_list(guest: &GuestInfo) -> Value {
    let items = filesystem_items(guest);
    list("VirtualMachineInstanceFileSystemList", items)
}

/// Everything that is asked for by `guestosinfo`.
pub(super) fn document(guest: &GuestInfo) -> Value {
    let zone = match (guest.time_zone.as_str(), guest.time_zone_offset) {
        ("", _) => String::new(),
        (name, offset) => format!("{}, {offset}", cut(name)),
    };
    let mut document = json!({
        "apiVersion": "subresources.kubevirt.io/v1",
        "kind": "VirtualMachineInstanceGuestAgentInfo",
        "guestAgentVersion": cut(&guest.agent_version),
        "hostname": cut(&guest.host_name),
        "os": os_info(guest),
        "timezone": zone,
        "userList": user_items(guest),
        "fsInfo": { "disks": filesystem_items(guest) },
    });
    if let Some(status) = some(&guest.freeze_status) {
        document["fsFreezeStatus"] = json!(status);
    }
    document
}

#[cfg(test)]
mod tests {
    use podvisor_node_api::messages::{GuestFileSystem, GuestUser};

    use super::*;

    #[test]
    fn what_a_guest_says_is_cut() {
        let guest = GuestInfo {
            host_name: format!("a\n\x1b[2J{}", "€".repeat(1000)),
            users: vec![GuestUser::default(); 1000],
            file_systems: vec![GuestFileSystem::default(); 1000],
            ..Default::default()
        };
        let found = document(&guest);
        let hostname = found["hostname"].as_str().unwrap();
        assert!(hostname.starts_with("a[2J") && hostname.chars().count() == MAX_TEXT);
        assert_eq!(found["userList"].as_array().unwrap().len(), MAX_ITEMS);
        let items = filesystem_list(&guest)["items"].clone();
        assert_eq!(items.as_array().unwrap().len(), MAX_ITEMS);
    }

    #[test]
    fn sizes_beyond_a_signed_number_are_cut() {
        let filesystem = GuestFileSystem {
            total_bytes: u64::MAX,
            ..Default::default()
        };
        let guest = GuestInfo {
            file_systems: vec![filesystem],
            ..Default::default()
        };
        assert_eq!(filesystem_list(&guest)["items"][0]["totalBytes"], i64::MAX);
    }
}
