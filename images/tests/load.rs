//! Loading images from files, as written by other tools.

mod support;

use std::process::Command;

use podvisor_images::{Digest, Error};
use serde_json::json;
use support::image::{Layer, Packing};
use support::{Tarball, TestImage, TestStore, explain, extract, options};

fn skopeo(from: &str, to: &str) {
    let out = Command::new("skopeo")
        .args(["--insecure-policy", "copy", from, to])
        .output()
        .unwrap();
    assert!(
        out.status.success(),
        "{}",
        String::from_utf8_lossy(&out.stderr)
    );
}

fn check(image: &podvisor_images::Image) {
    let dir = extract(image);
    assert_eq!(
        std::fs::read(dir.path().join("root/etc/hello")).unwrap(),
        b"hello\n"
    );
    assert!(!dir.path().join("root/etc/gone").exists());
}

#[test]
fn a_layout_directory_and_what_skopeo_makes_of_it_are_the_same_image() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let image = TestImage::small();
    image.write_layout(&dir.path().join("layout"), "example.org/app:v1");
    let from = format!("oci:{}:example.org/app:v1", path("layout"));
    skopeo(
        &from,
        &format!("oci-archive:{}:example.org/app:v1", path("oci.tar")),
    );
    // Docker's format does not support zstd.
    let gzipped = TestImage::packed([Packing::Gzip, Packing::Gzip]);
    gzipped.write_layout(&dir.path().join("gzipped"), "example.org/app:v1");
    let from = format!("oci:{}:example.org/app:v1", path("gzipped"));
    skopeo(
        &from,
        &format!("docker-archive:{}:example.org/app:v1", path("docker.tar")),
    );
    assert!(
        Command::new("gzip")
            .args(["-k", &path("docker.tar")])
            .status()
            .unwrap()
            .success()
    );
    for file in ["layout", "oci.tar", "docker.tar", "docker.tar.gz"] {
        let test = TestStore::new();
        let loaded = test.store.load(path(file), None, &options()).unwrap();
        assert_eq!(loaded.len(), 1);
        assert_eq!(loaded[0].image.tags(), ["example.org/app:v1"], "{file}");
        if !file.starts_with("docker") {
            assert_eq!(loaded[0].image.manifest_digest(), image.digest());
        }
        assert_eq!(
            test.store.resolve("example.org/app:v1").unwrap().id(),
            loaded[0].image.id()
        );
        check(&loaded[0].image);
        let again = test
            .store
            .load(path(file), Some("other"), &options())
            .unwrap();
        assert_eq!(
            again[0].image.tags(),
            ["docker.io/library/other:latest", "example.org/app:v1"]
        );
        assert_eq!(loaded[0].names, ["example.org/app:v1"], "{file}");
        assert_eq!(again[0].names, ["docker.io/library/other:latest"]);
        test.store
            .remove(&loaded[0].image.id().to_string())
            .unwrap();
        assert_eq!(test.files(), [""; 0], "{file}");
    }
}

