//! Registries and mirrors as configured by a directory of settings.

mod support;

use std::path::Path;

use podvisor_images::{
    Digest, Error, HostsError, PullEvent, PullOptions, RegistryConfig, RegistryError, RegistryHost,
};
use support::faulty::honest;
use support::{Body, Faulty, Reply, TestImage, TestStore, explain, options, registries};

fn directory(files: &[(&str, String)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let path = dir.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    dir
}

fn with(dir: &Path) -> Result<PullOptions, HostsError> {
    let config: RegistryConfig = registries().hosts_directory(dir)?;
    Ok(options().registries(config))
}

#[tokio::test]
async fn a_registry_is_found_where_the_directory_says() {
    let server = Faulty::serve(TestImage::small(), |_| None);
    let toml = format!("server = \"http://{}\"", server.host);
    let dir = directory(&[("registry.example/hosts.toml", toml)]);
    let test = TestStore::new();
    let image = test
        .store
        .pull("registry.example/app:v1", &with(dir.path()).unwrap())
        .await
        .unwrap();
    // It keeps the name by which it was requested.
    assert_eq!(image.tags(), ["registry.example/app:v1"]);
    // Another host is told whose content is asked for, the registry itself is not.
    assert_eq!(
        server.paths()[0],
        "/v2/app/manifests/v1?ns=registry.example"
    );
    let direct = Faulty::serve(TestImage::small(), |_| None);
    let toml = format!("server = \"http://{}\"", direct.host);
    let dir = directory(&[(&format!("{}/hosts.toml", direct.host), toml)]);
    let options = with(dir.path()).unwrap();
    test.store.pull(&direct.name(), &options).await.unwrap();
    assert_eq!(direct.paths()[0], "/v2/app/manifests/v1");
}

#[tokio::test]
async fn a_registry_is_asked_as_its_own_table_says_with_its_credentials() {
    let server = Faulty::serve(TestImage::small(), |request| {
        let header = request.headers.get("authorization");
        header
            .is_none_or(|header| header != "Basic dTpw")
            .then(|| Reply::new(401, "").header("WWW-Authenticate", "Basic realm=\"r\""))
    });
    let toml = format!(
        "server = \"https://{0}\"\n[host.\"http://{0}\"]\ncapabilities = [\"pull\", \"resolve\"]",
        server.host
    );
    let dir = directory(&[(&format!("{}/hosts.toml", server.host), toml)]);
    let credentials = podvisor_images::Credentials::Basic {
        user: "u".into(),
        password: "p".into(),
    };
    let options = with(dir.path()).unwrap().credentials(credentials);
    let test = TestStore::new();
    test.store.pull(&server.name(), &options).await.unwrap();
}

#[tokio::test]
async fn mirrors_below_a_path_serve_every_registry() {
    let image = TestImage::small();
    let mirror = Faulty::serve(image.clone(), move |request| {
        let mut request = request.clone();
        request.path = match request.path.strip_prefix("/v2/proxy") {
            Some(path) => format!("/v2{path}"),
            None => return Some(Reply::new(500, "not below the path")),
        };
        Some(honest(&request, &image))
    });
    let toml = format!(
        "[host.\"http://{}/v2/proxy\"]\noverride_path = true",
        mirror.host
    );
    let dir = directory(&[("_default/hosts.toml", toml)]);
    let test = TestStore::new();
    test.store
        .pull("nowhere.invalid/app:v1", &with(dir.path()).unwrap())
        .await
        .unwrap();
    assert!(
        mirror
            .paths()
            .iter()
            .all(|path| path.contains("ns=nowhere.invalid")),
        "{:?}",
        mirror.paths()
    );
}

#[tokio::test]
async fn a_mirror_that_may_only_serve_digests_is_not_asked_for_tags() {
    let image = TestImage::small();
    let mirror = Faulty::serve(image.clone(), |_| None);
    let registry = Faulty::serve(image, |_| None);
    let toml = format!(
        "server = \"http://{}\"\n[host.\"http://{}\"]\ncapabilities = [\"pull\"]",
        registry.host, mirror.host
    );
    let dir = directory(&[("registry.example/hosts.toml", toml)]);
    let test = TestStore::new();
    test.store
        .pull("registry.example/app:v1", &with(dir.path()).unwrap())
        .await
        .unwrap();
    let kind = |server: &Faulty, kind: &str| {
        server
            .paths()
            .iter()
            .filter(|path| path.contains(kind))
            .count()
    };
    assert_eq!(
        (kind(&mirror, "/manifests/"), kind(&mirror, "/blobs/")),
        (0, 3)
    );
    assert_eq!(
        (kind(&registry, "/manifests/"), kind(&registry, "/blobs/")),
        (1, 0)
    );
}

#[tokio::test]
async fn a_mirror_is_asked_first_and_a_bad_one_passed_over() {
    let image = TestImage::small();
    let good = Faulty::serve(image.clone(), |_| None);
    let lying = Faulty::serve(image.clone(), |request| {
        request
            .path
            .contains("/blobs/")
            .then(|| Reply::new(200, "forged"))
    });
    let registry = Faulty::serve(image, |_| None);
    for (mirror, asked) in [(&good, 0), (&lying, 3)] {
        registry.requests.lock().unwrap().clear();
        let host = RegistryHost::default().mirror(mirror.host.clone());
        let registries = registries().host(registry.host.clone(), host);
        let test = TestStore::new();
        test.store
            .pull(&registry.name(), &options().registries(registries))
            .await
            .unwrap();
        assert!(mirror.paths()[0].contains("ns="));
        assert_eq!(registry.paths().len(), asked);
    }
}

#[tokio::test]
async fn a_mirror_whose_answer_to_a_tag_is_of_no_use_is_passed_over() {
    let other_platform = r#"{"schemaVersion":2,"manifests":[{"mediaType":"m","size":1,
        "digest":"sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "platform":{"os":"linux","architecture":"arm64"}}]}"#;
    let image = TestImage::small();
    for (answer, words) in [
        ("<html>log in</html>", "not valid"),
        (r#"{"schemaVersion":1,"name":"app"}"#, "schema version 1"),
        (r#"{"schemaVersion":2,"mediaType":"t"}"#, "type \"t\""),
        (other_platform, "linux/arm64"),
    ] {
        let bad = || {
            Faulty::serve(TestImage::small(), move |request| {
                let asked = request.path.contains("/manifests/v1");
                asked.then(|| Reply::new(200, answer).header("Content-Type", "text/html"))
            })
        };
        let mirror = bad();
        let registry = Faulty::serve(image.clone(), |_| None);
        let host = RegistryHost::default().mirror(mirror.host.clone());
        let config = registries().host(registry.host.clone(), host);
        let test = TestStore::new();
        let options = options().registries(config);
        let pulled = test.store.pull(&registry.name(), &options).await;
        assert_eq!(pulled.expect(words).id(), image.id());
        assert_eq!(mirror.paths().len(), 4, "the tag and three blobs");

        // The registry itself is the last that is asked, and its answer counts.
        let error = TestStore::new().pull(&bad().name()).await.unwrap_err();
        let manifest = matches!(error, Error::Registry(RegistryError::Manifest { .. }));
        assert!(manifest && explain(&error).contains(words), "{error:?}");
    }
}

#[tokio::test]
async fn a_mirror_that_is_not_there_is_asked_once() {
    let free = std::net::TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0)).unwrap();
    let gone = free.local_addr().unwrap().to_string();
    drop(free);
    let registry = Faulty::serve(TestImage::small(), |_| None);
    let host = RegistryHost::default().mirror(gone);
    let registries = registries().host(registry.host.clone(), host);
    let (events, mut received) = tokio::sync::mpsc::unbounded_channel();
    let options = options().registries(registries).events(events);
    let test = TestStore::new();
    test.store.pull(&registry.name(), &options).await.unwrap();
    while let Ok(event) = received.try_recv() {
        assert!(!matches!(event, PullEvent::Retrying { .. }), "{event:?}");
    }
}

#[tokio::test]
async fn what_a_mirror_sent_of_a_layer_is_not_added_to() {
    let image = TestImage::large();
    let layer = image.layers[0].blob.clone();
    let mut damaged = layer.clone();
    damaged[1_000_000] ^= 1;
    let name = Digest::of(&layer).to_string();
    let mirror = Faulty::serve(image.clone(), move |request| {
        request.path.contains(&name).then(|| match request.range() {
            None => Reply::ok(Body::Cut(damaged.clone(), 1_500_000)),
            Some(_) => Reply::new(500, ""),
        })
    });
    let registry = Faulty::serve(image, |_| None);
    let host = RegistryHost::default().mirror(mirror.host.clone());
    let registries = registries().host(registry.host.clone(), host);
    let test = TestStore::new();
    test.store
        .pull(&registry.name(), &options().registries(registries))
        .await
        .unwrap();
}
