//! Where the guest's kernel and initramfs are found.
//!
//! The first of these folders that has a file of the wanted name: `$PODVISOR_GUEST_DIR`
//! alone when it is set, else `guest/` beside the folder of the executable, else
//! `/usr/lib/podvisor`.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Names the directory that holds the guest's files.
pub const GUEST_DIR_VARIABLE: &str = "PODVISOR_GUEST_DIR";

const SYSTEM_DIR: &str = "/usr/lib/podvisor";

/// A file that every guest boots from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GuestFile {
    /// An ELF vmlinux or a bzImage.
    Kernel,
    /// Holds the agent as `/init`.
    Initramfs,
}

impl GuestFile {
    /// The file's name in its directory.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kernel => "vmlinux",
            Self::Initramfs => "initramfs.cpio",
        }
    }
}

/// A file of the guest's is not there.
#[derive(Debug, thiserror::Error)]
#[error("no guest {} `{}` in {}", self.what(), .file.name(), list(.searched))]
pub struct AssetError {
    /// Which one.
    pub file: GuestFile,
    /// Where it was looked for.
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

fn list(folders: &[PathBuf]) -> String {
    let names: Vec<String> = folders.iter().map(|f| f.display().to_string()).collect();
    names.join(" or ")
}

/// The directories that are searched, in order.
#[derive(Debug, Clone)]
pub struct Assets {
    folders: Vec<PathBuf>,
}

impl Assets {
    /// As this process's environment and executable say.
    #[must_use]
    pub fn of_this_process() -> Self {
        Self::new(
            env::var_os(GUEST_DIR_VARIABLE),
            env::current_exe().ok().as_deref(),
        )
    }

    /// One folder alone.
    #[cfg(test)]
    pub(crate) fn in_folder(folder: &Path) -> Self {
        Self {
            folders: vec![folder.to_owned()],
        }
    }

    fn new(variable: Option<OsString>, executable: Option<&Path>) -> Self {
        if let Some(folder) = variable.filter(|v| !v.is_empty()) {
            return Self {
                folders: vec![PathBuf::from(folder)],
            };
        }
        let beside = executable
            .and_then(Path::parent)
            .and_then(Path::parent)
            .map(|folder| folder.join("guest"));
        Self {
            folders: beside
                .into_iter()
                .chain([PathBuf::from(SYSTEM_DIR)])
                .collect(),
        }
    }

    /// The guest's kernel.
    ///
    /// # Errors
    /// When no directory has it.
    pub fn kernel(&self) -> Result<PathBuf, AssetError> {
        self.find(GuestFile::Kernel)
    }

    /// The initramfs with the agent.
    ///
    /// # Errors
    /// When no directory has it.
    pub fn initramfs(&self) -> Result<PathBuf, AssetError> {
        self.find(GuestFile::Initramfs)
    }

    fn find(&self, file: GuestFile) -> Result<PathBuf, AssetError> {
        self.folders
            .iter()
            .map(|folder| folder.join(file.name()))
            .find(|path| path.is_file())
            .ok_or_else(|| AssetError {
                file,
                searched: self.folders.clone(),
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_is_the_only_place_when_set() {
        let assets = Assets::new(Some("/a".into()), Some(Path::new("/x/bin/podvisor")));
        assert_eq!(assets.folders, [PathBuf::from("/a")]);
    }

    #[test]
    fn without_it_the_folder_beside_the_executables_comes_first() {
        for variable in [None, Some(OsString::new())] {
            let assets = Assets::new(variable, Some(Path::new("/x/bin/podvisor")));
            assert_eq!(
                assets.folders,
                [PathBuf::from("/x/guest"), PathBuf::from(SYSTEM_DIR)]
            );
        }
    }

    #[test]
    fn a_file_is_found_and_a_missing_one_says_where_it_was_looked_for() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(GuestFile::Kernel.name()), b"").unwrap();
        let assets = Assets::new(Some(folder.path().into()), None);
        assert_eq!(
            assets.kernel().unwrap(),
            folder.path().join(GuestFile::Kernel.name())
        );
        let message = assets.initramfs().unwrap_err().to_string();
        assert!(message.contains("initramfs.cpio"), "{message}");
        assert!(
            message.contains(folder.path().to_str().unwrap()),
            "{message}"
        );
    }
}
