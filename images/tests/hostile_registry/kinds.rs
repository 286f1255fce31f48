//! Manifests and indexes of images that cannot be run.

use super::*;

#[tokio::test]
async fn images_that_cannot_be_run_are_refused_in_words() {
    let image = TestImage::small();
    let descriptor = json!({
        "mediaType": "application/vnd.oci.image.config.v1+json",
        "digest": Digest::of(&image.config), "size": image.config.len(),
    });
    let layer =
        |media_type: &str| json!([{"mediaType": media_type, "digest": Digest::of(b""), "size": 9}]);
    let manifest = |layers: serde_json::Value| json!({"schemaVersion": 2, "config": descriptor, "layers": layers});
    for (document, words) in [
        (
            manifest(json!([])),
            "no layers, so there is no root file system",
        ),
        (
            manifest(layer(
                "application/vnd.oci.image.layer.nondistributable.v1.tar",
            )),
            "is foreign",
        ),
        (
            manifest(layer("application/vnd.wasm.content.layer.v1+wasm")),
            "no file system layer",
        ),
        (
            manifest(layer("application/vnd.oci.image.layer.v1.tar")),
            "the configuration speaks of 2",
        ),
        (
            manifest(json!([{"mediaType": "x", "digest": "sha256:../../etc", "size": 9}])),
            "not valid",
        ),
        (
            json!({"schemaVersion": 1, "fsLayers": []}),
            "schema version 1",
        ),
        (json!([]), "not valid"),
        (
            json!({"schemaVersion": 2, "mediaType": "text/plain"}),
            "not a container image's",
        ),
        (
            json!({"schemaVersion": 2, "manifests": [{
                "mediaType": "m", "digest": Digest::of(b""), "size": 1,
                "platform": {"os": "linux", "architecture": "arm64"}}]}),
            "but for linux/arm64",
        ),
    ] {
        let body = serde_json::to_vec(&document).unwrap();
        let server = Faulty::serve(image.clone(), move |request| {
            request
                .path
                .contains("/manifests/")
                .then(|| Reply::new(200, body.clone()))
        });
        let message = refused(&server, &TestStore::new()).await;
        assert!(message.contains(words), "{message}");
        assert!(!message.contains('\n'));
    }
}

#[tokio::test]
async fn an_image_that_names_no_platform_is_taken() {
    let layers = TestImage::small().layers;
    let diff_ids: Vec<_> = layers.iter().map(|layer| layer.diff_id).collect();
    for platform in [
        json!({}),
        json!({"os": "", "architecture": ""}),
        json!({"os": "linux", "architecture": "x86_64"}),
    ] {
        let mut config = platform.clone();
        config["rootfs"] = json!({"type": "layers", "diff_ids": diff_ids});
        let image = TestImage::with_config(layers.clone(), config);
        let server = Faulty::serve(image.clone(), |_| None);
        let test = TestStore::new();
        let pulled = test.pull(&server.name()).await.unwrap();
        assert_eq!(pulled.id(), image.id(), "{platform}");
        let found = test.store.resolve(&server.name()).unwrap();
        assert_eq!(found.config().architecture().to_string(), "amd64");
        let test = TestStore::new();
        let dir = tempfile::tempdir().unwrap();
        image.write_layout(dir.path(), "x/y:z");
        let loaded = test.store.load(dir.path(), None, &options()).unwrap();
        assert_eq!(loaded[0].image.id(), image.id(), "{platform}");
    }
}

#[tokio::test]
async fn an_image_that_has_a_configuration_as_layer_is_refused_and_holds_up_nobody() {
    let config = |mark: &str| {
        json!({
            "os": "linux", "architecture": "amd64", "author": mark,
            "rootfs": {"type": "layers", "diff_ids": [Digest::of(b"")]},
        })
    };
    let image = |own: &str, layer: &str| {
        let blob = serde_json::to_vec(&config(layer)).unwrap();
        let layer = Layer {
            blob,
            ..Layer::new(b"", Packing::Plain)
        };
        TestImage::with_config(vec![layer], config(own))
    };
    let test = TestStore::new();
    // Each with its own layer, and each with the other's.
    for pair in [[("a", "a"), ("b", "b")], [("a", "b"), ("b", "a")]] {
        let servers = pair.map(|(own, layer)| Faulty::serve(image(own, layer), |_| None));
        let names = [servers[0].name(), servers[1].name()];
        let pulls = async { tokio::join!(test.pull(&names[0]), test.pull(&names[1])) };
        let (a, b) = tokio::time::timeout(Duration::from_secs(120), pulls)
            .await
            .expect("no pull waits for itself");
        for outcome in [a, b] {
            let message = explain(&outcome.unwrap_err());
            assert!(message.contains("cannot be unpacked"), "{message}");
        }
        assert_eq!(test.files(), [""; 0]);
    }
}

