//! Images that are pulled, shown and removed.

use super::*;

#[tokio::test]
async fn images_are_pulled_shown_and_removed() {
    let (daemon, _guest) = Daemon::without_guests(&[]);
    let image = TestImage::busybox(json!({"User": "1000:50", "Cmd": ["true"]}));
    let id = image.config.digest.clone();
    let registry = Registry::serve(&[("test/busybox", image)]);
    let name = registry.name("test/busybox");
    let mut images = daemon.images().await;

    let request = |name: &str| ImageStatusRequest {
        image: spec(name),
        verbose: true,
    };
    let status = images
        .image_status(request(&name))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(status.image, None);

    let pull = || PullImageRequest {
        image: spec(&name),
        ..PullImageRequest::default()
    };
    let (mut one, mut two) = (images.clone(), images.clone());
    let (one, two) = tokio::join!(one.pull_image(pull()), two.pull_image(pull()));
    assert_eq!(one.unwrap().into_inner().image_ref, id);
    assert_eq!(two.unwrap().into_inner().image_ref, id);

    for known in [name.as_str(), id.as_str()] {
        let status = images
            .image_status(request(known))
            .await
            .unwrap()
            .into_inner();
        let image = status.image.unwrap();
        assert_eq!(image.id, id);
        assert_eq!(image.repo_tags, std::slice::from_ref(&name));
        assert_eq!(image.repo_digests.len(), 1);
        assert_eq!(image.uid, Some(Int64Value { value: 1000 }));
        assert!(image.size > 0);
        assert!(status.info["info"].contains("imageSpec"));
    }
    let listed = images
        .list_images(ListImagesRequest::default())
        .await
        .unwrap()
        .into_inner();
    assert_eq!(listed.images.len(), 1);
    let usage = images
        .image_fs_info(ImageFsInfoRequest {})
        .await
        .unwrap()
        .into_inner();
    let used = usage.image_filesystems[0]
        .used_bytes
        .as_ref()
        .unwrap()
        .value;
    assert!(used > 0);

    let remove = || RemoveImageRequest { image: spec(&name) };
    images.remove_image(remove()).await.unwrap();
    images.remove_image(remove()).await.unwrap();
    let listed = images
        .list_images(ListImagesRequest::default())
        .await
        .unwrap()
        .into_inner();
    assert!(listed.images.is_empty());

    let bad = images
        .pull_image(PullImageRequest::default())
        .await
        .unwrap_err();
    assert_eq!(bad.code(), Code::InvalidArgument);
    let bad = PullImageRequest {
        image: spec(&registry.name("no/such")),
        ..PullImageRequest::default()
    };
    assert!(images.pull_image(bad).await.is_err());
}

#[tokio::test]
async fn settings_of_registries_are_read_at_each_pull() {
    let (mut daemon, _guest) = Daemon::without_guests(&[]);
    daemon.end(Signal::TERM);
    let settings = daemon.path("certs.d");
    let host = settings.join("registry.invalid");
    fs::create_dir_all(&host).unwrap();
    fs::write(host.join("hosts.toml"), "server = \"http://127.0.0.1:1\"").unwrap();
    let dir = settings.to_str().unwrap().to_owned();
    daemon.arguments.extend(["--hosts-dir".to_owned(), dir]);
    daemon.start();
    let image = TestImage::busybox(json!({"Cmd": ["true"]}));
    let id = image.config.digest.clone();
    let registry = Registry::serve(&[("test/busybox", image)]);
    let mut images = daemon.images().await;
    let pull = || PullImageRequest {
        image: spec("registry.invalid/test/busybox:1"),
        ..PullImageRequest::default()
    };
    images.pull_image(pull()).await.unwrap_err();
    let toml = format!("server = \"http://{}\"", registry.address());
    fs::write(host.join("hosts.toml"), toml).unwrap();
    let pulled = images.pull_image(pull()).await.unwrap().into_inner();
    assert_eq!(pulled.image_ref, id);
    // Settings that cannot be used leave those before.
    fs::write(host.join("hosts.toml"), "server =").unwrap();
    images.pull_image(pull()).await.unwrap();
}

#[tokio::test]
async fn a_signature_policy_holds_for_pulls_and_is_read_anew() {
    let (mut daemon, _guest) = Daemon::without_guests(&[]);
    daemon.end(Signal::TERM);
    let file = daemon.path("policy.json");
    let path = file.clone();
    let policy = |of_test: &str, registry: &str| {
        let text = json!({
            "default": [{ "type": "reject" }],
            "transports": { "docker": { format!("{registry}/test"): [{ "type": of_test }] } },
        });
        fs::write(&path, text.to_string()).unwrap();
    };
    let image = TestImage::busybox(json!({"Cmd": ["true"]}));
    let id = image.config.digest.clone();
    let registry = Registry::serve(&[("test/busybox", image)]);
    policy("reject", &registry.address().to_string());
    let file = file.to_str().unwrap().to_owned();
    daemon
        .arguments
        .extend(["--signature-policy".to_owned(), file]);
    daemon.start();
    let mut images = daemon.images().await;
    let name = registry.name("test/busybox");
    let pull = || PullImageRequest {
        image: spec(&name),
        ..PullImageRequest::default()
    };
    let refused = async |images: &mut ImageServiceClient<Channel>| {
        let error = images.pull_image(pull()).await.unwrap_err();
        assert_eq!(error.code(), Code::Unknown, "{error}");
        let message = error.message().to_owned();
        assert!(
            message.starts_with("SignatureValidationFailed: "),
            "{message}"
        );
        message
    };
    refused(&mut images).await;
    policy("insecureAcceptAnything", &registry.address().to_string());
    let pulled = images.pull_image(pull()).await.unwrap().into_inner();
    assert_eq!(pulled.image_ref, id);
    // A policy of which nothing is known lets nothing in.
    fs::write(&path, "{").unwrap();
    let message = refused(&mut images).await;
    assert!(message.contains("policy.json"), "{message}");
}
