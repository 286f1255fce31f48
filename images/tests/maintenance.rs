//! Names, pins, pruning and disk usage of a store.

mod support;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use podvisor_images::{Digest, Error, Image, Prune, PullEvent, PullPolicy, RemovedImages, Store};
use rustix::fs::{FlockOperation, flock};
use support::image::{Layer, Packing};
use support::{Body, Faulty, Reply, Tarball, TestImage, TestStore, options};

/// Loads a separate image from an OCI layout directory.
fn load(test: &TestStore, name: &str) -> Image {
    let tar = Tarball::new().file("name", 0o644, name.as_bytes()).finish();
    let image = TestImage::new(vec![Layer::new(&tar, Packing::Plain)]);
    let dir = tempfile::tempdir().unwrap();
    image.write_layout(&PathBuf::from(dir.path()), "x");
    test.store
        .load(dir.path(), Some(name), &options())
        .unwrap()
        .remove(0)
        .image
}

#[test]
fn an_image_stays_until_its_last_tag_goes() {
    let test = TestStore::new();
    let image = load(&test, "a:1");
    test.store.tag("a:1", "b").unwrap();
    assert_eq!(test.store.resolve("b").unwrap().id(), image.id());
    let removed = test.store.remove("a:1").unwrap();
    assert_eq!(
        (removed.names, removed.image),
        (vec!["docker.io/library/a:1".to_owned()], None)
    );
    let removed = test.store.remove("b").unwrap();
    assert_eq!(removed.image, Some(image.id()));
    assert!(test.store.list().unwrap().is_empty());
}

#[test]
fn names_with_a_digest_are_given_by_pulls_alone() {
    let test = TestStore::new();
    load(&test, "a:1");
    let name = format!("b@sha256:{}", "a".repeat(64));
    assert!(matches!(
        test.store.tag("a:1", &name),
        Err(Error::Reference { .. })
    ));
    assert!(matches!(
        test.store.tag("nothing", "b"),
        Err(Error::NotFound { .. })
    ));
}

#[test]
fn pruning_spares_what_is_tagged_pinned_or_in_use() {
    let test = TestStore::new();
    let (moved, pinned, used) = (
        load(&test, "moved"),
        load(&test, "pinned"),
        load(&test, "used"),
    );
    load(&test, "tagged");
    test.store.pin("pinned", true).unwrap();
    let open = used.open_rootfs().unwrap();
    // Its name moves to another image, so that it has none.
    test.store.tag("tagged", "moved").unwrap();
    let removed = test.store.prune(&Prune::default()).unwrap();
    assert_eq!(
        removed
            .iter()
            .filter_map(|one| one.image)
            .collect::<Vec<_>>(),
        [moved.id()]
    );
    assert!(
        test.store
            .prune(
                &Prune::default()
                    .tagged()
                    .unused_for(Duration::from_secs(3600))
            )
            .unwrap()
            .is_empty()
    );
    test.store.prune(&Prune::default().tagged()).unwrap();
    let mut left: Vec<_> = test.store.list().unwrap().iter().map(Image::id).collect();
    let mut expected = vec![pinned.id(), used.id()];
    left.sort_unstable();
    expected.sort_unstable();
    assert_eq!(left, expected);
    assert!(test.store.resolve("pinned").unwrap().pinned());
    drop(open);
    test.store.pin("pinned", false).unwrap();
    test.store.touch("used").unwrap();
    test.store.prune(&Prune::default().tagged()).unwrap();
    assert_eq!(test.files(), [""; 0]);
}

#[test]
fn pruning_stops_when_the_store_is_small_enough() {
    let test = TestStore::new();
    for name in ["a", "b", "c"] {
        load(&test, name);
    }
    let full = test.store.usage().unwrap();
    assert!(full.bytes > 0 && full.inodes > 3 * 4);
    test.store
        .prune(&Prune::default().tagged().keep_bytes(full.bytes))
        .unwrap();
    assert_eq!(test.store.list().unwrap().len(), 3);
    test.store
        .prune(&Prune::default().tagged().keep_bytes(full.bytes - 1))
        .unwrap();
    assert_eq!(test.store.list().unwrap().len(), 2);
}

