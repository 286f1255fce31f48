//! Volumes of a pod: each is bind-mounted to a name of its own in the directory that the
//! guest shares, when a container needs it, and unmounted with the last container that has it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Component, Path, PathBuf};

use k8s_cri::v1::{Mount, MountPropagation};
use rustix::fs::{StatVfsMountFlags, fstatvfs, statvfs};
use rustix::io::Errno;
use rustix::mount::{MountPropagationFlags, UnmountFlags, mount_bind, mount_change, unmount};
use tracing::warn;

use super::error::{CriError, Result};
use super::mounted::{Mounted, Users};
use super::spec::mounts::image_of;
use super::spec::{MemorySource, Volume, VolumeSource};
use crate::bind::{self, DetachedTree, Extent, MountPoint, Propagation, open_path, open_root};
use crate::removal::remove_tree;

/// Directory of a pod's volumes within its own.
pub(super) const SHARED: &str = "shared";

/// What the path of an emptyDir holds, as a kubelet has it.
pub(super) const EMPTY_DIR: &str = "/volumes/kubernetes.io~empty-dir/";

/// Ends the names of volumes in which the host's later mounts appear.
const FOLLOWS: char = 's';

/// What a container wants to have mounted: open, and looked at. So mounting it waits for no server
/// of files.
#[derive(Debug)]
pub(super) struct Looked {
    /// In the order of the mounts, but for those of images.
    volumes: Vec<(Mount, Source)>,
    /// Volumes that were mounted already.
    there: BTreeMap<String, There>,
}

#[derive(Debug)]
enum Source {
    Memory(MemorySource),
    Host(Box<Wanted>),
}

/// A volume of the pod that is mounted.
#[derive(Debug, Clone, Copy)]
struct There {
    /// Device and inode.
    object: (u64, u64),
    flags: StatVfsMountFlags,
}

/// Opens and looks at what `mounts` name, but for those of images and, by their numbers, those that
/// are in the guest's `memory`; and at what is mounted for the pod. This waits without end where a
/// server of files does not answer: nothing is to be locked meanwhile.
pub(super) fn look(
    shared: &Path,
    mounted: &Mounted,
    mounts: &[Mount],
    mut memory: BTreeMap<usize, MemorySource>,
) -> Result<Looked> {
    let mut volumes = Vec::new();
    for (number, mount) in mounts.iter().enumerate() {
        if image_of(mount).is_some() {
            continue;
        }
        let source = match memory.remove(&number) {
            Some(source) => Source::Memory(source),
            None => Source::Host(Box::new(Wanted::open(number, mount, mounted)?)),
        };
        volumes.push((mount.clone(), source));
    }
    let objects: Vec<_> = volumes
        .iter()
        .filter_map(|(_, source)| match source {
            Source::Host(wanted) => Some(wanted.there.object),
            Source::Memory(_) => None,
        })
        .collect();
    let names: Vec<String> = mounted.lock().names().map(str::to_owned).collect();
    let mut there = BTreeMap::new();
    for name in names {
        let target = shared.join(&name);
        let Ok(meta) = fs::symlink_metadata(&target) else {
            continue;
        };
        let object = (meta.dev(), meta.ino());
        if !objects.contains(&object) {
            continue;
        }
        // One that is unmounted by now is nobody's.
        if let Ok(at) = statvfs(&target) {
            let flags = at.f_flag;
            there.insert(name, There { object, flags });
        }
    }
    Ok(Looked { volumes, there })
}

/// Mounts what was looked at for a container. What another container has mounted alike is not
/// mounted again. Nothing of it stays when one fails.
pub(super) fn mount(
    shared: &Path,
    mounted: &Mounted,
    container: &str,
    looked: Looked,
) -> Result<Vec<Volume>> {
    let mut users = mounted.lock();
    let Looked { volumes, mut there } = looked;
    // It may have been unmounted meanwhile.
    there.retain(|name, _| users.names().any(|known| known == name));
    let mut done = Vec::new();
    for (wanted, source) in volumes {
        let source = match source {
            Source::Memory(source) => Ok((VolumeSource::Memory(source), wanted.readonly)),
            Source::Host(host) => {
                let short: String = container.chars().take(16).collect();
                let follows = is_slave(&wanted).then_some(FOLLOWS);
                let number = host.number;
                let name = format!("{short}-{number}").chars().chain(follows).collect();
                share_or_mount(shared, &mut users, &mut there, container, name, &host)
            }
        };
        match source {
            Ok((source, readonly)) => done.push(Volume {
                source,
                is_slave: is_slave(&wanted),
                destination: wanted.container_path,
                readonly,
            }),
            Err(error) => {
                let unused = users.release(container);
                remove_unused(shared, &mut users, unused)?;
                return Err(error);
            }
        }
    }
    Ok(done)
}

