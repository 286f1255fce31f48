//! Finds the guest's kernel and initramfs.
//!
//! They are taken from the first of these directories that has a file of the wanted name: only
//! `$PODVISOR_GUEST_DIR` if it is set, else `guest/` next to the directory of the executable, else
//! `/usr/lib/podvisor`. Next to the usual kernel there may be one for CPUs that need retpolines or
//! return thunks, which is preferred on those.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The environment variable that names the directory of the guest's files.
pub const GUEST_DIR_VARIABLE: &str = "PODVISOR_GUEST_DIR";

const SYSTEM_DIR: &str = "/usr/lib/podvisor";

/// The kernel with retpolines and return thunks, for CPUs whose branch prediction is unsafe.
const RETPOLINE_KERNEL: &str = "vmlinux-retpoline";

/// The host kernel's reports on vulnerabilities of its CPU, one file each.
const VULNERABILITIES: &str = "/sys/devices/system/cpu/vulnerabilities";

/// Files in it, and the host kernel's names of the mitigations that a guest's kernel needs, too.
const THUNKS: [(&str, &str); 4] = [
    ("spectre_v2", "Retpolines"),
    ("retbleed", "untrained return thunk"),
    ("spec_rstack_overflow", "Safe RET"),
    ("indirect_target_selection", "Aligned branch/return thunks"),
];

/// A file that every guest boots from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GuestFile {
    /// An ELF vmlinux or a bzImage.
    Kernel,
    /// Holds the agent as `/init`.
    Initramfs,
}

impl GuestFile {
    /// Returns the file's name in its directory.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kernel => "vmlinux",
            Self::Initramfs => "initramfs.cpio",
        }
    }
}

/// A file of the guest is missing.
#[derive(Debug, thiserror::Error)]
#[error("no guest {} `{}` in {}", self.what(), .file.name(), list(.searched))]
pub struct AssetError {
    /// The missing file.
    pub file: GuestFile,
    /// The directories that were searched.
    pub searched: Vec<PathBuf>,
}

impl AssetError {
    fn what(&self) -> &'static str {
        match self.file {
            GuestFile::Kernel => "kernel",
            GuestFile::Initramfs => "initramfs",
        }
    }
}

fn list(directories: &[PathBuf]) -> String {
    let names: Vec<String> = directories
        .iter()
        .map(|f| f.display().to_string())
        .collect();
    names.join(" or ")
}

/// The directories that are searched, in order.
#[derive(Debug, Clone)]
pub struct Assets {
    directories: Vec<PathBuf>,
}

impl Assets {
    /// Uses this process's environment and executable.
    #[must_use]
    pub fn of_this_process() -> Self {
        Self::new(
            env::var_os(GUEST_DIR_VARIABLE),
            env::current_exe().ok().as_deref(),
        )
    }

    /// Uses only one directory.
    #[cfg(test)]
    pub(crate) fn in_directory(directory: &Path) -> Self {
        Self {
            directories: vec![directory.to_owned()],
        }
    }

    fn new(variable: Option<OsString>, executable: Option<&Path>) -> Self {
        if let Some(directory) = variable.filter(|v| !v.is_empty()) {
            return Self {
                directories: vec![PathBuf::from(directory)],
            };
        }
        let beside = executable
            .and_then(Path::parent)
            .and_then(Path::parent)
            .map(|directory| directory.join("guest"));
        Self {
            directories: beside
                .into_iter()
                .chain([PathBuf::from(SYSTEM_DIR)])
                .collect(),
        }
    }

    /// Returns the guest's kernel for this CPU.
    ///
    /// # Errors
    /// No directory has it.
    pub fn kernel(&self) -> Result<PathBuf, AssetError> {
        self.kernel_for(Path::new(VULNERABILITIES))
    }

    fn kernel_for(&self, vulnerabilities: &Path) -> Result<PathBuf, AssetError> {
        let usual = self.find(GuestFile::Kernel)?;
        let other = usual.with_file_name(RETPOLINE_KERNEL);
        Ok(match other.is_file() && needs_thunks(vulnerabilities) {
            true => other,
            false => usual,
        })
    }

    /// Whether containers of one guest could read each other's memory on this CPU because the
    /// kernel for it is missing.
    #[must_use]
    pub fn lacks_retpolines(&self) -> bool {
        let vulnerabilities = Path::new(VULNERABILITIES);
        let kernel = self.kernel_for(vulnerabilities);
        kernel.is_ok_and(|kernel| !kernel.ends_with(RETPOLINE_KERNEL))
            && needs_thunks(vulnerabilities)
    }

    /// Returns the initramfs with the agent.
    ///
    /// # Errors
    /// No directory has it.
    pub fn initramfs(&self) -> Result<PathBuf, AssetError> {
        self.find(GuestFile::Initramfs)
    }

    fn find(&self, file: GuestFile) -> Result<PathBuf, AssetError> {
        self.directories
            .iter()
            .map(|directory| directory.join(file.name()))
            .find(|path| path.is_file())
            .ok_or_else(|| AssetError {
                file,
                searched: self.directories.clone(),
            })
    }
}

/// Whether the host's kernel mitigates a vulnerability of the CPU by retpolines or return thunks.
fn needs_thunks(vulnerabilities: &Path) -> bool {
    THUNKS.iter().any(|(name, remedy)| {
        let said = std::fs::read_to_string(vulnerabilities.join(name));
        said.is_ok_and(|said| said.contains(remedy))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_that_needs_retpolines_gets_the_kernel_that_has_them_if_it_is_there() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        std::fs::write(path(GuestFile::Kernel.name()), b"").unwrap();
        let assets = Assets::in_directory(directory.path());
        let kernel = || assets.kernel_for(directory.path()).unwrap();
        for (name, remedy) in THUNKS {
            std::fs::write(path(name), format!("Mitigation: {remedy}; other\n")).unwrap();
            let _ = std::fs::remove_file(path(RETPOLINE_KERNEL));
            assert_eq!(kernel(), path(GuestFile::Kernel.name()));
            std::fs::write(path(RETPOLINE_KERNEL), b"").unwrap();
            assert_eq!(kernel(), path(RETPOLINE_KERNEL), "{name}");
            std::fs::write(path(name), "Mitigation: Enhanced / Automatic IBRS\n").unwrap();
            assert_eq!(kernel(), path(GuestFile::Kernel.name()), "{name}");
        }
    }

    #[test]
    fn the_variable_is_the_only_place_when_set() {
        let assets = Assets::new(Some("/a".into()), Some(Path::new("/x/bin/podvisor")));
        assert_eq!(assets.directories, [PathBuf::from("/a")]);
    }

    #[test]
    fn without_it_the_directory_beside_the_executables_comes_first() {
        for variable in [None, Some(OsString::new())] {
            let assets = Assets::new(variable, Some(Path::new("/x/bin/podvisor")));
            assert_eq!(
                assets.directories,
                [PathBuf::from("/x/guest"), PathBuf::from(SYSTEM_DIR)]
            );
        }
    }

    #[test]
    fn a_file_is_found_and_a_missing_one_says_where_it_was_looked_for() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join(GuestFile::Kernel.name()), b"").unwrap();
        let assets = Assets::new(Some(directory.path().into()), None);
        assert_eq!(
            assets.kernel().unwrap(),
            directory.path().join(GuestFile::Kernel.name())
        );
        let message = assets.initramfs().unwrap_err().to_string();
        assert!(message.contains("initramfs.cpio"), "{message}");
        assert!(
            message.contains(directory.path().to_str().unwrap()),
            "{message}"
        );
    }
}
