//! Finds the guest's kernel and initramfs.
//!
//! They are taken from the first of these directories that has a file of the wanted name: only
//! `$PODVISOR_GUEST_DIR` if it is set, else `guest/` next to the directory of the executable, else
//! `/usr/lib/podvisor`. Next to the usual kernel there may be one for CPUs that need retpolines or
//! return thunks, which is preferred on those.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The environment variable that names the directory of the guest's files.
pub const GUEST_DIR_VARIABLE: &str = "PODVISOR_GUEST_DIR";

const SYSTEM_DIR: &str = "/usr/lib/podvisor";

/// The kernel with retpolines and return thunks, for CPUs whose branch prediction is unsafe.
const RETPOLINE_KERNEL: &str = "vmlinux-retpoline";

/// The host kernel's reports on vulnerabilities of its CPU, one file each.
const VULNERABILITIES: &str = "/sys/devices/system/cpu/vulnerabilities";

/// Files in it, and the host kernel's names of the mitigations that a guest's kernel needs, too, in
/// lower case: Linux before 6.7 writes "safe RET", later ones "Safe RET".
const THUNKS: [(&str, &str); 4] = [
    (SPECTRE_V2, "retpolines"),
    ("retbleed", "untrained return thunk"),
    ("spec_rstack_overflow", "safe ret"),
    ("indirect_target_selection", "aligned branch/return thunks"),
];

const SPECTRE_V2: &str = "spectre_v2";

/// A file that every guest boots from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GuestFile {
    /// An ELF vmlinux or a bzImage.
    Kernel,
    /// Holds the agent as `/init`.
    Initramfs,
    /// The kernel of the loader, an ELF vmlinux.
    LoaderKernel,
    /// Holds the loader as `/init`, which starts what is on a disk.
    Loader,
    /// A UEFI firmware, EDK2's for Cloud Hypervisor's machine, which is not part of every
    /// installation.
    Firmware,
    /// podvisor's guest agent, a program for guests with a system of their own.
    GuestAgent,
}

