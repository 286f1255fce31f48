//! The token of an upload: a JSON Web Token (RFC 7519) with HS256, good for one claim.
//!
//! The API signs and the proxy verifies with the same key, which is in a Secret that only these
//! two read. To have all tokens refused, delete the Secret.

use std::{
    collections::BTreeMap,
    fmt,
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD as BASE64};
use k8s_openapi::{ByteString, api::core::v1::Secret};
use kube::{
    Api, Client,
    api::{ObjectMeta, PostParams},
};
use ring::{hmac, rand::SecureRandom as _};
use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;

/// The Secret with the key.
pub(crate) const SECRET: &str = "podvisor-upload-tokens";

/// The key's name in it.
const KEY: &str = "key";

/// Bytes of the key: as many as of the digest.
const KEY_LENGTH: usize = 32;

/// How long a token is good.
const LIFE: Duration = Duration::from_secs(300);

/// Clocks of the API and of the proxy differ.
const LEEWAY: Duration = Duration::from_secs(10);

/// How long the key is not read again.
const KEY_LASTS: Duration = Duration::from_secs(10);

/// Nobody signs longer tokens: names have at most 253 bytes.
const MAX_TOKEN: usize = 2048;

const HEADER: &str = r#"{"alg":"HS256","typ":"JWT"}"#;
const ISSUER: &str = "podvisor";
const OPERATION: &str = "Upload";

/// Why there is no key.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum KeyError {
    /// The Secret cannot be read or made.
    #[error("failed to {action} secret {namespace}/{SECRET}: check the account's role")]
    Secret {
        action: &'static str,
        namespace: String,
        #[source]
        source: kube::Error,
    },
    /// The Secret is not ours, or was damaged, or does not exist yet.
    #[error("secret {namespace}/{SECRET} has no key: delete it if it exists, and ask for a token")]
    NoKey { namespace: String },
    /// The system has no random numbers.
    #[error("failed to make a key for the tokens of uploads")]
    Random,
}

/// What a token is good for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Grant {
    /// The claim's namespace.
    #[serde(rename = "ns")]
    pub(crate) namespace: String,
    /// The claim's name.
    #[serde(rename = "sub")]
    pub(crate) name: String,
    /// The claim's unique id: another one of the same name is not meant.
    pub(crate) uid: String,
}

#[derive(Serialize, Deserialize)]
struct Claims {
    iss: String,
    op: String,
    exp: u64,
    #[serde(flatten)]
    grant: Grant,
}

/// What signs and verifies tokens.
#[derive(Clone)]
pub(crate) struct Key(Arc<hmac::Key>);

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Key").finish_non_exhaustive()
    }
}

impl Key {
    fn of(bytes: &[u8]) -> Option<Self> {
        (bytes.len() == KEY_LENGTH)
            .then(|| Self(Arc::new(hmac::Key::new(hmac::HMAC_SHA256, bytes))))
    }

    /// Returns a token that is good from now on, for a short time.
    pub(crate) fn sign(&self, grant: Grant, now: SystemTime) -> String {
        let claims = Claims {
            iss: ISSUER.to_owned(),
            op: OPERATION.to_owned(),
            exp: seconds(now + LIFE),
            grant,
        };
        let claims = serde_json::json!(claims).to_string();
        let mut token = format!("{}.{}", BASE64.encode(HEADER), BASE64.encode(claims));
        let tag = hmac::sign(&self.0, token.as_bytes());
        token.push('.');
        token.push_str(&BASE64.encode(tag.as_ref()));
        token
    }

    /// Returns what a token is good for; `None` if it was not signed with this key, or has
    /// expired. The signature is compared in constant time.
    pub(crate) fn verify(&self, token: &str, now: SystemTime) -> Option<Grant> {
        if token.len() > MAX_TOKEN {
            return None;
        }
        let (signed, tag) = token.rsplit_once('.')?;
        let tag = BASE64.decode(tag).ok()?;
        hmac::verify(&self.0, signed.as_bytes(), &tag).ok()?;
        let (header, claims) = signed.split_once('.')?;
        if BASE64.decode(header).ok()? != HEADER.as_bytes() {
            return None;
        }
        let claims: Claims = serde_json::from_slice(&BASE64.decode(claims).ok()?).ok()?;
        let is_ours = claims.iss == ISSUER && claims.op == OPERATION;
        let is_alive = seconds(now) < claims.exp.saturating_add(LEEWAY.as_secs());
        (is_ours && is_alive).then_some(claims.grant)
    }
}

fn seconds(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH);
    since.unwrap_or_default().as_secs()
}

/// Where the key is.
pub(crate) struct KeyStore {
    client: Client,
    namespace: String,
    known: Mutex<Option<(Instant, Key)>>,
}

impl fmt::Debug for KeyStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyStore")
            .field("namespace", &self.namespace)
            .finish_non_exhaustive()
    }
}

impl KeyStore {
    /// The key of the components in `namespace`.
    pub(crate) fn new(client: Client, namespace: &str) -> Self {
        Self {
            client,
            namespace: namespace.to_owned(),
            known: Mutex::default(),
        }
    }

    /// Returns the key that exists.
    pub(crate) async fn key(&self) -> Result<Key, KeyError> {
        self.read(false).await
    }

