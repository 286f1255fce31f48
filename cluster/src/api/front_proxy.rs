//! Who asks: the API server vouches for the user in headers, under a certificate of its own.

use std::{collections::BTreeMap, fmt, sync::Arc};

use anyhow::Context as _;
use http::{HeaderMap, HeaderName};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client};
use tokio_rustls::rustls::{
    RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, pem::PemObject},
    server::{WebPkiClientVerifier, danger::ClientCertVerifier},
};

use crate::{https::Peer, status::Failure};

/// Where the API server says how it vouches for users.
const NAMESPACE: &str = "kube-system";
const CONFIG_MAP: &str = "extension-apiserver-authentication";

/// Who asks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct User {
    pub(super) name: String,
    pub(super) groups: Vec<String>,
    pub(super) extra: BTreeMap<String, Vec<String>>,
}

/// How the API server vouches for users.
pub(super) struct FrontProxy {
    authority: String,
    /// Common names of its certificate; none means any.
    allowed_names: Vec<String>,
    username_headers: Vec<HeaderName>,
    group_headers: Vec<HeaderName>,
    extra_prefixes: Vec<String>,
}

impl fmt::Debug for FrontProxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FrontProxy")
            .field("allowed_names", &self.allowed_names)
            .finish_non_exhaustive()
    }
}

impl FrontProxy {
    pub(super) async fn read(client: &Client) -> anyhow::Result<Self> {
        let api: Api<ConfigMap> = Api::namespaced(client.clone(), NAMESPACE);
        let map = api.get(CONFIG_MAP).await.with_context(|| {
            format!("failed to read config map {NAMESPACE}/{CONFIG_MAP}: check the account's role")
        })?;
        Self::of(&map.data.unwrap_or_default())
    }

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

    /// What checks certificates of clients; one without any may connect, for its health.
    pub(super) fn verifier(&self) -> anyhow::Result<Arc<dyn ClientCertVerifier>> {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(self.authority.as_bytes()) {
            let certificate = certificate.context("the front proxy's authority is no PEM")?;
            roots
                .add(certificate)
                .context("the front proxy's authority is invalid")?;
        }
        let provider = Arc::new(ring::default_provider());
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
            .allow_unauthenticated()
            .build()
            .context("the front proxy's authority is unusable")
    }

    /// The user that a request is for.
    pub(super) fn user(&self, peer: &Peer, headers: &HeaderMap) -> Result<User, Failure> {
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
    use rcgen::{CertificateParams, DnType, KeyPair};

    use super::*;

    fn front_proxy() -> FrontProxy {
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
        FrontProxy::of(&BTreeMap::from(data)).unwrap()
    }

    fn peer(common_name: Option<&str>) -> Peer {
        let certificates = common_name.map(|name| {
            let mut params = CertificateParams::default();
            params.distinguished_name.push(DnType::CommonName, name);
            let certificate = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
            CertificateDer::from(certificate.der().to_vec())
        });
        Peer {
            certificates: certificates.into_iter().collect(),
        }
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
}
