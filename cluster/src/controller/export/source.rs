//! What an export is of, and whether that can be read: pure functions of what was observed.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;

use crate::objects::{MEMORY_DUMP_ANNOTATION, VolumeState};

/// A volume that is exported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Volume {
    /// Its name in links: the claim's, or that of which a snapshot was taken.
    pub name: String,
    /// The claim that is read.
    pub claim: String,
    /// What it has.
    pub content: Content,
}

/// What a claim has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// A disk, in a file.
    Disk,
    /// A disk, which is a device.
    Device,
    /// Files, of which none is a disk: dumps of memory.
    Files,
}

/// What an export is of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// These volumes can be read.
    Available(Vec<Volume>),
    /// Something has to happen first.
    Waits(Obstacle),
    /// There is nothing to read, for this reason.
    Nothing {
        /// The reason of a condition.
        reason: &'static str,
        /// The same for people.
        message: String,
    },
}

/// Why a source cannot be read yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Obstacle {
    /// It does not exist.
    Missing(String),
    /// It is not complete yet.
    Unfilled(String),
    /// Somebody may write to it.
    InUse(String),
}

impl Obstacle {
    /// The same for people.
    #[must_use]
    pub fn message(&self) -> &str {
        let (Self::Missing(message) | Self::Unfilled(message) | Self::InUse(message)) = self;
        message
    }

    /// The reason of the condition `Ready`.
    #[must_use]
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::InUse(_) => "InUse",
            Self::Missing(_) | Self::Unfilled(_) => "Initializing",
        }
    }
}

/// What is known of a claim that is to be exported.
#[derive(Debug, Clone)]
pub(super) struct Claim<'a> {
    /// Its name.
    pub(super) name: &'a str,
    /// Itself, if it exists.
    pub(super) claim: Option<&'a PersistentVolumeClaim>,
    /// How far the DataVolume of its name is, if there is one.
    pub(super) state: Option<VolumeState>,
    /// The pod that may write to it.
    pub(super) writer: Option<&'a str>,
}

/// What a claim has.
pub(super) fn content_of(claim: &PersistentVolumeClaim) -> Content {
    let spec = claim.spec.as_ref();
    let annotations = claim.metadata.annotations.as_ref();
    let is_block = spec.and_then(|spec| spec.volume_mode.as_deref()) == Some("Block");
    match is_block {
        true => Content::Device,
        false if annotations.is_some_and(|all| all.contains_key(MEMORY_DUMP_ANNOTATION)) => {
            Content::Files
        }
        false => Content::Disk,
    }
}

/// Whether claims of a namespace can be read: all of them exist, are filled, and are written to by
/// nobody.
pub(super) fn of_claims(namespace: &str, claims: &[Claim<'_>]) -> Source {
    let mut seen = BTreeSet::new();
    let mut volumes = Vec::new();
    for of in claims.iter().filter(|of| seen.insert(of.name)) {
        let name = format!("pvc {namespace}/{}", of.name);
        let Some(claim) = of.claim else {
            return Source::Waits(Obstacle::Missing(format!("{name} not found")));
        };
        if of.state.is_some_and(|state| state != VolumeState::Ready) {
            return Source::Waits(Obstacle::Unfilled(format!("{name} is not populated")));
        }
        if let Some(pod) = of.writer {
            let message = format!("{name} is in use by the pod {pod}");
            return Source::Waits(Obstacle::InUse(message));
        }
        volumes.push(Volume {
            name: of.name.to_owned(),
            claim: of.name.to_owned(),
            content: content_of(claim),
        });
    }
    Source::Available(volumes)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pvc(mode: &str) -> PersistentVolumeClaim {
        serde_json::from_value(json!({"spec": {"volumeMode": mode}})).unwrap()
    }

    fn claim<'a>(name: &'a str, claim: &'a PersistentVolumeClaim) -> Claim<'a> {
        Claim {
            name,
            claim: Some(claim),
            state: None,
            writer: None,
        }
    }

    #[test]
    fn claims_that_are_filled_and_at_rest_can_be_read() {
        let (file, device) = (pvc("Filesystem"), pvc("Block"));
        let mut dumps = pvc("Filesystem");
        let annotation = (MEMORY_DUMP_ANNOTATION.to_owned(), "dump".to_owned());
        dumps.metadata.annotations = Some([annotation].into());
        let filled = Claim {
            state: Some(VolumeState::Ready),
            ..claim("b", &device)
        };
        let claims = [
            claim("a", &file),
            filled,
            claim("a", &file),
            claim("c", &dumps),
        ];
        let Source::Available(volumes) = of_claims("n", &claims) else {
            panic!("they wait");
        };
        let volumes: Vec<_> = volumes.iter().map(|of| (&*of.name, of.content)).collect();
        let expected = [
            ("a", Content::Disk),
            ("b", Content::Device),
            ("c", Content::Files),
        ];
        assert_eq!(volumes, expected, "each once");
    }

    #[test]
    fn others_are_waited_for_with_a_reason() {
        let file = pvc("Filesystem");
        let is = |change: fn(&mut Claim<'static>), reason, message: &str| {
            let file = Box::leak(Box::new(file.clone()));
            let mut of = claim("a", file);
            change(&mut of);
            let Source::Waits(obstacle) = of_claims("n", &[claim("z", file), of]) else {
                panic!("{message}");
            };
            assert_eq!((obstacle.reason(), obstacle.message()), (reason, message));
        };
        is(|of| of.claim = None, "Initializing", "pvc n/a not found");
        for state in [VolumeState::Filling, VolumeState::Failed] {
            let change: fn(&mut Claim<'_>) = match state {
                VolumeState::Failed => |of| of.state = Some(VolumeState::Failed),
                _ => |of| of.state = Some(VolumeState::Filling),
            };
            is(change, "Initializing", "pvc n/a is not populated");
        }
        let message = "pvc n/a is in use by the pod p";
        is(|of| of.writer = Some("p"), "InUse", message);
    }
}
