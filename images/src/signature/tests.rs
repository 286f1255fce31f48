use proptest::prelude::*;
use rcgen::{
    KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_ECDSA_P384_SHA384, PKCS_ED25519, SigningKey as _,
};
use serde_json::{Value, json};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use super::error::KeyFault;
use super::key::Key;
use super::scope::{Identity, scopes_of};
use super::*;
use crate::error::parse_reference;
use crate::{Digest, Reference};

fn reference(name: &str) -> Reference {
    parse_reference(name).unwrap()
}

fn key_data(key: &KeyPair) -> String {
    STANDARD.encode(key.public_key_pem())
}

fn signed_by(key: &KeyPair, identity: Value) -> Value {
    json!([{"type": "sigstoreSigned", "keyData": key_data(key), "signedIdentity": identity}])
}

fn policy(docker: Value) -> SignaturePolicy {
    let policy = json!({"default": [{"type": "reject"}], "transports": {"docker": docker}});
    SignaturePolicy::parse(policy.to_string().as_bytes()).unwrap()
}

fn pointer_to(content: &[u8], media_type: &str, signature: Option<&[u8]>) -> Value {
    let mut pointer = json!({
        "mediaType": media_type, "digest": Digest::of(content), "size": content.len(),
    });
    if let Some(signature) = signature {
        pointer["annotations"] =
            json!({"dev.cosignproject.cosign/signature": STANDARD.encode(signature)});
    }
    pointer
}

/// A payload signed by `key`, read back from the manifest of a registry.
fn simple(key: &KeyPair, payload: &Value) -> Attached {
    let payload = payload.to_string().into_bytes();
    let signature = key.sign(&payload).unwrap();
    let media_type = "application/vnd.dev.cosign.simplesigning.v1+json";
    let manifest = json!({"layers": [pointer_to(&payload, media_type, Some(&signature))]});
    let mut found = simple_of(manifest.to_string().as_bytes());
    assert_eq!(found.len(), 1);
    found.remove(0).with(payload)
}

fn payload(manifest: &Digest, name: &str) -> Value {
    json!({"critical": {
        "identity": {"docker-reference": name},
        "image": {"docker-manifest-digest": manifest},
        "type": "cosign container image signature",
    }, "optional": null})
}

fn statement(manifest: &Digest, predicate: &str) -> Value {
    json!({
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": "", "digest": {"sha256": manifest.hex()}}],
        "predicateType": predicate,
        "predicate": {},
    })
}

const SIGN: &str = "https://sigstore.dev/cosign/sign/v1";

fn bundle(key: &KeyPair, statement: &Value) -> Attached {
    let payload = statement.to_string();
    let kind = "application/vnd.in-toto+json";
    let signed = format!("DSSEv1 {} {kind} {} {payload}", kind.len(), payload.len());
    let bundle = json!({
        "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
        "verificationMaterial": {"publicKey": {"hint": "x"}},
        "dsseEnvelope": {
            "payload": STANDARD.encode(&payload), "payloadType": kind,
            "signatures": [{"sig": STANDARD.encode(key.sign(signed.as_bytes()).unwrap())}],
        },
    });
    let bundle = bundle.to_string().into_bytes();
    let layer = pointer_to(
        &bundle,
        "application/vnd.dev.sigstore.bundle.v0.3+json",
        None,
    );
    let manifest = json!({"layers": [layer]}).to_string();
    bundle_of(manifest.as_bytes()).unwrap().with(bundle)
}

#[test]
fn every_kind_of_key_that_cosign_makes_is_understood() {
    let image = reference("app");
    let manifest = Digest::of(b"manifest");
    for algorithm in [
        &PKCS_ECDSA_P256_SHA256,
        &PKCS_ECDSA_P384_SHA384,
        &PKCS_ED25519,
    ] {
        let key = KeyPair::generate_for(algorithm).unwrap();
        let policy = policy(json!({"": signed_by(&key, json!({"type": "matchDigest"}))}));
        for signature in [
            simple(&key, &payload(&manifest, "app")),
            bundle(&key, &statement(&manifest, SIGN)),
        ] {
            let claim = policy.claim(&image, &signature).unwrap();
            assert_eq!(claim.manifest, manifest);
            policy.check(&image, &[claim], 1).unwrap();
        }
        let other = KeyPair::generate_for(algorithm).unwrap();
        let signature = simple(&other, &payload(&manifest, "app"));
        assert_eq!(policy.claim(&image, &signature), None);
    }
}