#[test]
fn directories_may_disappear_while_a_store_is_measured() {
    let test = TestStore::new();
    load(&test, "a");
    let is_done = AtomicBool::new(false);
    let removed = test.store.root().join("images");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                let all = (0..50).map(|n| removed.join(format!("gone-{n}")));
                all.clone().for_each(|path| fs::create_dir(path).unwrap());
                all.clone().for_each(|path| fs::remove_dir(path).unwrap());
            }
        });
        let usages: Vec<_> = (0..200).map(|_| test.store.usage()).collect();
        is_done.store(true, Ordering::Relaxed);
        for usage in usages {
            assert!(usage.unwrap().bytes > 0);
        }
    });
}

#[tokio::test]
async fn an_image_whose_file_system_was_cut_is_damaged_and_a_pull_repairs_it() {
    let image = TestImage::large();
    let server = Faulty::serve(image.clone(), |_| None);
    let test = TestStore::new();
    let pulled = test.pull(&server.name()).await.unwrap();
    let path = pulled.rootfs().to_owned();
    let whole = std::fs::read(&path).unwrap();
    for length in [0, 4096, whole.len() - 4096] {
        std::fs::write(&path, &whole[..length]).unwrap();
        let found = test.store.resolve(&server.name());
        assert!(matches!(found, Err(Error::Damaged { id }) if id == image.id()));
        test.pull(&server.name()).await.unwrap();
        assert_eq!(std::fs::read(&path).unwrap().len(), whole.len());
        test.store.resolve(&server.name()).unwrap();
    }
}

#[test]
fn layers_stay_while_the_manifest_of_an_image_cannot_be_read() {
    let test = TestStore::new();
    let kept = load(&test, "kept");
    load(&test, "removed");
    let blobs = test.dir.path().join("blobs/sha256");
    let manifest = blobs.join(kept.manifest_digest().hex());
    let text = std::fs::read(&manifest).unwrap();
    std::fs::write(&manifest, &text[..text.len() / 2]).unwrap();
    test.store.remove("removed").unwrap();
    std::fs::write(&manifest, &text).unwrap();
    // Of this one nothing is missing, and the other one's go with the next removal.
    let cancel = podvisor_images::Cancel::default();
    let save = |name: &str| {
        let out = std::io::sink();
        test.store.save(&[name], Default::default(), out, &cancel)
    };
    save("kept").unwrap();
    load(&test, "another");
    test.store.remove("another").unwrap();
    assert_eq!(std::fs::read_dir(&blobs).unwrap().count(), 3);
}

#[test]
fn a_damaged_image_is_named_and_does_not_hide_the_others() {
    let test = TestStore::new();
    let (bad, good) = (load(&test, "bad"), load(&test, "good"));
    let blobs = test.dir.path().join("blobs/sha256");
    let config = blobs.join(bad.id().hex());
    std::fs::remove_file(bad.rootfs()).unwrap();
    // What a disk does that does not read a block: EIO.
    let unreadable = |path: &Path| {
        std::fs::remove_file(path).unwrap();
        std::os::unix::fs::symlink("/proc/self/mem", path).unwrap();
    };
    for damage in [None, Some(bad.rootfs()), Some(&config)] {
        damage.inspect(|path| unreadable(path));
        assert!(matches!(test.store.resolve("bad"), Err(Error::Damaged { id }) if id == bad.id()));
        assert_eq!(test.store.list().unwrap()[0].id(), good.id());
        // It is made whole in its place.
        assert_eq!(load(&test, "bad").id(), bad.id());
        assert_eq!(test.store.list().unwrap().len(), 2);
    }
    unreadable(bad.rootfs());
    test.store.remove("bad").unwrap();
    assert!(matches!(
        test.store.resolve("bad"),
        Err(Error::NotFound { .. })
    ));
}

