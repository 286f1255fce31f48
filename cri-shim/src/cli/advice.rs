//! What a person can do about an error. The libraries state what happened; what follows from
//! it, in terms of this command line, is said here.

use crate::machine::{AssetError, GUEST_DIR_VARIABLE, GuestFile, MachineExit};
use crate::sandbox::{BOOT_TIMEOUT_VARIABLE, SandboxError};

/// What to do about a missing kernel or initramfs.
pub(super) fn for_missing_file(error: &AssetError) -> String {
    let hint = match error.file {
        GuestFile::Kernel => ", or give one with --kernel",
        GuestFile::Initramfs => "",
    };
    format!(
        "build it with `cargo xtask guest`, or set {GUEST_DIR_VARIABLE} to the directory that \
         has it{hint}"
    )
}

/// A missing file with the remedy.
pub(super) fn missing_file(error: AssetError) -> anyhow::Error {
    let advice = for_missing_file(&error);
    anyhow::anyhow!("{error}; {advice}")
}

/// A sandbox's error, with the remedy where there is one.
pub(super) fn advised(error: SandboxError) -> anyhow::Error {
    let advice = for_sandbox(&error);
    let error = anyhow::Error::from(error);
    match advice {
        Some(advice) => {
            // The whole chain comes first: a context would stand in front of it.
            let text = super::message(&error);
            anyhow::Error::msg(format!("{text}; {advice}"))
        }
        None => error,
    }
}

fn for_sandbox(error: &SandboxError) -> Option<String> {
    Some(match error {
        SandboxError::Silent(_) => format!(
            "run again with --console FILE and read there how far the guest came, or give it \
             more time with {BOOT_TIMEOUT_VARIABLE}=SECONDS"
        ),
        SandboxError::GaveUp => "its kernel may lack a driver that the agent needs \
             (virtio-mmio, virtio-vsock, EROFS, overlayfs): run with --console FILE and read \
             there which"
            .to_owned(),
        SandboxError::Ended(MachineExit::Failed(_)) => {
            "`podvisor check` says whether this machine can run guests".to_owned()
        }
        SandboxError::Ended(_) => "run again with --console FILE and read there why".to_owned(),
        SandboxError::Launch(why) if why.contains("jail") => {
            "give --no-jail to run without a jail where the host does not allow one".to_owned()
        }
        SandboxError::Launch(_) | SandboxError::Gone { .. } => {
            "`podvisor check` says whether this machine can run guests; if it can, run again with \
             --console FILE and read there how far the guest came"
                .to_owned()
        }
        _ => return None,
    })
}