#[test]
fn what_was_changed_after_signing_counts_for_nothing() {
    let key = KeyPair::generate().unwrap();
    let image = reference("app");
    let manifest = Digest::of(b"manifest");
    let policy = policy(json!({"": signed_by(&key, json!({"type": "matchDigest"}))}));
    let simple = simple(&key, &payload(&manifest, "app"));
    let bundle = bundle(&key, &statement(&manifest, SIGN));
    let forged = Digest::of(b"forged").hex();
    for signature in [simple, bundle] {
        assert!(policy.claim(&image, &signature).is_some());
        let text = String::from_utf8(signature.content().to_vec()).unwrap();
        let inner = STANDARD.encode(statement(&manifest, SIGN).to_string());
        let outer = STANDARD.encode(statement(&Digest::of(b"forged"), SIGN).to_string());
        let changed = text
            .replace(&manifest.hex(), &forged)
            .replace(&inner, &outer);
        assert_ne!(changed, text);
        let signature = signature.with_content(changed.into_bytes());
        assert_eq!(policy.claim(&image, &signature), None);
    }
}

#[test]
fn an_attestation_by_the_same_key_is_no_signature() {
    let key = KeyPair::generate().unwrap();
    let image = reference("app");
    let manifest = Digest::of(b"manifest");
    let policy = policy(json!({"": signed_by(&key, json!({"type": "matchDigest"}))}));
    let bom = bundle(&key, &statement(&manifest, "https://spdx.dev/Document"));
    assert_eq!(policy.claim(&image, &bom), None);
    let mut other = payload(&manifest, "app");
    other["critical"]["type"] = "atomic container signature".into();
    assert_eq!(policy.claim(&image, &simple(&key, &other)), None);
}

#[test]
fn signatures_without_end_and_giant_ones_are_passed_over() {
    let annotations = json!({"dev.cosignproject.cosign/signature": "AAAA"});
    let simple = |size: u64| {
        json!({
            "mediaType": "application/vnd.dev.cosign.simplesigning.v1+json",
            "digest": Digest::of(b""), "size": size, "annotations": annotations,
        })
    };
    let bundle = |size: u64| {
        let kind = "application/vnd.dev.sigstore.bundle.v0.3+json";
        json!({"mediaType": kind, "artifactType": kind, "digest": Digest::of(b""), "size": size})
    };
    let layers = |layers: Vec<Value>| json!({ "layers": layers }).to_string();
    assert_eq!(
        simple_of(layers(vec![simple(1); 1000]).as_bytes()).len(),
        32
    );
    assert_eq!(
        simple_of(layers(vec![simple(65_537), simple(65_536)]).as_bytes()).len(),
        1
    );
    let index = json!({"manifests": vec![bundle(1); 1000]}).to_string();
    assert_eq!(bundles_of(index.as_bytes()).len(), 32);
    assert!(bundle_of(layers(vec![bundle(1 << 20)]).as_bytes()).is_some());
    assert!(bundle_of(layers(vec![bundle((1 << 20) + 1)]).as_bytes()).is_none());
}

#[test]
fn keys_that_are_none_are_told_apart() {
    let key = KeyPair::generate().unwrap();
    let pem = key.public_key_pem();
    assert!(Key::from_pem(pem.as_bytes()).is_ok());
    let twice = format!("{pem}{pem}");
    let secret = key.serialize_pem();
    for text in [
        "",
        "-----BEGIN PUBLIC KEY-----",
        secret.as_str(),
        twice.as_str(),
    ] {
        assert!(
            matches!(Key::from_pem(text.as_bytes()), Err(KeyFault::Pem)),
            "{text}"
        );
    }
    // X25519, which cannot sign (RFC 8410, section 10.1, with another object identifier).
    let der = [
        &b"\x30\x2a\x30\x05\x06\x03\x2b\x65\x6e\x03\x21\x00"[..],
        &[7; 32],
    ]
    .concat();
    let pem = format!(
        "-----BEGIN PUBLIC KEY-----\n{}\n-----END PUBLIC KEY-----\n",
        STANDARD.encode(der)
    );
    assert!(matches!(Key::from_pem(pem.as_bytes()), Err(KeyFault::Kind)));
    assert!(matches!(Key::from_base64("*"), Err(KeyFault::Base64(_))));
}

