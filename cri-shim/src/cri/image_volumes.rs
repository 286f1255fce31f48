//! Volumes that an image declares (`VOLUME`) and that no mount of the request covers: each is a
//! directory of the node for one container, with the image's files of that path. Here they are
//! chosen, created and removed; the guest's agent fills them. Otherwise they are like other
//! volumes.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use oci_spec::image;
use podvisor_cri_messages::Mount;

use super::error::{CriError, Result};
use super::node::{Node, Pod};
use super::spec::mounts::MAX_VOLUMES;
use crate::removal::{remove_tree_aside, remove_tree_within};

/// The parent of these directories, in the daemon's root.
const DIR: &str = "volumes";

/// The field for errors.
const FIELD: &str = "image.config.Volumes";

/// How long one attempt to remove a container's directories may take. Its guest may still run and
/// fill them, if Landlock does not deny it what is not mounted any more. The next call continues.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum length of a volume's path: the kernel's limit.
const PATH_BYTES: usize = 4095;

/// Directories that a container has from the guest, even if its image declares volumes there.
/// Images with systemd declare `/sys/fs/cgroup`.
const GUESTS: [&str; 3] = ["/dev", "/proc", "/sys"];

impl Node {
    /// Creates the directories of a container's image volumes and returns their mounts. With the
    /// agent of an older daemon, which would not fill them, none are created.
    pub(super) fn make_image_volumes(
        &self,
        pod: &Pod,
        container: &str,
        image: Option<&image::Config>,
        mounts: &[Mount],
    ) -> Result<Vec<Mount>> {
        let paths = wanted(image, mounts)?;
        if paths.is_empty() || !pod.record().fills_volumes {
            return Ok(Vec::new());
        }
        make(&self.image_volumes_dir(&pod.id).join(container), &paths)
    }

    /// Removes the directories of a container, which are not mounted any more.
    pub(super) async fn remove_image_volumes(&self, pod: &str, container: &str) -> Result<()> {
        let of_pod = self.image_volumes_dir(pod);
        let dir = of_pod.join(container);
        removed(&dir, remove_tree_within(&dir, REMOVAL_TIMEOUT).await)?;
        // It fails if other containers have some.
        let _ = fs::remove_dir(&of_pod);
        Ok(())
    }

    /// Removes all directories of a pod.
    pub(super) async fn remove_all_image_volumes(&self, pod: &str) -> Result<()> {
        let dir = self.image_volumes_dir(pod);
        removed(&dir, remove_tree_aside(&dir).await)
    }

    /// Returns the pods that have directories.
    pub(super) fn pods_with_image_volumes(&self) -> Result<Vec<String>> {
        let dir = self.config.root.join(DIR);
        let entries = match fs::read_dir(&dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(CriError::io("read the directory", &dir))?,
        };
        let names = entries.flatten().map(|entry| entry.file_name());
        Ok(names.filter_map(|name| name.into_string().ok()).collect())
    }

    pub(super) fn image_volumes_dir(&self, pod: &str) -> PathBuf {
        self.config.root.join(DIR).join(pod)
    }
}

/// Returns the paths of an image's volumes that no mount of the request covers.
fn wanted(image: Option<&image::Config>, mounts: &[Mount]) -> Result<BTreeSet<PathBuf>> {
    let declared = image.and_then(|image| image.volumes().as_deref());
    let declared = declared.unwrap_or_default();
    // A volume of no name is what `VOLUME [""]` leaves: none.
    let declared: Vec<_> = declared.iter().filter(|path| !path.is_empty()).collect();
    let most = MAX_VOLUMES.saturating_sub(mounts.len());
    if declared.len() > most {
        let reason = format!(
            "the image declares {} volumes, and there is room for {most} beside those of the \
             request",
            declared.len()
        );
        return Err(CriError::invalid(FIELD, reason));
    }
    let mounted: Vec<PathBuf> = mounts
        .iter()
        .map(|mount| at(&mount.container_path))
        .collect();
    let mut wanted = BTreeSet::new();
    for declared in declared {
        let path = at(declared);
        let is_inside = path
            .components()
            .all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
        let is_path = is_inside && !declared.contains('\0') && declared.len() <= PATH_BYTES;
        if !is_path || path == Path::new("/") {
            let shown: String = declared.chars().take(256).collect();
            let reason = format!(
                "the image declares a volume at {shown:?}, which is no path below its root"
            );
            return Err(CriError::invalid(FIELD, reason));
        }
        let is_taken = GUESTS.iter().any(|taken| path.starts_with(taken))
            || mounted.iter().any(|taken| path.starts_with(taken));
        if !is_taken {
            // Normalized, without a slash at its end, for example.
            wanted.insert(path.components().collect());
        }
    }
    Ok(wanted)
}

