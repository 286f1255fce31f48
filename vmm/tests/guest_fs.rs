//! A shared directory as a Linux guest sees it, in a mount namespace of the test.

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use podvisor_vmm::{FsDevice, MemorySize, Transport, VmExit};
use support::mounts::{mount, own_mounts};
use support::{Console, PATIENCE, linux, raise_limit_of_files};

/// Directories, and files in each, unless `PODVISOR_TEST_FILES` sets another number for PCI.
const DIRS: usize = 10;
const FILES: usize = 10;

const MOUNT: &str = "mkdir /share; mount -t virtiofs data /share || exit 1\n";

/// The metadata that a copy must preserve: mode, owner, group, seconds of mtime, content.
type Kept = (u32, u32, u32, i64, Vec<u8>);

fn kept(root: &Path) -> BTreeMap<PathBuf, Kept> {
    let mut all = BTreeMap::new();
    let mut dirs = vec![root.to_path_buf()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            let meta = path.symlink_metadata().unwrap();
            let contents = if meta.is_dir() {
                dirs.push(path.clone());
                Vec::new()
            } else if meta.is_symlink() {
                fs::read_link(&path)
                    .unwrap()
                    .into_os_string()
                    .into_encoded_bytes()
            } else {
                fs::read(&path).unwrap()
            };
            // The mtime of a directory is that of its last entry; that of a link is not copied.
            let time = if meta.is_file() { meta.mtime() } else { 0 };
            let what = (meta.mode(), meta.uid(), meta.gid(), time, contents);
            all.insert(path.strip_prefix(root).unwrap().into(), what);
        }
    }
    all
}

/// The transports that every test of a device runs on.
const TRANSPORTS: [Transport; 2] = [Transport::Mmio, Transport::Pci];

#[test]
fn guest_long_copies_a_tree_and_a_large_file_both_ways_on_both_transports() {
    // Each file of both trees costs a descriptor.
    raise_limit_of_files();
    let files = std::env::var("PODVISOR_TEST_FILES").map_or(FILES, |n| n.parse().unwrap());
    copies_both_ways(Transport::Mmio, FILES);
    copies_both_ways(Transport::Pci, files);
}

fn copies_both_ways(transport: Transport, files: usize) {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("in");
    let time = |n: usize| {
        std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000_000 + n as u64 * 1000)
    };
    for d in 0..DIRS {
        let at = source.join(format!("d{d}"));
        fs::create_dir_all(&at).unwrap();
        for f in 0..files {
            let n = d * files + f;
            let path = at.join(format!("f{f}"));
            fs::write(&path, format!("{n}\n").repeat(n % 50)).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600 | (n as u32 & 0o77)))
                .unwrap();
            chown(&path, Some(n as u32 % 7), Some(n as u32 % 11)).unwrap();
            fs::File::options()
                .write(true)
                .open(&path)
                .unwrap()
                .set_modified(time(n))
                .unwrap();
        }
    }
    let large: Vec<u8> = (0..1u32 << 20).flat_map(u32::to_le_bytes).collect();
    fs::write(source.join("large"), large).unwrap();
    symlink("d1/f1", source.join("link")).unwrap();

    let console = Console::default();
    let script = format!(
        "{MOUNT}cp -a /share/in /copy && cp -a /copy /share/out && echo copied\n\
         echo 3 > /proc/sys/vm/drop_caches\n\
         cmp /copy/large /share/out/large && echo same\n\
         umount /share && echo unmounted"
    );
    let vm = linux(&script, &console)
        .transport(transport)
        .memory(MemorySize::mib(256))
        .fs(FsDevice::open("data", dir.path()).unwrap())
        .build()
        .unwrap();
    vm.start().unwrap();
    assert_eq!(vm.wait().unwrap(), VmExit::Reset);
    let text = console.text();
    assert!(text.contains("copied\nsame\nunmounted\n"), "{text}");
    let (before, after) = (kept(&source), kept(&dir.path().join("out")));
    assert_eq!(before.len(), after.len());
    for (path, what) in before {
        assert!(after.get(&path) == Some(&what), "{}", path.display());
    }
    let counters = vm.fs("fs0").unwrap().counters();
    let count = |name| counters.iter().find(|c| c.name == name).unwrap().value;
    assert_eq!((count("open_objects"), count("open_handles")), (0, 0));
    assert_eq!(count("malformed_requests"), 0);
    assert!(count("read_bytes") > 4 << 20 && count("written_bytes") > 4 << 20);
    assert!(vm.faults().is_empty());
}