#[test]
fn a_file_that_cannot_be_removed_keeps_no_other() {
    let test = TestStore::new();
    let [a, b, c] = ["a", "b", "c"].map(|name| load(&test, name));
    let stays = test.dir.path().join("blobs/sha256").join("0".repeat(64));
    std::fs::create_dir_all(stays.join("in it")).unwrap();
    let failed = |result: Error| assert!(result.to_string().contains("/000000"), "{result}");
    let mut gone = RemovedImages::default();
    failed(test.store.remove_into("a", &mut gone).unwrap_err());
    assert!(!a.rootfs().exists());
    let name = "docker.io/library/a:latest".to_owned();
    assert!(gone.names.contains(&name), "{gone:?}");
    assert_eq!(gone.image, Some(a.id()));
    assert!(gone.bytes > 0 && !gone.deferred, "{gone:?}");
    // Both that are pruned, though each meets it.
    let mut removed = Vec::new();
    let pruned = test
        .store
        .prune_into(&Prune::default().tagged(), &mut removed);
    failed(pruned.unwrap_err());
    let mut ids: Vec<_> = removed.iter().filter_map(|removed| removed.image).collect();
    // Both were last used at the same time.
    ids.sort_by_key(|id| *id != b.id());
    assert_eq!(ids, [b.id(), c.id()]);
    assert!(
        removed.iter().all(|removed| removed.bytes > 0),
        "{removed:?}"
    );
    assert!(!b.rootfs().exists() && !c.rootfs().exists());
    assert!(test.store.list().unwrap().is_empty());
    std::fs::remove_dir_all(&stays).unwrap();
    test.store.prune(&Prune::default()).unwrap();
    assert_eq!(test.files(), [""; 0]);
}

#[test]
fn looking_writes_nothing_and_a_crash_s_rest_is_repaired() {
    let test = TestStore::new();
    load(&test, "a");
    let database = test.dir.path().join("store.redb");
    let before = std::fs::read(&database).unwrap();
    test.store.resolve("a").unwrap();
    test.store.list().unwrap();
    assert!(std::fs::read(&database).unwrap() == before);
    // The header's flag that marks a writer that died (bit 1 after the magic number).
    let mut dirty = before.clone();
    dirty[9] |= 2;
    std::fs::write(&database, &dirty).unwrap();
    test.store.resolve("a").unwrap();
    let repaired = std::fs::read(&database).unwrap();
    assert_eq!(repaired[9] & 2, 0);
}

#[test]
fn an_image_that_is_used_again_and_again_is_written_down_once() {
    let test = TestStore::new();
    let image = load(&test, "a");
    let database = test.dir.path().join("store.redb");
    let before = std::fs::read(&database).unwrap();
    for _ in 0..2 {
        test.store.note_use(&image).unwrap();
    }
    assert!(std::fs::read(&database).unwrap() == before);
    test.store.touch("a").unwrap();
    assert!(std::fs::read(&database).unwrap() != before);
}

#[test]
fn files_stay_while_somebody_saves_and_go_when_that_ends() {
    let test = TestStore::new();
    load(&test, "a");
    load(&test, "b");
    /// Removes an image while another is being written.
    struct Meddler<'a>(&'a TestStore, Vec<podvisor_images::RemovedImages>);
    impl std::io::Write for &mut Meddler<'_> {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            if self.1.is_empty() {
                self.1.push(self.0.store.remove("a").unwrap());
                self.1
                    .extend(self.0.store.prune(&Prune::default()).unwrap());
            }
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut meddler = Meddler(&test, Vec::new());
    let cancel = podvisor_images::Cancel::default();
    test.store
        .save(&["a", "b"], Default::default(), &mut meddler, &cancel)
        .unwrap();
    let removed = &meddler.1[0];
    assert!(removed.image.is_some() && removed.deferred && removed.bytes > 0);
    assert!(meddler.1[1].deferred);
    assert_eq!(test.store.list().unwrap().len(), 1);
    assert_eq!(test.files().len(), 4, "{:?}", test.files());
    assert_eq!(test.store.prune(&Prune::default()).unwrap(), []);
}

#[tokio::test]
async fn files_stay_while_several_pulls_are_under_way_and_go_with_the_last_one() {
    let image = TestImage::large();
    let server = Faulty::serve(image.clone(), move |request| {
        let blob = image.layers[0].blob.clone();
        let mine = request.path.ends_with(&Digest::of(&blob).to_string());
        mine.then(|| Reply::ok(Body::Stall(blob, 1_500_000)))
    });
    let test = TestStore::new();
    load(&test, "a");
    let other = Store::open(test.dir.path()).unwrap();
    let name = server.name();
    let mut pulls = Vec::new();
    for store in [&test.store, &other] {
        let (events, mut received) = tokio::sync::mpsc::unbounded_channel();
        let (store, name) = (store.clone(), name.clone());
        pulls.push(tokio::spawn(async move {
            store.pull(&name, &options().events(events)).await
        }));
        while !matches!(received.recv().await, Some(PullEvent::Resolved { .. })) {}
    }
    let own = |kind: &str| {
        let files = test.files();
        files.iter().filter(|file| file.starts_with(kind)).count()
    };
    assert_eq!((own("images/"), own("blobs/")), (1, 3));
    let removed = test.store.remove("a").unwrap();
    assert!(removed.deferred && removed.bytes > 0, "{removed:?}");
    // Files that no other image can share are removed without waiting.
    assert_eq!(own("images/"), 0);
    for pull in pulls {
        assert_eq!(own("blobs/"), 3);
        pull.abort();
        assert!(pull.await.unwrap_err().is_cancelled());
    }
    eventually(|| own("blobs/") == 0);
}

