//! Signatures of images: created by OpenSSL in cosign's formats, stored in a real registry,
//! required by a policy.

mod support;

use std::process::Command;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use podvisor_images::{
    Digest, Error, Image, PullEvent, PullOptions, PullPolicy, SignatureError, SignaturePolicy,
};
use serde_json::{Value, json};
use support::image::{Layer, Packing};
use support::{Registry, Tarball, TestImage, TestStore, options};

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const PAYLOAD: &str = "application/vnd.dev.cosign.simplesigning.v1+json";
const BUNDLE: &str = "application/vnd.dev.sigstore.bundle.v0.3+json";

/// A key pair that only OpenSSL knows.
struct Key(tempfile::TempDir);

impl Key {
    fn new() -> Self {
        Self::of(&["EC", "-pkeyopt", "ec_paramgen_curve:P-256"])
    }

    fn of(kind: &[&str]) -> Self {
        let key = Self(tempfile::tempdir().unwrap());
        let private = key.file("key");
        openssl(&[&["genpkey", "-out", &private, "-algorithm"], kind].concat());
        openssl(&["pkey", "-in", &private, "-pubout", "-out", &key.file("pub")]);
        key
    }

    fn file(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    /// As `keyData` of a policy.
    fn data(&self) -> String {
        STANDARD.encode(std::fs::read(self.file("pub")).unwrap())
    }

    /// In base64.
    fn sign(&self, message: &[u8]) -> String {
        let file = self.file("message");
        std::fs::write(&file, message).unwrap();
        STANDARD.encode(openssl(&[
            "dgst",
            "-sha256",
            "-sign",
            &self.file("key"),
            &file,
        ]))
    }
}

fn openssl(arguments: &[&str]) -> Vec<u8> {
    let out = Command::new("openssl")
        .args(arguments)
        .output()
        .expect("openssl is needed: apt-get install openssl");
    assert!(
        out.status.success(),
        "{}",
        String::from_utf8_lossy(&out.stderr)
    );
    out.stdout
}

fn another_image() -> TestImage {
    let tar = Tarball::new().file("other", 0o644, b"other\n").finish();
    TestImage::new(vec![Layer::new(&tar, Packing::Gzip)])
}

/// Pushes with a signature.
async fn push_signed(registry: &Registry, repository: &str, image: &TestImage, key: &Key) {
    registry.push(repository, "v1", image).await;
    let name = registry.name(&format!("{repository}:v1"));
    sign(registry, repository, key, image.digest(), &name).await;
}

/// Pushes blobs as layers of an artifact under a tag.
async fn push_artifact(
    registry: &Registry,
    repository: &str,
    tag: &str,
    layers: &[(&[u8], &str, Value)],
) -> Digest {
    registry.push_blob(repository, b"{}").await;
    let mut entries = Vec::new();
    for (blob, media_type, annotations) in layers {
        registry.push_blob(repository, blob).await;
        entries.push(json!({
            "mediaType": media_type, "digest": Digest::of(blob), "size": blob.len(),
            "annotations": annotations,
        }));
    }
    let manifest = json!({
        "schemaVersion": 2, "mediaType": MANIFEST, "artifactType": BUNDLE,
        "config": {"mediaType": "application/vnd.oci.empty.v1+json", "digest": Digest::of(b"{}"), "size": 2},
        "layers": entries,
    });
    let manifest = manifest.to_string().into_bytes();
    registry
        .push_manifest(repository, tag, MANIFEST, &manifest)
        .await;
    Digest::of(&manifest)
}

/// Stores what `cosign sign --key` stores in a registry.
async fn sign(registry: &Registry, repository: &str, key: &Key, manifest: Digest, name: &str) {
    let payload = json!({"critical": {
        "identity": {"docker-reference": name},
        "image": {"docker-manifest-digest": manifest},
        "type": "cosign container image signature",
    }, "optional": null})
    .to_string()
    .into_bytes();
    let signature = key.sign(&payload);
    let annotations = json!({"dev.cosignproject.cosign/signature": signature});
    let tag = format!("sha256-{}.sig", manifest.hex());
    push_artifact(
        registry,
        repository,
        &tag,
        &[(&payload, PAYLOAD, annotations)],
    )
    .await;
}

/// Stores what newer versions store: a bundle among the referrers.
async fn sign_by_bundle(
    registry: &Registry,
    repository: &str,
    key: &Key,
    manifest: Digest,
    predicate: &str,
) {
    let payload = json!({
        "_type": "https://in-toto.io/Statement/v1", "predicateType": predicate, "predicate": {},
        "subject": [{"digest": {"sha256": manifest.hex()}}],
    })
    .to_string();
    let kind = "application/vnd.in-toto+json";
    let signed = format!("DSSEv1 {} {kind} {} {payload}", kind.len(), payload.len());
    let signature = key.sign(signed.as_bytes());
    let bundle = json!({"mediaType": BUNDLE, "dsseEnvelope": {
        "payload": STANDARD.encode(&payload), "payloadType": kind, "signatures": [{"sig": signature}],
    }})
    .to_string()
    .into_bytes();
    let layers: &[(&[u8], _, _)] = &[(&bundle, BUNDLE, json!({}))];
    let artifact = push_artifact(registry, repository, "bundle", layers).await;
    let index = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [
        {"mediaType": MANIFEST, "digest": artifact, "size": 1, "artifactType": BUNDLE},
    ]});
    // The size of an entry is not checked, but the registry requires the entry.
    let tag = format!("sha256-{}", manifest.hex());
    registry
        .push_manifest(repository, &tag, INDEX, index.to_string().as_bytes())
        .await;
}

