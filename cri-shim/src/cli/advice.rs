//! Advice for the user on errors. The libraries state what happened; this module states the
//! remedies in terms of this command line.

use std::io;

use podvisor_images::Error as ImageError;

use super::message::message;
use crate::machine::{AssetError, GUEST_DIR_VARIABLE, GuestFile, MachineExit};
use crate::sandbox::{SandboxError, jail};

/// Returns the advice for a missing kernel or initramfs.
pub(super) fn for_missing_file(error: &AssetError) -> String {
    let hint = match error.file {
        GuestFile::Firmware => {
            return "podvisor's package does not have it: build it with `cargo xtask firmware` in \
                    podvisor's source, and give it with --firmware FILE"
                .to_owned();
        }
        GuestFile::GuestAgent => "; without --agent, an image's own qemu-guest-agent is asked",
        GuestFile::Kernel => ", or give one with --kernel",
        _ => "",
    };
    format!(
        "install podvisor's package, or build it with `cargo xtask guest` in podvisor's source, or \
         set {GUEST_DIR_VARIABLE} to the directory that has it{hint}"
    )
}

/// Returns the advice for an error, if there is any.
pub(super) fn for_error(error: &anyhow::Error) -> Option<String> {
    for_image(error).or_else(|| for_full_disk(error))
}

/// Returns the advice for a file that found no room, unless the error has it already.
fn for_full_disk(error: &anyhow::Error) -> Option<String> {
    let is_full = |cause: &io::Error| {
        let kinds = [io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded];
        kinds.contains(&cause.kind())
    };
    let mut causes = error.chain().filter_map(|cause| cause.downcast_ref());
    let is_advised = || {
        error
            .chain()
            .any(|cause| cause.to_string().contains("free some"))
    };
    (causes.any(is_full) && !is_advised())
        .then(|| "free some space on that disk, or use another one".to_owned())
}

/// Returns the advice for an error of the image store, if there is any.
fn for_image(error: &anyhow::Error) -> Option<String> {
    let error = error.chain().find_map(|cause| cause.downcast_ref());
    Some(match error? {
        ImageError::NotFound { .. } => {
            "`podvisor images` lists what there is, `podvisor pull` fetches one".to_owned()
        }
        ImageError::Damaged { id } => {
            format!("remove it by `podvisor rmi {id}` and pull it again")
        }
        ImageError::DiskFull { .. } => "free some, or remove images by `podvisor rmi`".to_owned(),
        _ => return None,
    })
}

/// Adds advice to the error of a missing file.
pub(super) fn missing_file(error: AssetError) -> anyhow::Error {
    let advice = for_missing_file(&error);
    anyhow::anyhow!("{error}; {advice}")
}

/// Adds advice to a sandbox's error, if there is any; `has_console` says whether the user enabled a
/// console.
pub(super) fn advised(error: SandboxError, has_console: bool) -> anyhow::Error {
    let advice = for_sandbox(&error, has_console);
    let error = anyhow::Error::from(error);
    match advice {
        Some(advice) => {
            // The whole chain first: a context would be printed before it.
            let text = message(&error);
            anyhow::Error::msg(format!("{text}; {advice}"))
        }
        None => error,
    }
}

fn for_sandbox(error: &SandboxError, has_console: bool) -> Option<String> {
    let read = match has_console {
        true => "read in the console's file",
        false => "run again with --console FILE and read there",
    };
    Some(match error {
        SandboxError::Silent(_) => format!("{read} how far the guest came"),
        SandboxError::GaveUp => format!(
            "its kernel may lack a driver that the agent needs (virtio-mmio, virtio-vsock, EROFS, \
             overlayfs): {read} which"
        ),
        SandboxError::Ended(MachineExit::Failed(_)) => {
            "`podvisor check` says whether this machine can run guests".to_owned()
        }
        SandboxError::Ended(_) => format!("{read} why"),
        SandboxError::JailRefused(_) => {
            let refused = !jail::can_change_identity() && jail::try_user_namespaces().is_err();
            for_jail(refused.then(jail::user_namespaces_remedy))
        }
        SandboxError::Launch(_) | SandboxError::Panicked(_) | SandboxError::Gone { .. } => format!(
            "`podvisor check` says whether this machine can run guests; if it can, {read} how far \
             the guest came"
        ),
        _ => return None,
    })
}

/// What allows user namespaces, where the host refuses them, comes before giving up the jail.
fn for_jail(namespaces: Option<String>) -> String {
    let without = "give --no-jail to run without a jail where the host does not allow one";
    match namespaces {
        Some(remedy) => format!("to allow user namespaces: {remedy}; or {without}"),
        None => without.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_the_store_come_with_their_remedy() {
        let advice = |error: ImageError| {
            let error = anyhow::Error::from(error).context("cannot do it");
            for_error(&error).unwrap()
        };
        let name = "x".to_owned();
        assert!(advice(ImageError::NotFound { name }).contains("podvisor pull"));
        let id = podvisor_images::Digest::of(b"");
        let damaged = advice(ImageError::Damaged { id });
        assert!(damaged.contains(&format!("podvisor rmi {id}")), "{damaged}");
        let full = ImageError::DiskFull {
            path: "/x".into(),
            source: io::ErrorKind::StorageFull.into(),
        };
        assert!(advice(full).contains("podvisor rmi"));
        let other = anyhow::Error::from(ImageError::Cancelled);
        assert_eq!(for_error(&other), None);
    }

    #[test]
    fn a_full_disk_is_told_once_what_to_do_about() {
        let error = |kind: io::ErrorKind| anyhow::Error::from(io::Error::from(kind));
        let full = || error(io::ErrorKind::StorageFull).context("cannot write /x");
        assert!(for_error(&full()).unwrap().starts_with("free some space"));
        assert!(for_error(&error(io::ErrorKind::QuotaExceeded)).is_some());
        assert_eq!(for_error(&full().context("no space left; free some")), None);
        assert_eq!(for_error(&error(io::ErrorKind::NotFound)), None);
    }

    #[test]
    fn the_remedy_goes_by_the_kind_and_by_what_was_given() {
        let advice = |error, has_console| for_sandbox(&error, has_console).unwrap();
        let jailed = "cannot open /tmp/jail/vmlinux".to_owned();
        assert!(!advice(SandboxError::Launch(jailed.clone()), false).contains("--no-jail"));
        assert!(advice(SandboxError::JailRefused(jailed), false).contains("--no-jail"));
        let refused = for_jail(Some("sysctl a=1".to_owned()));
        let [first, last] = ["sysctl a=1", "--no-jail"].map(|text| refused.find(text).unwrap());
        assert!(first < last, "{refused}");
        let silent = || SandboxError::Silent(std::time::Duration::ZERO);
        assert!(advice(silent(), false).contains("--console FILE"));
        assert!(!advice(silent(), true).contains("--console"));
    }
}