#[test]
fn what_is_no_archive_of_images_is_refused_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let image = TestImage::small();
    let bad_layout = dir.path().join("bad");
    image.write_layout(&bad_layout, "x/y:z");
    let layer = Digest::of(&image.layers[0].blob).hex();
    std::fs::write(bad_layout.join("blobs/sha256").join(layer), b"forged").unwrap();
    let docker = |manifest: &str| {
        Tarball::new()
            .file("manifest.json", 0o644, manifest.as_bytes())
            .finish()
    };
    let write = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    let cases = [
        (dir.path().join("missing"), "cannot open"),
        (write("text", b"hello"), "not a tar archive"),
        (
            write("empty.tar", &Tarball::new().finish()),
            "neither index.json",
        ),
        (
            write(
                "lies.tar",
                &docker(r#"[{"Config":"../../etc/passwd","Layers":["a"]}]"#),
            ),
            "has no ../../etc/passwd",
        ),
        (
            write("no-layers.tar", &docker(r#"[{"Config":"c","Layers":[]}]"#)),
            "no layers",
        ),
        (
            write("json.tar", &docker("{}")),
            "\"manifest.json\" of the archive is not valid",
        ),
        (bad_layout, "instead of"),
    ];
    for (path, words) in cases {
        let test = TestStore::new();
        let error = test.store.load(&path, None, &options()).expect_err(words);
        assert!(
            explain(&error).contains(words),
            "{}: {}",
            path.display(),
            explain(&error)
        );
        assert_eq!(test.files(), [""; 0]);
    }
}

#[test]
fn one_name_is_not_given_to_several_images() {
    let dir = tempfile::tempdir().unwrap();
    let add = |image: &TestImage, name: &str, before: Vec<serde_json::Value>| {
        image.write_layout(dir.path(), name);
        let path = dir.path().join("index.json");
        let mut index: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let entries = index["manifests"].as_array_mut().unwrap();
        entries.extend(before);
        let entries = entries.clone();
        std::fs::write(path, index.to_string()).unwrap();
        entries
    };
    let entries = add(&TestImage::small(), "x/y:z", Vec::new());
    let other = TestImage::packed([Packing::Plain, Packing::Plain]);
    add(&other, "x/y:other", entries);
    let test = TestStore::new();
    // With other compression, it is still the same image.
    let loaded = test.store.load(dir.path(), None, &options()).unwrap();
    assert_eq!(loaded.len(), 2);
    assert_eq!(loaded[0].image.id(), loaded[1].image.id());
    let error = test
        .store
        .load(dir.path(), Some("one"), &options())
        .unwrap_err();
    assert!(matches!(error, Error::SeveralImages { count: 2, .. }));
}

#[test]
fn an_image_with_several_entries_gets_all_their_names() {
    let dir = tempfile::tempdir().unwrap();
    TestImage::small().write_layout(dir.path(), "x/y:z");
    let path = dir.path().join("index.json");
    let index = std::fs::read_to_string(&path).unwrap();
    let mut index: serde_json::Value = serde_json::from_str(&index).unwrap();
    let mut entry = index["manifests"][0].clone();
    entry["annotations"]["org.opencontainers.image.ref.name"] = "x/y:other".into();
    index["manifests"].as_array_mut().unwrap().push(entry);
    std::fs::write(&path, index.to_string()).unwrap();
    let test = TestStore::new();
    let loaded = test.store.load(dir.path(), None, &options()).unwrap();
    assert_eq!(loaded.len(), 1);
    assert_eq!(
        loaded[0].image.tags(),
        ["docker.io/x/y:other", "docker.io/x/y:z"]
    );
    assert_eq!(loaded[0].names, ["docker.io/x/y:z", "docker.io/x/y:other"]);
}

#[test]
fn the_names_of_an_archive_are_told_apart_from_those_of_the_store() {
    let test = TestStore::new();
    let image = TestImage::small();
    let dir = layout(&[(&image, json!({}))]);
    let loaded = test.store.load(dir.path(), Some("mine"), &options());
    assert_eq!(loaded.unwrap()[0].names, ["docker.io/library/mine:latest"]);
    let loaded = test.store.load(dir.path(), None, &options()).unwrap();
    assert_eq!(loaded[0].names, [""; 0]);
    assert_eq!(loaded[0].image.tags(), ["docker.io/library/mine:latest"]);
    let entry = json!({"annotations": {"org.opencontainers.image.ref.name": "x/y:z"}});
    let dir = layout(&[(&image, entry.clone()), (&image, entry)]);
    let loaded = test.store.load(dir.path(), None, &options()).unwrap();
    assert_eq!(loaded[0].names, ["docker.io/x/y:z"]);
    assert_eq!(
        loaded[0].image.tags(),
        ["docker.io/library/mine:latest", "docker.io/x/y:z"]
    );
}

#[test]
fn an_archive_may_come_through_a_pipe_and_be_compressed() {
    let dir = tempfile::tempdir().unwrap();
    TestImage::small().write_layout(dir.path(), "x/y:z");
    for program in ["cat", "gzip"] {
        let (reader, writer) = std::io::pipe().unwrap();
        let mut child = Command::new("sh")
            .args(["-c", &format!("tar c -C \"$0\" . | {program}")])
            .arg(dir.path())
            .stdout(writer)
            .spawn()
            .unwrap();
        let test = TestStore::new();
        let file = std::fs::File::from(std::os::fd::OwnedFd::from(reader));
        let loaded = test.store.load_file(file, None, &options()).unwrap();
        assert!(child.wait().unwrap().success());
        assert_eq!(loaded[0].image.id(), TestImage::small().id());
        check(&loaded[0].image);
        assert!(test.files().iter().all(|file| !file.starts_with("tmp/")));
    }
}

#[test]
fn work_that_is_given_up_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    TestImage::small().write_layout(dir.path(), "x/y:z");
    let test = TestStore::new();
    let cancel = podvisor_images::Cancel::default();
    cancel.cancel();
    let options = options().cancel(cancel);
    let error = test.store.load(dir.path(), None, &options).unwrap_err();
    assert!(matches!(error, Error::Cancelled), "{error:?}");
    assert_eq!(test.files(), [""; 0]);
}

/// Writes a layout whose index has these entries, besides their digests.
fn layout(entries: &[(&TestImage, serde_json::Value)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut manifests = Vec::new();
    for (image, more) in entries {
        image.write_layout(dir.path(), "unused");
        let mut entry = json!({
            "digest": image.digest(), "size": image.manifest.len(),
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
        });
        let members = entry.as_object_mut().unwrap();
        members.extend(more.as_object().unwrap().clone());
        manifests.push(entry);
    }
    let index = json!({"schemaVersion": 2, "manifests": manifests});
    std::fs::write(dir.path().join("index.json"), index.to_string()).unwrap();
    dir
}

/// An image of one file, for a platform.
fn image_for(architecture: &str, content: &str) -> TestImage {
    let tar = Tarball::new().file("f", 0o644, content.as_bytes()).finish();
    let layer = Layer::new(&tar, Packing::Plain);
    let config = json!({
        "os": "linux", "architecture": architecture,
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id]},
    });
    TestImage::with_config(vec![layer], config)
}

