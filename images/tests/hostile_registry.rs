//! Registries that lie, stall and disconnect. Whatever they do, the store is unchanged afterwards.

mod support;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use podvisor_images::{Digest, Prune, PullEvent, Store, StoreOptions};
use serde_json::json;
use support::faulty::honest;
use support::image::{Layer, Packing};
use support::{Body, Faulty, Reply, TestImage, TestStore, explain, options, registries};

/// Pulls and returns the error's message; nothing may be left in the store.
async fn refused(server: &Faulty, test: &TestStore) -> String {
    let error = test
        .pull(&server.name())
        .await
        .expect_err("the image must be refused");
    assert_eq!(test.files(), [""; 0], "{error:?}");
    explain(&error)
}

fn is_blob(path: &str, blob: &[u8]) -> bool {
    path.ends_with(&Digest::of(blob).to_string())
}

#[tokio::test]
async fn a_manifest_with_another_digest_is_discarded() {
    let server = Faulty::serve(TestImage::small(), |_| None);
    let test = TestStore::new();
    let name = format!("{}/app@sha256:{}", server.host, "ab".repeat(32));
    let error = test.pull(&name).await.unwrap_err();
    assert!(
        explain(&error).contains("damaged or forged"),
        "{}",
        explain(&error)
    );
    assert_eq!(test.files(), [""; 0]);
}

#[tokio::test]
async fn a_manifest_without_end_is_cut_off() {
    let server = Faulty::serve(TestImage::small(), |request| {
        request
            .path
            .contains("/manifests/")
            .then(|| Reply::ok(Body::Endless(vec![b' '; 65536])))
    });
    let message = refused(&server, &TestStore::new()).await;
    assert!(
        message.contains("more than 4194304 bytes for the manifest"),
        "{message}"
    );
}

#[tokio::test]
async fn a_configuration_that_lies_about_its_size_or_content_is_discarded() {
    for (body, words) in [
        (&b"{}"[..], "bytes instead of"),
        (b"", "has 0 bytes instead of"),
    ] {
        let image = TestImage::small();
        let config = image.config.clone();
        let server = Faulty::serve(image, move |request| {
            is_blob(&request.path, &config).then(|| Reply::new(200, body))
        });
        let message = refused(&server, &TestStore::new()).await;
        assert!(message.contains(words), "{message}");
    }
}

#[tokio::test]
async fn a_layer_with_other_content_or_another_length_is_discarded() {
    let image = TestImage::small();
    let layer = image.layers[0].blob.clone();
    let mut forged = layer.clone();
    forged[20] ^= 1;
    let longer = [&layer[..], b"more"].concat();
    for (body, words) in [
        (Body::Bytes(forged), "damaged or forged"),
        (Body::Bytes(longer.clone()), "bytes instead of"),
        (Body::Chunked(longer), "bytes instead of"),
        (
            Body::Chunked(layer[..10].to_vec()),
            "has 10 bytes instead of",
        ),
        (Body::Endless(vec![0; 65536]), "bytes instead of"),
    ] {
        let (layer, body) = (layer.clone(), std::sync::Mutex::new(Some(body)));
        let server = Faulty::serve(image.clone(), move |request| {
            let mine = is_blob(&request.path, &layer);
            mine.then(|| Reply::ok(body.lock().unwrap().take().expect("asked once")))
        });
        let message = refused(&server, &TestStore::new()).await;
        assert!(message.contains(words), "{message}");
    }
}

#[tokio::test]
async fn redirects_are_followed_a_few_times_only() {
    let image = TestImage::small();
    let server = Faulty::serve(image, |request| {
        let again = Reply::new(307, "").header("Location", format!("{}x", request.path));
        request.path.contains("/blobs/").then_some(again)
    });
    let message = refused(&server, &TestStore::new()).await;
    assert!(message.contains("too many redirects"), "{message}");
    let server = Faulty::serve(TestImage::small(), |_| {
        Some(Reply::new(302, "").header("Location", "file:///etc/passwd"))
    });
    assert!(
        refused(&server, &TestStore::new())
            .await
            .contains("it is not HTTPS")
    );
}