/// The limit of this test's device.
const MAX_OPEN: usize = 100;

/// Of a byte each, in a mount below the share.
const WRITES: u64 = 400;

/// A POSIX access control list (`linux/posix_acl_xattr.h`) that lets one more user do everything.
fn list_with(user: u32) -> Vec<u8> {
    let none = u32::MAX;
    let mut list = 2u32.to_le_bytes().to_vec();
    // The owner, the user, the owning group, the mask, and others.
    for (tag, permissions, id) in [
        (1, 7, none),
        (2, 7, user),
        (4, 0, none),
        (16, 7, none),
        (32, 0, none),
    ] {
        list.extend(u16::to_le_bytes(tag));
        list.extend(u16::to_le_bytes(permissions));
        list.extend(u32::to_le_bytes(id));
    }
    list
}

/// Whether this process, whose device it is, holds a file that has been removed.
fn is_kept(path: &Path) -> bool {
    let removed = format!("{} (deleted)", path.display());
    let open = fs::read_dir("/proc/self/fd").unwrap();
    let mut paths = open.filter_map(|fd| fs::read_link(fd.unwrap().path()).ok());
    paths.any(|path| path == Path::new(&removed))
}

#[test]
fn guest_sees_mounts_swaps_and_owners_of_the_host_and_leaves_its_own_on_both_transports() {
    own_mounts();
    TRANSPORTS.into_iter().for_each(mounts_swaps_and_owners);
}

