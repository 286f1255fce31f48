//! Debian's docker-registry on loopback.

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use podvisor_images::Digest;

use super::TestImage;

/// A registry process with separate storage; ends when dropped.
pub struct Registry {
    child: Child,
    port: u16,
    scheme: &'static str,
    auth: Option<(String, String)>,
    pub dir: tempfile::TempDir,
}

impl Registry {
    pub fn start() -> Self {
        Self::with("", None)
    }

    /// `extra` is inserted below `http:` in the configuration, `auth` requires a user: name,
    /// password, and the line of an htpasswd file for them.
    pub fn with(extra: &str, auth: Option<(&str, &str, &str)>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        for _ in 0..5 {
            // The port may be taken before the registry binds it: then another one is tried.
            let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            let port = free.local_addr().unwrap().port();
            drop(free);
            let mut config = format!(
                "version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {}}}, delete: {{enabled: true}}}}\n\
                 http:\n  addr: 127.0.0.1:{port}\n{extra}",
                dir.path().join("data").display()
            );
            if let Some((_, _, hashed)) = auth {
                let users = dir.path().join("htpasswd");
                std::fs::write(&users, hashed).unwrap();
                config.push_str(&format!(
                    "auth: {{htpasswd: {{realm: test, path: {}}}}}\n",
                    users.display()
                ));
            }
            let file = dir.path().join("config.yml");
            std::fs::write(&file, config).unwrap();
            let mut child = Command::new("docker-registry")
                .arg("serve")
                .arg(&file)
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .expect("docker-registry is needed: apt-get install docker-registry");
            let deadline = Instant::now() + Duration::from_secs(60);
            while Instant::now() < deadline && child.try_wait().unwrap().is_none() {
                if TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok() {
                    let scheme = if extra.contains("tls:") {
                        "https"
                    } else {
                        "http"
                    };
                    let auth =
                        auth.map(|(user, password, _)| (user.to_owned(), password.to_owned()));
                    return Self {
                        child,
                        port,
                        scheme,
                        auth,
                        dir,
                    };
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            let _ = child.kill();
            let _ = child.wait();
        }
        panic!("docker-registry does not start");
    }

    /// `127.0.0.1:PORT`.
    pub fn host(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    pub fn name(&self, repository: &str) -> String {
        format!("{}/{repository}", self.host())
    }

    /// Pushes an image under `repository:tag`.
    pub async fn push(&self, repository: &str, tag: &str, image: &TestImage) {
        for blob in image.blobs() {
            self.push_blob(repository, blob).await;
        }
        self.push_manifest(
            repository,
            tag,
            "application/vnd.oci.image.manifest.v1+json",
            &image.manifest,
        )
        .await;
    }

    pub async fn push_blob(&self, repository: &str, blob: &[u8]) {
        let client = self.client();
        let start = format!(
            "{}://{}/v2/{repository}/blobs/uploads/",
            self.scheme,
            self.host()
        );
        let response = self.authorize(client.post(start)).send().await.unwrap();
        let mut target: reqwest::Url = response.headers()["location"]
            .to_str()
            .unwrap()
            .parse()
            .unwrap();
        target
            .query_pairs_mut()
            .append_pair("digest", &Digest::of(blob).to_string());
        let response = self
            .authorize(client.put(target))
            .body(blob.to_vec())
            .send()
            .await
            .unwrap();
        assert_eq!(response.status(), 201, "{}", response.text().await.unwrap());
    }

    pub async fn push_manifest(
        &self,
        repository: &str,
        tag: &str,
        media_type: &str,
        manifest: &[u8],
    ) {
        let target = format!(
            "{}://{}/v2/{repository}/manifests/{tag}",
            self.scheme,
            self.host()
        );
        let request = self.client().put(target).header("Content-Type", media_type);
        let response = self
            .authorize(request)
            .body(manifest.to_vec())
            .send()
            .await
            .unwrap();
        assert_eq!(response.status(), 201, "{}", response.text().await.unwrap());
    }

    fn authorize(&self, request: reqwest::RequestBuilder) -> reqwest::RequestBuilder {
        match &self.auth {
            Some((user, password)) => request.basic_auth(user, Some(password)),
            None => request,
        }
    }

    fn client(&self) -> reqwest::Client {
        let roots = rustls::RootCertStore::empty();
        let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
        let mut tls = rustls::ClientConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        tls.dangerous()
            .set_certificate_verifier(std::sync::Arc::new(AnyServer(provider)));
        reqwest::Client::builder()
            .tls_backend_preconfigured(tls)
            .no_proxy()
            .build()
            .unwrap()
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Pushes of tests accept any server certificate.
#[derive(Debug)]
struct AnyServer(std::sync::Arc<rustls::crypto::CryptoProvider>);

impl rustls::client::danger::ServerCertVerifier for AnyServer {
    fn verify_server_cert(
        &self,
        _: &rustls::pki_types::CertificateDer<'_>,
        _: &[rustls::pki_types::CertificateDer<'_>],
        _: &rustls::pki_types::ServerName<'_>,
        _: &[u8],
        _: rustls::pki_types::UnixTime,
    ) -> Result<rustls::client::danger::ServerCertVerified, rustls::Error> {
        Ok(rustls::client::danger::ServerCertVerified::assertion())
    }
    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &rustls::pki_types::CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
    }
    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &rustls::pki_types::CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
    }
    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
