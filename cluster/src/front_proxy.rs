//! Who asks: the API server vouches for the user in headers, under a certificate of its own.
//!
//! Whom to believe stands in a ConfigMap, which is followed: its authority may be replaced while a
//! server runs.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, PoisonError, RwLock},
};

use anyhow::Context as _;
use futures_util::StreamExt as _;
use http::{HeaderMap, HeaderName};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api, Client,
    runtime::{WatchStreamExt as _, watcher},
};
use tokio_rustls::rustls::{
    DigitallySignedStruct, DistinguishedName, Error, RootCertStore, SignatureScheme,
    client::danger::HandshakeSignatureValid,
    crypto::ring,
    pki_types::{CertificateDer, UnixTime, pem::PemObject},
    server::{
        WebPkiClientVerifier,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
};

use crate::{https::Peer, status::Failure};

/// Where the API server says how it vouches for users.
const NAMESPACE: &str = "kube-system";
const CONFIG_MAP: &str = "extension-apiserver-authentication";

fn maps(client: &Client) -> Api<ConfigMap> {
    Api::namespaced(client.clone(), NAMESPACE)
}

/// Who asks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct User {
    pub(crate) name: String,
    pub(crate) groups: Vec<String>,
    pub(crate) extra: BTreeMap<String, Vec<String>>,
}

/// What recognizes the API server, and knows for whom it asks.
pub(crate) struct FrontProxy {
    current: RwLock<Current>,
}

#[derive(Clone)]
struct Current {
    rules: Arc<Rules>,
    verifier: Arc<dyn ClientCertVerifier>,
}

impl Current {
    fn of(map: ConfigMap) -> anyhow::Result<Self> {
        let rules = Rules::of(&map.data.unwrap_or_default())?;
        Ok(Self {
            verifier: rules.verifier()?,
            rules: Arc::new(rules),
        })
    }
}

impl fmt::Debug for FrontProxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FrontProxy")
            .field("allowed_names", &self.current().rules.allowed_names)
            .finish_non_exhaustive()
    }
}

impl FrontProxy {
    pub(crate) async fn read(client: &Client) -> anyhow::Result<Arc<Self>> {
        let map = maps(client).get(CONFIG_MAP).await.with_context(|| {
            format!("failed to read config map {NAMESPACE}/{CONFIG_MAP}: check the account's role")
        })?;
        Ok(Arc::new(Self::with(Current::of(map)?)))
    }

    fn with(current: Current) -> Self {
        Self {
            current: RwLock::new(current),
        }
    }

    /// Follows the ConfigMap for ever.
    pub(crate) async fn follow(self: Arc<Self>, client: Client) {
        let changes = watcher::watch_object(maps(&client), CONFIG_MAP);
        let mut changes = changes.default_backoff().boxed();
        while let Some(change) = changes.next().await {
            let changed = match change {
                Ok(Some(map)) => Current::of(map),
                // It is made again by the API server.
                Ok(None) => continue,
                Err(error) => {
                    tracing::debug!(
                        error = &error as &dyn std::error::Error,
                        "the front proxy's authority is asked for again"
                    );
                    continue;
                }
            };
            match changed {
                Ok(changed) => self.set(changed),
                Err(error) => tracing::error!(
                    error = format!("{error:#}"),
                    "the front proxy's authority is not replaced"
                ),
            }
        }
    }

    fn set(&self, changed: Current) {
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = changed;
    }

