//! Pulling from a real registry.

mod support;

use std::os::unix::fs::MetadataExt;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use podvisor_images::{
    Digest, Error, Prune, PullEvent, PullPolicy, RegistryError, RegistryHost, Store,
};
use support::faulty::honest;
use support::image::{Layer, Packing};
use support::{
    Faulty, Registry, Reply, Tarball, TestImage, TestStore, explain, extract, options, registries,
};
use tokio::sync::mpsc;

#[tokio::test]
async fn an_image_is_pulled_found_and_removed() {
    let registry = Registry::start();
    let image = TestImage::small();
    registry.push("app", "v1", &image).await;
    let test = TestStore::new();
    let name = registry.name("app:v1");

    let pulled = test.pull(&name).await.unwrap();
    assert_eq!(pulled.id(), image.id());
    assert_eq!(pulled.manifest_digest(), image.digest());
    assert_eq!(pulled.tags(), std::slice::from_ref(&name));
    assert_eq!(
        pulled.digests(),
        [format!("{}@{}", registry.name("app"), image.digest())]
    );
    assert_eq!(
        pulled.config().config().as_ref().unwrap().user().as_deref(),
        Some("1000")
    );
    assert!(pulled.size() > 0 && pulled.created().is_some());
    let dir = extract(&pulled);
    assert_eq!(
        std::fs::read(dir.path().join("root/etc/hello")).unwrap(),
        b"hello\n"
    );
    assert!(!dir.path().join("root/etc/gone").exists());

    let id = image.id().to_string();
    let again = Store::open(test.dir.path()).unwrap();
    for name in [&name, &id, &id[7..], &id[7..13], &pulled.digests()[0]] {
        assert_eq!(again.resolve(name).unwrap().id(), image.id(), "{name}");
    }
    assert_eq!(again.list().unwrap().len(), 1);

    let removed = again.remove(&name).unwrap();
    assert_eq!(removed.image, Some(image.id()));
    assert!(removed.bytes > 0);
    assert!(matches!(again.resolve(&name), Err(Error::NotFound { .. })));
    assert_eq!(test.files(), [""; 0]);
}

#[tokio::test]
async fn events_tell_what_happens_in_order() {
    let registry = Registry::start();
    registry.push("app", "latest", &TestImage::small()).await;
    let test = TestStore::new();
    let (events, mut received) = mpsc::unbounded_channel();
    let options = options().events(events);
    test.store
        .pull(&registry.name("app"), &options)
        .await
        .unwrap();
    let mut told = Vec::new();
    while let Ok(event) = received.try_recv() {
        told.push(event);
    }
    let at = |wanted: fn(&PullEvent) -> bool| told.iter().position(wanted).unwrap();
    assert_eq!(at(|event| matches!(event, PullEvent::Resolving { .. })), 0);
    assert_eq!(
        at(|event| matches!(event, PullEvent::Resolved { layers, .. } if layers.len() == 2)),
        1
    );
    assert!(
        at(|event| matches!(event, PullEvent::LayerDone { .. }))
            < at(|event| matches!(event, PullEvent::Unpacking { .. }))
    );
    assert!(matches!(
        told.last(),
        Some(PullEvent::Done { new: true, .. })
    ));
    assert_eq!(
        told.iter()
            .filter(|event| matches!(event, PullEvent::Unpacking { .. }))
            .count(),
        2
    );

    test.store
        .pull(&registry.name("app"), &options)
        .await
        .unwrap();
    let mut last = None;
    while let Ok(event) = received.try_recv() {
        assert!(!matches!(
            event,
            PullEvent::LayerBytes { .. } | PullEvent::Unpacking { .. }
        ));
        last = Some(event);
    }
    assert!(matches!(last, Some(PullEvent::Done { new: false, .. })));
}

#[tokio::test]
async fn a_tag_that_moved_takes_its_name_along_and_the_old_image_stays_by_digest() {
    let registry = Registry::start();
    let (old, new) = (TestImage::small(), other_image());
    registry.push("app", "v1", &old).await;
    let test = TestStore::new();
    let name = registry.name("app:v1");
    test.pull(&name).await.unwrap();
    registry.push("app", "v1", &new).await;
    let missing_only = options().policy(PullPolicy::IfMissing);
    assert_eq!(
        test.store.pull(&name, &missing_only).await.unwrap().id(),
        old.id()
    );
    assert_eq!(test.pull(&name).await.unwrap().id(), new.id());
    assert_eq!(test.store.resolve(&name).unwrap().id(), new.id());
    let old = test.store.resolve(&old.id().to_string()).unwrap();
    assert!(old.tags().is_empty());
    assert_eq!(old.digests().len(), 1);
}

