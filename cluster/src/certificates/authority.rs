//! The authority: a Secret with its key and the certificates of all that have not expired.

use std::{
    collections::BTreeMap,
    fmt,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use k8s_openapi::{ByteString, api::core::v1::Secret};
use kube::{
    Api, Client,
    api::{ObjectMeta, PostParams},
};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

use super::{ATTEMPTS, BUNDLE, CertificateError, SECRET};

/// How long an authority lives, and how long before its end the next one is made.
const AUTHORITY_LIFE: Duration = Duration::from_secs(365 * 24 * 3600);
const AUTHORITY_OVERLAP: Duration = Duration::from_secs(90 * 24 * 3600);

/// Clocks of a cluster differ.
const CLOCK_SKEW: Duration = Duration::from_secs(3600);

/// When the newest authority ends, in seconds of Unix time.
const NOT_AFTER: &str = "podvisor.io/not-after";

/// How long the ends of an upload or a copy are known by their certificates: the authority is
/// trusted as long.
const TARGET_LIFE: Duration = AUTHORITY_OVERLAP;

/// The newest authority and the bundle of all that have not expired.
pub(crate) struct Authority {
    key: KeyPair,
    /// The certificates, in PEM.
    pub(crate) bundle: String,
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authority").finish_non_exhaustive()
    }
}

/// A certificate and its key, in PEM.
pub(crate) struct Issued {
    pub(crate) certificate: String,
    pub(crate) key: String,
}

impl Authority {
    /// Issues the certificate of a server that serves uploads under `name`.
    pub(crate) fn issue_target(&self, name: &str) -> Result<Issued, CertificateError> {
        self.issue_end(name, ExtendedKeyUsagePurpose::ServerAuth)
    }

    /// Issues the certificate of a client that sends a copy, as `name`.
    pub(crate) fn issue_sender(&self, name: &str) -> Result<Issued, CertificateError> {
        self.issue_end(name, ExtendedKeyUsagePurpose::ClientAuth)
    }

    /// Issues the certificate of one end of an upload or a copy.
    fn issue_end(
        &self,
        name: &str,
        usage: ExtendedKeyUsagePurpose,
    ) -> Result<Issued, CertificateError> {
        let names = [name.to_owned()];
        let (certificate, key) = self.issue(name, &names, vec![usage], TARGET_LIFE)?;
        Ok(Issued {
            certificate: certificate.pem(),
            key: key.serialize_pem(),
        })
    }

    /// Issues a certificate for a new key.
    pub(super) fn issue(
        &self,
        service: &str,
        names: &[String],
        usages: Vec<ExtendedKeyUsagePurpose>,
        life: Duration,
    ) -> Result<(rcgen::Certificate, KeyPair), CertificateError> {
        let mut params = CertificateParams::new(names)?;
        params.distinguished_name.push(DnType::CommonName, service);
        params.extended_key_usages = usages;
        params.use_authority_key_identifier_extension = true;
        set_validity(&mut params, life);
        let key = KeyPair::generate()?;
        let authority_params = authority_params();
        let issuer = Issuer::from_params(&authority_params, &self.key);
        Ok((params.signed_by(&key, &issuer)?, key))
    }
}

/// Where the authority is.
#[derive(Clone)]
pub(crate) struct AuthorityStore {
    client: Client,
    namespace: String,
}

impl fmt::Debug for AuthorityStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AuthorityStore")
            .field("namespace", &self.namespace)
            .finish_non_exhaustive()
    }
}

impl AuthorityStore {
    /// The authority of the components in `namespace`.
    pub(crate) fn new(client: Client, namespace: &str) -> Self {
        Self {
            client,
            namespace: namespace.to_owned(),
        }
    }