/// The container has no volumes any more: those that no other one has are unmounted.
pub(super) fn release(shared: &Path, mounted: &Mounted, container: &str) -> Result<()> {
    let mut users = mounted.lock();
    let unused = users.release(container);
    remove_unused(shared, &mut users, unused)
}

/// No container has volumes any more, as their machine is gone: all are unmounted.
pub(super) fn release_all(shared: &Path, mounted: &Mounted) -> Result<()> {
    let mut users = mounted.lock();
    let unused = users.release_all();
    let removed = remove_unused(shared, &mut users, unused);
    removed.and(remove_strangers(shared, &users))
}

/// Unmounts what no container has: a daemon that was killed may have mounted a volume, and not have
/// come to note for whom.
pub(super) fn release_strangers(shared: &Path, mounted: &Mounted) -> Result<()> {
    remove_strangers(shared, &mounted.lock())
}

fn remove_strangers(shared: &Path, users: &Users) -> Result<()> {
    // As the table of mounts has it.
    let shared = &match shared.canonicalize() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found.map_err(CriError::io("look at", shared))?,
    };
    let mut strangers = BTreeSet::new();
    for point in mount_points(shared)? {
        // Others may be mounted below it.
        let below = point.strip_prefix(shared).ok();
        let Some(Component::Normal(name)) = below.and_then(|below| below.components().next())
        else {
            continue;
        };
        if users.names().all(|known| known != name) {
            strangers.insert(name.to_owned());
        }
    }
    let mut first = Ok(());
    for name in strangers {
        first = first.and(remove_one(&shared.join(name)));
    }
    first
}

fn remove_unused(shared: &Path, users: &mut Users, unused: Vec<String>) -> Result<()> {
    let mut first = Ok(());
    for name in unused {
        let removed = remove_one(&shared.join(&name));
        if removed.is_ok() {
            users.forget(&name);
        }
        first = first.and(removed);
    }
    first
}

/// Where a container finds a volume, and whether nothing in it can be written.
fn share_or_mount(
    shared: &Path,
    users: &mut Users,
    there: &mut BTreeMap<String, There>,
    container: &str,
    name: String,
    wanted: &Wanted,
) -> Result<(VolumeSource, bool)> {
    if let Some(name) = wanted.find(shared, there)? {
        users.add(&name, container);
        // What may be mounted below one that follows the host is as the host has it.
        let readonly = wanted.mount.readonly && !is_slave(&wanted.mount);
        return Ok((VolumeSource::Shared(name), readonly));
    }
    users.add(&name, container);
    let readonly = wanted.mount_at(shared, &name)?;
    there.insert(name.clone(), wanted.once_mounted());
    Ok((VolumeSource::Shared(name), readonly))
}

fn is_slave(mount: &Mount) -> bool {
    mount.propagation == i32::from(MountPropagation::PropagationHostToContainer)
}

/// What a container wants to have mounted, open.
#[derive(Debug)]
struct Wanted {
    /// Among all mounts of the container.
    number: usize,
    mount: Mount,
    source: File,
    meta: Metadata,
    /// As it is mounted where it comes from.
    there: There,
    /// The host does not let the guest write there. What belongs to the pod alone, and is kept from
    /// one of its containers, the guest keeps from that one.
    is_read_only: bool,
}

impl Wanted {
    fn open(number: usize, mount: &Mount, mounted: &Mounted) -> Result<Self> {
        let path = Path::new(&mount.host_path);
        let failed = || CriError::io("look at", path);
        let source = open_source(path)?;
        let meta = source.metadata().map_err(failed())?;
        let at = fstatvfs(&source).map_err(|error| failed()(error.into()))?;
        let there = There {
            object: (meta.dev(), meta.ino()),
            flags: at.f_flag,
        };
        let mut wanted = Self {
            number,
            mount: mount.clone(),
            source,
            meta,
            there,
            is_read_only: mount.readonly,
        };
        let is_the_pods = mounted.is_the_pods(&mount.host_path) && !is_slave(mount);
        if mount.readonly && is_the_pods && wanted.is_single()? {
            wanted.is_read_only = false;
        }
        Ok(wanted)
    }

