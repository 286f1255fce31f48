//! A process that is killed in the middle of a pull loses no existing data and leaves nothing
//! incomplete.

mod support;

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio};

use podvisor_images::{Digest, Disk, Error, Image, ImportSource, Prune, Store};
use support::image::{Layer, Packing};
use support::{Faulty, Tarball, TestImage, TestStore, options};

/// System calls that change the disk.
const WRITES: [&str; 10] = [
    "write",
    "pwrite64",
    "fsync",
    "fdatasync",
    "ftruncate",
    "fallocate",
    "rename",
    "unlink",
    "rmdir",
    "mkdir",
];

/// The source and the target of the other process's pull.
const JOB: &str = "PODVISOR_TEST_PULL";

/// The name that loaded images get.
const LOADED: &str = "new";
/// The other process's exit code for a full disk.
const DISK_FULL: i32 = 28;

/// The pull that gets killed when this binary runs itself; otherwise an ordinary pull.
#[tokio::test]
async fn pulls_as_a_process_of_its_own() {
    if let Ok(job) = std::env::var(JOB) {
        let (root, source) = job.split_once(' ').unwrap();
        let store = Store::open(root).unwrap();
        let done = match source.split_once(':') {
            Some(("import", directory)) => {
                let source = ImportSource::Directory(directory.into());
                store.import(source, Some(LOADED), &options()).map(|_| ())
            }
            _ if source.starts_with('/') => {
                store.load(source, Some(LOADED), &options()).map(|_| ())
            }
            _ if Disk::is_url(source) => {
                store.pull_disk(source, None, &options()).await.map(|_| ())
            }
            _ => store.pull(source, &options()).await.map(|_| ()),
        };
        match done {
            Ok(()) => {}
            Err(Error::DiskFull { .. }) => std::process::exit(DISK_FULL),
            Err(error) => panic!("{error:?}"),
        }
        return;
    }
    let server = Faulty::serve(TestImage::small(), |_| None);
    assert_eq!(
        TestStore::new().pull(&server.name()).await.unwrap().id(),
        TestImage::small().id()
    );
}

/// Pulls, or loads from a path, in a separate process, with `fate` injected into the system calls
/// `calls`.
fn pull_with(test: &TestStore, source: &str, calls: &str, fate: &str) -> ExitStatus {
    Command::new("strace")
        .args(["-f", "-qq", "-o", "/dev/null"])
        .args(["-e", &format!("trace={calls}")])
        .args(["-e", &format!("inject={calls}:{fate}")])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "pulls_as_a_process_of_its_own"])
        .env(JOB, format!("{} {source}", test.dir.path().display()))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .expect("strace is needed: apt-get install strace")
}

fn fingerprint(image: &Image) -> Digest {
    Digest::of(&std::fs::read(image.rootfs()).unwrap())
}

/// A pull has several threads; it is killed when any of them makes its N-th call of a kind.
#[test]
fn killed_in_the_middle_of_a_pull_the_store_is_whole() {
    let image = two_layers();
    let server = Faulty::serve(image, |_| None);
    kill_at_every_write(&server.name(), &server.name(), 40);
}

/// Loading has one thread, so here it is killed at every single write.
#[test]
fn killed_at_every_write_of_a_load_the_store_is_whole() {
    let layout = tempfile::tempdir().unwrap();
    two_layers().write_layout(layout.path(), "x");
    kill_at_every_write(&layout.path().display().to_string(), LOADED, 40);
}

#[test]
fn killed_at_every_write_of_an_import_the_store_is_whole() {
    let directory = directory();
    let source = format!("import:{}", directory.path().display());
    kill_at_every_write(&source, LOADED, 25);
}

#[test]
fn an_import_that_fills_the_disk_leaves_the_store_as_it_was() {
    let directory = directory();
    let test = TestStore::new();
    let layout = tempfile::tempdir().unwrap();
    TestImage::small().write_layout(layout.path(), "x");
    test.store
        .load(layout.path(), Some("old"), &options())
        .unwrap();
    let before = test.files();
    let source = format!("import:{}", directory.path().display());
    let mut failures = 0;
    for call in 1.. {
        assert!(call < 1000, "the import does not end");
        let fate = format!("error=ENOSPC:when={call}");
        let status = pull_with(&test, &source, "write,pwrite64,fallocate", &fate);
        if status.success() {
            break;
        }
        // A few of the writes are the test harness's own.
        failures += usize::from(status.code() == Some(DISK_FULL));
        assert!(
            matches!(test.store.resolve(LOADED), Err(Error::NotFound { .. })),
            "call {call}"
        );
        assert_eq!(test.files(), before, "call {call}");
    }
    assert!(failures > 3, "only {failures} failures");
    assert!(test.store.resolve(LOADED).is_ok());
}

fn directory() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("large"), [7; 300_000]).unwrap();
    std::fs::create_dir(directory.path().join("etc")).unwrap();
    std::fs::write(directory.path().join("etc/name"), "x").unwrap();
    directory
}

