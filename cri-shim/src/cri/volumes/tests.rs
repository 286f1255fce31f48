use podvisor_cri_messages::MountPropagation;
use rustix::mount::mount_bind;

use super::directory::{mount_points, remove_dir_now};
use super::*;
use crate::bind;

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
    let shared = SharedDirectory::of_host(shared);
    let looked = look(&shared, mounted, mounts, memory)?;
    super::mount(&shared, mounted, container, looked)
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
fn a_device_that_guests_have_themselves_is_the_guests() {
    let dir = tempfile::tempdir().unwrap();
    let shared = dir.path().join("shared");
    fs::create_dir(&shared).unwrap();
    let mounted = Mounted::of("u");
    let mounts = [wanted(Path::new("/dev/null"))];
    let volumes = mount(&shared, &mounted, "a", &mounts, none()).unwrap();
    assert_eq!(volumes[0].source, VolumeSource::Device("/dev/null"));
    assert_eq!(fs::read_dir(&shared).unwrap().count(), 0);
}

#[test]
fn a_volume_is_mounted_as_its_source_is() {
    use rustix::mount::{MountFlags, mount as mount_tmpfs};
    let dir = tempfile::tempdir().unwrap();
    let [shared, strict, open] = ["shared", "strict", "open"].map(|name| dir.path().join(name));
    for made in [&shared, &strict, &open] {
        fs::create_dir(made).unwrap();
    }
    let flags = MountFlags::NOSUID | MountFlags::NOEXEC;
    mount_tmpfs("none", &strict, "tmpfs", flags, None).unwrap();
    mount_tmpfs("none", &open, "tmpfs", MountFlags::NODEV, None).unwrap();
    let mounted = Mounted::of("u");
    let mounts = [wanted(&strict), wanted(&open)];
    // The second one finds them mounted by the first, without attributes that the host added.
    for container in ["a", "b"] {
        let volumes = mount(&shared, &mounted, container, &mounts, none()).unwrap();
        let options = volumes.iter().map(|volume| {
            let options = bind::guest_options(volume.flags);
            options.collect::<Vec<_>>().join(",")
        });
        assert_eq!(options.collect::<Vec<_>>(), ["rnosuid,rnoexec", ""]);
        assert_eq!(volumes[0].name(), Some("a-0"));
    }
    for container in ["a", "b"] {
        release(&shared, &mounted, container).unwrap();
    }
    for path in [strict, open] {
        unmount(&path, UnmountFlags::DETACH).unwrap();
    }
}

#[test]
fn a_volume_that_is_mounted_when_it_is_used_is_mounted() {
    use rustix::mount::{MountFlags, mount as mount_debugfs};
    let dir = tempfile::tempdir().unwrap();
    let [shared, debug] = ["shared", "debug"].map(|name| dir.path().join(name));
    for made in [&shared, &debug] {
        fs::create_dir(made).unwrap();
    }
    // The kernel's own example of such a directory, which not every host has.
    let mounted = mount_debugfs("none", &debug, "debugfs", MountFlags::empty(), None);
    if mounted.is_err() {
        return;
    }
    let tracing = debug.join("tracing");
    let users = Mounted::of("u");
    let of_tracing = [wanted(&tracing)];
    // To ask of it by its path would mount it.
    let mut listed = fs::read_dir(&debug).unwrap();
    if listed.any(|entry| entry.unwrap().file_name() == "tracing") {
        let volumes = mount(&shared, &users, "a", &of_tracing, none()).unwrap();
        let at = shared.join(volumes[0].name().unwrap());
        // Opened as the guest's device does it, which has nothing mounted.
        let there = bind::open_path(&at).unwrap();
        let tracefs = 0x7472_6163;
        assert_eq!(rustix::fs::fstatfs(there).unwrap().f_type, tracefs);
        release(&shared, &users, "a").unwrap();
    }
    unmount(&debug, UnmountFlags::DETACH).unwrap();
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
    // A volume of the pod's own is writable on the host even if the first container may not write
    // it.
    let all = [read_only(&empty_dir), read_only(&host), wanted(&empty_dir)];
    let first = [("a-0", true), ("a-1", true), ("a-0", false)];
    assert_eq!(names("a", &all), first.map(|(name, ro)| named(name, ro)));
    fs::write(shared.join("a-0/f"), "x").unwrap();
    assert!(fs::write(shared.join("a-1/f"), "x").is_err());
    // The host enforces read-only for its own directories.
    assert_eq!(names("b", &[wanted(&host)]), [named("b-0", false)]);
    assert_eq!(names("c", &[wanted(&host)]), [named("b-0", false)]);
    assert_eq!(names("d", &[read_only(&host)]), [named("a-1", true)]);
    assert_eq!(names("e", &[follows(&host)]), [named("e-0s", false)]);
    assert_eq!(names("f", &[follows(&host)]), [named("e-0s", false)]);
    // The host makes only the top of such a mount read-only; the guest does not protect what is
    // below.
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
    let of_host = SharedDirectory::of_host(&shared);
    let looked = look(&of_host, &mounted, &[wanted(&data)], none()).unwrap();
    release(&shared, &mounted, "a").unwrap();
    let volumes = super::mount(&of_host, &mounted, "b", looked).unwrap();
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
    // Their removal finds nothing to do, even if the directory is gone after a reboot.
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
    // The guest may create something there; it is removed with the pod.
    fs::create_dir_all(shared.join("guest/own")).unwrap();
    release_strangers(&SharedDirectory::of_host(&shared), &mounted).unwrap();
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
