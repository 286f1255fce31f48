//! Where the guest's kernel and initramfs are found.
//!
//! The first of these folders that has a file of the wanted name: `$PODVISOR_GUEST_DIR`
//! alone when it is set, else `guest/` beside the folder of the executable, else
//! `/usr/lib/podvisor`.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Names the folder that holds the guest's files.
pub(crate) const GUEST_DIR_VARIABLE: &str = "PODVISOR_GUEST_DIR";

/// The kernel's file name: an ELF vmlinux or a bzImage.
pub(crate) const KERNEL: &str = "vmlinux";

/// The initramfs' file name; it holds the agent as `/init`.
pub(crate) const INITRAMFS: &str = "initramfs.cpio";

const SYSTEM_DIR: &str = "/usr/lib/podvisor";

/// A file of the guest's is not there.
#[derive(Debug, thiserror::Error)]
#[error("{}; {}", self.found(), self.remedy())]
pub(crate) struct AssetError {
    what: &'static str,
    name: &'static str,
    searched: Vec<PathBuf>,
    hint: &'static str,
}

impl AssetError {
    /// What was looked for where.
    pub(crate) fn found(&self) -> String {
        let (what, name) = (self.what, self.name);
        format!("no guest {what} `{name}` in {}", list(&self.searched))
    }

    /// What to do.
    pub(crate) fn remedy(&self) -> String {
        let hint = self.hint;
        format!(
            "build it with `cargo xtask guest`, or set {GUEST_DIR_VARIABLE} to the folder that \
             has it{hint}"
        )
    }
}

fn list(folders: &[PathBuf]) -> String {
    let names: Vec<String> = folders.iter().map(|f| f.display().to_string()).collect();
    names.join(" or ")
}

/// The folders that are searched, in order.
#[derive(Debug, Clone)]
pub(crate) struct Assets {
    folders: Vec<PathBuf>,
}

impl Assets {
    /// As this process's environment and executable say.
    pub(crate) fn of_this_process() -> Self {
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
    pub(crate) fn kernel(&self) -> Result<PathBuf, AssetError> {
        self.find("kernel", KERNEL, ", or give one with --kernel")
    }

    /// The initramfs with the agent.
    pub(crate) fn initramfs(&self) -> Result<PathBuf, AssetError> {
        self.find("initramfs", INITRAMFS, "")
    }

    fn find(
        &self,
        what: &'static str,
        name: &'static str,
        hint: &'static str,
    ) -> Result<PathBuf, AssetError> {
        self.folders
            .iter()
            .map(|folder| folder.join(name))
            .find(|file| file.is_file())
            .ok_or_else(|| AssetError {
                what,
                name,
                searched: self.folders.clone(),
                hint,
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
    fn a_file_is_found_and_a_missing_one_says_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(KERNEL), b"").unwrap();
        let assets = Assets::new(Some(folder.path().into()), None);
        assert_eq!(assets.kernel().unwrap(), folder.path().join(KERNEL));
        let message = assets.initramfs().unwrap_err().to_string();
        assert!(message.contains("initramfs.cpio"), "{message}");
        assert!(message.contains(GUEST_DIR_VARIABLE), "{message}");
    }
}