fn eventually(condition: impl Fn() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(
            begin.elapsed() < Duration::from_secs(60),
            "it does not come to that"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_that_is_removed_while_a_registry_is_awaited_is_made_anew() {
    let image = TestImage::large();
    let (requests, go_on) = (AtomicUsize::new(0), Arc::new(AtomicBool::new(false)));
    let server = Faulty::serve(image.clone(), {
        let (image, go_on) = (image.clone(), Arc::clone(&go_on));
        move |request| {
            let layer = Digest::of(&image.layers[0].blob).to_string();
            if request.path.ends_with(&layer) && requests.fetch_add(1, Ordering::Relaxed) == 1 {
                eventually(|| go_on.load(Ordering::Relaxed));
            }
            None
        }
    });
    let test = TestStore::new();
    let name = server.name();
    let pulled = test.store.pull(&name, &options()).await.unwrap();
    // A missing layer is fetched, and the image created from it.
    let layer = Digest::of(&image.layers[0].blob);
    std::fs::remove_file(test.dir.path().join("blobs/sha256").join(layer.hex())).unwrap();
    let again = {
        let (store, name) = (test.store.clone(), name.clone());
        let options = options().policy(PullPolicy::Always);
        tokio::spawn(async move { store.pull(&name, &options).await })
    };
    let work = format!("tmp/blob-{}", layer.hex());
    eventually(|| test.files().iter().any(|file| file.starts_with(&work)));
    let removed = test.store.remove(&pulled.id().to_string()).unwrap();
    // A registry that sends nothing keeps nobody from freeing the disk.
    assert!(removed.deferred && removed.bytes > 0, "{removed:?}");
    assert!(!pulled.rootfs().exists());
    go_on.store(true, Ordering::Relaxed);
    let again = again.await.unwrap().unwrap();
    assert!(again.open_rootfs().is_ok());
    assert_eq!(test.files().len(), 4, "{:?}", test.files());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pull_that_is_cancelled_at_its_end_keeps_files_until_the_image_has_its_record() {
    let image = TestImage::small();
    let test = TestStore::new();
    let lock = |name: &str, how| {
        let mut file = File::options();
        let file = file.write(true).create(true).truncate(false);
        let file = file.open(test.dir.path().join(name)).unwrap();
        flock(&file, how).map(|()| file)
    };
    let database = Arc::new(Mutex::new(None));
    let server = Faulty::serve(image.clone(), {
        let (path, database) = (test.dir.path().join("lock"), Arc::clone(&database));
        move |request| {
            if request.path.contains("/blobs/") {
                // From now on nothing can be recorded.
                database.lock().unwrap().get_or_insert_with(|| {
                    let file = File::options()
                        .write(true)
                        .create(true)
                        .truncate(false)
                        .open(&path);
                    let file = file.unwrap();
                    flock(&file, FlockOperation::LockExclusive).unwrap();
                    file
                });
            }
            None
        }
    });
    let name = server.name();
    let pull = {
        let (store, name) = (test.store.clone(), name.clone());
        tokio::spawn(async move { store.pull(&name, &options()).await })
    };
    // The last file before the record.
    let config = format!("blobs/sha256/{}", Digest::of(&image.config).hex());
    eventually(|| test.files().contains(&config));
    pull.abort();
    assert!(pull.await.unwrap_err().is_cancelled());
    let alone = FlockOperation::NonBlockingLockExclusive;
    assert!(lock("gc.lock", alone).is_err(), "files may be removed");
    database.lock().unwrap().take();
    eventually(|| lock("gc.lock", alone).is_ok());
    let pulled = test.store.resolve(&name).unwrap();
    assert!(pulled.rootfs().exists());
    assert_eq!(test.store.prune(&Prune::default()).unwrap(), []);
}

#[test]
fn what_reads_as_an_id_is_no_name() {
    let test = TestStore::new();
    let image = load(&test, "a");
    let id = image.id().to_string();
    let dir = tempfile::tempdir().unwrap();
    TestImage::small().write_layout(dir.path(), &id);
    for name in [None, Some(id.as_str()), Some(&id[7..])] {
        let loaded = test.store.load(dir.path(), name, &options());
        assert!(matches!(loaded, Err(Error::Reference { .. })), "{loaded:?}");
    }
    let tagged = test.store.tag("a", &id);
    assert!(matches!(tagged, Err(Error::Reference { .. })), "{tagged:?}");
    // With its full name the id may be used as a name, and stands for nothing else.
    TestImage::small().write_layout(dir.path(), &format!("docker.io/library/{id}"));
    let other = test.store.load(dir.path(), None, &options()).unwrap();
    assert_ne!(other[0].image.id(), image.id());
    assert_eq!(test.store.resolve(&id).unwrap().id(), image.id());
}

#[test]
fn an_inspection_tells_layers_configuration_and_history() {
    let test = TestStore::new();
    let image = load(&test, "a");
    let details = test.store.inspect("a").unwrap();
    assert_eq!(details.image.id(), image.id());
    assert_eq!(podvisor_images::Digest::of(&details.config), image.id());
    assert_eq!(details.layers.len(), 1);
    assert_eq!(details.layers[0].digest, details.layers[0].diff_id);
    assert_eq!(details.history[0].layer, Some(0));
    assert!(matches!(
        test.store.inspect("none"),
        Err(Error::NotFound { .. })
    ));
}

#[test]
fn a_store_whose_directories_were_removed_is_used_again() {
    let test = TestStore::new();
    load(&test, "a");
    let root = test.store.root().to_owned();
    for path in [root.clone(), root.join("blobs"), root.join("tmp")] {
        std::fs::remove_dir_all(path).unwrap();
        test.store.list().unwrap();
        let image = load(&test, "a");
        assert_eq!(test.store.resolve("a").unwrap().id(), image.id());
    }
}

/// A base layer, and two images on it.
fn two_on_one_base() -> [TestImage; 2] {
    let base = Tarball::new().file("base", 0o644, &[7; 5000]).finish();
    let base = Layer::new(&base, Packing::Gzip);
    ["a", "b"].map(|name| {
        let own = Tarball::new().file(name, 0o644, b"own").finish();
        TestImage::new(vec![base.clone(), Layer::new(&own, Packing::Plain)])
    })
}

#[tokio::test]
async fn a_layer_that_was_damaged_in_the_store_is_fetched_again() {
    let [a, b] = two_on_one_base();
    let whole = a.layers[0].blob.clone();
    for broken in 0..2 {
        let test = TestStore::new();
        let blobs = test.dir.path().join("blobs/sha256");
        let base = blobs.join(Digest::of(&whole).hex());
        let servers = [&a, &b].map(|image| Faulty::serve(image.clone(), |_| None));
        test.pull(&servers[0].name()).await.unwrap();
        // In the middle, and in what tells how it is packed.
        let mut bytes = whole.clone();
        bytes[[whole.len() / 2, 1][broken]] ^= 1;
        std::fs::write(&base, &bytes).unwrap();
        let pulled = test.pull(&servers[1].name()).await.unwrap();
        assert_eq!(pulled.id(), b.id());
        assert_eq!(std::fs::read(&base).unwrap(), whole);
    }
}

#[tokio::test]
async fn a_load_mends_a_layer_that_was_damaged_in_the_store() {
    let [a, b] = two_on_one_base();
    let whole = a.layers[0].blob.clone();
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 1;
    for damaged in [flipped, Vec::new()] {
        let test = TestStore::new();
        let blobs = test.dir.path().join("blobs/sha256");
        let base = blobs.join(Digest::of(&whole).hex());
        let server = Faulty::serve(a.clone(), |_| None);
        test.pull(&server.name()).await.unwrap();
        std::fs::write(&base, &damaged).unwrap();
        let dir = tempfile::tempdir().unwrap();
        b.write_layout(dir.path(), "x/y:z");
        let loaded = test.store.load(dir.path(), None, &options()).unwrap();
        assert_eq!(loaded[0].image.id(), b.id());
        assert_eq!(std::fs::read(&base).unwrap(), whole);
    }
}
