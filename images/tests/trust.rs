//! TLS and log-in, with a real registry.

mod support;

use std::path::{Path, PathBuf};

use podvisor_images::{
    ClientCertificate, Credentials, Error, PullOptions, RegistryError, RegistryHost,
    RegistryProtocol,
};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use support::{Registry, TestImage, TestStore, explain, options, registries};

/// A certificate authority of the test, and PEM files of what it signs.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    dir: tempfile::TempDir,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("ca.pem"), issuer.pem()).unwrap();
        Self { issuer, dir }
    }

    fn file(&self) -> PathBuf {
        self.dir.path().join("ca.pem")
    }

    /// A certificate and its key for 127.0.0.1.
    fn sign(&self, name: &str) -> (PathBuf, PathBuf) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let path = |kind: &str| self.dir.path().join(format!("{name}.{kind}"));
        std::fs::write(path("pem"), certificate.pem()).unwrap();
        std::fs::write(path("key"), key.serialize_pem()).unwrap();
        (path("pem"), path("key"))
    }

    fn registry(&self, clients: Option<&Path>) -> Registry {
        let (certificate, key) = self.sign("server");
        let clients = clients.map_or_else(String::new, |file| {
            format!(", clientcas: [{}]", file.display())
        });
        let tls = format!(
            "  tls: {{certificate: {}, key: {}{clients}}}\n",
            certificate.display(),
            key.display()
        );
        Registry::with(&tls, None)
    }
}

fn with(registry: &Registry, host: RegistryHost) -> PullOptions {
    options().registries(registries().host(registry.host(), host.protocol(RegistryProtocol::Https)))
}

#[tokio::test]
async fn a_registry_is_trusted_by_its_authority_alone() {
    let authority = Authority::new();
    let registry = authority.registry(None);
    registry.push("app", "v1", &TestImage::small()).await;
    let test = TestStore::new();
    let name = registry.name("app:v1");

    let error = test
        .store
        .pull(&name, &with(&registry, RegistryHost::default()))
        .await
        .unwrap_err();
    assert!(
        matches!(error, Error::Registry(RegistryError::Tls { .. })),
        "{error:?}"
    );
    assert!(explain(&error).contains("update-ca-certificates"));
    let other = RegistryHost::default().authority(Authority::new().file());
    let error = test
        .store
        .pull(&name, &with(&registry, other))
        .await
        .unwrap_err();
    assert!(
        matches!(error, Error::Registry(RegistryError::Certificate { .. })),
        "{error:?}"
    );
    assert_eq!(test.files(), [""; 0]);

    let trusted = RegistryHost::default().authority(authority.file());
    test.store
        .pull(&name, &with(&registry, trusted))
        .await
        .unwrap();
}