#[test]
fn the_most_specific_scope_decides() {
    assert_eq!(
        scopes_of(&reference("a.b.example:5000/team/app:v1")),
        [
            "a.b.example:5000/team/app:v1",
            "a.b.example:5000/team/app",
            "a.b.example:5000/team",
            "a.b.example:5000",
            "*.b.example:5000",
            "*.example:5000",
        ]
    );
    let (anything, reject) = (
        json!([{"type": "insecureAcceptAnything"}]),
        json!([{"type": "reject"}]),
    );
    let policy = policy(json!({
        "docker.io/library": anything,
        "docker.io/library/busybox": reject,
        "*.example.org": anything,
        "bad.example.org": reject,
    }));
    for (name, allowed) in [
        ("alpine", true),
        ("busybox:1", false),
        ("user/alpine", false),
        ("a.example.org/x", true),
        ("bad.example.org/x", false),
        ("example.org/x", false),
        ("aexample.org/x", false),
    ] {
        let checked = policy.check(&reference(name), &[], 0);
        assert_eq!(checked.is_ok(), allowed, "{name}: {checked:?}");
    }
}

#[test]
fn a_signature_must_be_for_the_name_that_the_policy_wants() {
    let digest = format!("@{}", Digest::of(b"x"));
    let by_digest = format!("host.example/app{digest}");
    let named = |value: Value| serde_json::from_value::<Identity>(value).unwrap();
    let kind = |kind: &str| named(json!({"type": kind}));
    let remap = named(json!({
        "type": "remapIdentity", "prefix": "mirror.example/hub", "signedPrefix": "docker.io",
    }));
    let exact = named(json!({"type": "exactReference", "dockerReference": "alpine:3"}));
    let repository = named(json!({"type": "exactRepository", "dockerRepository": "alpine"}));
    for (identity, image, signed, allowed) in [
        (
            kind("matchExact"),
            "host.example/app:v1",
            "host.example/app:v1",
            true,
        ),
        (
            kind("matchExact"),
            "host.example/app:v1",
            "host.example/app:v2",
            false,
        ),
        (
            kind("matchExact"),
            "host.example/app:v1",
            "host.example/app",
            false,
        ),
        (
            kind("matchExact"),
            "alpine",
            "docker.io/library/alpine:latest",
            true,
        ),
        (
            Identity::default(),
            "host.example/app:v1",
            "host.example/app:v1",
            true,
        ),
        (
            Identity::default(),
            "host.example/app:v1",
            "host.example/app",
            false,
        ),
        (Identity::default(), &by_digest, "host.example/app", true),
        (Identity::default(), &by_digest, "host.example/app:v9", true),
        (Identity::default(), &by_digest, "host.example/other", false),
        (
            kind("matchRepository"),
            "host.example/app:v1",
            "host.example/app",
            true,
        ),
        (
            kind("matchRepository"),
            "host.example/app:v1",
            "evil.example/app",
            false,
        ),
        (
            kind("matchDigest"),
            "host.example/app:v1",
            "evil.example/app",
            true,
        ),
        (
            remap.clone(),
            "mirror.example/hub/library/alpine:3",
            "alpine:3",
            true,
        ),
        (
            remap.clone(),
            "mirror.example/hub/library/alpine:3",
            "alpine:4",
            false,
        ),
        (
            remap.clone(),
            "mirror.example/hubris/alpine:3",
            "docker.io/ris/alpine:3",
            false,
        ),
        (remap, "other.example/app:3", "other.example/app:3", true),
        (
            exact.clone(),
            "mirror.example/x:1",
            "docker.io/library/alpine:3",
            true,
        ),
        (exact, "alpine:4", "alpine:4", false),
        (repository.clone(), "mirror.example/x:1", "alpine:4", true),
        (repository, "alpine:4", "user/alpine:4", false),
    ] {
        let image = reference(image);
        assert_eq!(
            identity.allows(&image, Some(signed)),
            allowed,
            "{identity:?}: {image} signed as {signed}"
        );
        assert!(!identity.allows(&image, Some("Not A Name")) || identity == kind("matchDigest"));
    }
    assert!(!Identity::default().allows(&reference("a"), None));
    assert!(kind("matchDigest").allows(&reference("a"), None));
}

