//! The policy: which images need which signatures.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use super::attached::Attached;
use super::claim::Claim;
use super::error::{PolicyError, SignatureError};
use super::key::Key;
use super::scope::{Identity, scopes_of};
use crate::Reference;

/// Bytes of a policy or key file.
const MAX_FILE_SIZE: u64 = 1 << 20;

/// Which signatures images need, by their names: the policy file of containers/image
/// (containers-policy.json(5)), limited to `sigstoreSigned` with keys, or one key for everything.
///
/// ```
/// use podvisor_images::SignaturePolicy;
///
/// let policy = SignaturePolicy::parse(br#"{
///     "default": [{"type": "reject"}],
///     "transports": {"docker": {"docker.io/library": [{"type": "insecureAcceptAnything"}]}}
/// }"#)?;
/// # let _ = policy;
/// # Ok::<(), podvisor_images::PolicyError>(())
/// ```
#[derive(Clone, Debug)]
pub struct SignaturePolicy {
    default: Vec<Requirement>,
    scopes: HashMap<String, Vec<Requirement>>,
}

#[derive(Clone, Debug)]
enum Requirement {
    Anything,
    Reject,
    Signed {
        keys: Vec<Key>,
        identity: Identity,
    },
    /// A requirement that is not supported here: nothing meets it.
    Unsupported(String),
}

impl SignaturePolicy {
    /// Requires a signature of every image by one of these keys, public keys in PEM, whatever the
    /// name that it was signed for: the same as `cosign verify --key`.
    ///
    /// # Errors
    /// A file that cannot be read, or is not a key; no files at all.
    pub fn keys<P: AsRef<Path>>(files: impl IntoIterator<Item = P>) -> Result<Self, PolicyError> {
        let keys = files
            .into_iter()
            .map(|file| key_file(file.as_ref()))
            .collect::<Result<Vec<_>, _>>()?;
        if keys.is_empty() {
            return Err(PolicyError::Invalid("there are no keys".to_owned()));
        }
        let identity = Identity::Digest {};
        Ok(Self {
            default: vec![Requirement::Signed { keys, identity }],
            scopes: HashMap::new(),
        })
    }

    /// Reads a policy file. Key files that it names are read immediately, relative ones from the
    /// policy's directory.
    ///
    /// # Errors
    /// A file that cannot be read, or is invalid.
    pub fn read(file: &Path) -> Result<Self, PolicyError> {
        let directory = file.parent().unwrap_or(Path::new(""));
        Self::parse_in(&read(file)?, directory)
    }

    /// As [`SignaturePolicy::read`], for a policy in memory; relative paths are relative to the
    /// current directory.
    ///
    /// # Errors
    /// As [`SignaturePolicy::read`].
    pub fn parse(json: &[u8]) -> Result<Self, PolicyError> {
        Self::parse_in(json, Path::new(""))
    }

    fn parse_in(json: &[u8], directory: &Path) -> Result<Self, PolicyError> {
        let raw: RawPolicy = serde_json::from_slice(json).map_err(PolicyError::Json)?;
        let requirements = |scope: &str, raw: Vec<Value>| {
            if raw.is_empty() {
                let message = format!("{scope:?} has no requirements");
                return Err(PolicyError::Invalid(message));
            }
            raw.into_iter()
                .map(|raw| requirement(raw, directory))
                .collect::<Result<Vec<_>, _>>()
        };
        let mut transports = raw.transports;
        let mut scopes = HashMap::new();
        // Other transports are not registries, so their scopes do not apply here.
        let docker = transports.remove("docker").unwrap_or(Value::Null);
        let docker: Option<HashMap<String, Vec<Value>>> =
            serde_json::from_value(docker).map_err(PolicyError::Json)?;
        for (scope, raw) in docker.unwrap_or_default() {
            let parsed = requirements(&scope, raw)?;
            scopes.insert(scope, parsed);
        }
        Ok(Self {
            default: requirements("default", raw.default)?,
            scopes,
        })
    }

    /// Returns the requirements of the most specific scope.
    fn requirements(&self, image: &Reference) -> &[Requirement] {
        scopes_of(image)
            .iter()
            .chain([&String::new()])
            .find_map(|scope| self.scopes.get(scope))
            .unwrap_or(&self.default)
    }

    /// Returns whether an image of that name needs to be signed at all.
    pub(crate) fn wants_signatures(&self, image: &Reference) -> bool {
        let is_signed =
            |requirement: &Requirement| matches!(requirement, Requirement::Signed { .. });
        self.requirements(image).iter().any(is_signed)
    }

    /// Returns the claim of a signature if it was made by a key that the policy has for images of
    /// that name.
    pub(crate) fn claim(&self, image: &Reference, signature: &Attached) -> Option<Claim> {
        let keys: Vec<_> = self
            .requirements(image)
            .iter()
            .filter_map(|requirement| match requirement {
                Requirement::Signed { keys, .. } => Some(keys),
                _ => None,
            })
            .flatten()
            .collect();
        signature.verify(&keys)
    }