/// Relative paths start at the root, as those of mounts do.
fn at(path: &str) -> PathBuf {
    Path::new("/").join(path)
}

fn make(dir: &Path, paths: &BTreeSet<PathBuf>) -> Result<Vec<Mount>> {
    const ACTION: &str = "create the directory";
    let mut of_root = DirBuilder::new();
    of_root.recursive(true).mode(0o700);
    let made = of_root.create(dir);
    made.map_err(CriError::io(ACTION, dir))?;
    let mut mounts = Vec::new();
    for (number, path) in paths.iter().enumerate() {
        let host = dir.join(number.to_string());
        // If the image has nothing there, it stays as created.
        let made = DirBuilder::new().mode(0o755).create(&host);
        made.map_err(CriError::io(ACTION, &host))?;
        mounts.push(Mount {
            container_path: path.display().to_string(),
            host_path: host.display().to_string(),
            ..Mount::default()
        });
    }
    Ok(mounts)
}

/// Ignores that the directory is missing.
fn removed(dir: &Path, result: io::Result<()>) -> Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result.map_err(CriError::io("remove the directory", dir)),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    fn config(paths: &[&str]) -> image::Config {
        let volumes: Vec<_> = paths.iter().map(|path| (*path).to_owned()).collect();
        image::ConfigBuilder::default()
            .volumes(volumes)
            .build()
            .unwrap()
    }

    fn mount(path: &str) -> Mount {
        Mount {
            container_path: path.to_owned(),
            ..Mount::default()
        }
    }

    fn found(paths: &[&str], mounts: &[Mount]) -> Vec<String> {
        let wanted = wanted(Some(&config(paths)), mounts).unwrap();
        wanted
            .iter()
            .map(|path| path.display().to_string())
            .collect()
    }

    #[test]
    fn volumes_are_those_that_nothing_is_mounted_at_or_above() {
        let declared = ["/data", "srv//x/", "/data/below", "/var/lib/db", "/data/"];
        let all = ["/data", "/data/below", "/srv/x", "/var/lib/db"];
        assert_eq!(found(&declared, &[]), all);
        let mounts = [mount("/data/below"), mount("var/lib/"), mount("/srv/x/y")];
        assert_eq!(found(&declared, &mounts), ["/data", "/srv/x"]);
        assert!(found(&declared, &[mount("/data"), mount("/var"), mount("/srv")]).is_empty());
        assert!(found(&[], &[]).is_empty() && found(&[""], &[]).is_empty());
        assert!(wanted(None, &[]).unwrap().is_empty());
        // Directories that a container has from the guest are left as they are.
        let guests = ["/sys/fs/cgroup", "/proc", "/dev/shm", "/device"];
        assert_eq!(found(&guests, &[]), ["/device"]);
    }

    #[test]
    fn what_no_volume_can_be_is_refused_and_there_are_not_too_many() {
        let long = "x".repeat(PATH_BYTES + 1);
        for path in ["/", ".", "//", "/..", "/data/../..", "a\0b", &long] {
            let refused = wanted(Some(&config(&[path])), &[]).unwrap_err();
            assert!(refused.to_string().contains("below its root"), "{refused}");
        }
        let many: Vec<String> = (0..MAX_VOLUMES)
            .map(|number| format!("/{number}"))
            .collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert_eq!(found(&many, &[]).len(), MAX_VOLUMES);
        let refused = wanted(Some(&config(&many)), &[mount("/a")]).unwrap_err();
        assert!(refused.to_string().contains("512 volumes"), "{refused}");
    }

    #[tokio::test]
    async fn directories_are_roots_alone_and_go_with_what_is_in_them() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("volumes/pod/container");
        let paths = ["/a", "/b"].map(PathBuf::from).into();
        let mounts = make(&dir, &paths).unwrap();
        let paths: Vec<_> = mounts
            .iter()
            .map(|mount| mount.container_path.as_str())
            .collect();
        assert_eq!(paths, ["/a", "/b"]);
        assert_ne!(mounts[0].host_path, mounts[1].host_path);
        for above in ["volumes", "volumes/pod", "volumes/pod/container"] {
            let mode = fs::metadata(root.path().join(above)).unwrap().mode();
            assert_eq!(mode & 0o777, 0o700, "{above}");
        }
        fs::create_dir(Path::new(&mounts[0].host_path).join("below")).unwrap();
        removed(&dir, remove_tree_aside(&dir).await).unwrap();
        removed(&dir, remove_tree_aside(&dir).await).unwrap();
        assert!(!dir.exists());
    }
}
