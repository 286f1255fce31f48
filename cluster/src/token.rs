//! Tokens that components give each other: JSON Web Tokens (RFC 7519) with HS256, each good for one
//! thing ([`Grant`]).
//!
//! Who signs and who verifies have the same key, which is in a Secret that only these two read. To
//! have all tokens of a kind refused, delete its Secret.

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
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::sync::Mutex;

/// The key's name in its Secret.
const KEY: &str = "key";

/// Bytes of the key: as many as of the digest.
const KEY_LENGTH: usize = 32;

/// How long a token is good.
const LIFE: Duration = Duration::from_secs(300);

/// Clocks of who signs and of who verifies differ.
const LEEWAY: Duration = Duration::from_secs(10);

/// How long the key is not read again.
const KEY_LASTS: Duration = Duration::from_secs(10);

/// Nobody signs longer tokens: names have at most 253 bytes.
const MAX_TOKEN: usize = 2048;

const HEADER: &str = r#"{"alg":"HS256","typ":"JWT"}"#;
const ISSUER: &str = "podvisor";

/// What a token is good for.
pub(crate) trait Grant: Serialize + DeserializeOwned {
    /// What it allows, in a word: a token for one thing is none for another.
    const OPERATION: &'static str;

    /// The Secret with the key.
    const SECRET: &'static str;
}

/// Why there is no key.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum KeyError {
    /// The Secret cannot be read or made.
    #[error("failed to {action} secret {namespace}/{secret}: check the account's role")]
    Secret {
        action: &'static str,
        namespace: String,
        secret: &'static str,
        #[source]
        source: kube::Error,
    },
    /// The Secret is not ours, or was damaged, or does not exist yet.
    #[error("secret {namespace}/{secret} has no key: delete it if it exists, and ask for a token")]
    NoKey {
        namespace: String,
        secret: &'static str,
    },
    /// The system has no random numbers.
    #[error("failed to make a key for tokens")]
    Random,
}

#[derive(Serialize, Deserialize)]
struct Claims<G> {
    iss: String,
    op: String,
    #[serde(default)]
    iat: u64,
    exp: u64,
    #[serde(flatten)]
    grant: G,
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
    pub(crate) fn sign<G: Grant>(&self, grant: G, now: SystemTime) -> String {
        let claims = Claims {
            iss: ISSUER.to_owned(),
            op: G::OPERATION.to_owned(),
            iat: seconds(now),
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

    /// Returns what a token is good for at a time; `None` if it was not signed with this key, or
    /// later, or had expired by then. The signature is compared in constant time.
    pub(crate) fn verify<G: Grant>(&self, token: &str, now: SystemTime) -> Option<G> {
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
        let claims: Claims<G> = serde_json::from_slice(&BASE64.decode(claims).ok()?).ok()?;
        let is_ours = claims.iss == ISSUER && claims.op == G::OPERATION;
        let now = seconds(now);
        // Who signed may be ahead of the API server, by whose clock objects are created.
        let is_alive = now < claims.exp.saturating_add(LEEWAY.as_secs())
            && claims.iat <= now.saturating_add(LIFE.as_secs());
        (is_ours && is_alive).then_some(claims.grant)
    }
}

fn seconds(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH);
    since.unwrap_or_default().as_secs()
}

/// Where the key of one kind of tokens is.
pub(crate) struct KeyStore {
    client: Client,
    namespace: String,
    secret: &'static str,
    known: Mutex<Option<(Instant, Key)>>,
}

impl fmt::Debug for KeyStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyStore")
            .field("namespace", &self.namespace)
            .field("secret", &self.secret)
            .finish_non_exhaustive()
    }
}