fn mounts_swaps_and_owners(transport: Transport) {
    let dir = tempfile::tempdir().unwrap();
    let (share, other) = (dir.path().join("share"), dir.path().join("other"));
    for path in [&share, &other] {
        fs::create_dir(path).unwrap();
    }
    fs::write(other.join("file"), "bound").unwrap();
    fs::write(dir.path().join("secret"), "secret").unwrap();
    for name in ["late", "locked", "config", "pub"] {
        fs::create_dir(share.join(name)).unwrap();
    }
    let public = fs::Permissions::from_mode(0o777);
    fs::set_permissions(share.join("pub"), public).unwrap();
    for (version, text) in [("v1", "one"), ("v2", "two")] {
        fs::create_dir(share.join("config").join(version)).unwrap();
        fs::write(share.join("config").join(version).join("key"), text).unwrap();
    }
    symlink("v1", share.join("config/..data")).unwrap();
    symlink("..data/key", share.join("config/key")).unwrap();
    symlink("../secret", share.join("out")).unwrap();
    // Readable and writable for one of the guest's users only by a list.
    fs::write(share.join("listed"), "by a list\n").unwrap();
    fs::create_dir(share.join("team")).unwrap();
    let set = |name: &str, kind: &str| {
        let name = share.join(name);
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::setxattr(
            &name,
            format!("system.posix_acl_{kind}"),
            &list_with(1234),
            flags,
        )
    };
    set("listed", "access").unwrap();
    set("team", "access").unwrap();
    set("team", "default").unwrap();
    // More than the device may have open at the same time.
    fs::create_dir(share.join("many")).unwrap();
    for file in 0..2 * MAX_OPEN {
        fs::write(share.join(format!("many/{file}")), "x").unwrap();
    }
    fs::create_dir(share.join("logs")).unwrap();
    fs::write(share.join("logs/old"), "x".repeat(1 << 20)).unwrap();
    let path = |path: &Path| path.to_str().unwrap().to_owned();
    mount(&["--bind", &path(&other), &path(&share.join("locked"))]);
    mount(&["-o", "remount,bind,ro", &path(&share.join("locked"))]);

    let console = Console::default();
    let script = format!(
        "{MOUNT}cat /share/locked/file; echo\n\
         echo x 2>/dev/null > /share/locked/new || echo refused\n\
         rm /share/locked/file 2>/dev/null || echo kept\n\
         [ \"$(stat -c %d /share)\" != \"$(stat -c %d /share/locked)\" ] && echo mounts differ\n\
         cat /share/out 2>/dev/null || echo no way out\n\
         mknod /share/pub/disk b 8 0 2>/dev/null || echo no device\n\
         touch /share/pub/mine; chown 1000:2000 /share/pub/mine; chmod 6755 /share/pub/mine\n\
         mkdir /etc; echo 'they:x:1234:5678::/:/bin/sh' > /etc/passwd\n\
         echo 'nobody:x:65534:65534::/:/bin/sh' >> /etc/passwd\n\
         echo 'they:x:5678:' > /etc/group; su they -c 'touch /share/pub/theirs'\n\
         su they -c 'cat /share/listed; umask 077; touch /share/team/theirs'\n\
         su nobody -s /bin/sh -c 'cat /share/listed' 2>/dev/null || echo not by others\n\
         wc -c < /share/logs/old\n\
         ls -l /share/many | wc -l; cat /share/many/* | wc -c\n\
         mkdir /second; mount -t virtiofs second /second; cat /second/file; echo\n\
         echo x 2>/dev/null > /second/new || echo second refused\n\
         cat /share/config/key; echo; echo ready\n\
         until [ \"$(cat /share/config/key)\" = two ]; do :; done; echo swapped\n\
         until [ -e /share/late/file ]; do :; done; cat /share/late/file; echo\n\
         echo new > /share/late/new && echo written\n\
         until [ -e /share/late/removed ]; do :; done\n\
         until [ -e /share/late/done ]; do echo 2 > /proc/sys/vm/drop_caches; done\n\
         dd if=/dev/zero of=/share/late/bytes bs=1 count={WRITES} 2>/dev/null && echo filled"
    );
    let vm = linux(&script, &console)
        .transport(transport)
        .fs(FsDevice::open("data", &share)
            .and_then(|share| share.max_open(MAX_OPEN))
            .unwrap())
        .fs(FsDevice::open("second", &other)
            .and_then(FsDevice::read_only)
            .unwrap())
        .build()
        .unwrap();
    vm.start().unwrap();
    console.wait_for("ready");
    // As the kubelet does it.
    symlink("v2", share.join("config/..data_tmp")).unwrap();
    fs::rename(share.join("config/..data_tmp"), share.join("config/..data")).unwrap();
    console.wait_for("swapped");
    mount(&["--bind", &path(&other), &path(&share.join("late"))]);
    console.wait_for("written");
    // Kept for the guest, which caches its name, until that drops unused names.
    let log = share.join("logs/old");
    let device = vm.fs("fs0").unwrap();
    fs::remove_file(&log).unwrap();
    assert!(is_kept(&log));
    assert!(device.run(FsDevice::count_removed_objects).unwrap() > 0);
    fs::write(other.join("removed"), "").unwrap();
    let deadline = Instant::now() + PATIENCE;
    while is_kept(&log) {
        assert!(Instant::now() < deadline, "{}", console.text());
        thread::sleep(Duration::from_millis(10));
    }
    let requests = || {
        let counters = device.counters();
        let count = counters.iter().find(|count| count.name == "requests");
        count.unwrap().value
    };
    let before = requests();
    fs::write(other.join("done"), "").unwrap();
    assert_eq!(vm.wait().unwrap(), VmExit::Reset);
    // Each write is one, also in a mount below the share: nothing is asked before it.
    let asked = requests() - before;
    assert!(asked < WRITES + WRITES / 2, "{asked} requests");

    let text = console.text();
    let seen = "bound\nrefused\nkept\nmounts differ\nno way out\nno device\n\
                by a list\nnot by others\n1048576\n201\n200\nbound\nsecond refused\none\n\
                ready\nswapped\nbound\nwritten\n";
    assert!(text.contains(seen), "{text}");
    assert!(text.contains("filled\n"), "{text}");
    assert_eq!(fs::read_to_string(other.join("new")).unwrap(), "new\n");
    let owner = |name: &str| {
        let meta = share.join("pub").join(name).metadata().unwrap();
        (meta.uid(), meta.gid(), meta.mode() & 0o7777)
    };
    assert_eq!(owner("mine"), (1000, 2000, 0o6755));
    assert_eq!(owner("theirs"), (1234, 5678, 0o644));
    // By the directory's default list, and not by the umask.
    assert_eq!(owner("../team/theirs"), (1234, 5678, 0o660));
    assert!(!share.join("pub/disk").exists());
    assert!(vm.faults().is_empty());
}