    /// Returns the key, and makes the first.
    pub(crate) async fn key_or_new(&self) -> Result<Key, KeyError> {
        self.read(true).await
    }

    async fn read(&self, makes: bool) -> Result<Key, KeyError> {
        let mut known = self.known.lock().await;
        if let Some((read, key)) = &*known
            && read.elapsed() < KEY_LASTS
        {
            return Ok(key.clone());
        }
        let failed = |action: &'static str| {
            let namespace = self.namespace.clone();
            move |source| KeyError::Secret {
                action,
                namespace,
                source,
            }
        };
        let api: Api<Secret> = Api::namespaced(self.client.clone(), &self.namespace);
        let mut found = api.get_opt(SECRET).await.map_err(failed("read"))?;
        if found.is_none() && makes {
            let made = api.create(&PostParams::default(), &new_secret()?).await;
            found = match made {
                Ok(secret) => Some(secret),
                // Another process was faster: its key is as good.
                Err(kube::Error::Api(status)) if status.code == 409 => {
                    api.get_opt(SECRET).await.map_err(failed("read"))?
                }
                Err(source) => return Err(failed("make")(source)),
            };
        }
        let key = found.and_then(|secret| Key::of(&secret.data?.get(KEY)?.0));
        let key = key.ok_or_else(|| KeyError::NoKey {
            namespace: self.namespace.clone(),
        })?;
        *known = Some((Instant::now(), key.clone()));
        Ok(key)
    }
}

fn new_secret() -> Result<Secret, KeyError> {
    let mut bytes = vec![0; KEY_LENGTH];
    ring::rand::SystemRandom::new()
        .fill(&mut bytes)
        .map_err(|_| KeyError::Random)?;
    Ok(Secret {
        metadata: ObjectMeta {
            name: Some(SECRET.to_owned()),
            ..ObjectMeta::default()
        },
        data: Some(BTreeMap::from([(KEY.to_owned(), ByteString(bytes))])),
        ..Secret::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(byte: u8) -> Key {
        Key::of(&[byte; KEY_LENGTH]).unwrap()
    }

    fn grant() -> Grant {
        Grant {
            namespace: "n".to_owned(),
            name: "a".to_owned(),
            uid: "u".to_owned(),
        }
    }

    #[test]
    fn a_token_is_good_for_its_claim_and_for_its_time() {
        let now = SystemTime::now();
        let token = key(1).sign(grant(), now);
        assert_eq!(key(1).verify(&token, now), Some(grant()));
        let late = now + LIFE + LEEWAY;
        assert_eq!(key(1).verify(&token, late - LEEWAY), Some(grant()));
        assert_eq!(key(1).verify(&token, late + Duration::from_secs(1)), None);
        assert_eq!(key(2).verify(&token, now), None);
    }

    #[test]
    fn a_token_that_was_changed_is_refused() {
        let now = SystemTime::now();
        let token = key(1).sign(grant(), now);
        for at in 0..token.len() {
            let mut bytes = token.clone().into_bytes();
            bytes[at] = if bytes[at] == b'A' { b'B' } else { b'A' };
            let changed = String::from_utf8(bytes).unwrap();
            assert_eq!(key(1).verify(&changed, now), None, "{at}");
        }
        let unsigned = token.rsplit_once('.').unwrap().0;
        let none = BASE64.encode(r#"{"alg":"none"}"#);
        let claims = unsigned.split_once('.').unwrap().1;
        for forged in [
            String::new(),
            ".".to_owned(),
            "..".to_owned(),
            format!("{unsigned}."),
            unsigned.to_owned(),
            format!("{none}.{claims}."),
            "x".repeat(MAX_TOKEN + 1),
        ] {
            assert_eq!(key(1).verify(&forged, now), None, "{forged}");
        }
    }

    #[test]
    fn what_was_signed_for_something_else_is_refused() {
        let now = SystemTime::now();
        let other = |header: &str, claims: serde_json::Value| {
            let claims = claims.to_string();
            let signed = format!("{}.{}", BASE64.encode(header), BASE64.encode(claims));
            let tag = hmac::sign(&key(1).0, signed.as_bytes());
            format!("{signed}.{}", BASE64.encode(tag.as_ref()))
        };
        let claims = |op: &str, iss: &str| {
            serde_json::json!({
                "iss": iss, "op": op, "exp": seconds(now) + 60, "ns": "n", "sub": "a", "uid": "u",
            })
        };
        let right = other(HEADER, claims(OPERATION, ISSUER));
        assert_eq!(key(1).verify(&right, now), Some(grant()));
        for wrong in [
            other(HEADER, claims("Clone", ISSUER)),
            other(HEADER, claims(OPERATION, "others")),
            other(r#"{"alg":"none"}"#, claims(OPERATION, ISSUER)),
            other(HEADER, serde_json::json!({ "exp": seconds(now) + 60 })),
        ] {
            assert_eq!(key(1).verify(&wrong, now), None, "{wrong}");
        }
    }

    #[test]
    fn a_new_key_is_random_and_taken() {
        let bytes = || new_secret().unwrap().data.unwrap()[KEY].0.clone();
        let first = bytes();
        assert!(Key::of(&first).is_some() && first != bytes());
        assert!(Key::of(&first[1..]).is_none());
    }
}