impl KeyStore {
    /// The key of the components in `namespace` for tokens with `G`.
    pub(crate) fn of<G: Grant>(client: Client, namespace: &str) -> Self {
        Self {
            client,
            namespace: namespace.to_owned(),
            secret: G::SECRET,
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
                secret: self.secret,
                source,
            }
        };
        let api: Api<Secret> = Api::namespaced(self.client.clone(), &self.namespace);
        let mut found = api.get_opt(self.secret).await.map_err(failed("read"))?;
        if found.is_none() && makes {
            let made = api
                .create(&PostParams::default(), &new_secret(self.secret)?)
                .await;
            found = match made {
                Ok(secret) => Some(secret),
                // Another process was faster: its key is as good.
                Err(kube::Error::Api(status)) if status.code == 409 => {
                    api.get_opt(self.secret).await.map_err(failed("read"))?
                }
                Err(source) => return Err(failed("make")(source)),
            };
        }
        let key = found.and_then(|secret| Key::of(&secret.data?.get(KEY)?.0));
        let key = key.ok_or_else(|| KeyError::NoKey {
            namespace: self.namespace.clone(),
            secret: self.secret,
        })?;
        *known = Some((Instant::now(), key.clone()));
        Ok(key)
    }
}

/// Bytes that nobody guesses.
fn random_bytes() -> Result<Vec<u8>, KeyError> {
    let mut bytes = vec![0; KEY_LENGTH];
    ring::rand::SystemRandom::new()
        .fill(&mut bytes)
        .map_err(|_| KeyError::Random)?;
    Ok(bytes)
}

/// Returns a text that nobody guesses, of letters, digits, `-` and `_`.
pub(crate) fn random() -> Result<String, KeyError> {
    Ok(BASE64.encode(random_bytes()?))
}

fn new_secret(name: &str) -> Result<Secret, KeyError> {
    let bytes = random_bytes()?;
    Ok(Secret {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
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

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Named {
        name: String,
    }

    impl Grant for Named {
        const OPERATION: &'static str = "Name";
        const SECRET: &'static str = "names";
    }

    fn grant() -> Named {
        let name = "a".to_owned();
        Named { name }
    }

    fn verify(key_of: u8, token: &str, now: SystemTime) -> Option<Named> {
        key(key_of).verify(token, now)
    }

    #[test]
    fn a_token_is_good_for_its_claim_and_for_its_time() {
        let now = SystemTime::now();
        let token = key(1).sign(grant(), now);
        assert_eq!(verify(1, &token, now), Some(grant()));
        let late = now + LIFE + LEEWAY;
        assert_eq!(verify(1, &token, late - LEEWAY), Some(grant()));
        assert_eq!(verify(1, &token, late + Duration::from_secs(1)), None);
        assert_eq!(verify(2, &token, now), None);
        // Nor for what was long before it.
        assert!(verify(1, &token, now - LIFE).is_some());
        let early = now - LIFE - Duration::from_secs(2);
        assert_eq!(verify(1, &token, early), None);
    }

    #[test]
    fn a_token_that_was_changed_is_refused() {
        let now = SystemTime::now();
        let token = key(1).sign(grant(), now);
        for at in 0..token.len() {
            let mut bytes = token.clone().into_bytes();
            bytes[at] = if bytes[at] == b'A' { b'B' } else { b'A' };
            let changed = String::from_utf8(bytes).unwrap();
            assert_eq!(verify(1, &changed, now), None, "{at}");
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
            assert_eq!(verify(1, &forged, now), None, "{forged}");
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
                "iss": iss, "op": op, "exp": seconds(now) + 60, "name": "a",
            })
        };
        let right = other(HEADER, claims(Named::OPERATION, ISSUER));
        assert_eq!(verify(1, &right, now), Some(grant()));
        for wrong in [
            other(HEADER, claims("Other", ISSUER)),
            other(HEADER, claims(Named::OPERATION, "others")),
            other(r#"{"alg":"none"}"#, claims(Named::OPERATION, ISSUER)),
            other(HEADER, serde_json::json!({ "exp": seconds(now) + 60 })),
        ] {
            assert_eq!(verify(1, &wrong, now), None, "{wrong}");
        }
    }

    #[test]
    fn a_new_key_is_random_and_taken() {
        let bytes = || new_secret("names").unwrap().data.unwrap()[KEY].0.clone();
        let first = bytes();
        assert!(Key::of(&first).is_some() && first != bytes());
        assert!(Key::of(&first[1..]).is_none());
    }
}