    /// Whether nothing is mounted below it.
    fn is_single(&self) -> Result<bool> {
        let link = format!("/proc/self/fd/{}", self.source.as_raw_fd());
        let path = fs::read_link(&link).map_err(CriError::io("read", &link))?;
        let points = mount_points(&path)?;
        Ok(points.iter().all(|point| *point == path))
    }

    /// The name of what some container has, if this one can have the same.
    fn find(&self, shared: &Path, there: &BTreeMap<String, There>) -> Result<Option<String>> {
        for (name, there) in there {
            if there.object == self.there.object
                && name.ends_with(FOLLOWS) == is_slave(&self.mount)
                && self.is_like(there, &shared.join(name))?
            {
                return Ok(Some(name.clone()));
            }
        }
        Ok(None)
    }

    /// Whether a mount of the same object is as it would be for this container.
    fn is_like(&self, there: &There, target: &Path) -> Result<bool> {
        let differ = there.flags ^ self.there.flags;
        if differ.contains(StatVfsMountFlags::NOEXEC) {
            return Ok(false);
        }
        let there = there.flags.contains(StatVfsMountFlags::RDONLY);
        let read_only = self.is_read_only || self.there.flags.contains(StatVfsMountFlags::RDONLY);
        if is_slave(&self.mount) {
            // What is mounted below follows the host in both.
            return Ok(there == read_only);
        }
        // The guest keeps who may not write from writing.
        let may_be_used = there == read_only || self.mount.readonly && !there;
        Ok(may_be_used && mount_points(target)?.len() == 1 && self.is_single()?)
    }

    /// What it is once it is mounted.
    fn once_mounted(&self) -> There {
        let mut there = self.there;
        if self.is_read_only {
            there.flags |= StatVfsMountFlags::RDONLY;
        }
        there
    }

    /// Mounts it on a name in `shared`. True when nothing in it can be written, not even below
    /// mounts in it.
    fn mount_at(&self, shared: &Path, name: &str) -> Result<bool> {
        let wanted = &self.mount;
        let failed = || CriError::io("mount the volume", Path::new(&wanted.host_path));
        let is_dir = self.meta.is_dir();
        let extent = match is_dir {
            true => Extent::Whole,
            false => Extent::Top,
        };
        let propagation = match is_slave(wanted) {
            true => Propagation::FromSource,
            false => Propagation::Private,
        };
        // By its descriptor: what the path means cannot change in between.
        let tree = DetachedTree::of(&self.source, extent, propagation).map_err(failed())?;
        // What is made or found there is neither a device nor a program with another's rights on
        // the host.
        tree.make_harmless().map_err(failed())?;
        // The guest must not write even if it ignores what it is told. What is mounted below stays
        // as it is, unless the request says otherwise.
        if self.is_read_only {
            let extent = match wanted.recursive_read_only {
                true => Extent::Whole,
                false => Extent::Top,
            };
            tree.make_read_only(extent).map_err(failed())?;
        }
        let target = shared.join(name);
        let root = open_root(shared).map_err(CriError::io("open", shared))?;
        let point = MountPoint::make(root.as_fd(), name, is_dir);
        let point = point.map_err(CriError::io("create", &target))?;
        tree.attach(&point).map_err(failed())?;
        let is_whole = wanted.recursive_read_only
            || (wanted.readonly && !is_slave(wanted) && mount_points(&target)?.len() == 1);
        Ok(wanted.readonly && is_whole)
    }
}

/// Opens what is to be mounted; a path that is not there becomes a directory, as other
/// runtimes have it.
fn open_source(path: &Path) -> Result<File> {
    let failed = || CriError::io("open the volume", path);
    match open_path(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let mut builder = fs::DirBuilder::new();
            let made = builder.recursive(true).mode(0o755).create(path);
            made.map_err(CriError::io("create the volume", path))?;
            open_path(path).map_err(failed())
        }
        opened => opened.map_err(failed()),
    }
}

