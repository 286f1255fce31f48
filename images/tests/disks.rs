//! Disk images by HTTP, from good and bad servers.

#[path = "disks/broken.rs"]
mod broken;
mod support;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use podvisor_images::{
    Checksum, Digest, Disk, DiskError, DiskFormat, Error, Prune, PullEvent, PullPolicy,
    RegistryHost, RegistryProtocol, Store, StoreOptions,
};
use sha2::{Digest as _, Sha512};
use support::disk::{content, qcow2, qemu_img, raw};
use support::faulty::Request;
use support::{Body, Faulty, Reply, TestImage, TestStore, explain, options, registries};

/// A good file server, with ranges and tags.
fn file(request: &Request, bytes: &[u8]) -> Reply {
    let tag = format!("\"{}\"", &Digest::of(bytes).hex()[..16]);
    if request.headers.get("if-none-match") == Some(&tag) {
        return Reply::new(304, "").header("ETag", tag);
    }
    let same = request
        .headers
        .get("if-range")
        .is_none_or(|range| *range == tag);
    match request.range().filter(|_| same) {
        Some(from) if from >= bytes.len() => Reply::new(416, ""),
        Some(from) => Reply::new(206, &bytes[from..]).header(
            "Content-Range",
            format!("bytes {from}-{}/{}", bytes.len() - 1, bytes.len()),
        ),
        None => Reply::new(200, bytes),
    }
    .header("ETag", tag)
}

/// Serves `bytes`, but the first answer is the result of `first`.
fn serve(
    bytes: Vec<u8>,
    first: impl Fn(&Request, &[u8]) -> Option<Reply> + Send + Sync + 'static,
) -> Faulty {
    let count = AtomicUsize::new(0);
    Faulty::serve(TestImage::small(), move |request| {
        let now = count.fetch_add(1, Ordering::SeqCst);
        let reply = if now == 0 {
            first(request, &bytes)
        } else {
            None
        };
        Some(reply.unwrap_or_else(|| file(request, &bytes)))
    })
}

fn url(server: &Faulty) -> String {
    format!("http://{}/images/disk.qcow2", server.host)
}

async fn pull(test: &TestStore, server: &Faulty) -> podvisor_images::Result<Disk> {
    test.store.pull_disk(&url(server), None, &options()).await
}

/// Pulls and returns the error's message; nothing may be left in the store.
async fn refused(server: &Faulty, checksum: Option<&Checksum>) -> String {
    let test = TestStore::new();
    let error = test
        .store
        .pull_disk(&url(server), checksum, &options())
        .await;
    let error = error.expect_err("the disk image must be refused");
    assert_eq!(test.files(), [""; 0], "{error:?}");
    assert!(test.store.disks().unwrap().is_empty());
    explain(&error)
}

fn sha512(bytes: &[u8]) -> Checksum {
    let digest = Sha512::digest(bytes);
    let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha512:{hex}").parse().unwrap()
}

fn sha256(bytes: &[u8]) -> Checksum {
    Digest::of(bytes).to_string().parse().unwrap()
}

#[tokio::test]
async fn a_disk_image_is_fetched_once_and_kept_as_a_sparse_raw_file() {
    let raw = raw();
    let bytes = qcow2(&raw, &["-c"]);
    let server = serve(bytes.clone(), |_, _| None);
    let test = TestStore::new();
    let disk = pull(&test, &server).await.unwrap();
    assert!(content(&disk) == raw);
    assert_eq!(disk.id(), Digest::of(&bytes));
    assert_eq!(disk.source_format(), Some(DiskFormat::Qcow2));
    assert_eq!(disk.virtual_size(), raw.len() as u64);
    assert!(disk.size() < disk.virtual_size() * 3 / 4, "{}", disk.size());
    assert_eq!(disk.urls(), [url(&server)]);
    assert_eq!(
        test.files(),
        [format!("disks/{}/disk.raw", disk.id().hex())]
    );

    // The server reports that it is unchanged, and is not even asked if the policy does not require
    // it.
    assert_eq!(pull(&test, &server).await.unwrap().id(), disk.id());
    let missing = options().policy(PullPolicy::IfMissing);
    test.store
        .pull_disk(&url(&server), None, &missing)
        .await
        .unwrap();
    let asked: Vec<bool> = server
        .requests
        .lock()
        .unwrap()
        .iter()
        .map(|request| request.headers.contains_key("if-none-match"))
        .collect();
    assert_eq!(asked, [false, true]);

    let id = disk.id().to_string();
    for name in [&url(&server), &id, &id[7..15]] {
        assert_eq!(test.store.resolve_disk(name).unwrap().id(), disk.id());
    }
    let again = Store::open(test.dir.path()).unwrap();
    assert_eq!(again.disks().unwrap().len(), 1);
    assert!(again.usage().unwrap().bytes >= disk.size());
}