fn two_layers() -> TestImage {
    let noise: Vec<u8> = (0..100_000u32)
        .flat_map(|i| i.wrapping_mul(2_654_435_761).to_be_bytes())
        .collect();
    TestImage::new(vec![
        Layer::new(
            &Tarball::new()
                .file("noise", 0o644, &noise)
                .file("gone", 0o644, &noise)
                .finish(),
            Packing::Gzip,
        ),
        Layer::new(
            &Tarball::new().file(".wh.gone", 0, b"").finish(),
            Packing::Plain,
        ),
    ])
}

fn kill_at_every_write(source: &str, name: &str, at_least: usize) {
    let test = TestStore::new();
    let layout = tempfile::tempdir().unwrap();
    TestImage::small().write_layout(layout.path(), "x");
    let old = test
        .store
        .load(layout.path(), Some("old"), &options())
        .unwrap()
        .remove(0)
        .image;
    let old_print = fingerprint(&old);
    let mut new_print = None;
    let mut kills = 0;
    for kind in WRITES {
        for call in 1.. {
            let status = pull_with(&test, source, kind, &format!("signal=KILL:when={call}"));
            let killed = status.signal() == Some(9) || status.code() == Some(128 + 9);
            assert!(killed || status.success(), "{status}");
            kills += usize::from(killed);

            let store = Store::open(test.dir.path()).unwrap();
            assert_eq!(
                fingerprint(&store.resolve("old").unwrap()),
                old_print,
                "{kind} {call}"
            );
            match store.resolve(name) {
                Ok(new) => {
                    let print = fingerprint(&new);
                    assert_eq!(*new_print.get_or_insert(print), print, "{kind} {call}");
                    store.remove(name).unwrap();
                }
                Err(Error::NotFound { .. }) => assert!(killed, "{kind} {call}"),
                Err(error) => panic!("{kind} {call}: {error:?}"),
            }
            assert!(
                test.files().iter().all(|file| !file.starts_with("tmp/")),
                "{kind} {call}: {:?}",
                test.files()
            );
            store.prune(&Prune::default()).unwrap();
            let left = [format!("images/{}/rootfs.erofs", old.id().hex())];
            assert!(
                test.files()
                    .iter()
                    .filter(|file| file.starts_with("images/"))
                    .eq(&left),
                "{kind} {call}"
            );
            if !killed {
                break;
            }
        }
    }
    assert!(kills >= at_least, "only {kills} kills");
}

#[test]
fn a_full_disk_is_told_as_such_and_the_store_stays_as_it_was() {
    let noise = [7; 300_000];
    let base = Tarball::new()
        .file("noise", 0o644, &noise)
        .file("gone", 0o644, &noise)
        .finish();
    let server = Faulty::serve(
        TestImage::new(vec![Layer::new(&base, Packing::Plain)]),
        |_| None,
    );
    let test = TestStore::new();
    let layout = tempfile::tempdir().unwrap();
    TestImage::small().write_layout(layout.path(), "x");
    test.store
        .load(layout.path(), Some("old"), &options())
        .unwrap();
    let images = |test: &TestStore| -> Vec<String> {
        let mut files = test.files();
        files.retain(|file| !file.starts_with("blobs/"));
        files
    };
    let before = images(&test);
    let mut failures = 0;
    for call in 1.. {
        assert!(call < 1000, "the pull does not end");
        // `write` is left out: the other process uses it to report.
        let status = pull_with(
            &test,
            &server.name(),
            "pwrite64,fallocate",
            &format!("error=ENOSPC:when={call}+"),
        );
        if status.success() {
            break;
        }
        assert_eq!(status.code(), Some(DISK_FULL), "call {call}");
        failures += 1;
        assert!(
            matches!(
                test.store.resolve(&server.name()),
                Err(Error::NotFound { .. })
            ),
            "call {call}"
        );
        assert!(test.store.resolve("old").is_ok(), "call {call}");
        test.store.prune(&Prune::default()).unwrap();
        assert_eq!(images(&test), before, "call {call}");
    }
    assert!(failures > 3, "only {failures} failures");
    assert!(test.store.resolve(&server.name()).is_ok());
}

#[test]
fn a_pull_that_fills_the_disk_leaves_no_layers() {
    let server = Faulty::serve(two_layers(), |_| None);
    let test = TestStore::new();
    // Only the file system has holes.
    let status = pull_with(&test, &server.name(), "fallocate", "error=ENOSPC");
    assert_eq!(status.code(), Some(DISK_FULL));
    assert_eq!(test.files(), [""; 0]);
}

