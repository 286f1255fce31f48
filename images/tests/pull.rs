//! Pulling from a real registry.

mod support;

use std::os::unix::fs::MetadataExt;

use podvisor_images::{Error, Prune, PullEvent, PullPolicy, RegistryError, Store};
use support::image::{Layer, Packing};
use support::{Registry, Tarball, TestImage, TestStore, explain, extract, options};
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
    let (old, new) = (
        TestImage::small(),
        TestImage::new(vec![Layer::new(
            &Tarball::new().file("new", 0o644, b"new").finish(),
            Packing::Plain,
        )]),
    );
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