    /// Decides whether an image may be used under that name. `claims` are about exactly this image;
    /// `signatures` is the number of signatures that were looked at.
    ///
    /// # Errors
    /// The requirement that is not met.
    pub(crate) fn check(
        &self,
        image: &Reference,
        claims: &[Claim],
        signatures: usize,
    ) -> Result<(), SignatureError> {
        let name = || image.to_string();
        for requirement in self.requirements(image) {
            let (keys, identity) = match requirement {
                Requirement::Anything => continue,
                Requirement::Reject => return Err(SignatureError::Rejected { name: name() }),
                Requirement::Unsupported(what) => {
                    let (name, what) = (name(), what.clone());
                    return Err(SignatureError::Unsupported { name, what });
                }
                Requirement::Signed { keys, identity } => (keys, identity),
            };
            let trusted = |claim: &&Claim| keys.iter().any(|key| key.fingerprint() == claim.key);
            let mut other = None;
            let is_met = claims.iter().filter(trusted).any(|claim| {
                other.get_or_insert(claim);
                identity.allows(image, claim.reference.as_deref())
            });
            if is_met {
                continue;
            }
            return Err(match other {
                _ if signatures == 0 => SignatureError::Unsigned { name: name() },
                None => SignatureError::Untrusted {
                    name: name(),
                    signatures,
                },
                Some(claim) => SignatureError::Identity {
                    name: name(),
                    signed: shown(claim.reference.as_deref()),
                    wanted: identity.wanted(image),
                },
            });
        }
        Ok(())
    }
}

fn shown(signed: Option<&str>) -> String {
    let Some(signed) = signed else {
        return "a digest without a name (a bundle; `matchDigest` takes it)".to_owned();
    };
    let short = signed.chars().take(300);
    format!("{:?}", short.collect::<String>())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawPolicy {
    default: Vec<Value>,
    #[serde(default)]
    transports: HashMap<String, Value>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct RawSigned {
    #[serde(rename = "type")]
    _kind: String,
    #[serde(default)]
    key_path: Option<PathBuf>,
    #[serde(default)]
    key_paths: Option<Vec<PathBuf>>,
    #[serde(default)]
    key_data: Option<String>,
    #[serde(default)]
    key_datas: Option<Vec<String>>,
    #[serde(default)]
    signed_identity: Identity,
}

/// Members of `sigstoreSigned` that require what a key cannot prove.
const KEYLESS: &[(&str, &str)] = &[
    ("fulcio", "a certificate of Fulcio"),
    ("pki", "a certificate"),
    ("rekorPublicKeyPath", "an entry in a transparency log"),
    ("rekorPublicKeyPaths", "an entry in a transparency log"),
    ("rekorPublicKeyData", "an entry in a transparency log"),
    ("rekorPublicKeyDatas", "an entry in a transparency log"),
];

fn requirement(raw: Value, directory: &Path) -> Result<Requirement, PolicyError> {
    let kind = raw.get("type").and_then(Value::as_str);
    match kind {
        Some("insecureAcceptAnything") => Ok(Requirement::Anything),
        Some("reject") => Ok(Requirement::Reject),
        Some("signedBy") => Ok(Requirement::Unsupported("a signature by GPG".to_owned())),
        Some("sigstoreSigned") => {
            let keyless = KEYLESS.iter().find(|(member, _)| raw.get(member).is_some());
            match keyless {
                Some((_, what)) => Ok(Requirement::Unsupported((*what).to_owned())),
                None => signed(raw, directory),
            }
        }
        Some(other) => Err(PolicyError::Invalid(format!(
            "there is no requirement of type {other:?}"
        ))),
        None => Err(PolicyError::Invalid("a requirement has no type".to_owned())),
    }
}

fn signed(raw: Value, directory: &Path) -> Result<Requirement, PolicyError> {
    let raw: RawSigned = serde_json::from_value(raw).map_err(PolicyError::Json)?;
    raw.signed_identity.check().map_err(PolicyError::Invalid)?;
    let kinds = [
        raw.key_path.is_some(),
        raw.key_paths.is_some(),
        raw.key_data.is_some(),
        raw.key_datas.is_some(),
    ];
    if kinds.iter().filter(|given| **given).count() != 1 {
        let message = "sigstoreSigned needs one of keyPath, keyPaths, keyData and keyDatas";
        return Err(PolicyError::Invalid(message.to_owned()));
    }
    let files = raw
        .key_path
        .into_iter()
        .chain(raw.key_paths.unwrap_or_default());
    let texts = raw
        .key_data
        .into_iter()
        .chain(raw.key_datas.unwrap_or_default());
    let keys = files
        .map(|file| key_file(&directory.join(file)))
        .chain(texts.map(|text| {
            Key::from_base64(&text).map_err(|source| PolicyError::Key {
                name: "the policy's keyData".to_owned(),
                source,
            })
        }))
        .collect::<Result<Vec<_>, _>>()?;
    if keys.is_empty() {
        let message = "sigstoreSigned has an empty list of keys";
        return Err(PolicyError::Invalid(message.to_owned()));
    }
    Ok(Requirement::Signed {
        keys,
        identity: raw.signed_identity,
    })
}

fn key_file(file: &Path) -> Result<Key, PolicyError> {
    Key::from_pem(&read(file)?).map_err(|source| PolicyError::Key {
        name: file.display().to_string(),
        source,
    })
}

fn read(path: &Path) -> Result<Vec<u8>, PolicyError> {
    let fault = |source| PolicyError::Read {
        path: path.to_owned(),
        source,
    };
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(fault)?;
    file.take(MAX_FILE_SIZE + 1)
        .read_to_end(&mut bytes)
        .map_err(fault)?;
    if bytes.len() as u64 > MAX_FILE_SIZE {
        return Err(PolicyError::TooLarge {
            path: path.to_owned(),
            limit: MAX_FILE_SIZE,
        });
    }
    Ok(bytes)
}
