//! Content that is not what its digest and size say.

use super::*;

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
