//! Names in policies: the scopes that an image belongs to, and the names that a signature may be
//! for (containers-policy.json(5)).

use serde::Deserialize;

use crate::Reference;
use crate::error::parse_reference;

/// `REGISTRY/REPOSITORY`.
fn repository(reference: &Reference) -> String {
    format!("{}/{}", reference.registry(), reference.repository())
}

/// Returns the scopes that `reference` belongs to, the most specific first: itself, its repository
/// and the repository's parents, its registry, the registry's domains as `*.example.org`. The scope
/// of everything, `""`, is not included.
pub(super) fn scopes_of(reference: &Reference) -> Vec<String> {
    let repository = repository(reference);
    let mut scopes = vec![match (reference.digest(), reference.tag()) {
        (Some(digest), _) => format!("{repository}@{digest}"),
        (None, Some(tag)) => format!("{repository}:{tag}"),
        (None, None) => format!("{repository}:latest"),
    }];
    let mut rest = repository.as_str();
    loop {
        scopes.push(rest.to_owned());
        match rest.rfind('/') {
            Some(slash) => rest = &rest[..slash],
            None => break,
        }
    }
    while let Some((_, domain)) = rest.split_once('.') {
        scopes.push(format!("*.{domain}"));
        rest = domain;
    }
    scopes
}

/// The name that a signature must be for.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(tag = "type", deny_unknown_fields)]
pub(super) enum Identity {
    /// Any, or none: only the digest says what was signed, as for `cosign verify`. An extension,
    /// which bundles need.
    #[serde(rename = "matchDigest")]
    Digest {},
    /// The image's own name and tag.
    #[serde(rename = "matchExact")]
    Exact {},
    /// For an image by tag its name and tag, for one by digest its repository.
    #[serde(rename = "matchRepoDigestOrExact")]
    RepoDigestOrExact {},
    /// The image's repository, whatever the tag.
    #[serde(rename = "matchRepository")]
    Repository {},
    /// This name and tag.
    #[serde(rename = "exactReference")]
    ExactReference {
        #[serde(rename = "dockerReference")]
        reference: String,
    },
    /// This repository, whatever the tag.
    #[serde(rename = "exactRepository")]
    ExactRepository {
        #[serde(rename = "dockerRepository")]
        repository: String,
    },
    /// As `RepoDigestOrExact`, with another prefix: an image of a mirror that is signed under its
    /// original name.
    #[serde(rename = "remapIdentity")]
    Remap {
        prefix: String,
        #[serde(rename = "signedPrefix")]
        signed_prefix: String,
    },
}

impl Default for Identity {
    fn default() -> Self {
        Self::RepoDigestOrExact {}
    }
}

impl Identity {
    /// Checks the names in the policy; the error says what is wrong.
    pub(super) fn check(&self) -> Result<(), String> {
        let name = match self {
            Self::ExactReference { reference } => reference,
            Self::ExactRepository { repository } => repository,
            Self::Remap {
                prefix,
                signed_prefix,
            } if prefix.is_empty() || signed_prefix.is_empty() => {
                return Err("remapIdentity needs a prefix and a signedPrefix".to_owned());
            }
            _ => return Ok(()),
        };
        let parsed = parse_reference(name).map_err(|error| error.to_string())?;
        let is_repository = normal(name) == repository(&parsed);
        match self {
            Self::ExactReference { .. } if is_repository => {
                Err(format!("exactReference {name:?} needs a tag or digest"))
            }
            Self::ExactRepository { .. } if !is_repository => {
                Err(format!("exactRepository {name:?} has a tag or digest"))
            }
            _ => Ok(()),
        }
    }

    /// Returns whether a signature for the name `signed` may be one of `image`.
    pub(super) fn allows(&self, image: &Reference, signed: Option<&str>) -> bool {
        if matches!(self, Self::Digest {}) {
            return true;
        }
        let Some(signed) = signed else {
            return false;
        };
        let Ok(parsed) = parse_reference(signed) else {
            return false;
        };
        let signed = Signed {
            full: normal(signed),
            repository: repository(&parsed),
        };
        match self {
            Self::Digest {} => true,
            Self::Exact {} => signed.full == full(image),
            Self::RepoDigestOrExact {} => signed.is_of(image, &repository(image)),
            Self::Repository {} => signed.repository == repository(image),
            Self::ExactReference { reference } => signed.full == normal(reference),
            Self::ExactRepository { repository } => signed.repository == normal(repository),
            Self::Remap {
                prefix,
                signed_prefix,
            } => match remapped(&repository(image), prefix, signed_prefix) {
                Some(repository) => signed.is_of(image, &repository),
                None => signed.is_of(image, &repository(image)),
            },
        }
    }

    /// Returns the accepted names, for a message.
    pub(super) fn wanted(&self, image: &Reference) -> String {
        let own = repository(image);
        match self {
            Self::Digest {} => "anything".to_owned(),
            Self::Exact {} => full(image),
            Self::Repository {} => own,
            Self::ExactReference { reference } => normal(reference),
            Self::ExactRepository { repository } => normal(repository),
            Self::RepoDigestOrExact {} => named(image, own),
            Self::Remap {
                prefix,
                signed_prefix,
            } => {
                let repository = remapped(&own, prefix, signed_prefix).unwrap_or(own);
                named(image, repository)
            }
        }
    }
}

/// The name in a signature.
struct Signed {
    full: String,
    repository: String,
}

impl Signed {
    /// Returns whether it would name `image` if that were in `repository`: with its tag, unless the
    /// image has a digest.
    fn is_of(&self, image: &Reference, repository: &str) -> bool {
        match image.digest() {
            Some(_) => self.repository == repository,
            None => self.full == named(image, repository.to_owned()),
        }
    }
}

fn full(image: &Reference) -> String {
    match image.digest() {
        Some(digest) => format!("{}@{digest}", repository(image)),
        None => named(image, repository(image)),
    }
}

/// Returns `repository` with the image's tag, or without one if the image is named by digest.
fn named(image: &Reference, repository: String) -> String {
    match (image.digest(), image.tag()) {
        (Some(_), _) => repository,
        (None, tag) => format!("{repository}:{}", tag.unwrap_or("latest")),
    }
}

/// Expands Docker's short forms in a name, but adds no tag: a signature is for the tag that it
/// states.
fn normal(name: &str) -> String {
    let Ok(reference) = parse_reference(name) else {
        return name.to_owned();
    };
    let repository = repository(&reference);
    let last = name.rsplit('/').next().unwrap_or(name);
    match (reference.digest(), last.contains(':')) {
        (Some(digest), _) => format!("{repository}@{digest}"),
        (None, true) => format!("{repository}:{}", reference.tag().unwrap_or_default()),
        (None, false) => repository,
    }
}

/// Replaces the prefix `prefix` of `repository`, which must end where a part of the name does.
fn remapped(repository: &str, prefix: &str, signed_prefix: &str) -> Option<String> {
    let rest = repository.strip_prefix(prefix)?;
    (rest.is_empty() || rest.starts_with('/')).then(|| format!("{signed_prefix}{rest}"))
}