#[tokio::test]
async fn an_image_is_pulled_by_digest_and_through_an_index() {
    let registry = Registry::start();
    let image = TestImage::small();
    registry.push("app", "amd", &image).await;
    let index = serde_json::to_vec(&serde_json::json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [{
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "digest": image.digest(), "size": image.manifest.len(),
            "platform": { "os": "linux", "architecture": "amd64" },
        }],
    }))
    .unwrap();
    registry
        .push_manifest(
            "app",
            "multi",
            "application/vnd.oci.image.index.v1+json",
            &index,
        )
        .await;
    let test = TestStore::new();
    let by_digest = test
        .pull(&format!("{}@{}", registry.name("app"), image.digest()))
        .await
        .unwrap();
    assert!(by_digest.tags().is_empty());
    let by_index = test.pull(&registry.name("app:multi")).await.unwrap();
    assert_eq!(by_index.id(), by_digest.id());
    assert_eq!(by_index.digests().len(), 2);
}

#[tokio::test]
async fn an_image_that_comes_packed_otherwise_gets_the_names_and_keeps_its_layers() {
    let registry = Registry::start();
    let (gzip, zstd) = (
        TestImage::packed([Packing::Gzip, Packing::Gzip]),
        TestImage::packed([Packing::Zstd, Packing::Zstd]),
    );
    registry.push("a/x", "v1", &gzip).await;
    registry.push("b/x", "v1", &zstd).await;
    let test = TestStore::new();
    let names = [registry.name("a/x:v1"), registry.name("b/x:v1")];
    let save = || {
        let cancel = podvisor_images::Cancel::default();
        let out = std::io::sink();
        test.store.save(&names, Default::default(), out, &cancel)
    };
    test.pull(&names[0]).await.unwrap();
    let image = test.pull(&names[1]).await.unwrap();
    assert_eq!(image.manifest_digest(), gzip.digest());
    assert_eq!(image.tags(), names);
    let digests = [("a/x", &gzip), ("b/x", &zstd)]
        .map(|(name, image)| format!("{}@{}", registry.name(name), image.digest()));
    assert_eq!(image.digests(), digests);
    test.store.prune(&Prune::default()).unwrap();
    save().unwrap();

    // An image with missing layers gets those that are pulled.
    let before = std::fs::metadata(image.rootfs()).unwrap().ino();
    let layer = podvisor_images::Digest::of(&gzip.layers[0].blob);
    std::fs::remove_file(test.dir.path().join("blobs/sha256").join(layer.hex())).unwrap();
    assert!(matches!(save(), Err(Error::Damaged { .. })));
    let image = test.pull(&names[1]).await.unwrap();
    assert_eq!(image.manifest_digest(), zstd.digest());
    test.store.prune(&Prune::default()).unwrap();
    save().unwrap();
    assert_eq!(std::fs::metadata(image.rootfs()).unwrap().ino(), before);
}

#[tokio::test]
async fn an_image_that_is_open_is_not_removed() {
    let registry = Registry::start();
    registry.push("app", "v1", &TestImage::small()).await;
    let test = TestStore::new();
    let name = registry.name("app:v1");
    let open = test.pull(&name).await.unwrap().open_rootfs().unwrap();
    assert!(matches!(test.store.remove(&name), Err(Error::InUse { .. })));
    assert!(test.store.resolve(&name).is_ok());
    drop(open);
    assert!(test.store.remove(&name).is_ok());
}

#[tokio::test]
async fn two_pulls_at_once_share_the_work() {
    let registry = Registry::start();
    registry.push("app", "v1", &TestImage::small()).await;
    let test = TestStore::new();
    let name = registry.name("app:v1");
    let (events, mut received) = mpsc::unbounded_channel();
    let options = options().events(events);
    // Another process has a separate store on the same directory.
    let other = Store::open(test.dir.path()).unwrap();
    let (a, b, c) = tokio::join!(
        test.store.pull(&name, &options),
        test.store.pull(&name, &options),
        other.pull(&name, &options)
    );
    assert!(a.unwrap().id() == b.unwrap().id() && c.is_ok());
    let (mut unpacked, mut new) = (0, 0);
    while let Ok(event) = received.try_recv() {
        unpacked += usize::from(matches!(event, PullEvent::Unpacking { .. }));
        new += usize::from(matches!(event, PullEvent::Done { new: true, .. }));
    }
    assert_eq!((unpacked, new), (2, 1));
}