/// As signatures and SBOMs are: a manifest with something else as its layer.
fn artifact(layer_type: &str) -> TestImage {
    let layer = Layer {
        media_type: layer_type.to_owned(),
        ..Layer::new(b"{}", Packing::Plain)
    };
    TestImage::with_config(vec![layer], json!({}))
}

#[test]
fn of_a_layout_the_images_for_this_machine_are_loaded_and_what_is_no_image_is_left_out() {
    let name = "org.opencontainers.image.ref.name";
    let (amd, arm) = (image_for("amd64", "amd"), image_for("arm64", "arm"));
    let sbom = artifact("application/spdx+json");
    let tar = artifact("application/vnd.oci.image.layer.v1.tar");
    let for_platform = |architecture: &str| {
        json!({
            "platform": {"os": "linux", "architecture": architecture},
            "annotations": {name: "x/y:z"},
        })
    };
    let bare = || json!({"annotations": {name: "x/y:z"}});
    let kind = |kind: &str| json!({"artifactType": kind, "annotations": {name: "x/y:z"}});
    for (other, entry) in [
        (&arm, for_platform("arm64")),
        (&arm, for_platform("unknown")),
        // Its configuration says it.
        (&arm, bare()),
        (&sbom, bare()),
        (&tar, bare()),
        (&amd, kind("application/spdx+json")),
        (&tar, kind("application/spdx+json")),
        (&sbom, json!({"mediaType": "application/spdx+json"})),
    ] {
        let told = entry.to_string();
        let ours = (&image_for("amd64", "ours"), for_platform("amd64"));
        for entries in [
            [(other, entry.clone()), ours.clone()],
            [ours.clone(), (other, entry.clone())],
        ] {
            let dir = layout(&entries);
            let test = TestStore::new();
            let loaded = test.store.load(dir.path(), None, &options()).expect(&told);
            let ids: Vec<_> = loaded.iter().map(|loaded| loaded.image.id()).collect();
            assert_eq!(ids, [ours.0.id()], "{told}");
            assert_eq!(loaded[0].image.tags(), ["docker.io/x/y:z"], "{told}");
            // It is one image, which may get a name.
            let named = test.store.load(dir.path(), Some("one"), &options());
            assert_eq!(named.expect(&told).len(), 1);
        }
    }
}

