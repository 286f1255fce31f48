//! `pull` and `run` under a signature policy.

mod support;

use serde_json::json;
use support::Root;
use support::guest_files::{elf, run};
use support::image::Image;
use support::registry::Registry;

/// A public key whose private key does not exist any more.
const KEY: &str = "-----BEGIN PUBLIC KEY-----\n\
    MCowBQYDK2VwAyEAGb9ECWmEzNUy1SFFvjM6Hes4NRLq5N3bABVteIUIjPc=\n\
    -----END PUBLIC KEY-----\n";

fn file(root: &Root, name: &str, content: &str) -> String {
    let path = root.path().join(name);
    std::fs::write(&path, content).unwrap();
    path.display().to_string()
}

fn app() -> (Registry, String) {
    let registry = Registry::serve(&[("app", Image::busybox(json!({"Cmd": ["sh"]})))]);
    let name = registry.name("app");
    (registry, name)
}

#[test]
fn an_image_that_is_not_signed_is_refused_and_leaves_nothing() {
    let root = Root::default();
    let (_registry, name) = app();
    let key = file(&root, "cosign.pub", KEY);
    let refusal = ["is not signed", "cosign sign --key", &name];
    for pull in [&["pull"][..], &["image", "pull"]] {
        let words = [pull, &["-q", "--verify-key", &key, &name]].concat();
        root.output(&words).refused(1, &refusal);
    }
    let kernel = elf(&root);
    let signed = ["--kernel", &kernel, "--verify-key", &key];
    run(&root, &[&signed[..], &["-q", &name]].concat()).refused(125, &refusal);
    assert!(root.files_ending_in(".erofs").is_empty());

    // An unverified local image counts as a missing one.
    root.output(&["pull", "-q", &name]);
    let never = [&signed[..], &["--pull", "never", &name]].concat();
    run(&root, &never).refused(125, &["no signature of it was verified", "pull it again"]);
}

#[test]
fn a_policy_file_decides_by_name() {
    let root = Root::default();
    let (_registry, name) = app();
    file(&root, "cosign.pub", KEY);
    let repository = name.strip_suffix(":1").unwrap();
    let policy = |requirement: &str| {
        let policy = format!(
            r#"{{"default": [{{"type": "reject"}}], "transports": {{"docker": {{"{repository}": [{requirement}]}}}}}}"#
        );
        file(&root, "policy.json", &policy)
    };
    // A relative key file is next to the policy.
    let signed = policy(r#"{"type": "sigstoreSigned", "keyPath": "cosign.pub"}"#);
    root.output(&["pull", "--signature-policy", &signed, &name])
        .refused(1, &["is not signed"]);
    let anything = policy(r#"{"type": "insecureAcceptAnything"}"#);
    root.output(&["pull", "--signature-policy", &anything, "other"])
        .refused(1, &["allows none of that name", "docker.io/library/other"]);
    let ran = root.output(&["pull", "--signature-policy", &anything, &name]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
}

#[test]
fn keys_and_policies_that_are_none_are_told_in_words() {
    let root = Root::default();
    let (key, junk) = (file(&root, "k.pub", KEY), file(&root, "junk", "{"));
    let missing = root.path().join("missing").display().to_string();
    let disk = "https://127.0.0.1:1/disk.raw";
    let cases: [(&[&str], &[&str]); 4] = [
        (
            &["--verify-key", &missing, "app"],
            &["cannot read", "missing"],
        ),
        (
            &["--verify-key", &junk, "app"],
            &["holds no public key", "generate-key-pair"],
        ),
        (
            &["--signature-policy", &junk, "app"],
            &["signature policy is not valid"],
        ),
        (&["--verify-key", &key, disk], &["--checksum"]),
    ];
    for (words, expected) in cases {
        root.output(&[&["pull"], words].concat())
            .refused(1, expected);
    }
}