#[tokio::test]
async fn a_changed_file_takes_the_name_and_the_old_one_is_pruned() {
    let (old, new) = (vec![1; 10_000], vec![2; 20_000]);
    let server = serve(new.clone(), move |request, _| Some(file(request, &old)));
    let test = TestStore::new();
    let first = pull(&test, &server).await.unwrap();
    let second = pull(&test, &server).await.unwrap();
    assert_eq!(content(&second)[..20_000], new);
    assert!(
        test.store
            .resolve_disk(&first.id().to_string())
            .unwrap()
            .urls()
            .is_empty()
    );
    let removed = test.store.prune(&Prune::default()).unwrap();
    assert_eq!(
        removed
            .iter()
            .filter_map(|removed| removed.image)
            .collect::<Vec<_>>(),
        [first.id()]
    );
    assert!(!first.path().exists() && second.path().exists());
    test.store.pin(&url(&server), true).unwrap();
    assert!(
        test.store
            .prune(&Prune::default().tagged())
            .unwrap()
            .is_empty()
    );
    test.store.pin(&url(&server), false).unwrap();
    assert_eq!(
        test.store.prune(&Prune::default().tagged()).unwrap().len(),
        1
    );
    assert_eq!(test.files(), [""; 0]);
}

#[tokio::test]
async fn what_is_in_use_is_kept_and_a_removed_disk_image_leaves_nothing() {
    let server = serve(vec![7; 5000], |_, _| None);
    let test = TestStore::new();
    let disk = pull(&test, &server).await.unwrap();
    let open = disk.open().unwrap();
    assert!(matches!(
        test.store.remove(&url(&server)),
        Err(Error::InUse { .. })
    ));
    assert!(
        test.store
            .prune(&Prune::default().tagged())
            .unwrap()
            .is_empty()
    );
    drop(open);
    let removed = test.store.remove(&url(&server)).unwrap();
    assert_eq!(
        (removed.names, removed.image),
        (vec![url(&server)], Some(disk.id()))
    );
    assert!(removed.bytes > 0);
    assert_eq!(test.files(), [""; 0]);
    assert!(matches!(
        test.store.remove(&url(&server)),
        Err(Error::NotFound { .. })
    ));
    assert!(matches!(disk.open(), Err(Error::NotFound { .. })));
    // Also by id.
    let disk = pull(&test, &server).await.unwrap();
    test.store.remove(&disk.id().hex()[..12]).unwrap();
    assert_eq!(test.files(), [""; 0]);
}

#[tokio::test]
async fn a_checksum_is_kept_to_and_spares_the_next_fetch() {
    let bytes = qcow2(&raw(), &[]);
    let server = serve(bytes.clone(), |_, _| None);
    let test = TestStore::new();
    let store = &test.store;
    let disk = store
        .pull_disk(&url(&server), Some(&sha512(&bytes)), &options())
        .await
        .unwrap();
    for checksum in [sha512(&bytes), sha256(&bytes)] {
        let other = format!("{}?mirror", url(&server));
        let again = store
            .pull_disk(&other, Some(&checksum), &options())
            .await
            .unwrap();
        assert_eq!(again.id(), disk.id());
        assert_eq!(again.urls().len(), 2);
    }
    assert_eq!(server.paths().len(), 1);
    for wrong in [sha256(b"x"), sha512(b"x")] {
        let message = refused(&server, Some(&wrong)).await;
        let words = format!("instead of {wrong}; it is damaged, forged or newer");
        assert!(message.contains(&words), "{message}");
        // The store keeps what it has under the name.
        assert!(
            store
                .pull_disk(&url(&server), Some(&wrong), &options())
                .await
                .is_err()
        );
        assert!(content(&store.resolve_disk(&url(&server)).unwrap()) == raw());
    }
}