fn by_key(key: &Key) -> PullOptions {
    options().signatures(Arc::new(SignaturePolicy::keys([key.file("pub")]).unwrap()))
}

fn by_policy(docker: Value) -> PullOptions {
    let policy = json!({"default": [{"type": "reject"}], "transports": {"docker": docker}});
    let policy = SignaturePolicy::parse(policy.to_string().as_bytes()).unwrap();
    options().signatures(Arc::new(policy))
}

fn signed_by(key: &Key) -> Value {
    json!([{"type": "sigstoreSigned", "keyPath": key.file("pub")}])
}

fn refusal(pulled: podvisor_images::Result<Image>) -> SignatureError {
    match pulled {
        Err(Error::Signature(error)) => error,
        other => panic!("not refused for its signature: {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_signed_is_pulled_and_all_else_refused() {
    let registry = Registry::start();
    let (signed, unsigned) = (TestImage::small(), another_image());
    let key = Key::new();
    push_signed(&registry, "team/app", &signed, &key).await;
    registry.push("team/app", "v2", &unsigned).await;
    let test = TestStore::new();

    let theirs = by_key(&Key::new());
    let name = registry.name("team/app:v1");
    let error = refusal(test.store.pull(&name, &theirs).await);
    assert!(
        matches!(error, SignatureError::Untrusted { signatures: 1, .. }),
        "{error:?}"
    );
    let ours = by_key(&key);
    let error = refusal(test.store.pull(&registry.name("team/app:v2"), &ours).await);
    assert!(
        matches!(error, SignatureError::Unsigned { .. }),
        "{error:?}"
    );
    assert_eq!(test.files(), [""; 0], "nothing of what was refused is kept");

    let (events, mut received) = tokio::sync::mpsc::unbounded_channel();
    let image = test.store.pull(&name, &ours.events(events)).await.unwrap();
    assert_eq!(image.id(), signed.id());
    let mut verified = 0;
    while let Ok(event) = received.try_recv() {
        verified += u32::from(matches!(event, PullEvent::Verified { .. }));
    }
    assert_eq!(verified, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_tells_registries_and_repositories_apart() {
    let registry = Registry::start();
    let key = Key::new();
    push_signed(&registry, "team/app", &TestImage::small(), &key).await;
    registry.push("free/app", "v1", &another_image()).await;
    registry.push("team/app", "v2", &another_image()).await;
    let test = TestStore::new();
    let policy = by_policy(json!({
        registry.name("team"): signed_by(&key),
        registry.name("free"): [{"type": "insecureAcceptAnything"}],
    }));
    test.store
        .pull(&registry.name("team/app:v1"), &policy)
        .await
        .unwrap();
    test.store
        .pull(&registry.name("free/app:v1"), &policy)
        .await
        .unwrap();
    let error = refusal(
        test.store
            .pull(&registry.name("team/app:v2"), &policy)
            .await,
    );
    assert!(
        matches!(error, SignatureError::Unsigned { .. }),
        "{error:?}"
    );
    // No registry is asked for an image that the policy forbids by its name.
    let error = refusal(test.store.pull("127.0.0.1:1/app", &policy).await);
    assert!(
        matches!(error, SignatureError::Rejected { .. }),
        "{error:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signature_serves_no_other_name_and_no_other_image() {
    let registry = Registry::start();
    let key = Key::new();
    let (good, bad) = (TestImage::small(), another_image());
    let name = registry.name("app:v1");
    let trusted = |identity: &str| {
        by_policy(json!({"": [{
            "type": "sigstoreSigned", "keyData": key.data(),
            "signedIdentity": {"type": identity},
        }]}))
    };
    // Signed as app:v1, and also served under another name.
    for repository in ["app", "admin"] {
        registry.push(repository, "v1", &good).await;
        sign(&registry, repository, &key, good.digest(), &name).await;
    }
    // A signature of the good image, under the tag of the bad one's.
    registry.push("app", "v2", &bad).await;
    let replayed = json!({"critical": {
        "identity": {"docker-reference": registry.name("app:v2")},
        "image": {"docker-manifest-digest": good.digest()},
        "type": "cosign container image signature",
    }})
    .to_string();
    let signature = key.sign(replayed.as_bytes());
    let annotations = json!({"dev.cosignproject.cosign/signature": signature});
    let tag = format!("sha256-{}.sig", bad.digest().hex());
    let layers: &[(&[u8], _, _)] = &[(replayed.as_bytes(), PAYLOAD, annotations)];
    push_artifact(&registry, "app", &tag, layers).await;

    let test = TestStore::new();
    let exact = trusted("matchRepoDigestOrExact");
    let error = refusal(test.store.pull(&registry.name("admin:v1"), &exact).await);
    let SignatureError::Identity { signed, wanted, .. } = error else {
        panic!("{error:?}");
    };
    assert_eq!(signed, format!("{name:?}"));
    assert_eq!(wanted, registry.name("admin:v1"));
    for policy in [&exact, &trusted("matchDigest")] {
        let error = refusal(test.store.pull(&registry.name("app:v2"), policy).await);
        assert!(
            matches!(error, SignatureError::Untrusted { signatures: 1, .. }),
            "{error:?}"
        );
    }
    test.store.pull(&name, &exact).await.unwrap();
    let by_digest = registry.name(&format!("app@{}", good.digest()));
    test.store.pull(&by_digest, &exact).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn bundles_count_as_signatures_and_other_statements_do_not() {
    let registry = Registry::start();
    let key = Key::new();
    let image = TestImage::small();
    for (repository, predicate) in [
        ("signed", "https://sigstore.dev/cosign/sign/v1"),
        ("attested", "https://spdx.dev/Document"),
    ] {
        registry.push(repository, "v1", &image).await;
        sign_by_bundle(&registry, repository, &key, image.digest(), predicate).await;
    }
    let test = TestStore::new();
    let error = refusal(
        test.store
            .pull(&registry.name("attested:v1"), &by_key(&key))
            .await,
    );
    assert!(
        matches!(error, SignatureError::Untrusted { signatures: 1, .. }),
        "{error:?}"
    );
    test.store
        .pull(&registry.name("signed:v1"), &by_key(&key))
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signed_index_vouches_for_what_it_names() {
    let registry = Registry::start();
    let key = Key::new();
    let image = TestImage::small();
    registry.push("app", "amd64", &image).await;
    let index = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [{
        "mediaType": MANIFEST, "digest": image.digest(), "size": image.manifest.len(),
        "platform": {"os": "linux", "architecture": "amd64"},
    }]})
    .to_string();
    registry
        .push_manifest("app", "v1", INDEX, index.as_bytes())
        .await;
    sign(&registry, "app", &key, Digest::of(index.as_bytes()), "app").await;
    let test = TestStore::new();
    let error = refusal(
        test.store
            .pull(&registry.name("app:amd64"), &by_key(&key))
            .await,
    );
    assert!(
        matches!(error, SignatureError::Unsigned { .. }),
        "{error:?}"
    );
    test.store
        .pull(&registry.name("app:v1"), &by_key(&key))
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_verified_once_is_used_without_its_registry() {
    let registry = Registry::start();
    let key = Key::new();
    push_signed(&registry, "app", &TestImage::small(), &key).await;
    registry.push("app", "v2", &another_image()).await;
    let test = TestStore::new();
    let policy = by_policy(json!({"": signed_by(&key)}));
    let missing = policy.clone().policy(PullPolicy::IfMissing);
    let (signed, unsigned) = (registry.name("app:v1"), registry.name("app:v2"));

    // Pulled without requiring signatures.
    let id = test.pull(&signed).await.unwrap().id();
    test.pull(&unsigned).await.unwrap();
    let rules = policy.signatures.as_deref().unwrap();
    for name in [&signed, &unsigned, &id.to_string()] {
        let error = refusal(test.store.resolve_signed(name, rules));
        assert!(
            matches!(error, SignatureError::Unverified { .. }),
            "{error:?}"
        );
    }
    test.store.pull(&signed, &missing).await.unwrap();
    refusal(test.store.pull(&unsigned, &missing).await);
    // If signatures are not required, none that were known are forgotten.
    test.pull(&signed).await.unwrap();

    drop(registry);
    test.store.pull(&signed, &missing).await.unwrap();
    test.store.resolve_signed(&signed, rules).unwrap();
    test.store.resolve_signed(&id.to_string(), rules).unwrap();
    // The signature is not for this other name.
    test.store.tag(&signed, "127.0.0.1:5000/app:v9").unwrap();
    let error = refusal(test.store.resolve_signed("127.0.0.1:5000/app:v9", rules));
    assert!(
        matches!(error, SignatureError::Identity { .. }),
        "{error:?}"
    );
    let other = by_key(&Key::new());
    let error = refusal(
        test.store
            .resolve_signed(&signed, other.signatures.as_deref().unwrap()),
    );
    assert!(
        matches!(error, SignatureError::Untrusted { .. }),
        "{error:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_of_all_kinds_sign() {
    let registry = Registry::start();
    let test = TestStore::new();
    let kinds: [(&str, &[&str]); 3] = [
        ("p384", &["EC", "-pkeyopt", "ec_paramgen_curve:P-384"]),
        ("rsa", &["RSA", "-pkeyopt", "rsa_keygen_bits:2048"]),
        ("p256", &["EC", "-pkeyopt", "ec_paramgen_curve:P-256"]),
    ];
    for (name, kind) in kinds {
        let key = Key::of(kind);
        push_signed(&registry, name, &TestImage::small(), &key).await;
        let name = registry.name(&format!("{name}:v1"));
        test.store.pull(&name, &by_key(&key)).await.unwrap();
        refusal(test.store.pull(&name, &by_key(&Key::of(kind))).await);
    }
}
