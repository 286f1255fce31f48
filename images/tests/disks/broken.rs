//! Downloads of disk images that break off, stall or come from a file that has changed.

use super::*;

#[tokio::test]
async fn a_broken_download_goes_on_where_it_stopped() {
    let raw = raw();
    for bytes in [raw.clone(), qcow2(&raw, &[])] {
        let cut = bytes.len() / 2 + 77;
        let server = serve(bytes.clone(), move |request, bytes| {
            Some(Reply {
                body: Body::Cut(bytes.to_vec(), cut),
                ..file(request, bytes)
            })
        });
        let test = TestStore::new();
        let (events, mut received) = tokio::sync::mpsc::unbounded_channel();
        let disk = test
            .store
            .pull_disk(&url(&server), None, &options().events(events))
            .await
            .unwrap();
        assert!(content(&disk) == raw);
        let ranges: Vec<_> = server
            .requests
            .lock()
            .unwrap()
            .iter()
            .map(Request::range)
            .collect();
        assert_eq!(ranges.len(), 2);
        // Data in transit when the connection broke may be lost.
        assert!(ranges[0].is_none() && ranges[1].is_some_and(|from| from > 0 && from <= cut));
        let mut last = 0;
        let mut retried = false;
        while let Some(event) = received.recv().await {
            match event {
                PullEvent::DiskBytes { done, total } => {
                    assert!(done > last && total == Some(bytes.len() as u64) || retried);
                    last = done;
                }
                PullEvent::Retrying { .. } => retried = true,
                PullEvent::Done { new, .. } => assert!(new),
                _ => {}
            }
        }
        assert!(retried);
        assert_eq!(last, bytes.len() as u64);
    }
}

#[tokio::test]
async fn without_ranges_or_tags_a_broken_download_begins_again() {
    let bytes = qcow2(&raw(), &[]);
    // No ranges: the whole file is sent. No tag: it is requested from the beginning.
    for tag in [true, false] {
        let count = AtomicUsize::new(0);
        let served = bytes.clone();
        let server = Faulty::serve(TestImage::small(), move |_| {
            let reply = match count.fetch_add(1, Ordering::SeqCst) {
                0 => Reply::ok(Body::Cut(served.clone(), served.len() / 2)),
                _ => Reply::new(200, served.clone()),
            };
            Some(if tag {
                reply.header("ETag", "\"x\"")
            } else {
                reply
            })
        });
        let test = TestStore::new();
        assert!(content(&pull(&test, &server).await.unwrap()) == raw());
        let ranges: Vec<_> = server
            .requests
            .lock()
            .unwrap()
            .iter()
            .map(|request| request.range().is_some())
            .collect();
        assert_eq!(ranges, [false, tag]);
    }
}

#[tokio::test]
async fn the_rest_of_another_file_is_refused() {
    let bytes = vec![5; 3 << 20];
    type Lie = fn(usize) -> Reply;
    let lies: [(Lie, &str); 3] = [
        (
            |from| {
                Reply::new(206, vec![6; 100])
                    .header("ETag", "\"y\"")
                    .header(
                        "Content-Range",
                        format!("bytes {from}-{}/{}", from + 99, from + 100),
                    )
            },
            "a part of another file than before",
        ),
        (
            |from| {
                Reply::new(206, vec![6; 100]).header(
                    "Content-Range",
                    format!("bytes {}-{}/{}", from + 1, from + 100, 3 << 20),
                )
            },
            "another part of the file than was asked for",
        ),
        (
            |_| Reply::new(206, vec![6; 100]),
            "another part of the file than was asked for",
        ),
    ];
    for (lie, words) in lies {
        let served = bytes.clone();
        let server = Faulty::serve(TestImage::small(), move |request| {
            Some(match request.range() {
                Some(from) => lie(from),
                None => Reply::ok(Body::Cut(served.clone(), 2 << 20)).header("ETag", "\"x\""),
            })
        });
        let message = refused(&server, None).await;
        assert!(message.contains(words), "{message}");
    }
    // A file that has become shorter is fetched again.
    let (long, short) = (bytes, vec![6; 1 << 20]);
    let server = serve(short.clone(), move |_, _| {
        Some(Reply::ok(Body::Cut(long.clone(), 2 << 20)).header("Last-Modified", "x"))
    });
    assert!(content(&pull(&TestStore::new(), &server).await.unwrap()) == short);
}

#[tokio::test]
async fn a_server_that_stalls_is_given_up_and_asked_again() {
    let bytes = raw();
    let server = serve(bytes.clone(), |request, bytes| {
        Some(Reply {
            body: Body::Stall(bytes.to_vec(), 1 << 20),
            ..file(request, bytes)
        })
    });
    let mut registries = registries();
    registries.stall_timeout = Duration::from_secs(2);
    let test = TestStore::new();
    let options = options().registries(registries);
    let disk = test
        .store
        .pull_disk(&url(&server), None, &options)
        .await
        .unwrap();
    assert!(content(&disk) == bytes);
    // More often if the machine itself stalls.
    assert!(server.paths().len() >= 2);
}

#[tokio::test]
async fn a_server_that_never_gets_further_is_given_up() {
    let server = Faulty::serve(TestImage::small(), |_| {
        Some(Reply::ok(Body::Cut(vec![1; 1000], 10)).header("ETag", "\"x\""))
    });
    let message = refused(&server, None).await;
    assert!(
        message.contains("answered with") || message.contains("broke off"),
        "{message}"
    );
    let server = Faulty::serve(TestImage::small(), |_| Some(Reply::new(503, "")));
    let message = refused(&server, None).await;
    assert!(
        message.contains("the server answered 503 for http://"),
        "{message}"
    );
    assert_eq!(server.paths().len(), 5);
}