impl GuestFile {
    /// Returns the file's name in its directory.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kernel => "vmlinux",
            Self::Initramfs => "initramfs.cpio",
            Self::LoaderKernel => "vmlinux-loader",
            Self::Loader => "loader.cpio",
            Self::Firmware => "CLOUDHV.fd",
            Self::GuestAgent => "podvisor-ga",
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
            GuestFile::LoaderKernel => "loader's kernel",
            GuestFile::Loader => "loader",
            GuestFile::Firmware => "UEFI firmware",
            GuestFile::GuestAgent => "agent",
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
    #[must_use]
    pub fn in_directory(directory: &Path) -> Self {
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

    /// Returns where a file is, or where it would be if it were there.
    #[must_use]
    pub fn expected(&self, file: GuestFile) -> PathBuf {
        let last = || {
            self.directories
                .last()
                .map(|directory| directory.join(file.name()))
        };
        self.find(file).ok().or_else(last).unwrap_or_default()
    }

    /// Returns the guest's kernel for this CPU.
    ///
    /// # Errors
    /// No directory has it.
    pub fn kernel(&self) -> Result<PathBuf, AssetError> {
        self.kernel_for(this_cpu_needs_thunks)
    }

    fn kernel_for(&self, needs_thunks: impl FnOnce() -> bool) -> Result<PathBuf, AssetError> {
        let usual = self.find(GuestFile::Kernel)?;
        let other = usual.with_file_name(RETPOLINE_KERNEL);
        Ok(match other.is_file() && needs_thunks() {
            true => other,
            false => usual,
        })
    }

    /// Whether containers of one guest could read each other's memory on this CPU because the
    /// kernel for it is missing.
    #[must_use]
    pub fn lacks_retpolines(&self) -> bool {
        let needs_thunks = this_cpu_needs_thunks();
        let kernel = self.kernel_for(|| needs_thunks);
        needs_thunks && kernel.is_ok_and(|kernel| !kernel.ends_with(RETPOLINE_KERNEL))
    }

    /// Returns the initramfs with the agent.
    ///
    /// # Errors
    /// No directory has it.
    pub fn initramfs(&self) -> Result<PathBuf, AssetError> {
        self.find(GuestFile::Initramfs)
    }

    /// Returns the loader's kernel and its initramfs, which start what is on a disk.
    ///
    /// # Errors
    /// No directory has one of them.
    pub fn loader(&self) -> Result<(PathBuf, PathBuf), AssetError> {
        Ok((
            self.find(GuestFile::LoaderKernel)?,
            self.find(GuestFile::Loader)?,
        ))
    }

    /// Returns the UEFI firmware.
    ///
    /// # Errors
    /// No directory has it.
    pub fn firmware(&self) -> Result<PathBuf, AssetError> {
        self.find(GuestFile::Firmware)
    }

    /// Returns the guest agent that is installed in guests with a system of their own.
    ///
    /// # Errors
    /// No directory has it.
    pub fn guest_agent(&self) -> Result<PathBuf, AssetError> {
        self.find(GuestFile::GuestAgent)
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

fn this_cpu_needs_thunks() -> bool {
    // Neither the processor nor what KVM offers of it changes.
    static LACK_IBRS: OnceLock<bool> = OnceLock::new();
    let lack_ibrs = || match LACK_IBRS.get() {
        Some(lack) => *lack,
        // KVM may come later.
        None => podvisor_vmm::check::guests_lack_ibrs()
            .is_ok_and(|lack| *LACK_IBRS.get_or_init(|| lack)),
    };
    needs_thunks(Path::new(VULNERABILITIES), lack_ibrs)
}

/// Whether the host's kernel mitigates a vulnerability of the CPU by retpolines or return thunks,
/// or mitigates Spectre v2 by what guests do not have (`lack_ibrs`). A host that mitigates nothing
/// (`mitigations=off`) needs none.
fn needs_thunks(vulnerabilities: &Path, lack_ibrs: impl FnOnce() -> bool) -> bool {
    let said = |name: &str| {
        let said = std::fs::read_to_string(vulnerabilities.join(name));
        said.unwrap_or_default().to_lowercase()
    };
    let is_mitigated = |said: &str| {
        // "Vulnerable: eIBRS with unprivileged eBPF", but not "Vulnerable; IBPB: disabled".
        said.starts_with("mitigation:") || said.starts_with("vulnerable:")
    };
    THUNKS
        .iter()
        .any(|(name, remedy)| said(name).contains(remedy))
        || is_mitigated(&said(SPECTRE_V2)) && lack_ibrs()
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
        let needs = || needs_thunks(directory.path(), || false);
        let kernel = || assets.kernel_for(needs).unwrap();
        // As Linux 6.12 and 6.1 write them.
        for (name, remedy) in [
            ("spectre_v2", "Retpolines"),
            ("retbleed", "untrained return thunk"),
            ("spec_rstack_overflow", "Safe RET"),
            ("spec_rstack_overflow", "safe RET"),
            ("indirect_target_selection", "Aligned branch/return thunks"),
        ] {
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
    fn a_cpu_needs_retpolines_where_guests_lack_what_protects_its_host() {
        let directory = tempfile::tempdir().unwrap();
        assert!(!needs_thunks(directory.path(), || true));
        let needs = |said: &str, lack_ibrs| {
            std::fs::write(directory.path().join(SPECTRE_V2), said).unwrap();
            needs_thunks(directory.path(), || lack_ibrs)
        };
        for said in [
            "Mitigation: Enhanced / Automatic IBRS; IBPB: conditional\n",
            "Vulnerable: eIBRS with unprivileged eBPF\n",
        ] {
            assert!(needs(said, true), "{said}");
            assert!(!needs(said, false), "{said}");
        }
        for said in [
            "Not affected\n",
            "Vulnerable; IBPB: disabled; STIBP: disabled\n",
            "Vulnerable, IBPB: disabled, STIBP: disabled\n",
            "Vulnerable\n",
        ] {
            assert!(!needs(said, true), "{said}");
        }
        assert!(needs("Mitigation: Retpolines; IBPB: conditional\n", false));
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