#[tokio::test]
async fn credentials_do_not_follow_a_redirect_to_another_host() {
    let image = TestImage::small();
    let elsewhere = Faulty::serve(image.clone(), |_| None);
    let target = elsewhere.host.clone();
    let server = Faulty::serve(image, move |request| {
        if !request.headers.contains_key("authorization") {
            return Some(Reply::new(401, "").header("WWW-Authenticate", "Basic realm=\"r\""));
        }
        let there = format!("http://{target}{}", request.path);
        request
            .path
            .contains("/blobs/")
            .then(|| Reply::new(307, "").header("Location", there))
    });
    let test = TestStore::new();
    let credentials = podvisor_images::Credentials::Basic {
        user: "u".into(),
        password: "p".into(),
    };
    test.store
        .pull(&server.name(), &options().credentials(credentials))
        .await
        .unwrap();
    let seen = elsewhere.requests.lock().unwrap();
    assert!(!seen.is_empty());
    assert!(
        seen.iter()
            .all(|request| !request.headers.contains_key("authorization"))
    );
}

#[tokio::test]
async fn an_overloaded_registry_is_asked_again_and_in_the_end_given_up() {
    let failures = AtomicUsize::new(0);
    let server = Faulty::serve(TestImage::small(), move |_| {
        match failures.fetch_add(1, Ordering::SeqCst) {
            0 => Some(Reply::new(429, "").header("Retry-After", "0")),
            1 => Some(Reply::new(503, "")),
            _ => None,
        }
    });
    let (events, mut received) = tokio::sync::mpsc::unbounded_channel();
    let test = TestStore::new();
    test.store
        .pull(&server.name(), &options().events(events))
        .await
        .unwrap();
    let mut retries = 0;
    while let Ok(event) = received.try_recv() {
        retries += usize::from(matches!(event, PullEvent::Retrying { .. }));
    }
    assert_eq!(retries, 2);

    let server = Faulty::serve(TestImage::small(), |_| {
        Some(Reply::new(
            500,
            r#"{"errors":[{"code":"X","message":"disk\u0007 on fire"}]}"#,
        ))
    });
    let message = refused(&server, &TestStore::new()).await;
    assert!(
        message.contains("answered 500") && message.contains(": disk on fire; try again later"),
        "{message}"
    );
    assert_eq!(server.paths().len(), 5);
}

#[tokio::test]
async fn a_broken_download_goes_on_where_it_stopped() {
    let image = TestImage::large();
    let layer = image.layers[0].blob.clone();
    let server = Faulty::serve(image, move |request| {
        (is_blob(&request.path, &layer) && request.range().is_none())
            .then(|| Reply::ok(Body::Cut(layer.clone(), 1_500_000)))
    });
    let test = TestStore::new();
    test.pull(&server.name()).await.unwrap();
    let ranges: Vec<_> = server
        .requests
        .lock()
        .unwrap()
        .iter()
        .filter_map(support::faulty::Request::range)
        .collect();
    assert_eq!(ranges.len(), 1);
    assert!(ranges[0] > 0 && ranges[0] <= 1_500_000, "{ranges:?}");
}

#[tokio::test]
async fn a_layer_whose_download_breaks_often_but_gets_further_is_fetched() {
    let tar = support::Tarball::new().file("f", 0o644, &vec![7; 16 << 20]);
    let image = TestImage::new(vec![Layer::new(&tar.finish(), Packing::Plain)]);
    let layer = image.layers[0].blob.clone();
    let whole = image.clone();
    let server = Faulty::serve(image, move |request| {
        if !is_blob(&request.path, &layer) {
            return None;
        }
        let mut reply = honest(request, &whole);
        if let Body::Bytes(rest) = &reply.body
            && rest.len() > 2_000_000
        {
            reply.body = Body::Cut(rest.clone(), 2_000_000);
        }
        Some(reply)
    });
    TestStore::new().pull(&server.name()).await.unwrap();
    let seen = server.requests.lock().unwrap();
    assert!(seen.iter().filter_map(|request| request.range()).count() > 5);
}

