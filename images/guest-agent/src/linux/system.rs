//! What the guest says of itself.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::statvfs;
use rustix::system::uname;
use serde_json::{Map, Value, json};

use super::mounts::Mount;
use super::sys;
use super::text::read_text;

/// What `/etc/os-release` has, by the names of the answer.
const OS: [(&str, &str); 7] = [
    ("ID", "id"),
    ("NAME", "name"),
    ("PRETTY_NAME", "pretty-name"),
    ("VERSION", "version"),
    ("VERSION_ID", "version-id"),
    ("VARIANT", "variant"),
    ("VARIANT_ID", "variant-id"),
];

pub(super) fn os(root: &Path) -> Value {
    let system = uname();
    let mut os = Map::new();
    for (name, text) in [
        ("kernel-release", system.release()),
        ("kernel-version", system.version()),
        ("machine", system.machine()),
    ] {
        os.insert(name.to_owned(), json!(text.to_string_lossy()));
    }
    let read = |path| read_text(&root.join(path));
    let release = read("etc/os-release").or_else(|_| read("usr/lib/os-release"));
    let release = release.unwrap_or_default();
    for line in release.lines() {
        let Some((key, value)) = line.trim().split_once('=') else {
            continue;
        };
        if let Some((_, name)) = OS.iter().find(|(known, _)| *known == key) {
            os.insert((*name).to_owned(), json!(unquote(value)));
        }
    }
    Value::Object(os)
}

/// Reads a value as a shell does (os-release(5)).
fn unquote(value: &str) -> String {
    let inner = |quote: char| value.strip_prefix(quote)?.strip_suffix(quote);
    if let Some(inner) = inner('\'') {
        return inner.to_owned();
    }
    let mut text = String::new();
    let mut rest = inner('"').unwrap_or(value).chars();
    while let Some(next) = rest.next() {
        text.extend(match next {
            '\\' => rest.next(),
            next => Some(next),
        });
    }
    text
}

pub(super) fn host_name() -> Value {
    json!({ "host-name": uname().nodename().to_string_lossy() })
}

pub(super) fn time_zone() -> Value {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = i64::try_from(now.unwrap_or_default().as_secs()).unwrap_or(0);
    match sys::time_zone(now) {
        Some((zone, offset)) => json!({ "zone": zone, "offset": offset }),
        None => json!({ "zone": "UTC", "offset": 0 }),
    }
}

pub(super) fn file_systems(mounts: &[Mount], root: &Path) -> Value {
    let each = mounts.iter().map(|mount| {
        let mut shown = json!({
            "name": name(mount, root),
            "mountpoint": mount.point,
            "type": mount.kind,
            "disk": [],
        });
        let place = root.join(mount.point.trim_start_matches('/'));
        if let Ok(found) = statvfs(&place) {
            let bytes = |blocks: u64| json!(blocks.saturating_mul(found.f_frsize));
            let used = found.f_blocks.saturating_sub(found.f_bfree);
            shown["used-bytes"] = bytes(used);
            shown["total-bytes"] = bytes(used.saturating_add(found.f_bavail));
        }
        shown
    });
    each.collect()
}

/// The kernel's name of a disk: its device may be a link, or `/dev/root`.
fn name(mount: &Mount, root: &Path) -> String {
    let device = std::fs::read_link(root.join("sys/dev/block").join(&mount.device));
    let device = device.unwrap_or_else(|_| mount.source.as_str().into());
    let name = device.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_os_release_are_read_as_a_shell_does() {
        for (value, meant) in [
            ("debian", "debian"),
            (
                "\"Debian GNU/Linux 12 (bookworm)\"",
                "Debian GNU/Linux 12 (bookworm)",
            ),
            ("'a \"b\"'", "a \"b\""),
            ("\"a \\\"b\\\" \\$c\"", "a \"b\" $c"),
            ("\"", "\""),
            ("", ""),
        ] {
            assert_eq!(unquote(value), meant);
        }
    }

    #[test]
    fn a_system_without_os_release_has_a_kernel_nevertheless() {
        let dir = tempfile::tempdir().unwrap();
        let found = os(dir.path());
        assert!(found["kernel-release"].is_string() && found["id"].is_null());
        std::fs::create_dir_all(dir.path().join("usr/lib")).unwrap();
        let release = "# comment\nID=small\nVERSION_ID=\"1\"\nHOME_URL=x\n";
        std::fs::write(dir.path().join("usr/lib/os-release"), release).unwrap();
        let found = os(dir.path());
        assert_eq!(
            (&found["id"], &found["version-id"]),
            (&json!("small"), &json!("1"))
        );
    }

    #[test]
    fn a_file_system_has_the_kernels_name_of_its_disk_and_its_size() {
        let dir = tempfile::tempdir().unwrap();
        let blocks = dir.path().join("sys/dev/block");
        std::fs::create_dir_all(&blocks).unwrap();
        std::os::unix::fs::symlink("../../devices/pci/vda1", blocks.join("254:1")).unwrap();
        let mount = Mount {
            device: "254:1".to_owned(),
            point: "/".to_owned(),
            kind: "ext4".to_owned(),
            source: "/dev/root".to_owned(),
        };
        let found = &file_systems(&[mount], dir.path())[0];
        assert_eq!(found["name"], "vda1");
        assert!(found["total-bytes"].as_u64() >= found["used-bytes"].as_u64());
        assert!(found["total-bytes"].as_u64() > Some(0));
    }
}