#[tokio::test]
async fn a_layer_that_is_here_is_not_read_as_a_configuration() {
    let image = TestImage::large();
    let server = Faulty::serve(image.clone(), |_| None);
    let test = TestStore::new();
    test.pull(&server.name()).await.unwrap();
    let mut manifest: serde_json::Value = serde_json::from_slice(&image.manifest).unwrap();
    manifest["config"]["digest"] = manifest["layers"][0]["digest"].clone();
    manifest["config"]["size"] = 2.into();
    let forged = TestImage {
        manifest: manifest.to_string().into_bytes(),
        ..image
    };
    let server = Faulty::serve(forged, |_| None);
    let message = explain(&test.pull(&server.name()).await.unwrap_err());
    assert!(message.contains("bytes instead of 2"), "{message}");
}

#[tokio::test]
async fn a_manifest_with_other_layers_takes_nothing_from_an_image() {
    let victim = TestImage::small();
    let server = Faulty::serve(victim.clone(), |_| None);
    let other = TestImage::packed([Packing::Plain, Packing::Gzip]);
    let plain = |text: &str| Layer::new(text.as_bytes(), Packing::Plain);
    let config: serde_json::Value = serde_json::from_slice(&victim.config).unwrap();
    // Layers of something else, and the image's own, packed otherwise.
    for (layers, belong) in [(vec![plain("1"), plain("2")], false), (other.layers, true)] {
        let test = TestStore::new();
        test.pull(&server.name()).await.unwrap();
        let dir = tempfile::tempdir().unwrap();
        for (at, layer) in layers.iter().enumerate() {
            let one = TestImage::new(vec![layer.clone()]);
            let dir = dir.path().join(at.to_string());
            one.write_layout(&dir, "x/y:z");
            // The layer stays if its image is invalid, because nothing removes it.
            let _ = test.store.load(&dir, None, &options());
        }
        let forged = TestImage::with_config(layers, config.clone());
        assert_eq!(forged.id(), victim.id());
        let forger = Faulty::serve(forged.clone(), |_| None);
        let pulled = test.pull(&forger.name()).await;
        forged.write_layout(&dir.path().join("forged"), "x/y:forged");
        let loaded = test
            .store
            .load(dir.path().join("forged"), None, &options())
            .map(|mut loaded| loaded.remove(0).image);
        for taken in [pulled, loaded] {
            match taken {
                Ok(image) => {
                    assert!(belong);
                    assert_eq!(image.manifest_digest(), victim.digest());
                }
                Err(error) => {
                    assert!(!belong);
                    let message = explain(&error);
                    assert!(message.contains("cannot be unpacked"), "{message}");
                }
            }
        }
        let image = test.store.resolve(&server.name()).unwrap();
        assert_eq!(image.tags().len(), if belong { 3 } else { 1 });
        test.store.prune(&Prune::default()).unwrap();
        let cancel = podvisor_images::Cancel::default();
        test.store
            .save(
                &[server.name()],
                Default::default(),
                std::io::sink(),
                &cancel,
            )
            .unwrap();
    }
}

#[tokio::test]
async fn indexes_within_indexes_are_followed_four_deep() {
    let mut documents = vec![br#"{"schemaVersion":2,"manifests":[]}"#.to_vec()];
    for _ in 0..5 {
        let inner = documents.last().unwrap();
        let entry = json!({"mediaType": "application/vnd.oci.image.index.v1+json",
            "digest": Digest::of(inner), "size": inner.len()});
        documents
            .push(serde_json::to_vec(&json!({"schemaVersion": 2, "manifests": [entry]})).unwrap());
    }
    let server = Faulty::serve(TestImage::small(), move |request| {
        let wanted = request.path.strip_prefix("/v2/app/manifests/")?;
        let found = documents
            .iter()
            .find(|document| Digest::of(document).to_string() == wanted);
        Some(Reply::new(
            200,
            found.unwrap_or_else(|| documents.last().unwrap()).clone(),
        ))
    });
    let message = refused(&server, &TestStore::new()).await;
    assert!(message.contains("more than 4 deep"), "{message}");
}