#[tokio::test]
async fn a_file_of_which_nobody_says_how_long_it_is_needs_a_checksum() {
    let bytes = vec![9; 100_000];
    let whole = bytes.clone();
    let server = Faulty::serve(TestImage::small(), move |_| {
        Some(Reply::ok(Body::Unsized(whole.clone())))
    });
    let message = refused(&server, None).await;
    assert!(message.contains("does not tell how long"), "{message}");
    let test = TestStore::new();
    test.store
        .pull_disk(&url(&server), Some(&sha256(&bytes)), &options())
        .await
        .unwrap();
    let cut = bytes[..50_000].to_vec();
    let server = Faulty::serve(TestImage::small(), move |_| {
        Some(Reply::ok(Body::Unsized(cut.clone())))
    });
    let message = refused(&server, Some(&sha256(&bytes))).await;
    assert!(message.contains("instead of sha256:"), "{message}");
    // Chunked transfers mark their own end.
    let server = Faulty::serve(TestImage::small(), |_| {
        Some(Reply::ok(Body::Chunked(vec![1; 5000])))
    });
    pull(&test, &server).await.unwrap();
}

#[tokio::test]
async fn what_is_no_disk_image_is_refused_and_leaves_nothing() {
    let raw = vec![3; 200_000];
    let dir = tempfile::tempdir().unwrap();
    let (base, overlay) = (dir.path().join("base"), dir.path().join("overlay"));
    std::fs::write(&base, &raw).unwrap();
    qemu_img(
        &["create", "-q", "-f", "qcow2", "-F", "raw", "-b"],
        &[&base, &overlay],
    );
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::Write::write_all(&mut gzip, &noise()).unwrap();
    let gzip = gzip.finish().unwrap();
    let cases = [
        (std::fs::read(overlay).unwrap(), "it needs a backing file"),
        (Vec::new(), "it is empty"),
        (b"KDMV".to_vec(), "it is in VMDK format"),
        (gzip[..gzip.len() / 2].to_vec(), "damaged or cut off"),
        (qcow2(&raw, &[])[..300_000].to_vec(), "damaged or cut off"),
    ];
    for (bytes, words) in cases {
        let server = serve(bytes, |_, _| None);
        let message = refused(&server, None).await;
        assert!(message.contains(words), "{message}");
        assert!(message.contains("is not a usable disk image"), "{message}");
        assert_eq!(server.paths().len(), 1);
    }
}

fn noise() -> Vec<u8> {
    raw()[..500_000].to_vec()
}

#[tokio::test]
async fn endless_files_and_bombs_end_at_the_limits() {
    let mut limits = podvisor_images::Limits::default();
    limits.disk_file_bytes = 4 << 20;
    limits.disk_bytes = 4 << 20;
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open_with(dir.path(), StoreOptions::default().limits(limits)).unwrap();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    std::io::Write::write_all(&mut gzip, &vec![0; 8 << 20]).unwrap();
    let gzip = gzip.finish().unwrap();
    type Make = Box<dyn Fn() -> Body + Send + Sync>;
    let bodies: [(Make, &str); 3] = [
        (
            Box::new(|| Body::Endless(vec![0; 65536])),
            "more than 4194304 bytes of",
        ),
        (
            Box::new(|| Body::Bytes(vec![0; 5 << 20])),
            "more than 4194304 bytes of file",
        ),
        (
            Box::new(move || Body::Bytes(gzip.clone())),
            "more than 4194304 bytes of disk",
        ),
    ];
    for (body, words) in bodies {
        let server = Faulty::serve(TestImage::small(), move |_| Some(Reply::ok(body())));
        let error = store
            .pull_disk(&url(&server), None, &options())
            .await
            .unwrap_err();
        assert!(explain(&error).contains(words), "{}", explain(&error));
    }
    assert!(
        std::fs::read_dir(dir.path().join("tmp"))
            .unwrap()
            .next()
            .is_none()
    );
}