/// Unmounts a volume and removes its name; what is gone is no error.
fn remove_one(target: &Path) -> Result<()> {
    let failed = || CriError::io("unmount the volume", target);
    loop {
        match unmount(target, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
            Ok(()) => {}
            Err(Errno::NOENT) => return Ok(()),
            // Not a mount point, or no longer.
            Err(Errno::INVAL) => break,
            Err(error) => return Err(failed()(error.into())),
        }
    }
    let meta = match fs::symlink_metadata(target) {
        Ok(meta) => meta,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed()(error)),
    };
    // Never recursively: what is below is not ours.
    let removed = match meta.is_dir() {
        true => fs::remove_dir(target),
        false => fs::remove_file(target),
    };
    removed.map_err(CriError::io("remove", target))
}

/// Makes the directory of sandboxes a mount of its own which passes nothing on, so that pods'
/// volumes appear in no other mount namespace.
pub(super) fn make_private(dir: &Path) -> Result<()> {
    let failed = || CriError::io("make a private mount of", dir);
    let dir = fs::canonicalize(dir).map_err(failed())?;
    if !mount_points(&dir)?.contains(&dir) {
        mount_bind(&dir, &dir).map_err(|error| failed()(error.into()))?;
    }
    let private = MountPropagationFlags::PRIVATE;
    mount_change(&dir, private).map_err(|error| failed()(error.into()))
}

/// Removes a sandbox's directory with all that is mounted below it, where others wait for this
/// thread.
pub(super) async fn remove_dir(dir: &Path) -> Result<()> {
    let own = dir.to_owned();
    let removed = tokio::task::spawn_blocking(move || remove_dir_now(&own)).await;
    let failed = CriError::io("remove the directory", dir);
    removed.unwrap_or_else(|error| Err(failed(io::Error::other(error))))
}

fn remove_dir_now(dir: &Path) -> Result<()> {
    for point in mount_points(dir)?.iter().rev() {
        if let Err(error) = unmount(point, UnmountFlags::DETACH) {
            warn!(point = %point.display(), %error, "cannot unmount");
        }
    }
    // A mount that is still there must not have its files removed with the directory.
    if let Some(left) = mount_points(dir)?.first() {
        let busy = io::Error::from(io::ErrorKind::ResourceBusy);
        return Err(CriError::io("unmount", left)(busy));
    }
    match remove_tree(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(CriError::io("remove the directory", dir)(error))
        }
        _ => Ok(()),
    }
}

