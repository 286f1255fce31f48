//! Pulls of the same content from several registries: they share the work, and a registry that
//! sends next to nothing holds up only those who pull from it. What the store has is given to those
//! who know the digests of all of it.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use podvisor_images::{Digest, Image, Prune, PullEvent, PullOptions, Store};
use serde_json::Value;
use support::faulty::honest;
use support::image::{Layer, Packing};
use support::{Body, Faulty, Reply, Tarball, TestImage, TestStore, explain, options};
use tokio::task::JoinHandle;

/// Far more than a pull takes here, and less than a test may take.
const LONG: Duration = Duration::from_secs(60);

fn waiting(time: Duration) -> PullOptions {
    let mut options = options();
    options.other_registry_wait = time;
    options
}

fn is_blob(path: &str, blob: &[u8]) -> bool {
    path.ends_with(&Digest::of(blob).to_string())
}

/// A registry that sends all but the end of the image's layers, and the rest never.
fn slow(image: &TestImage) -> Faulty {
    let layers: Vec<_> = image
        .layers
        .iter()
        .map(|layer| layer.blob.clone())
        .collect();
    Faulty::serve(image.clone(), move |request| {
        let layer = layers.iter().find(|layer| is_blob(&request.path, layer))?;
        Some(Reply::ok(Body::Stall(layer.clone(), layer.len() - 1)))
    })
}

/// How often a blob was asked for.
fn requests(server: &Faulty, blob: &[u8]) -> usize {
    let paths = server.paths();
    paths.iter().filter(|path| is_blob(path, blob)).count()
}

/// Waits until the condition holds; other tasks run meanwhile.
async fn eventually(condition: impl Fn() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < LONG, "it does not come to that");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn pull(
    store: &Store,
    server: &Faulty,
    options: PullOptions,
) -> JoinHandle<podvisor_images::Result<Image>> {
    let (store, name) = (store.clone(), server.name());
    tokio::spawn(async move { store.pull(&name, &options).await })
}

async fn in_time<T>(work: impl Future<Output = T>) -> T {
    let done = tokio::time::timeout(LONG, work).await;
    done.expect("nobody is held up")
}