#[test]
fn a_layout_without_an_image_for_this_machine_is_refused_for_its_first_entry() {
    let arm = image_for("arm64", "arm");
    let sbom = artifact("application/spdx+json");
    let platform = json!({"platform": {"os": "linux", "architecture": "arm64"}});
    for (entries, words) in [
        (
            vec![(&arm, platform.clone()), (&sbom, json!({}))],
            "but for linux/arm64",
        ),
        (
            vec![(&arm, json!({})), (&sbom, json!({}))],
            "but for linux/arm64",
        ),
        (
            vec![(&sbom, json!({})), (&arm, platform)],
            "no file system layer",
        ),
        (
            vec![(&sbom, json!({"artifactType": "application/spdx+json"}))],
            "type \"application/spdx+json\"",
        ),
    ] {
        let dir = layout(&entries);
        let test = TestStore::new();
        let error = test.store.load(dir.path(), None, &options()).unwrap_err();
        assert!(explain(&error).contains(words), "{}", explain(&error));
        assert_eq!(test.files(), [""; 0]);
    }
}

#[test]
fn of_entries_with_one_name_that_for_any_processor_is_loaded() {
    let name = "org.opencontainers.image.ref.name";
    let entry = |variant: Option<&str>| {
        let mut entry = json!({"annotations": {name: "x/y:z"}});
        if let Some(variant) = variant {
            entry["platform"] = json!({"os": "linux", "architecture": "amd64", "variant": variant});
        }
        entry
    };
    let images = ["a", "b", "c"].map(|content| image_for("amd64", content));
    for (variants, chosen) in [
        ([Some("v4"), Some("v2"), Some("v1")], 2),
        ([None, Some("v9"), Some("v1")], 2),
        ([Some("v9"), None, None], 1),
        ([Some("v1"), Some("v1"), None], 0),
    ] {
        let entries: Vec<_> = images
            .iter()
            .zip(variants)
            .map(|(image, variant)| (image, entry(variant)))
            .collect();
        let test = TestStore::new();
        let dir = layout(&entries);
        let loaded = test.store.load(dir.path(), None, &options()).unwrap();
        let ids: Vec<_> = loaded.iter().map(|loaded| loaded.image.id()).collect();
        assert_eq!(ids, [images[chosen].id()], "{variants:?}");
        assert_eq!(loaded[0].image.tags(), ["docker.io/x/y:z"]);
    }
}

#[test]
fn what_is_wrong_with_an_image_of_a_layout_is_an_error_whatever_else_is_there() {
    let (ours, other) = (image_for("amd64", "ours"), image_for("amd64", "other"));
    let dir = layout(&[(&ours, json!({})), (&other, json!({}))]);
    let layer = Digest::of(&other.layers[0].blob).hex();
    std::fs::remove_file(dir.path().join("blobs/sha256").join(layer)).unwrap();
    let loaded = TestStore::new().store.load(dir.path(), None, &options());
    let message = explain(&loaded.unwrap_err());
    assert!(message.contains("the archive has no sha256:"), "{message}");
}