    fn current(&self) -> Current {
        let current = self.current.read();
        current.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The user that a request is for. Its connection is then known to be the API server's.
    pub(crate) fn user(&self, peer: &Peer, headers: &HeaderMap) -> Result<User, Failure> {
        let current = self.current();
        // The connection may be older than the authority.
        let (first, others) = peer
            .certificates
            .split_first()
            .ok_or_else(Failure::unauthorized)?;
        current
            .verifier
            .verify_client_cert(first, others, UnixTime::now())
            .map_err(|_| Failure::unauthorized())?;
        let user = current.rules.user(peer, headers)?;
        peer.recognize();
        Ok(user)
    }
}

/// Certificates of clients; one without any may connect, for its health.
impl ClientCertVerifier for FrontProxy {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verifier = self.current().verifier;
        verifier.verify_client_cert(end_entity, intermediates, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let verifier = self.current().verifier;
        verifier.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let verifier = self.current().verifier;
        verifier.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.current().verifier.supported_verify_schemes()
    }
}

/// How the API server vouches for users.
struct Rules {
    authority: String,
    /// Common names of its certificate; none means any.
    allowed_names: Vec<String>,
    username_headers: Vec<HeaderName>,
    group_headers: Vec<HeaderName>,
    extra_prefixes: Vec<String>,
}

impl Rules {
    fn of(data: &BTreeMap<String, String>) -> anyhow::Result<Self> {
        let text = |name: &str| {
            data.get(name)
                .with_context(|| format!("config map {CONFIG_MAP} has no {name}"))
        };
        let list = |name: &str| -> anyhow::Result<Vec<String>> {
            serde_json::from_str(text(name)?)
                .with_context(|| format!("config map {CONFIG_MAP}: {name} is no list"))
        };
        let headers = |name: &str| -> anyhow::Result<Vec<HeaderName>> {
            let names = list(name)?;
            let parsed: Result<Vec<_>, _> = names.iter().map(|name| name.parse()).collect();
            parsed.with_context(|| format!("config map {CONFIG_MAP}: {name} has invalid names"))
        };
        Ok(Self {
            authority: text("requestheader-client-ca-file")?.clone(),
            allowed_names: list("requestheader-allowed-names")?,
            username_headers: headers("requestheader-username-headers")?,
            group_headers: headers("requestheader-group-headers")?,
            extra_prefixes: list("requestheader-extra-headers-prefix")?
                .iter()
                .map(|prefix| prefix.to_ascii_lowercase())
                .collect(),
        })
    }

    fn verifier(&self) -> anyhow::Result<Arc<dyn ClientCertVerifier>> {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(self.authority.as_bytes()) {
            let certificate = certificate.context("the front proxy's authority is no PEM")?;
            roots
                .add(certificate)
                .context("the front proxy's authority is invalid")?;
        }
        let provider = Arc::new(ring::default_provider());
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
            .build()
            .context("the front proxy's authority is unusable")
    }

