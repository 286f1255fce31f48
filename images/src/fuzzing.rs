//! Entry points for fuzz targets: the parsers of everything that comes from outside.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::layer::Unpacker;
use crate::registry::{Challenge, Parsed};
use crate::signature::{bundle_of, bundles_of, simple_of};
use crate::{Checksum, Digest, Limits, SignaturePolicy, disk, erofs, rfc3339};

/// Applies arbitrary layers under tight limits. An image that results must be valid.
///
/// # Panics
/// If it is not, or no temporary file can be created.
pub fn layers(layers: &[&[u8]]) {
    let limits = Limits {
        unpacked_bytes: 1 << 20,
        entries: 1000,
        ..Limits::default()
    };
    let mut out = temporary();
    let file = out.try_clone().expect("a second handle");
    let mut unpacker = Unpacker::new(file, limits, Arc::default());
    for layer in layers {
        let mut blob = temporary();
        blob.write_all(layer).expect("a temporary file takes bytes");
        blob.rewind().expect("a temporary file can be rewound");
        let blob_digest = Digest::of(layer);
        match unpacker.layer(blob, blob_digest) {
            // The digest of a compressed layer differs, but by then all of the layer was applied.
            Ok(()) | Err(crate::LayerError::DiffId { .. }) => {}
            Err(_) => return,
        }
    }
    if unpacker.finish([0; 16]).is_ok() {
        let mut image = Vec::new();
        out.rewind().expect("a temporary file can be rewound");
        std::io::Read::read_to_end(&mut out, &mut image).expect("a temporary file can be read");
        erofs::reader::read(&image);
    }
}

/// Parses a document as every kind that a registry may send.
pub fn documents(bytes: &[u8]) {
    let _ = Parsed::parse(bytes, "", &Limits::default());
    let _ = serde_json::from_slice::<crate::ImageConfiguration>(bytes);
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let _ = Challenge::parse(text);
    let _ = rfc3339::parse(text);
    let _ = text.parse::<Digest>();
    let reference = crate::reference::parse(text);
    // oci-spec knows no IPv6 addresses.
    let is_v6 = matches!(&reference, Ok(name) if name.registry().starts_with('['));
    if text.is_ascii() && !is_v6 {
        // oci-spec accepts capital letters where they look like a registry's.
        let is_lower = |name: &crate::Reference| {
            !name
                .repository()
                .bytes()
                .any(|byte| byte.is_ascii_uppercase())
        };
        let oracle = text.parse::<crate::Reference>().ok().filter(is_lower);
        assert_eq!(reference.as_ref().ok(), oracle.as_ref(), "{text}");
    }
    if let Ok(reference) = reference {
        let again = reference.to_string();
        assert_eq!(
            crate::reference::parse(&again).as_ref(),
            Ok(&reference),
            "{again}"
        );
    }
}

/// Parses a document as each kind of input for signatures: a policy, an index of signatures, a
/// signature. None is valid.
///
/// # Panics
/// If one is.
pub fn signatures(bytes: &[u8]) {
    // A public key whose private key is not known to anyone.
    const POLICY: &[u8] = br#"{"default": [{"type": "sigstoreSigned", "keyData":
        "LS0tLS1CRUdJTiBQVUJMSUMgS0VZLS0tLS0KTUNvd0JRWURLMlZ3QXlFQUJsd0x0RHp1MWZ5QlV2Y1llL3RrZVovdy9UbWVCT3lZSUg5UWdxK1AvdVk9Ci0tLS0tRU5EIFBVQkxJQyBLRVktLS0tLQo=",
        "signedIdentity": {"type": "matchDigest"}}]}"#;
    let policy = SignaturePolicy::parse(POLICY).expect("the policy is sound");
    let image = crate::reference::parse("app").expect("a sound name");
    let _ = SignaturePolicy::parse(bytes);
    let _ = bundles_of(bytes);
    let mut found = simple_of(bytes);
    found.extend(bundle_of(bytes));
    for pointer in found {
        assert!(pointer.blob.size <= pointer.limit);
        let signature = pointer.with(bytes.to_vec());
        assert_eq!(policy.claim(&image, &signature), None);
    }
}

/// Converts an arbitrary file to a disk, under tight limits. A disk that results has the length
/// that it reports, and is the same however the file is split into pieces.
///
/// # Panics
/// If it is not, or no temporary file can be created.
pub fn disk(file: &[u8]) {
    let limits = Limits {
        disk_file_bytes: 1 << 20,
        disk_bytes: 64 << 20,
        disk_data_bytes: 4 << 20,
        ..Limits::default()
    };
    let cancelled = AtomicBool::new(false);
    let job = disk::Job {
        limits: &limits,
        cancelled: &cancelled,
    };
    let mut out = temporary();
    let sink = out.try_clone().expect("a second handle");
    let Ok(converted) = disk::convert(file, None, sink, &job) else {
        return;
    };
    assert_eq!(converted.digest, Digest::of(file));
    let length = out.seek(SeekFrom::End(0)).expect("a length");
    assert_eq!(length, converted.size);
    assert!(length.is_multiple_of(512) && length <= limits.disk_bytes);
    let mut again = temporary();
    let sink = again.try_clone().expect("a second handle");
    let slow = Slow(file);
    let second = disk::convert(slow, None, sink, &job).expect("what works once works again");
    assert_eq!(second, converted);
    if length <= 4 << 20 {
        assert!(content(&mut out) == content(&mut again));
    }
}