#[test]
fn all_requirements_must_be_met_each_by_a_key_of_its_own() {
    let (ours, theirs) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
    let image = reference("app");
    let manifest = Digest::of(b"manifest");
    let any = json!({"type": "matchDigest"});
    let both = json!([signed_by(&ours, any.clone())[0], signed_by(&theirs, any)[0]]);
    let policy = policy(json!({"docker.io": both}));
    let claim = |key: &KeyPair| {
        let signature = simple(key, &payload(&manifest, "app"));
        policy.claim(&image, &signature).unwrap()
    };
    let (first, second) = (claim(&ours), claim(&theirs));
    policy.check(&image, &[first.clone(), second], 2).unwrap();
    assert_eq!(
        policy.check(&image, &[first], 2),
        Err(SignatureError::Untrusted {
            name: image.to_string(),
            signatures: 2
        })
    );
}

#[test]
fn a_policy_that_makes_no_sense_is_refused_in_words() {
    let key = KeyPair::generate().unwrap();
    let (text, pem) = (key_data(&key), STANDARD.encode("x"));
    let signed =
        |members: &str| format!(r#"{{"default": [{{"type": "sigstoreSigned", {members}}}]}}"#);
    for (policy, expected) in [
        ("{}".to_owned(), "is not valid; containers-policy.json(5)"),
        (
            r#"{"default": []}"#.to_owned(),
            r#""default" has no requirements"#,
        ),
        (
            r#"{"default": [{}]}"#.to_owned(),
            "a requirement has no type",
        ),
        (
            r#"{"default": [{"type": "x"}]}"#.to_owned(),
            r#"no requirement of type "x""#,
        ),
        (
            r#"{"default": [{"type": "reject"}], "x": 1}"#.to_owned(),
            "is not valid",
        ),
        (
            r#"{"default": [{"type": "reject"}], "transports": {"docker": {"a": []}}}"#.to_owned(),
            r#""a" has no requirements"#,
        ),
        (
            signed(r#""signedIdentity": {"type": "matchExact"}"#),
            "needs one of keyPath",
        ),
        (
            signed(&format!(r#""keyData": "{text}", "keyPath": "/x""#)),
            "needs one of keyPath",
        ),
        (signed(r#""keyDatas": []"#), "an empty list of keys"),
        (
            signed(&format!(r#""keyData": "{pem}""#)),
            "the policy's keyData holds no public key",
        ),
        (
            signed(r#""keyPath": "/does/not/exist""#),
            "cannot read /does/not/exist",
        ),
        (
            signed(&format!(
                r#""keyData": "{text}", "signedIdentity": {{"type": "exactReference", "dockerReference": "a"}}"#
            )),
            "needs a tag or digest",
        ),
        (
            signed(&format!(
                r#""keyData": "{text}", "signedIdentity": {{"type": "exactRepository", "dockerRepository": "a:b"}}"#
            )),
            "has a tag or digest",
        ),
    ] {
        let error = SignaturePolicy::parse(policy.as_bytes()).unwrap_err();
        assert!(error.to_string().contains(expected), "{policy}: {error}");
    }
}

#[test]
fn requirements_of_other_tools_are_met_by_nothing() {
    let key = KeyPair::generate().unwrap();
    let text = key_data(&key);
    let policy = policy(json!({
        "gpg.example": [{"type": "signedBy", "keyType": "GPGKeys", "keyPath": "/x"}],
        "keyless.example": [{"type": "sigstoreSigned", "fulcio": {"caPath": "/x"}, "rekorPublicKeyPath": "/y"}],
        "log.example": [{"type": "sigstoreSigned", "keyData": text, "rekorPublicKeyData": "x"}],
    }));
    for host in ["gpg", "keyless", "log"] {
        let checked = policy.check(&reference(&format!("{host}.example/a")), &[], 0);
        assert!(
            matches!(checked, Err(SignatureError::Unsupported { .. })),
            "{checked:?}"
        );
    }
}

proptest! {
    #[test]
    fn any_document_is_no_reason_to_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        crate::fuzzing::signatures(&bytes);
    }

    #[test]
    fn a_damaged_signature_counts_for_nothing(at in any::<prop::sample::Index>(), bit in 0u8..8) {
        let key = KeyPair::generate().unwrap();
        let manifest = Digest::of(b"manifest");
        let policy = policy(json!({"": signed_by(&key, json!({"type": "matchDigest"}))}));
        let signature = simple(&key, &payload(&manifest, "app"));
        let mut content = signature.content().to_vec();
        let at = at.index(content.len());
        content[at] ^= 1 << bit;
        let signature = signature.with_content(content);
        prop_assert_eq!(policy.claim(&reference("app"), &signature), None);
    }
}