#[tokio::test]
async fn a_layer_whose_download_never_gets_further_is_given_up() {
    let image = TestImage::large();
    let layer = image.layers[0].blob.clone();
    let asked = layer.clone();
    let server = Faulty::serve(image, move |request| {
        is_blob(&request.path, &layer).then(|| Reply::ok(Body::Cut(layer.clone(), 1_500_000)))
    });
    let message = refused(&server, &TestStore::new()).await;
    assert!(message.contains("broke off the transfer"), "{message}");
    let paths = server.paths();
    assert_eq!(paths.iter().filter(|path| is_blob(path, &asked)).count(), 5);
}

#[tokio::test]
async fn a_server_that_cannot_resume_begins_anew() {
    let image = TestImage::large();
    let layer = image.layers[0].blob.clone();
    let requests = AtomicUsize::new(0);
    let server = Faulty::serve(image, move |request| {
        if !is_blob(&request.path, &layer) {
            return None;
        }
        Some(Reply::ok(match requests.fetch_add(1, Ordering::SeqCst) {
            0 => Body::Cut(layer.clone(), 1_500_000),
            _ => Body::Bytes(layer.clone()),
        }))
    });
    TestStore::new().pull(&server.name()).await.unwrap();
}

#[tokio::test]
async fn a_server_that_resumes_elsewhere_is_refused() {
    let image = TestImage::large();
    let layer = image.layers[0].blob.clone();
    let server = Faulty::serve(image, move |request| {
        if !is_blob(&request.path, &layer) {
            return None;
        }
        let part = Reply {
            status: 206,
            headers: Vec::new(),
            body: Body::Bytes(layer.clone()),
        };
        Some(match request.range() {
            None => Reply::ok(Body::Cut(layer.clone(), 1_500_000)),
            Some(_) => part.header(
                "Content-Range",
                format!("bytes 0-{}/{}", layer.len() - 1, layer.len()),
            ),
        })
    });
    let message = refused(&server, &TestStore::new()).await;
    assert!(message.contains("another part of the layer"), "{message}");
}

#[tokio::test]
async fn a_server_that_stalls_is_given_up_and_asked_again() {
    let image = TestImage::large();
    let layer = image.layers[0].blob.clone();
    let server = Faulty::serve(image, move |request| {
        (is_blob(&request.path, &layer) && request.range().is_none())
            .then(|| Reply::ok(Body::Stall(layer.clone(), 1_500_000)))
    });
    let mut registries = registries();
    registries.stall_timeout = Duration::from_secs(2);
    TestStore::new()
        .store
        .pull(&server.name(), &options().registries(registries))
        .await
        .unwrap();
}