#[tokio::test]
async fn what_is_not_there_is_said_in_one_line_and_leaves_nothing() {
    let registry = Registry::start();
    registry.push("app", "v1", &TestImage::small()).await;
    let test = TestStore::new();
    for name in [
        "nothing:v1",
        "app:v2",
        &format!("app@sha256:{}", "0".repeat(64)),
    ] {
        let error = test.pull(&registry.name(name)).await.unwrap_err();
        assert!(
            matches!(&error, Error::Registry(RegistryError::NotFound { .. })),
            "{error:?}"
        );
        assert!(!explain(&error).contains('\n'));
    }
    let host = registry.host();
    drop(registry);
    let error = test.pull(&format!("{host}/app:v1")).await.unwrap_err();
    assert!(
        matches!(error, Error::Registry(RegistryError::Unreachable { .. })),
        "{error:?}"
    );
    assert!(matches!(
        test.pull("Not A Name").await,
        Err(Error::Reference { .. })
    ));
    assert_eq!(test.files(), [""; 0]);
}

#[tokio::test]
async fn an_unpacked_layer_that_differs_from_the_configuration_is_refused() {
    let registry = Registry::start();
    let mut layer = Layer::new(
        &Tarball::new().file("a", 0o644, b"a").finish(),
        Packing::Gzip,
    );
    layer.diff_id = podvisor_images::Digest::of(b"another");
    registry
        .push("app", "v1", &TestImage::new(vec![layer]))
        .await;
    let test = TestStore::new();
    let error = test.pull(&registry.name("app:v1")).await.unwrap_err();
    assert!(
        explain(&error).contains("but the image configuration says"),
        "{}",
        explain(&error)
    );
    assert_eq!(test.files(), [""; 0]);
}

fn other_image() -> TestImage {
    let tar = Tarball::new().file("new", 0o644, b"new").finish();
    TestImage::new(vec![Layer::new(&tar, Packing::Plain)])
}

/// The methods of the requests for manifests since the last call.
fn asked(server: &Faulty) -> Vec<String> {
    let seen = std::mem::take(&mut *server.requests.lock().unwrap());
    let manifests = seen
        .into_iter()
        .filter(|request| request.path.contains("/manifests/"));
    manifests.map(|request| request.method).collect()
}

#[tokio::test]
async fn what_did_not_change_is_asked_for_by_head_alone() {
    let image = TestImage::small();
    let index = serde_json::json!({"schemaVersion": 2, "manifests": [{
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "digest": image.digest(), "size": image.manifest.len(),
        "platform": {"os": "linux", "architecture": "amd64"},
    }]});
    let index = index.to_string().into_bytes();
    let digest = Digest::of(&index).to_string();
    let server = Faulty::serve(image.clone(), {
        let digest = digest.clone();
        move |request| {
            let wanted = request.path.strip_prefix("/v2/app/manifests/")?;
            let reply = Reply::new(200, index.clone())
                .header("Content-Type", "application/vnd.oci.image.index.v1+json")
                .header("Docker-Content-Digest", digest.clone());
            (wanted == "multi" || wanted == digest).then_some(reply)
        }
    });
    for (name, first) in [
        (server.name(), &["GET"][..]),
        (format!("{}/app@{}", server.host, image.digest()), &["GET"]),
        (format!("{}/app:multi", server.host), &["GET", "GET"]),
        (format!("{}/app@{digest}", server.host), &["GET", "GET"]),
    ] {
        let test = TestStore::new();
        let pulled = test.pull(&name).await.unwrap();
        assert_eq!(asked(&server), first, "{name}");
        let again = test.pull(&name).await.unwrap();
        assert_eq!(asked(&server), ["HEAD"], "{name}");
        assert_eq!(again.id(), image.id());
        assert_eq!(
            (again.tags(), again.digests()),
            (pulled.tags(), pulled.digests())
        );
    }
    // Another tag of what is here.
    let test = TestStore::new();
    test.pull(&server.name()).await.unwrap();
    test.pull(&format!("{}/app:v2", server.host)).await.unwrap();
    assert_eq!(asked(&server), ["GET", "HEAD"]);
}

#[tokio::test]
async fn a_part_of_an_image_that_is_not_there_is_named() {
    let image = TestImage::small();
    let layer = Digest::of(&image.layers[0].blob);
    for missing in [layer, image.id()] {
        let server = Faulty::serve(image.clone(), move |request| {
            let is_missing = request.path.ends_with(&missing.to_string());
            is_missing.then(|| Reply::new(404, ""))
        });
        let error = TestStore::new().pull(&server.name()).await.unwrap_err();
        let told = explain(&error);
        let is_named = matches!(
            &error,
            Error::Registry(RegistryError::BlobNotFound { digest, .. }) if *digest == missing
        );
        assert!(is_named && told.contains("pushed again"), "{told}");
    }
}