fn mount_points(dir: &Path) -> Result<Vec<PathBuf>> {
    bind::mount_points(dir).map_err(CriError::io("read", bind::MOUNTINFO))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(path: &Path) -> Mount {
        Mount {
            container_path: "/x".to_owned(),
            host_path: path.to_str().unwrap().to_owned(),
            ..Mount::default()
        }
    }

    fn none() -> BTreeMap<usize, MemorySource> {
        BTreeMap::new()
    }

    fn mount(
        shared: &Path,
        mounted: &Mounted,
        container: &str,
        mounts: &[Mount],
        memory: BTreeMap<usize, MemorySource>,
    ) -> Result<Vec<Volume>> {
        let looked = look(shared, mounted, mounts, memory)?;
        super::mount(shared, mounted, container, looked)
    }

    #[test]
    fn files_and_directories_are_mounted_and_nothing_stays() {
        let dir = tempfile::tempdir().unwrap();
        let shared = dir.path().join("shared dir");
        let data = dir.path().join("data");
        fs::create_dir(&shared).unwrap();
        fs::create_dir(&data).unwrap();
        fs::write(data.join("file"), "x").unwrap();
        let missing = dir.path().join("a/b");
        let mut readonly = wanted(&data);
        readonly.readonly = true;
        let mounts = [wanted(&data.join("file")), readonly, wanted(&missing)];
        let mounted = Mounted::of("u");
        let id = "0123456789abcdef0";
        let volumes = mount(&shared, &mounted, id, &mounts, none()).unwrap();
        assert_eq!(volumes[1].name(), Some("0123456789abcdef-1"));
        let at = |n: usize| shared.join(volumes[n].name().unwrap());
        assert_eq!(fs::read_to_string(at(0)).unwrap(), "x");
        let written = fs::write(at(1).join("new"), "");
        assert_eq!(
            written.unwrap_err().kind(),
            io::ErrorKind::ReadOnlyFilesystem
        );
        fs::write(at(2).join("new"), "").unwrap();
        assert!(missing.join("new").exists());

        for number in 0..volumes.len() {
            use rustix::fs::{StatVfsMountFlags, statvfs};
            let flags = statvfs(at(number)).unwrap().f_flag;
            let harmless = StatVfsMountFlags::NOSUID | StatVfsMountFlags::NODEV;
            assert!(flags.contains(harmless), "{number}: {flags:?}");
        }

        release(&shared, &mounted, id).unwrap();
        release(&shared, &mounted, id).unwrap();
        assert_eq!(fs::read_dir(&shared).unwrap().count(), 0);
        assert!(data.join("file").exists());
    }

    #[test]
    fn what_several_containers_mount_alike_is_mounted_once() {
        let dir = tempfile::tempdir().unwrap();
        let shared = dir.path().join("shared");
        let host = dir.path().join("host");
        let empty_dir = dir.path().join("pods/u/volumes/kubernetes.io~empty-dir/e");
        for made in [&shared, &host, &empty_dir] {
            fs::create_dir_all(made).unwrap();
        }
        let mounted = Mounted::of("u");
        let names = |container: &str, mounts: &[Mount]| {
            let volumes = mount(&shared, &mounted, container, mounts, none()).unwrap();
            let all = volumes.iter().map(|volume| {
                let name = volume.name().unwrap().to_owned();
                (name, volume.readonly)
            });
            all.collect::<Vec<_>>()
        };
        let named = |name: &str, readonly| (name.to_owned(), readonly);
        let read_only = |path: &Path| Mount {
            readonly: true,
            ..wanted(path)
        };
        let follows = |path: &Path| Mount {
            propagation: MountPropagation::PropagationHostToContainer.into(),
            ..wanted(path)
        };
        // Of the pod's own directory, who comes first may be one that may not write.
        let all = [read_only(&empty_dir), read_only(&host), wanted(&empty_dir)];
        let first = [("a-0", true), ("a-1", true), ("a-0", false)];
        assert_eq!(names("a", &all), first.map(|(name, ro)| named(name, ro)));
        fs::write(shared.join("a-0/f"), "x").unwrap();
        assert!(fs::write(shared.join("a-1/f"), "x").is_err());
        // The host keeps what is its own from who may not write it.
        assert_eq!(names("b", &[wanted(&host)]), [named("b-0", false)]);
        assert_eq!(names("c", &[wanted(&host)]), [named("b-0", false)]);
        assert_eq!(names("d", &[read_only(&host)]), [named("a-1", true)]);
        assert_eq!(names("e", &[follows(&host)]), [named("e-0s", false)]);
        assert_eq!(names("f", &[follows(&host)]), [named("e-0s", false)]);
        // The host keeps the top of such a one from being written, and the guest what is below not.
        let both = Mount {
            readonly: true,
            ..follows(&host)
        };
        let both = [both.clone(), both];
        let same = named("h-0s", false);
        assert_eq!(names("h", &both), [same.clone(), same]);
        release(&shared, &mounted, "h").unwrap();
        for (container, left) in [
            ("a", "a-0 a-1 b-0 e-0s"),
            ("b", "a-1 b-0 e-0s"),
            ("c", "a-1 e-0s"),
            ("d", "e-0s"),
            ("e", "e-0s"),
            ("f", ""),
        ] {
            if container == "a" {
                assert_eq!(names("g", &[wanted(&empty_dir)]), [named("a-0", false)]);
            }
            release(&shared, &mounted, container).unwrap();
            let there = fs::read_dir(&shared).unwrap();
            let there = there.map(|entry| entry.unwrap().file_name().into_string().unwrap());
            let mut there: Vec<String> = there.collect();
            there.sort();
            assert_eq!(there.join(" "), left, "after {container}");
            if container == "a" {
                release(&shared, &mounted, "g").unwrap();
            }
        }
    }

    #[test]
    fn what_was_unmounted_since_it_was_looked_at_is_mounted_anew() {
        let dir = tempfile::tempdir().unwrap();
        let [shared, data] = ["shared", "data"].map(|name| dir.path().join(name));
        for made in [&shared, &data] {
            fs::create_dir(made).unwrap();
        }
        let mounted = Mounted::of("u");
        mount(&shared, &mounted, "a", &[wanted(&data)], none()).unwrap();
        let looked = look(&shared, &mounted, &[wanted(&data)], none()).unwrap();
        release(&shared, &mounted, "a").unwrap();
        let volumes = super::mount(&shared, &mounted, "b", looked).unwrap();
        assert_eq!(volumes[0].name(), Some("b-0"));
        fs::write(shared.join("b-0/f"), "x").unwrap();
        assert!(data.join("f").exists());
        release(&shared, &mounted, "b").unwrap();
    }

    #[test]
    fn a_pod_that_ends_has_nothing_mounted_whoever_had_it() {
        let dir = tempfile::tempdir().unwrap();
        let [shared, first, second] = ["shared", "first", "second"].map(|name| {
            let path = dir.path().join(name);
            fs::create_dir(&path).unwrap();
            path
        });
        let mounted = Mounted::of("u");
        for container in ["a", "b"] {
            let mounts = [wanted(&first), wanted(&second)];
            mount(&shared, &mounted, container, &mounts, none()).unwrap();
        }
        assert_eq!(mount_points(&shared).unwrap().len(), 2);
        release_all(&shared, &mounted).unwrap();
        assert_eq!(mount_points(&shared).unwrap().len(), 0);
        assert_eq!(fs::read_dir(&shared).unwrap().count(), 0);
        // Their removal finds nothing to do, also where the directory is gone with a boot.
        fs::remove_dir(&shared).unwrap();
        release(&shared, &mounted, "a").unwrap();
        mounted.lock().add("a-0", "a");
        release_all(&shared, &mounted).unwrap();
        assert_eq!(mounted.lock().names().count(), 0);
    }

    #[test]
    fn what_is_mounted_for_nobody_is_unmounted_with_all_that_is_below() {
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("data");
        let below = data.join("below");
        let real = dir.path().join("real");
        for made in [&below, &real.join("shared")] {
            fs::create_dir_all(made).unwrap();
        }
        std::os::unix::fs::symlink(&real, dir.path().join("link")).unwrap();
        let shared = dir.path().join("link/shared");
        mount_bind(&below, &below).unwrap();
        let names = || {
            let there = fs::read_dir(&shared).unwrap();
            let there = there.map(|entry| entry.unwrap().file_name().into_string().unwrap());
            there.collect::<BTreeSet<_>>()
        };
        let mounted = Mounted::of("u");
        mount(&shared, &mounted, "a", &[wanted(&below)], none()).unwrap();
        let by_one_that_was_killed = || {
            mount(&shared, &Mounted::of("u"), "b", &[wanted(&data)], none()).unwrap();
        };
        by_one_that_was_killed();
        // The guest may make something there; it goes with the pod.
        fs::create_dir_all(shared.join("guest/own")).unwrap();
        release_strangers(&shared, &mounted).unwrap();
        assert_eq!(names(), ["a-0", "guest"].map(str::to_owned).into());
        by_one_that_was_killed();
        release_all(&shared, &mounted).unwrap();
        assert_eq!(names(), ["guest".to_owned()].into());
        assert_eq!(
            mount_points(&real.canonicalize().unwrap()).unwrap().len(),
            0
        );
        unmount(&below, UnmountFlags::DETACH).unwrap();
    }

    #[test]
    fn a_mount_that_fails_takes_the_others_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "x").unwrap();
        let shared = dir.path().join("shared");
        fs::create_dir(&shared).unwrap();
        let mounts = [wanted(&file), wanted(&file.join("below"))];
        assert!(mount(&shared, &Mounted::of("u"), "c", &mounts, none()).is_err());
        assert_eq!(fs::read_dir(&shared).unwrap().count(), 0);
    }

    #[test]
    fn a_directory_is_removed_and_what_was_mounted_in_it_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("data");
        fs::create_dir(&data).unwrap();
        fs::write(data.join("file"), "x").unwrap();
        let shared = dir.path().join("pod/shared");
        fs::create_dir_all(&shared).unwrap();
        let state = dir.path().join("state");
        std::os::unix::fs::symlink(dir.path(), &state).unwrap();
        for way in [dir.path(), &state, &state] {
            make_private(&way.join("pod")).unwrap();
        }
        assert_eq!(mount_points(&state.join("pod")).unwrap().len(), 1);
        mount(&shared, &Mounted::of("u"), "c", &[wanted(&data)], none()).unwrap();
        remove_dir_now(&state.join("pod")).unwrap();
        assert!(!dir.path().join("pod").exists());
        assert!(data.join("file").exists());
    }
}