    fn user(&self, peer: &Peer, headers: &HeaderMap) -> Result<User, Failure> {
        if peer.certificates.is_empty() {
            return Err(Failure::unauthorized());
        }
        if !self.allowed_names.is_empty() {
            let name = peer.common_name().ok_or_else(Failure::unauthorized)?;
            if !self.allowed_names.contains(&name) {
                return Err(Failure::unauthorized());
            }
        }
        let values = |names: &[HeaderName]| -> Vec<String> {
            let values = names.iter().flat_map(|name| headers.get_all(name));
            values
                .filter_map(|value| value.to_str().ok())
                .map(str::to_owned)
                .collect()
        };
        let name = values(&self.username_headers)
            .into_iter()
            .next()
            .unwrap_or_default();
        if name.is_empty() {
            return Err(Failure::unauthorized());
        }
        let mut extra: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (header, value) in headers {
            let key = self
                .extra_prefixes
                .iter()
                .find_map(|prefix| header.as_str().strip_prefix(prefix));
            if let (Some(key), Ok(value)) = (key, value.to_str()) {
                extra
                    .entry(unescape(key))
                    .or_default()
                    .push(value.to_owned());
            }
        }
        Ok(User {
            name,
            groups: values(&self.group_headers),
            extra,
        })
    }
}

/// Keys of extra values stand percent-encoded in names of headers.
fn unescape(key: &str) -> String {
    let mut bytes = Vec::with_capacity(key.len());
    let mut rest = key.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        let code = (byte == b'%')
            .then(|| tail.get(..2))
            .flatten()
            .and_then(|hex| std::str::from_utf8(hex).ok())
            .and_then(|hex| u8::from_str_radix(hex, 16).ok());
        match code {
            Some(code) => {
                bytes.push(code);
                rest = tail.get(2..).unwrap_or_default();
            }
            None => {
                bytes.push(byte);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use rcgen::{
        BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose,
        IsCa, KeyPair,
    };
    use serde_json::json;

    use super::*;

    fn front_proxy() -> Rules {
        let data = [
            ("requestheader-client-ca-file", ""),
            ("requestheader-allowed-names", r#"["front-proxy-client"]"#),
            ("requestheader-username-headers", r#"["X-Remote-User"]"#),
            ("requestheader-group-headers", r#"["X-Remote-Group"]"#),
            (
                "requestheader-extra-headers-prefix",
                r#"["X-Remote-Extra-"]"#,
            ),
        ];
        let data = data.map(|(name, text)| (name.to_owned(), text.to_owned()));
        Rules::of(&BTreeMap::from(data)).unwrap()
    }

    fn peer(common_name: Option<&str>) -> Peer {
        let certificates = common_name.map(|name| {
            let mut params = CertificateParams::default();
            params.distinguished_name.push(DnType::CommonName, name);
            let certificate = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
            CertificateDer::from(certificate.der().to_vec())
        });
        Peer::with(certificates.into_iter().collect())
    }

    fn headers() -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert("x-remote-user", "ann".parse().unwrap());
        headers.append("x-remote-group", "a".parse().unwrap());
        headers.append("x-remote-group", "b".parse().unwrap());
        headers.insert("x-remote-extra-example.org%2fscopes", "s".parse().unwrap());
        headers
    }

    #[test]
    fn the_api_server_vouches_for_a_user_with_groups_and_extra_values() {
        let user = front_proxy()
            .user(&peer(Some("front-proxy-client")), &headers())
            .unwrap();
        assert_eq!(
            (user.name.as_str(), user.groups.as_slice()),
            ("ann", &["a".into(), "b".into()][..])
        );
        assert_eq!(user.extra["example.org/scopes"], ["s"]);
    }

    #[test]
    fn nobody_else_vouches_for_a_user() {
        for name in [None, Some("kube-apiserver-kubelet-client"), Some("")] {
            let failure = front_proxy().user(&peer(name), &headers()).unwrap_err();
            assert_eq!(failure.code(), 401, "{name:?}");
        }
        let nobody = front_proxy().user(&peer(Some("front-proxy-client")), &HeaderMap::new());
        assert_eq!(nobody.unwrap_err().code(), 401);
    }

    /// What the API server says, and who is at the other end of its connections.
    fn authority() -> (Current, Peer) {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let issuer = CertifiedIssuer::self_signed(params, key).unwrap();
        let mut params = CertificateParams::default();
        let name = "front-proxy-client";
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let client = params.signed_by(&KeyPair::generate().unwrap(), &issuer);
        let map = json!({ "data": {
            "requestheader-client-ca-file": issuer.pem(),
            "requestheader-allowed-names": json!([name]).to_string(),
            "requestheader-username-headers": r#"["X-Remote-User"]"#,
            "requestheader-group-headers": r#"["X-Remote-Group"]"#,
            "requestheader-extra-headers-prefix": r#"["X-Remote-Extra-"]"#,
        } });
        let current = Current::of(serde_json::from_value(map).unwrap()).unwrap();
        let certificate = CertificateDer::from(client.unwrap().der().to_vec());
        (current, Peer::with(vec![certificate]))
    }

    #[test]
    fn an_authority_that_is_replaced_is_believed_no_longer() {
        let ((first, old), (second, new)) = (authority(), authority());
        let front_proxy = FrontProxy::with(first);
        let is_believed = |peer: &Peer| {
            let certificate = peer.certificates.first().unwrap();
            let connects = front_proxy.verify_client_cert(certificate, &[], UnixTime::now());
            let user = front_proxy.user(peer, &headers());
            assert_eq!(connects.is_ok(), user.is_ok());
            user.is_ok()
        };
        assert!(is_believed(&old) && !is_believed(&new));
        front_proxy.set(second);
        assert!(!is_believed(&old) && is_believed(&new));
    }

    #[test]
    fn who_shows_no_certificate_connects_and_is_nobody() {
        let (current, _) = authority();
        let front_proxy = FrontProxy::with(current);
        assert!(!front_proxy.client_auth_mandatory());
        let nobody = front_proxy.user(&Peer::with(Vec::new()), &headers());
        assert_eq!(nobody.unwrap_err().code(), 401);
    }
}