#[tokio::test]
async fn addresses_status_and_redirects_are_told_in_words() {
    let message = |error: Error| explain(&error);
    let test = TestStore::new();
    let store = &test.store;
    let plain = store
        .pull_disk("http://192.0.2.1/x.img", None, &options())
        .await
        .unwrap_err();
    assert!(message(plain).contains("http://192.0.2.1/x.img is plain HTTP"));
    let bad = store
        .pull_disk("ftp://host/x", None, &options())
        .await
        .unwrap_err();
    assert!(message(bad).contains("is not the URL of a disk image"));
    for (reply, words) in [
        (404, "there is no http://"),
        (403, "does not allow to fetch http://"),
    ] {
        let server = Faulty::serve(TestImage::small(), move |_| Some(Reply::new(reply, "")));
        let text = refused(&server, None).await;
        assert!(text.contains(words), "{text}");
        assert_eq!(server.paths().len(), 1);
    }
    let server = Faulty::serve(TestImage::small(), |request| {
        Some(Reply::new(302, "").header("Location", format!("{}x", request.path)))
    });
    let text = refused(&server, None).await;
    assert!(text.contains("too many redirects"), "{text}");
    let server = Faulty::serve(TestImage::small(), |_| {
        Some(Reply::new(302, "").header("Location", "file:///etc/passwd"))
    });
    let text = refused(&server, None).await;
    assert!(text.contains("which is refused: it is not HTTPS"), "{text}");
    assert!(matches!(
        store
            .pull_disk("http://127.0.0.1:1/x", None, &options())
            .await,
        Err(Error::Disk(DiskError::Unreachable { .. }))
    ));
    let tls = registries().host(
        "127.0.0.1:1",
        RegistryHost::default().protocol(RegistryProtocol::Https),
    );
    let options = options().registries(tls);
    let error = store
        .pull_disk("http://127.0.0.1:1/x", None, &options)
        .await
        .unwrap_err();
    assert!(message(error).contains("is plain HTTP"));
}

#[tokio::test]
async fn user_and_password_go_to_the_server_and_nowhere_else() {
    let bytes = vec![1; 1000];
    let elsewhere = serve(bytes, |_, _| None);
    let target = url(&elsewhere);
    let server = Faulty::serve(TestImage::small(), move |_| {
        Some(Reply::new(302, "").header("Location", target.clone()))
    });
    let test = TestStore::new();
    let secret = format!("http://me:pass@{}/images/disk.qcow2", server.host);
    let disk = test
        .store
        .pull_disk(&secret, None, &options())
        .await
        .unwrap();
    assert_eq!(disk.urls(), [url(&server)]);
    let sent = |server: &Faulty| {
        server.requests.lock().unwrap()[0]
            .headers
            .get("authorization")
            .cloned()
    };
    assert_eq!(sent(&server).as_deref(), Some("Basic bWU6cGFzcw=="));
    assert_eq!(sent(&elsewhere), None);
    assert_eq!(test.store.resolve_disk(&secret).unwrap().id(), disk.id());
}

#[tokio::test]
async fn fetches_at_the_same_time_share_the_work() {
    let bytes = raw();
    // The answer to the first one waits until both others wait for it.
    let (requests, mut requested) = tokio::sync::mpsc::unbounded_channel();
    let (release, held) = std::sync::mpsc::channel::<()>();
    let held = Mutex::new(held);
    let server = Arc::new(serve(bytes.clone(), move |_, _| {
        let _ = requests.send(());
        let _ = held.lock().unwrap().recv();
        None
    }));
    let test = TestStore::new();
    let second = Store::open(test.dir.path()).unwrap();
    let url = url(&server);
    let fetch = async |store: &Store, waits: tokio::sync::oneshot::Sender<()>| {
        let (events, mut received) = tokio::sync::mpsc::unbounded_channel();
        let told = async {
            while received.recv().await != Some(PullEvent::DiskWaiting) {}
            waits.send(()).unwrap();
            // So that no task waits for a receiver.
            while received.recv().await.is_some() {}
        };
        let options = options().events(events);
        let pull = async {
            let disk = store.pull_disk(&url, None, &options).await;
            drop(options);
            disk
        };
        tokio::join!(pull, told).0
    };
    let others = async {
        requested.recv().await.unwrap();
        let [(one, one_waits), (two, two_waits)] =
            [(); 2].map(|()| tokio::sync::oneshot::channel());
        let waiting = async {
            one_waits.await.unwrap();
            two_waits.await.unwrap();
            release.send(()).unwrap();
        };
        tokio::join!(fetch(&test.store, one), fetch(&second, two), waiting)
    };
    let options = options();
    let first = test.store.pull_disk(&url, None, &options);
    let (a, (b, c, ())) = tokio::join!(first, others);
    for disk in [a, b, c] {
        assert!(content(&disk.unwrap()) == bytes);
    }
    assert_eq!(server.paths().len(), 1);
}
