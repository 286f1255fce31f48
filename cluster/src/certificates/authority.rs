//! The authority: a Secret with its key and the certificates of all that have not expired.
//!
//! A successor is made long before the authority ends, and used a day later: all that verify
//! certificates know it by then, since they ask more often.

use std::{
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

use super::{ATTEMPTS, BUNDLE, CertificateError, SECRET, SERVER_LIFE};

/// How long an authority lives, and how long before its end the next one is made.
const AUTHORITY_LIFE: Duration = Duration::from_secs(365 * 24 * 3600);
const AUTHORITY_OVERLAP: Duration = Duration::from_secs(90 * 24 * 3600);

/// Clocks of a cluster differ.
const CLOCK_SKEW: Duration = Duration::from_secs(3600);

/// How long a successor is made known before it is used. Servers publish it within 6 hours.
const PREPARATION: Duration = Duration::from_secs(24 * 3600);

/// When the authority that is used ends, in seconds of Unix time.
const NOT_AFTER: &str = "podvisor.io/not-after";

/// From when on its successor is used, and when that ends.
const NEXT_FROM: &str = "podvisor.io/next-from";
const NEXT_NOT_AFTER: &str = "podvisor.io/next-not-after";

/// Keys of the Secret: of the authority that is used, and of its successor.
const USED: [&str; 2] = ["tls.key", "tls.crt"];
const NEXT: [&str; 2] = ["next.key", "next.crt"];

/// How long the ends of an upload or a copy, and servers of exports, are known by their
/// certificates: the authority is trusted as long.
const TARGET_LIFE: Duration = AUTHORITY_OVERLAP;

/// The authority that is used, and the bundle of all that are to be trusted.
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

    /// Issues the certificate of a server that serves an export, by the names of its Service.
    pub(crate) fn issue_exporter(
        &self,
        service: &str,
        namespace: &str,
    ) -> Result<Issued, CertificateError> {
        let names = [
            format!("{service}.{namespace}.svc"),
            format!("{service}.{namespace}.svc.cluster.local"),
        ];
        let usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let (certificate, key) = self.issue(service, &names, usages, TARGET_LIFE)?;
        Ok(Issued {
            certificate: certificate.pem(),
            key: key.serialize_pem(),
        })
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

    /// Reads the authority; makes the first, and makes and uses the next when it is time.
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
            let now = SystemTime::now();
            let secret = match &found {
                None => first_secret(now)?,
                Some(secret) => match Step::of(secret, now) {
                    Step::None => return self.read(secret),
                    // What is not ours is not written to.
                    step => {
                        self.read(secret)?;
                        match step {
                            Step::Use => with_next_used(secret),
                            _ => with_next(secret, now)?,
                        }
                    }
                },
            };
            let params = PostParams::default();
            let written = match found {
                Some(_) => api.replace(SECRET, &params, &secret).await,
                None => api.create(&params, &secret).await,
            };
            match written {
                // It may be time for the next step at once.
                Ok(_) => {}
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

/// What is to be done with a Secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    None,
    /// A successor is made, and made known.
    Prepare,
    /// The successor is used.
    Use,
}

impl Step {
    fn of(secret: &Secret, now: SystemTime) -> Self {
        let not_after = date(secret, NOT_AFTER).unwrap_or(UNIX_EPOCH);
        if now + AUTHORITY_OVERLAP <= not_after {
            return Self::None;
        }
        let has = |name: &&str| secret.data.as_ref().is_some_and(|d| d.contains_key(*name));
        match date(secret, NEXT_FROM).filter(|_| NEXT.iter().all(has)) {
            None => Self::Prepare,
            // No server's certificate outlives its authority.
            Some(from) if now >= from || now + SERVER_LIFE >= not_after => Self::Use,
            Some(_) => Self::None,
        }
    }
}

fn date(secret: &Secret, annotation: &str) -> Option<SystemTime> {
    let annotations = secret.metadata.annotations.as_ref()?;
    let seconds = annotations.get(annotation)?.parse().ok()?;
    UNIX_EPOCH.checked_add(Duration::from_secs(seconds))
}

fn annotate(secret: &mut Secret, annotation: &str, time: SystemTime) {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let annotations = secret.metadata.annotations.get_or_insert_default();
    annotations.insert(annotation.to_owned(), since.as_secs().to_string());
}

fn put(secret: &mut Secret, name: &str, text: String) {
    let data = secret.data.get_or_insert_default();
    data.insert(name.to_owned(), ByteString(text.into()));
}

/// Puts a new authority under the names of its key and its certificate, which is returned.
fn put_new(secret: &mut Secret, names: [&str; 2]) -> Result<String, CertificateError> {
    let key = KeyPair::generate()?;
    let certificate = authority_params().self_signed(&key)?.pem();
    let [of_key, of_certificate] = names;
    put(secret, of_key, key.serialize_pem());
    put(secret, of_certificate, certificate.clone());
    Ok(certificate)
}

/// A Secret with the first authority.
fn first_secret(now: SystemTime) -> Result<Secret, CertificateError> {
    let mut secret = Secret {
        metadata: ObjectMeta {
            name: Some(SECRET.to_owned()),
            ..Default::default()
        },
        type_: Some("kubernetes.io/tls".to_owned()),
        ..Default::default()
    };
    let certificate = put_new(&mut secret, USED)?;
    put(&mut secret, BUNDLE, certificate);
    annotate(&mut secret, NOT_AFTER, now + AUTHORITY_LIFE);
    Ok(secret)
}

/// The Secret with a successor, and with these two in its bundle alone.
fn with_next(secret: &Secret, now: SystemTime) -> Result<Secret, CertificateError> {
    let mut secret = secret.clone();
    let data = secret.data.get_or_insert_default();
    let used = data.get(USED[1]).map(|used| used.0.clone());
    let mut bundle = put_new(&mut secret, NEXT)?;
    bundle.push_str(&String::from_utf8_lossy(&used.unwrap_or_default()));
    put(&mut secret, BUNDLE, bundle);
    annotate(&mut secret, NEXT_FROM, now + PREPARATION);
    annotate(&mut secret, NEXT_NOT_AFTER, now + AUTHORITY_LIFE);
    Ok(secret)
}

/// The Secret whose successor is the authority from now on.
fn with_next_used(secret: &Secret) -> Secret {
    let mut secret = secret.clone();
    let data = secret.data.get_or_insert_default();
    for (next, used) in NEXT.into_iter().zip(USED) {
        if let Some(value) = data.remove(next) {
            data.insert(used.to_owned(), value);
        }
    }
    let annotations = secret.metadata.annotations.get_or_insert_default();
    annotations.remove(NEXT_FROM);
    if let Some(end) = annotations.remove(NEXT_NOT_AFTER) {
        annotations.insert(NOT_AFTER.to_owned(), end);
    }
    secret
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

    fn bundle(secret: &Secret) -> String {
        String::from_utf8(secret.data.as_ref().unwrap()[BUNDLE].0.clone()).unwrap()
    }

    #[test]
    fn a_successor_is_trusted_before_it_is_used_and_the_old_one_after() {
        let now = SystemTime::now();
        let first = first_secret(now).unwrap();
        assert_eq!(Step::of(&first, now), Step::None);
        let late = now + AUTHORITY_LIFE - AUTHORITY_OVERLAP + CLOCK_SKEW;
        assert_eq!(Step::of(&first, late), Step::Prepare);
        let prepared = with_next(&first, late).unwrap();
        let data = |secret: &Secret, name: &str| secret.data.as_ref().unwrap()[name].clone();
        assert_eq!(data(&prepared, "tls.key"), data(&first, "tls.key"));
        assert_eq!(bundle(&prepared).matches("BEGIN CERTIFICATE").count(), 2);
        assert!(bundle(&prepared).ends_with(&bundle(&first)));
        assert_eq!(Step::of(&prepared, late), Step::None);
        assert_eq!(Step::of(&prepared, late + PREPARATION), Step::Use);
        let second = with_next_used(&prepared);
        assert_eq!(data(&second, "tls.key"), data(&prepared, "next.key"));
        assert_eq!(data(&second, "tls.crt"), data(&prepared, "next.crt"));
        assert_eq!(bundle(&second), bundle(&prepared));
        assert_eq!(Step::of(&second, late + PREPARATION), Step::None);
        let third = with_next(&second, late).unwrap();
        assert_eq!(bundle(&third).matches("BEGIN CERTIFICATE").count(), 2);
        assert!(!bundle(&third).contains(&bundle(&first)));
    }

    #[test]
    fn a_secret_without_dates_is_replaced_at_once() {
        let now = SystemTime::now();
        let mut old = first_secret(now).unwrap();
        old.metadata.annotations = None;
        assert_eq!(Step::of(&old, now), Step::Prepare);
        let prepared = with_next(&old, now).unwrap();
        assert_eq!(Step::of(&prepared, now), Step::Use);
        assert_eq!(Step::of(&with_next_used(&prepared), now), Step::None);
    }
}