#[tokio::test]
async fn a_registry_whose_answer_to_head_is_of_no_use_is_asked_by_get() {
    let image = TestImage::small();
    let layer = Digest::of(&image.layers[0].blob).to_string();
    let unknown = Digest::of(b"unknown").to_string();
    for (status, digest) in [
        (405, None),
        (404, None),
        (401, None),
        (500, None),
        (200, None),
        (200, Some("no digest")),
        (200, Some(&unknown)),
        (200, Some(&layer)),
    ] {
        let digest = digest.map(str::to_owned);
        let told = format!("{status} {digest:?}");
        let server = Faulty::serve(image.clone(), move |request| {
            let reply = Reply::new(status, "");
            let reply = match &digest {
                Some(digest) => reply.header("Docker-Content-Digest", digest.clone()),
                None => reply,
            };
            (request.method == "HEAD").then_some(reply)
        });
        let test = TestStore::new();
        test.pull(&server.name()).await.unwrap();
        assert_eq!(asked(&server), ["GET"], "{told}");
        test.pull(&server.name()).await.unwrap();
        assert_eq!(asked(&server), ["HEAD", "GET"], "{told}");
    }
}

#[tokio::test]
async fn a_tag_that_moved_is_pulled_anew_after_head() {
    let (moved, new) = (Arc::new(AtomicBool::new(false)), other_image());
    let server = Faulty::serve(TestImage::small(), {
        let (moved, new) = (Arc::clone(&moved), new.clone());
        move |request| {
            let moved = moved.load(Ordering::Relaxed);
            moved.then(|| honest(request, &new))
        }
    });
    let test = TestStore::new();
    test.pull(&server.name()).await.unwrap();
    moved.store(true, Ordering::Relaxed);
    let pulled = test.pull(&server.name()).await.unwrap();
    assert_eq!(pulled.id(), new.id());
    assert_eq!(asked(&server), ["GET", "HEAD", "GET"]);
}

#[tokio::test]
async fn what_is_here_is_pulled_by_those_alone_whom_the_registry_allows_it() {
    let closed = Arc::new(AtomicBool::new(false));
    let server = Faulty::serve(TestImage::small(), {
        let closed = Arc::clone(&closed);
        move |_| closed.load(Ordering::Relaxed).then(|| Reply::new(403, ""))
    });
    let test = TestStore::new();
    let pulled = test.pull(&server.name()).await.unwrap();
    closed.store(true, Ordering::Relaxed);
    for name in [server.name(), pulled.digests()[0].clone()] {
        let refused = test.pull(&name).await;
        assert!(
            matches!(
                refused,
                Err(Error::Registry(RegistryError::Unauthorized { .. }))
            ),
            "{refused:?}"
        );
    }
    // Nor does another repository get it by naming its digest.
    let digest = TestImage::small().digest().to_string();
    let forger = Faulty::serve(other_image(), move |request| {
        let reply = Reply::new(200, "").header("Docker-Content-Digest", digest.clone());
        (request.method == "HEAD").then_some(reply)
    });
    for _ in 0..2 {
        let pulled = test.pull(&forger.name()).await.unwrap();
        assert_eq!(pulled.id(), other_image().id());
    }
    assert_eq!(asked(&forger), ["GET", "HEAD", "GET"]);
}

#[tokio::test]
async fn mirrors_are_asked_by_head_in_their_order_and_passed_over() {
    let image = TestImage::small();
    let refusing = Faulty::serve(image.clone(), |_| Some(Reply::new(404, "")));
    let registry = Faulty::serve(image.clone(), |_| None);
    let free = std::net::TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0)).unwrap();
    let gone = free.local_addr().unwrap().to_string();
    drop(free);
    let host = RegistryHost::default()
        .mirror(gone)
        .mirror(refusing.host.clone());
    let options = options().registries(registries().host(registry.host.clone(), host));
    let test = TestStore::new();
    for seen in [&["GET"][..], &["HEAD"]] {
        let pulled = test.store.pull(&registry.name(), &options).await.unwrap();
        assert_eq!(pulled.id(), image.id());
        assert_eq!(asked(&registry), seen);
    }
    assert_eq!(asked(&refusing), ["GET", "HEAD", "GET"]);
}