#[test]
fn killed_in_the_middle_of_its_first_pull_a_store_can_be_used() {
    let base = Tarball::new().file("a", 0o644, b"a\n").finish();
    let image = TestImage::new(vec![Layer::new(&base, Packing::Plain)]);
    let server = Faulty::serve(image, |_| None);
    let mut kills = 0;
    for kind in WRITES {
        for call in 1.. {
            let test = TestStore::new();
            let fate = format!("signal=KILL:when={call}");
            let status = pull_with(&test, &server.name(), kind, &fate);
            let killed = status.signal() == Some(9) || status.code() == Some(128 + 9);
            assert!(killed || status.success(), "{status}");
            kills += usize::from(killed);
            let store = Store::open(test.dir.path()).unwrap();
            let found = store
                .list()
                .unwrap_or_else(|error| panic!("{kind} {call}: {error:?}"));
            assert!(found.len() <= 1, "{kind} {call}");
            store.prune(&Prune::default()).unwrap();
            if found.is_empty() {
                assert_eq!(test.files(), [""; 0], "{kind} {call}");
            }
            if !killed {
                break;
            }
        }
    }
    assert!(kills >= 30, "only {kills} kills");
}

/// A qcow2 file whose tables come after its data: everything is kept first and moved later.
fn backwards() -> Vec<u8> {
    const CLUSTER: usize = 64 << 10;
    const DATA: usize = 20;
    let mut file = vec![0; (DATA + 3) * CLUSTER];
    let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
    let place = |cluster: usize| ((cluster * CLUSTER) as u64).to_be_bytes();
    put(0, b"QFI\xfb\0\0\0\x03");
    put(20, &16u32.to_be_bytes());
    put(24, &place(DATA));
    put(36, &1u32.to_be_bytes());
    put(40, &place(DATA + 1));
    put(96, &4u32.to_be_bytes());
    put(100, &104u32.to_be_bytes());
    put((DATA + 1) * CLUSTER, &place(DATA + 2));
    for guest in 0..DATA {
        put((DATA + 2) * CLUSTER + guest * 8, &place(DATA - guest));
        put((DATA - guest) * CLUSTER, &vec![guest as u8 + 1; CLUSTER]);
    }
    file
}

/// Serves a disk image at any URL.
fn serve_disk(file: Vec<u8>) -> (Faulty, String) {
    let server = Faulty::serve(TestImage::small(), move |_| {
        Some(support::Reply::new(200, file.clone()))
    });
    let url = format!("http://{}/disk.qcow2", server.host);
    (server, url)
}

#[test]
fn killed_in_the_middle_of_fetching_a_disk_image_the_store_is_whole() {
    let (_server, url) = serve_disk(backwards());
    let (_old_server, old_url) = serve_disk(vec![7; 10_000]);
    let test = TestStore::new();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let old = runtime
        .block_on(test.store.pull_disk(&old_url, None, &options()))
        .unwrap();
    let old_file = format!("disks/{}/disk.raw", old.id().hex());
    let mut kills = 0;
    for kind in WRITES {
        for call in 1.. {
            let status = pull_with(&test, &url, kind, &format!("signal=KILL:when={call}"));
            let killed = status.signal() == Some(9) || status.code() == Some(128 + 9);
            assert!(killed || status.success(), "{status}");
            kills += usize::from(killed);

            let store = Store::open(test.dir.path()).unwrap();
            let kept = store.resolve_disk(&old_url).unwrap();
            assert_eq!(std::fs::read(kept.path()).unwrap()[..10_000], [7; 10_000]);
            match store.resolve_disk(&url) {
                Ok(new) => {
                    let disk = std::fs::read(new.path()).unwrap();
                    let clusters = disk.chunks(64 << 10).zip(1..);
                    assert_eq!(disk.len(), 20 * (64 << 10), "{kind} {call}");
                    for (cluster, byte) in clusters {
                        assert!(cluster.iter().all(|found| *found == byte), "{kind} {call}");
                    }
                    store.remove(&url).unwrap();
                }
                Err(Error::NotFound { .. }) => assert!(killed, "{kind} {call}"),
                Err(error) => panic!("{kind} {call}: {error:?}"),
            }
            store.prune(&Prune::default()).unwrap();
            assert_eq!(
                test.files(),
                std::slice::from_ref(&old_file),
                "{kind} {call}"
            );
            if !killed {
                break;
            }
        }
    }
    assert!(kills >= 30, "only {kills} kills");
}

#[test]
fn a_full_disk_while_a_disk_image_is_written_is_told_as_such() {
    let (_server, url) = serve_disk(backwards());
    let test = TestStore::new();
    let mut failures = 0;
    for call in 1.. {
        assert!(call < 1000, "the pull does not end");
        let fate = format!("error=ENOSPC:when={call}+");
        let status = pull_with(&test, &url, "pwrite64,ftruncate", &fate);
        if status.success() {
            break;
        }
        assert_eq!(status.code(), Some(DISK_FULL), "call {call}");
        failures += 1;
        assert!(
            matches!(test.store.resolve_disk(&url), Err(Error::NotFound { .. })),
            "call {call}"
        );
        // Files that could not even be truncated are removed at the next open.
        Store::open(test.dir.path()).unwrap();
        assert_eq!(test.files(), [""; 0], "call {call}");
    }
    assert!(failures > 20, "only {failures} failures");
    assert!(test.store.resolve_disk(&url).is_ok());
}