#[tokio::test]
async fn a_registry_that_is_its_own_authority_is_trusted_by_its_certificate() {
    let dir = tempfile::tempdir().unwrap();
    // As `openssl req -x509` makes them.
    let make = |name: &str, host: &str, years: std::ops::Range<i32>| {
        let mut params = CertificateParams::new(vec![host.to_owned()]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.not_before = rcgen::date_time_ymd(years.start, 1, 1);
        params.not_after = rcgen::date_time_ymd(years.end, 1, 1);
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        let path = |kind: &str| dir.path().join(format!("{name}.{kind}"));
        std::fs::write(path("pem"), certificate.pem()).unwrap();
        std::fs::write(path("key"), key.serialize_pem()).unwrap();
        let tls = format!(
            "  tls: {{certificate: {}, key: {}}}\n",
            path("pem").display(),
            path("key").display()
        );
        (path("pem"), tls)
    };
    let (own, tls) = make("own", "127.0.0.1", 2020..4000);
    let (same_name, _) = make("same-name", "127.0.0.1", 2020..4000);
    let registry = Registry::with(&tls, None);
    registry.push("app", "v1", &TestImage::small()).await;
    let trusting =
        |registry: &Registry, file: &Path| with(registry, RegistryHost::default().authority(file));
    let test = TestStore::new();
    let name = registry.name("app:v1");
    let pulled = test.store.pull(&name, &trusting(&registry, &own)).await;
    pulled.unwrap();

    let (elsewhere, tls) = make("elsewhere", "registry.example", 2020..4000);
    let wrong_name = Registry::with(&tls, None);
    let (expired, tls) = make("expired", "127.0.0.1", 2020..2021);
    let too_old = Registry::with(&tls, None);
    for (registry, file) in [
        (&registry, &same_name),
        (&wrong_name, &elsewhere),
        (&too_old, &expired),
    ] {
        let options = trusting(registry, file);
        let refused = test.store.pull(&registry.name("app:v1"), &options).await;
        assert!(
            matches!(refused, Err(Error::Registry(RegistryError::Tls { .. }))),
            "{refused:?}"
        );
    }
}

#[tokio::test]
async fn a_registry_that_asks_for_a_certificate_gets_the_configured_one() {
    let (authority, clients) = (Authority::new(), Authority::new());
    let registry = authority.registry(Some(&clients.file()));
    let test = TestStore::new();
    let name = registry.name("nothing:v1");
    let trusted = RegistryHost::default().authority(authority.file());
    let error = test
        .store
        .pull(&name, &with(&registry, trusted.clone()))
        .await
        .unwrap_err();
    assert!(
        !matches!(error, Error::Registry(RegistryError::NotFound { .. })),
        "{error:?}"
    );
    let (chain, key) = clients.sign("client");
    let known = trusted.client_certificate(ClientCertificate { chain, key });
    let error = test
        .store
        .pull(&name, &with(&registry, known))
        .await
        .unwrap_err();
    assert!(
        matches!(error, Error::Registry(RegistryError::NotFound { .. })),
        "{error:?}"
    );
}

#[tokio::test]
async fn https_spoken_to_a_plain_registry_is_told_as_such() {
    let registry = Registry::start();
    let test = TestStore::new();
    let error = test
        .store
        .pull(
            &registry.name("app"),
            &with(&registry, RegistryHost::default()),
        )
        .await
        .unwrap_err();
    assert!(
        matches!(error, Error::Registry(RegistryError::Tls { .. })),
        "{error:?}"
    );
}

/// `user:secret`, hashed by bcrypt.
const HTPASSWD: &str = "user:$2b$04$7U.66SGoYJGC0otjahiFHOvJzoM5BnHVUMBU9e1GI4W.tJrKIkS0u\n";

#[tokio::test]
async fn credentials_come_from_the_caller_or_dockers_file() {
    let registry = Registry::with("", Some(("user", "secret", HTPASSWD)));
    registry.push("app", "v1", &TestImage::small()).await;
    let test = TestStore::new();
    let name = registry.name("app:v1");
    let basic = |password: &str| Credentials::Basic {
        user: "user".into(),
        password: password.into(),
    };

    for credentials in [Credentials::Auto, Credentials::Anonymous, basic("wrong")] {
        let error = test
            .store
            .pull(&name, &options().credentials(credentials))
            .await
            .unwrap_err();
        assert!(
            matches!(error, Error::Registry(RegistryError::Unauthorized { .. })),
            "{error:?}"
        );
    }
    assert_eq!(test.files(), [""; 0]);
    test.store
        .pull(&name, &options().credentials(basic("secret")))
        .await
        .unwrap();
    test.store.remove(&name).unwrap();

    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config.json");
    std::fs::write(
        &file,
        format!(
            r#"{{"auths":{{"{}":{{"auth":"dXNlcjpzZWNyZXQ="}}}}}}"#,
            registry.host()
        ),
    )
    .unwrap();
    let mut registries = registries();
    registries.docker_config = Some(file);
    test.store
        .pull(&name, &options().registries(registries.clone()))
        .await
        .unwrap();
    test.store.remove(&name).unwrap();

    // Podman's, where Docker's has nothing.
    registries.podman_auth = registries.docker_config.take().into_iter().collect();
    registries.docker_config = Some(dir.path().join("missing"));
    test.store
        .pull(&name, &options().registries(registries))
        .await
        .unwrap();
}