    /// Reads the authority; makes the first, and makes the next when it is time.
    pub(crate) async fn authority(&self) -> Result<Authority, CertificateError> {
        let api: Api<Secret> = Api::namespaced(self.client.clone(), &self.namespace);
        let failed = |action: &'static str| {
            let namespace = self.namespace.clone();
            move |source| CertificateError::Secret {
                action,
                namespace,
                source,
            }
        };
        for _ in 0..ATTEMPTS {
            let found = api.get_opt(SECRET).await.map_err(failed("read"))?;
            let old = match &found {
                Some(secret) if !needs_successor(secret, SystemTime::now()) => {
                    return self.read(secret);
                }
                Some(secret) => Some(self.read(secret)?.bundle),
                None => None,
            };
            let secret = new_secret(found.as_ref(), old.as_deref())?;
            let params = PostParams::default();
            let written = match found {
                Some(_) => api.replace(SECRET, &params, &secret).await,
                None => api.create(&params, &secret).await,
            };
            match written {
                Ok(secret) => return self.read(&secret),
                // Another process was faster: its authority is as good.
                Err(kube::Error::Api(status)) if status.code == 409 => {}
                Err(source) => return Err(failed("write")(source)),
            }
        }
        Err(CertificateError::Contended {
            namespace: self.namespace.clone(),
        })
    }

    fn read(&self, secret: &Secret) -> Result<Authority, CertificateError> {
        let damaged = |what| CertificateError::Damaged {
            namespace: self.namespace.clone(),
            what,
        };
        let text = |name: &'static str| {
            let bytes = secret.data.as_ref().and_then(|data| data.get(name));
            bytes
                .and_then(|bytes| String::from_utf8(bytes.0.clone()).ok())
                .filter(|text| !text.is_empty())
                .ok_or_else(|| damaged(name))
        };
        let key = KeyPair::from_pem(&text("tls.key")?).map_err(|_| damaged("tls.key"))?;
        Ok(Authority {
            key,
            bundle: text(BUNDLE)?,
        })
    }
}

fn needs_successor(secret: &Secret, now: SystemTime) -> bool {
    let not_after = secret
        .metadata
        .annotations
        .as_ref()
        .and_then(|annotations| annotations.get(NOT_AFTER))
        .and_then(|seconds| seconds.parse().ok())
        .map_or(UNIX_EPOCH, |seconds| {
            UNIX_EPOCH + Duration::from_secs(seconds)
        });
    now + AUTHORITY_OVERLAP > not_after
}

/// A Secret with a new authority, which keeps the newest of the old ones in its bundle.
fn new_secret(found: Option<&Secret>, old: Option<&str>) -> Result<Secret, CertificateError> {
    let key = KeyPair::generate()?;
    let certificate = authority_params().self_signed(&key)?;
    let mut bundle = certificate.pem();
    if let Some(old) = old {
        bundle.push_str(first_certificate(old));
    }
    let not_after = SystemTime::now() + AUTHORITY_LIFE;
    let seconds = not_after
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs();
    let data = [
        ("tls.key", key.serialize_pem()),
        ("tls.crt", certificate.pem()),
        (BUNDLE, bundle),
    ];
    Ok(Secret {
        metadata: ObjectMeta {
            name: Some(SECRET.to_owned()),
            resource_version: found.and_then(|secret| secret.metadata.resource_version.clone()),
            annotations: Some(BTreeMap::from([(
                NOT_AFTER.to_owned(),
                seconds.to_string(),
            )])),
            ..Default::default()
        },
        type_: Some("kubernetes.io/tls".to_owned()),
        data: Some(
            data.into_iter()
                .map(|(name, text)| (name.to_owned(), ByteString(text.into())))
                .collect(),
        ),
        ..Default::default()
    })
}

fn first_certificate(bundle: &str) -> &str {
    const END: &str = "-----END CERTIFICATE-----";
    let end = bundle
        .find(END)
        .map_or(bundle.len(), |start| start + END.len());
    bundle.get(..end).unwrap_or(bundle)
}

fn authority_params() -> CertificateParams {
    let mut params = CertificateParams::default();
    params
        .distinguished_name
        .push(DnType::CommonName, "podvisor-cluster");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    set_validity(&mut params, AUTHORITY_LIFE);
    params
}

fn set_validity(params: &mut CertificateParams, life: Duration) {
    let now = SystemTime::now();
    params.not_before = (now - CLOCK_SKEW).into();
    params.not_after = (now + life).into();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_authority_has_a_successor_before_it_ends_and_both_are_trusted() {
        let first = new_secret(None, None).unwrap();
        let now = SystemTime::now();
        assert!(!needs_successor(&first, now));
        assert!(needs_successor(
            &first,
            now + AUTHORITY_LIFE - AUTHORITY_OVERLAP + CLOCK_SKEW
        ));
        let bundle = |secret: &Secret| {
            String::from_utf8(secret.data.as_ref().unwrap()["ca.crt"].0.clone()).unwrap()
        };
        let second = new_secret(Some(&first), Some(&bundle(&first))).unwrap();
        let third = new_secret(Some(&second), Some(&bundle(&second))).unwrap();
        let count = |secret: &Secret| bundle(secret).matches("BEGIN CERTIFICATE").count();
        assert_eq!([count(&first), count(&second), count(&third)], [1, 2, 2]);
        assert!(bundle(&second).contains(first_certificate(&bundle(&first))));
    }

    #[test]
    fn a_secret_without_a_date_is_replaced() {
        assert!(needs_successor(&Secret::default(), SystemTime::now()));
    }
}