/// Pulls `mine` from a good registry while another one sends the layers of `theirs`, or nothing of
/// them, to the same process and to another one.
async fn is_not_held_up(mine: &TestImage, theirs: &TestImage) {
    let (good, bad) = (Faulty::serve(mine.clone(), |_| None), slow(theirs));
    let test = TestStore::new();
    let other = Store::open(test.dir.path()).unwrap();
    let mut pulls = Vec::new();
    for (at, store) in [&test.store, &other].into_iter().enumerate() {
        pulls.push(pull(store, &bad, options()));
        let first = theirs.layers[0].blob.clone();
        eventually(|| at > 0 || requests(&bad, &first) > 0).await;
    }
    let wait = Duration::from_millis(100);
    let pulled = in_time(pull(&test.store, &good, waiting(wait))).await;
    assert_eq!(pulled.unwrap().unwrap().id(), mine.id());
    for pull in pulls {
        pull.abort();
        let _ = pull.await;
    }
    let list = test.store.list().unwrap();
    assert!(list.iter().any(|image| image.id() == mine.id()), "{list:?}");
    let images = list.len();
    drop(other);
    eventually(|| !test.files().iter().any(|file| file.starts_with("tmp/"))).await;
    test.store.prune(&Prune::default()).unwrap();
    // A manifest, a configuration and a root file system, and the layers.
    let files = images * 3 + mine.layers.len();
    assert_eq!(test.files().len(), files, "{:?}", test.files());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registry_that_sends_a_layer_of_another_s_image_slowly_holds_up_nobody() {
    let image = TestImage::small();
    is_not_held_up(&image, &image).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registry_that_names_the_configuration_of_another_s_image_holds_up_nobody() {
    let image = TestImage::small();
    is_not_held_up(&image, &with_other_layers(&image)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registry_that_sends_another_s_documents_as_layers_holds_up_nobody() {
    let image = TestImage::small();
    let layer = |blob: &[u8]| Layer::new(blob, Packing::Plain);
    let forged = TestImage::new(vec![layer(&image.config), layer(&image.manifest)]);
    is_not_held_up(&image, &forged).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_another_registry_sent_meanwhile_ends_a_slow_download() {
    let image = TestImage::small();
    let (good, bad) = (Faulty::serve(image.clone(), |_| None), slow(&image));
    let test = TestStore::new();
    let held = pull(&test.store, &bad, options());
    let layers: Vec<_> = image.layers.iter().map(|layer| &layer.blob).collect();
    eventually(|| layers.iter().all(|layer| requests(&bad, layer) > 0)).await;
    // Somebody with much patience is told as well.
    let patient = Faulty::serve(image.clone(), |_| None);
    let waits = pull(&test.store, &patient, waiting(LONG * 10));
    eventually(|| patient.paths().len() > 1).await;
    let pulled = in_time(pull(&test.store, &good, waiting(Duration::ZERO))).await;
    for pull in [held, waits] {
        let other = in_time(pull).await.unwrap().unwrap();
        assert_eq!(other.id(), pulled.as_ref().unwrap().as_ref().unwrap().id());
    }
    assert_eq!(
        layers
            .iter()
            .map(|layer| requests(&patient, layer))
            .sum::<usize>(),
        0
    );
    assert_eq!(test.store.list().unwrap()[0].tags().len(), 3);
    // Two layers, two documents, and the root file system.
    assert_eq!(test.files().len(), 5, "{:?}", test.files());
}

/// Two images on one base, and a registry that sends the base when it is told to.
fn two_on_one_base(go_on: &Arc<AtomicBool>) -> ([TestImage; 2], Faulty) {
    let base = Tarball::new().file("base", 0o644, &[7; 5000]).finish();
    let base = Layer::new(&base, Packing::Gzip);
    let images = ["a", "b"].map(|name| {
        let own = Tarball::new().file(name, 0o644, b"own").finish();
        TestImage::new(vec![base.clone(), Layer::new(&own, Packing::Plain)])
    });
    let (second, go_on) = (images[1].clone(), Arc::clone(go_on));
    let server = Faulty::serve(images[0].clone(), move |request| {
        if is_blob(&request.path, &base.blob) {
            while !go_on.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        let reply = honest(request, &second);
        (request.path.ends_with("v2") || reply.status == 200 && request.path.contains("/blobs/"))
            .then_some(reply)
    });
    (images, server)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_is_awaited_from_the_same_registry_for_as_long_as_it_takes() {
    let go_on = Arc::new(AtomicBool::new(false));
    let (images, server) = two_on_one_base(&go_on);
    let base = images[0].layers[0].blob.clone();
    let test = TestStore::new();
    let first = pull(&test.store, &server, options());
    eventually(|| requests(&server, &base) > 0).await;
    let (events, mut received) = tokio::sync::mpsc::unbounded_channel();
    let options = waiting(Duration::ZERO).events(events);
    let (store, name) = (test.store.clone(), server.name().replace("v1", "v2"));
    let second = tokio::spawn(async move { store.pull(&name, &options).await });
    while !matches!(
        in_time(received.recv()).await,
        Some(PullEvent::LayerWaiting { .. })
    ) {}
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!second.is_finished());
    go_on.store(true, Ordering::Relaxed);
    for (pull, image) in [first, second].into_iter().zip(&images) {
        assert_eq!(in_time(pull).await.unwrap().unwrap().id(), image.id());
    }
    assert_eq!(requests(&server, &base), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pull_says_once_that_it_waits_for_another_one_of_the_image() {
    let go_on = Arc::new(AtomicBool::new(false));
    let (images, server) = two_on_one_base(&go_on);
    let base = images[0].layers[0].blob.clone();
    let test = TestStore::new();
    let first = pull(&test.store, &server, options());
    eventually(|| requests(&server, &base) > 0).await;
    // As another process has it, and this one.
    for store in [Store::open(test.dir.path()).unwrap(), test.store.clone()] {
        let (events, mut received) = tokio::sync::mpsc::unbounded_channel();
        let waits = pull(&store, &server, options().events(events));
        while in_time(received.recv()).await != Some(PullEvent::RootfsWaiting) {}
        waits.abort();
    }
    let (events, mut received) = tokio::sync::mpsc::unbounded_channel();
    let store = Store::open(test.dir.path()).unwrap();
    let waits = pull(&store, &server, options().events(events));
    while in_time(received.recv()).await != Some(PullEvent::RootfsWaiting) {}
    go_on.store(true, Ordering::Relaxed);
    for pull in [first, waits] {
        assert_eq!(in_time(pull).await.unwrap().unwrap().id(), images[0].id());
    }
    while let Some(event) = in_time(received.recv()).await {
        assert_ne!(event, PullEvent::RootfsWaiting);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_that_another_registry_sends_in_time_is_shared() {
    let go_on = Arc::new(AtomicBool::new(false));
    let (images, server) = two_on_one_base(&go_on);
    let base = images[0].layers[0].blob.clone();
    let second = Faulty::serve(images[1].clone(), |_| None);
    let test = TestStore::new();
    let first = pull(&test.store, &server, options());
    eventually(|| requests(&server, &base) > 0).await;
    let waits = pull(&test.store, &second, waiting(LONG * 10));
    eventually(|| requests(&second, &images[1].layers[1].blob) > 0).await;
    go_on.store(true, Ordering::Relaxed);
    for pull in [first, waits] {
        in_time(pull).await.unwrap().unwrap();
    }
    assert_eq!(requests(&second, &base), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waited_for_a_download_that_failed_asks_its_own_registry() {
    let go_on = Arc::new(AtomicBool::new(false));
    let image = TestImage::small();
    let bad = Faulty::serve(image.clone(), {
        let go_on = Arc::clone(&go_on);
        move |request| {
            request.path.contains("/blobs/").then(|| {
                while !go_on.load(Ordering::Relaxed) {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Reply::new(404, "{}")
            })
        }
    });
    let good = Faulty::serve(image.clone(), |_| None);
    let test = TestStore::new();
    // The configuration is here, so that the bad registry is asked for layers alone.
    let layout = tempfile::tempdir().unwrap();
    image.write_layout(layout.path(), "x/y:z");
    test.store.load(layout.path(), None, &options()).unwrap();
    let blobs = test.dir.path().join("blobs/sha256");
    for layer in &image.layers {
        std::fs::remove_file(blobs.join(Digest::of(&layer.blob).hex())).unwrap();
    }
    let fails = pull(&test.store, &bad, options());
    let layer = &image.layers[0].blob;
    eventually(|| requests(&bad, layer) > 0).await;
    let waits = pull(&test.store, &good, waiting(LONG * 10));
    eventually(|| good.paths().len() == 1).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(requests(&good, layer), 0);
    go_on.store(true, Ordering::Relaxed);
    assert!(in_time(fails).await.unwrap().is_err());
    assert_eq!(in_time(waits).await.unwrap().unwrap().id(), image.id());
    assert_eq!(requests(&good, layer), 1);
}

/// A registry that has only a manifest.
fn forger(manifest: Vec<u8>) -> Faulty {
    Faulty::serve(TestImage::small(), move |request| {
        Some(match request.path.contains("/manifests/") {
            true => Reply::new(200, manifest.clone()),
            false => Reply::new(404, "{}"),
        })
    })
}

/// The image's manifest with other layers.
fn with_other_layers(image: &TestImage) -> TestImage {
    let config: Value = serde_json::from_slice(&image.config).unwrap();
    let layer = |text: &[u8]| Layer::new(text, Packing::Plain);
    let forged = TestImage::with_config(vec![layer(b"one"), layer(b"two")], config);
    assert_eq!(forged.id(), image.id());
    forged
}

#[tokio::test]
async fn an_image_is_given_to_who_names_the_digests_of_all_its_layers_and_of_its_configuration() {
    let image = TestImage::small();
    let server = Faulty::serve(image.clone(), |_| None);
    let test = TestStore::new();
    test.pull(&server.name()).await.unwrap();
    let files = test.files();
    let forger_of_id = forger(with_other_layers(&image).manifest);
    for _ in 0..2 {
        let refused = test.pull(&forger_of_id.name()).await.unwrap_err();
        assert!(
            explain(&refused).contains("but not its blob"),
            "{}",
            explain(&refused)
        );
        assert_eq!(test.files(), files);
        assert_eq!(test.store.list().unwrap()[0].tags(), [server.name()]);
    }
    // A digest is proof enough, as it is for containerd.
    let knowing = forger(image.manifest.clone());
    let pulled = test.pull(&knowing.name()).await.unwrap();
    assert_eq!(pulled.tags().len(), 2);
}

#[tokio::test]
async fn a_root_file_system_without_a_record_is_given_to_no_manifest_with_other_layers() {
    let image = TestImage::small();
    let server = Faulty::serve(image.clone(), |_| None);
    let test = TestStore::new();
    test.pull(&server.name()).await.unwrap();
    // As if the pull had been killed before the image had its record.
    std::fs::remove_file(test.dir.path().join("store.redb")).unwrap();
    let forged = with_other_layers(&image);
    for layer in &forged.layers {
        let name = Digest::of(&layer.blob).hex();
        let path = test.dir.path().join("blobs/sha256").join(name);
        std::fs::write(path, &layer.blob).unwrap();
    }
    let refused = test.pull(&forger(forged.manifest).name()).await;
    let message = explain(&refused.unwrap_err());
    assert!(message.contains("cannot be unpacked"), "{message}");
    let pulled = test.pull(&server.name()).await.unwrap();
    assert_eq!(pulled.manifest_digest(), image.digest());
    assert!(pulled.open_rootfs().is_ok());
}

#[tokio::test]
async fn layers_that_are_packed_otherwise_are_fetched_once_to_verify_them() {
    let images = [Packing::Gzip, Packing::Plain].map(|packing| TestImage::packed([packing; 2]));
    let servers = images.clone().map(|image| Faulty::serve(image, |_| None));
    let test = TestStore::new();
    for server in &servers {
        test.pull(&server.name()).await.unwrap();
    }
    let files = test.files();
    for _ in 0..2 {
        let image = test.pull(&servers[1].name()).await.unwrap();
        assert_eq!(image.manifest_digest(), images[0].digest());
        assert_eq!(image.tags().len(), 2);
    }
    for layer in &images[1].layers {
        assert_eq!(requests(&servers[1], &layer.blob), 1);
        let blob = format!("blobs/sha256/{}", Digest::of(&layer.blob).hex());
        assert!(!files.contains(&blob), "{files:?}");
    }
}
