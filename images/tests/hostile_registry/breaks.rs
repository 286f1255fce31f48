//! Servers that are overloaded, stall and break off.

use super::*;

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