#[tokio::test]
async fn tokens_come_from_the_server_that_the_challenge_names_and_bad_ones_are_refused() {
    for (token, good) in [
        (r#"{"token":"t"}"#, true),
        (r#"{"access_token":"t"}"#, true),
        (r#"{"token":"a\nb"}"#, false),
        ("{}", false),
    ] {
        let tokens = Faulty::serve(TestImage::small(), move |_| Some(Reply::new(200, token)));
        let challenge = format!(
            "Bearer realm=\"http://{}/token\",service=\"s\"",
            tokens.host
        );
        let server = Faulty::serve(TestImage::small(), move |request| {
            let known = request
                .headers
                .get("authorization")
                .is_some_and(|header| header == "Bearer t");
            (!known).then(|| Reply::new(401, "").header("WWW-Authenticate", challenge.clone()))
        });
        let test = TestStore::new();
        let pulled = test.pull(&server.name()).await;
        assert_eq!(pulled.is_ok(), good, "{token}");
        assert!(tokens.paths()[0].starts_with("/token?scope=repository%3Aapp%3Apull&service=s"));
        if let Err(error) = pulled {
            assert!(explain(&error).contains("token"), "{}", explain(&error));
        }
    }
}

#[tokio::test]
async fn a_registry_that_redirects_to_another_gets_an_anonymous_token_there() {
    let image = TestImage::small();
    let blob = Digest::of(&image.config).to_string();
    let tokens = Faulty::serve(TestImage::small(), |_| {
        Some(Reply::new(200, r#"{"token":"t"}"#))
    });
    let challenge = format!("Bearer realm=\"http://{}/token\"", tokens.host);
    let storage = Faulty::serve(image.clone(), |_| None);
    let target = storage.host.clone();
    let elsewhere = Faulty::serve(image.clone(), move |request| {
        let header = request.headers.get("authorization");
        if header.is_none_or(|header| header != "Bearer t") {
            return Some(Reply::new(401, "").header("WWW-Authenticate", challenge.clone()));
        }
        let there = format!("http://{target}{}", request.path);
        let moved = request.path.contains(&blob);
        moved.then(|| Reply::new(307, "").header("Location", there))
    });
    let target = elsewhere.host.clone();
    let own = "Basic dTpw";
    let server = Faulty::serve(image, move |request| {
        let header = request.headers.get("authorization");
        Some(if header.is_none_or(|header| header != own) {
            Reply::new(401, "").header("WWW-Authenticate", "Basic realm=\"r\"")
        } else {
            let there = format!("http://{target}{}", request.path);
            Reply::new(307, "").header("Location", there)
        })
    });
    let credentials = podvisor_images::Credentials::Basic {
        user: "u".into(),
        password: "p".into(),
    };
    let options = options().credentials(credentials);
    let test = TestStore::new();
    let pulled = test.store.pull(&server.name(), &options).await;
    pulled.unwrap();
    let headers = |server: &Faulty| -> Vec<_> {
        let seen = server.requests.lock().unwrap();
        let header =
            |request: &support::faulty::Request| request.headers.get("authorization").cloned();
        seen.iter().map(header).collect()
    };
    assert_eq!(headers(&tokens), [None]);
    assert_eq!(tokens.paths(), ["/token?scope=repository%3Aapp%3Apull"]);
    assert_eq!(headers(&storage), [None]);
    let seen = headers(&elsewhere);
    assert!(
        seen.iter().flatten().all(|header| header == "Bearer t"),
        "{seen:?}"
    );
}

#[tokio::test]
async fn only_the_registry_itself_sees_the_credentials() {
    for bearer in [true, false] {
        let thief = Faulty::serve(TestImage::small(), |_| {
            Some(Reply::new(200, r#"{"token":"t"}"#))
        });
        let challenge = match bearer {
            true => format!("Bearer realm=\"http://{}/token\",service=\"s\"", thief.host),
            false => "Basic realm=\"r\"".to_owned(),
        };
        let elsewhere = Faulty::serve(TestImage::small(), move |_| {
            Some(Reply::new(401, "").header("WWW-Authenticate", challenge.clone()))
        });
        let target = elsewhere.host.clone();
        let server = Faulty::serve(TestImage::small(), move |request| {
            let there = format!("http://{target}{}", request.path);
            Some(Reply::new(307, "").header("Location", there))
        });
        let test = TestStore::new();
        let credentials = podvisor_images::Credentials::IdentityToken("secret".into());
        let error = test
            .store
            .pull(&server.name(), &options().credentials(credentials))
            .await
            .unwrap_err();
        assert!(!elsewhere.paths().is_empty(), "{}", explain(&error));
        // An anonymous token is asked for, and nothing else.
        for request in thief.requests.lock().unwrap().iter() {
            assert_eq!(request.method, "GET", "{request:?}");
            assert!(!format!("{request:?}").contains("secret"), "{request:?}");
        }
        assert!(bearer || thief.paths().is_empty(), "{:?}", thief.paths());
        for request in elsewhere.requests.lock().unwrap().iter() {
            assert!(!format!("{request:?}").contains("secret"), "{request:?}");
        }
        assert!(explain(&error).contains("log in"), "{}", explain(&error));
    }
}

#[tokio::test]
async fn a_token_server_may_redirect_and_the_password_stays() {
    let basic = || podvisor_images::Credentials::Basic {
        user: "u".into(),
        password: "p".into(),
    };
    let identity = || podvisor_images::Credentials::IdentityToken("secret".into());
    for (credentials, leaves, good) in [
        (basic(), true, true),
        (identity(), false, true),
        (identity(), true, false),
    ] {
        let token = r#"{"token":"t"}"#;
        let other = Faulty::serve(TestImage::small(), move |_| Some(Reply::new(200, token)));
        let there = match leaves {
            true => format!("http://{}/new", other.host),
            false => "/token/".to_owned(),
        };
        let tokens = Faulty::serve(TestImage::small(), move |request| {
            let moved = Reply::new(308, "").header("Location", there.clone());
            let arrived = request.path.starts_with("/token/");
            Some(if arrived {
                Reply::new(200, token)
            } else {
                moved
            })
        });
        let challenge = format!("Bearer realm=\"http://{}/token\"", tokens.host);
        let server = Faulty::serve(TestImage::small(), move |request| {
            let header = request.headers.get("authorization");
            header
                .is_none_or(|header| header != "Bearer t")
                .then(|| Reply::new(401, "").header("WWW-Authenticate", challenge.clone()))
        });
        let options = options().credentials(credentials);
        let pulled = TestStore::new().store.pull(&server.name(), &options).await;
        match pulled {
            Ok(_) => assert!(good),
            Err(error) => {
                let message = explain(&error);
                assert!(
                    !good && message.contains("not sent to another"),
                    "{message}"
                );
            }
        }
        for request in other.requests.lock().unwrap().iter() {
            assert!(good, "{request:?}");
            assert_eq!(request.headers.get("authorization"), None);
        }
    }
}

#[tokio::test]
async fn who_may_not_pull_is_told_to_log_in() {
    let server = Faulty::serve(TestImage::small(), |_| {
        Some(Reply::new(401, "").header("WWW-Authenticate", "Basic realm=\"r\""))
    });
    let message = refused(&server, &TestStore::new()).await;
    assert!(message.contains("docker login"), "{message}");
    assert_eq!(server.paths().len(), 1);
}

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
            json!({"schemaVersion": 2, "manifests": [{"mediaType": "m", "digest": Digest::of(b""), "size": 1,
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

#[tokio::test]
async fn a_pull_that_is_given_up_leaves_nothing_in_the_making() {
    let image = TestImage::large();
    let layer = image.layers[0].blob.clone();
    let server = Faulty::serve(image, move |request| {
        is_blob(&request.path, &layer).then(|| Reply::ok(Body::Stall(layer.clone(), 1_500_000)))
    });
    let test = TestStore::new();
    let (events, mut received) = tokio::sync::mpsc::unbounded_channel();
    let options = options().events(events);
    let name = server.name();
    let mut pull = Box::pin(test.store.pull(&name, &options));
    loop {
        tokio::select! {
            _ = &mut pull => panic!("the layer never comes"),
            event = received.recv() => {
                if matches!(event, Some(PullEvent::LayerBytes { .. })) { break }
            }
        }
    }
    drop(pull);
    // The threads of the pull end at their next step; the store can be used for the next pull
    // immediately.
    let again = Faulty::serve(TestImage::small(), |_| None);
    test.pull(&again.name()).await.unwrap();
    let reopened = Store::open_with(test.dir.path(), StoreOptions::default()).unwrap();
    assert_eq!(reopened.list().unwrap().len(), 1);
    assert!(
        test.files().iter().all(|file| !file.starts_with("tmp/")),
        "{:?}",
        test.files()
    );
}