/// Returns a few bytes at a time.
struct Slow<'a>(&'a [u8]);

impl Read for Slow<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = buffer.len().min(self.0.len()).min(777);
        let (now, rest) = self.0.split_at(length);
        buffer[..length].copy_from_slice(now);
        self.0 = rest;
        Ok(length)
    }
}

fn content(file: &mut File) -> Vec<u8> {
    let mut bytes = Vec::new();
    file.rewind().expect("a temporary file can be rewound");
    file.read_to_end(&mut bytes)
        .expect("a temporary file can be read");
    bytes
}

/// Parses text as the name of an image, the URL of a disk image and a checksum. A value that was
/// parsed must parse to the same value after it is written out.
///
/// # Panics
/// If it does not.
pub fn names(text: &str) {
    if let Ok(source) = disk::Source::parse(text) {
        let name = source.name();
        assert!(disk::Source::is_meant(&name), "{name}");
        let again = disk::Source::parse(&name).expect("a name is an address");
        assert_eq!(again.name(), name);
        assert!(!source.shown().contains(['?', '#']), "{name}");
    }
    if let Ok(checksum) = text.parse::<Checksum>() {
        let again = checksum.to_string();
        assert_eq!(again.parse::<Checksum>().as_ref(), Ok(&checksum), "{again}");
    }
    if let Ok(reference) = crate::error::parse_reference(text) {
        let again = reference.to_string();
        let parsed = crate::error::parse_reference(&again).expect("a name is a reference");
        assert_eq!(parsed, reference, "{again}");
        assert!(!disk::Source::is_meant(&again), "{again}");
    }
}

fn temporary() -> File {
    let name = c"podvisor-fuzz";
    File::from(
        rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).expect("a memory file"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    use crate::tarball::Tarball;

    #[derive(Clone, Debug)]
    enum Step {
        File(u8, u16),
        Dir(u8),
        Symlink(u8),
        Hardlink(u8, u8),
        HardlinkBelow(u8, u8),
        Whiteout(u8),
        Opaque(u8),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (any::<u8>(), any::<u16>()).prop_map(|(at, size)| Step::File(at, size % 20_000)),
            any::<u8>().prop_map(Step::Dir),
            any::<u8>().prop_map(Step::Symlink),
            (any::<u8>(), any::<u8>()).prop_map(|(at, to)| Step::Hardlink(at, to)),
            (any::<u8>(), any::<u8>()).prop_map(|(at, to)| Step::HardlinkBelow(at, to)),
            any::<u8>().prop_map(Step::Whiteout),
            any::<u8>().prop_map(Step::Opaque),
        ]
    }

    /// Builds a path from a few names in directories of a few names, so that steps collide.
    fn path(at: u8, prefix: &str) -> String {
        let parts = [at >> 6, at >> 3 & 3, at & 3];
        let depth = usize::from(at >> 5 & 1) + 1 + usize::from(at >> 2 & 1);
        let mut names: Vec<String> = parts[..depth]
            .iter()
            .map(|part| format!("n{part}"))
            .collect();
        if let Some(last) = names.last_mut() {
            last.insert_str(0, prefix);
        }
        names.join("/")
    }

    fn tar(steps: &[Step]) -> Vec<u8> {
        let mut tar = Tarball::new();
        for step in steps {
            tar = match step {
                Step::File(at, size) => {
                    tar.file(&path(*at, ""), 0o644, &vec![*at; usize::from(*size)])
                }
                Step::Dir(at) => tar.dir(&path(*at, ""), 0o700),
                Step::Symlink(at) => tar.symlink(&path(*at, ""), "n0/n1"),
                Step::Hardlink(at, to) => tar.hardlink(&path(*at, ""), &path(*to, "")),
                Step::HardlinkBelow(at, to) => {
                    let name = format!("{}/{}", path(*to, ""), path(*at, ""));
                    tar.hardlink(&name, &path(*to, ""))
                }
                Step::Whiteout(at) => tar.file(&path(*at, ".wh."), 0, b""),
                Step::Opaque(at) => tar.file(&format!("{}/.wh..wh..opq", path(*at, "")), 0, b""),
            };
        }
        tar.finish()
    }

    proptest! {
        #[test]
        fn any_layers_give_a_sound_image_or_an_error(
            steps in prop::collection::vec(prop::collection::vec(step(), 0..12), 1..4),
        ) {
            let tars: Vec<_> = steps.iter().map(|steps| tar(steps)).collect();
            layers(&tars.iter().map(Vec::as_slice).collect::<Vec<_>>());
        }

        #[test]
        fn a_damaged_layer_gives_a_sound_image_or_an_error(
            steps in prop::collection::vec(step(), 1..8),
            at in any::<prop::sample::Index>(),
            byte in any::<u8>(),
        ) {
            let mut tar = tar(&steps);
            let at = at.index(tar.len());
            tar[at] = byte;
            layers(&[&tar]);
        }

        #[test]
        fn any_bytes_are_no_reason_to_panic(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            layers(&[&bytes]);
            documents(&bytes);
            disk(&bytes);
        }

        #[test]
        fn any_text_is_no_reason_to_panic(text in "[ -~]{0,120}") {
            documents(text.as_bytes());
            names(&text);
        }
    }
}
