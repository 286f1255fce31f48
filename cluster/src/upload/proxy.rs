//! `podvisor-cluster upload-proxy`: takes disks from outside, for who has a token.
//!
//! Nothing of a body is read before its token is verified and the claim's pod is found ready. The
//! bytes then go to that pod as they arrive, and its answer comes back. The proxy may read claims,
//! and no pods: where the claim's pod is, the controller wrote on the claim. Whoever changes that
//! reaches nobody, since the pod must show a certificate of the authority for this claim.

mod cors;

use std::{
    fmt,
    net::IpAddr,
    sync::Arc,
    time::{Duration, SystemTime},
};

use anyhow::Context as _;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode, header, request::Parts};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::{Api, Client};
use tokio::{net::TcpListener, net::TcpStream, time::timeout};
use tokio_rustls::{
    TlsConnector,
    rustls::{
        ClientConfig, RootCertStore,
        client::ResolvesClientCert,
        crypto::ring,
        pki_types::{CertificateDer, ServerName, pem::PemObject as _},
    },
};

use super::{ADDRESS, Grant, PHASE, PORT, PROXY, READY, TARGET, Way, server_name};
use crate::{
    certificates::{AuthorityStore, Certificates, Publish},
    https::{self, Answer, Listen, Peer},
    shares::Shares,
    token::KeyStore,
};

/// How long a pod may take to be connected to.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The longest answer of a pod that is passed on: why it did not take a disk.
const MAX_ANSWER: usize = 64 << 10;

/// So many uploads are passed on at once; and so many into one namespace, whose pods may leave
/// them without an answer. The rest of the server's connections is for all else that is asked.
const MAX_UPLOADS: usize = 384;
const MAX_OF_NAMESPACE: usize = 64;

/// Serves until the process is told to end.
///
/// # Errors
///
/// The API server cannot be reached, the certificates cannot be made, or the address is taken.
pub async fn run(options: Listen) -> anyhow::Result<()> {
    let (client, listener) = options.start().await?;
    serve(client, listener, &options.namespace, https::told_to_end()).await
}

/// Serves on a listener until `stop` is ready.
///
/// # Errors
///
/// The certificates cannot be made.
pub async fn serve(
    client: Client,
    listener: TcpListener,
    namespace: &str,
    stop: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    let certificates = Certificates::new(client.clone(), namespace, PROXY, Publish::People).await?;
    let tls = certificates.server_config(None)?;
    let proxy = Arc::new(Proxy {
        shares: Shares::new(MAX_UPLOADS, MAX_OF_NAMESPACE),
        keys: KeyStore::of::<Grant>(client.clone(), namespace),
        authority: AuthorityStore::new(client.clone(), namespace),
        certificate: certificates.for_clients(),
        client,
    });
    let fresh = tokio::spawn(certificates.keep_fresh());
    tracing::info!(address = ?listener.local_addr().ok(), "taking uploads");
    let handle = move |request: Request<Incoming>, peer: Peer| {
        let proxy = Arc::clone(&proxy);
        async move {
            let (parts, body) = request.into_parts();
            let answer = match proxy.judge(&parts, &peer).await {
                Ok(Judged::Target(grant, target)) => {
                    proxy.forward(&parts, body, &grant, target).await
                }
                Ok(Judged::Answer(answer)) => answer,
                Err(refused) => {
                    https::linger(body);
                    refused
                }
            };
            cors::allow(&parts, answer)
        }
    };
    https::serve(listener, tls, handle, stop).await;
    fresh.abort();
    Ok(())
}

struct Proxy {
    shares: Shares,
    client: Client,
    keys: KeyStore,
    authority: AuthorityStore,
    certificate: Arc<dyn ResolvesClientCert>,
}

impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Proxy").finish_non_exhaustive()
    }
}

impl Proxy {
    /// Decides by the head of a request alone.
    async fn judge(&self, request: &Parts, peer: &Peer) -> Result<Judged, Answer> {
        let path = request.uri.path();
        if path == "/healthz" {
            return Ok(Judged::Answer(https::text(StatusCode::OK, "ok")));
        }
        if is_archive(path) {
            let text = "archives are not taken, since a volume holds a disk: send a disk to upload";
            return Err(https::text(StatusCode::NOT_IMPLEMENTED, text));
        }
        if Way::of(path).is_none() {
            let text = "there is only /v1beta1/upload, upload-async, upload-form and \
                        upload-form-async";
            return Err(https::text(StatusCode::NOT_FOUND, text));
        }
        if let Some(answer) = cors::preflight(request) {
            return Ok(Judged::Answer(answer));
        }
        if !matches!(request.method, Method::HEAD | Method::POST | Method::PUT) {
            let text = "a disk is sent by POST or PUT";
            return Err(https::text(StatusCode::METHOD_NOT_ALLOWED, text));
        }
        let grant = self.grant(&request.headers).await?;
        peer.recognize();
        let target = self.target(&grant).await?;
        Ok(match request.method {
            Method::HEAD => Judged::Answer(https::text(StatusCode::OK, "")),
            _ => Judged::Target(grant, target),
        })
    }

    async fn forward(
        &self,
        request: &Parts,
        body: Incoming,
        grant: &Grant,
        target: IpAddr,
    ) -> Answer {
        let Grant {
            namespace, name, ..
        } = grant;
        let Some(_share) = self.shares.take(namespace) else {
            https::linger(body);
            let text = "too many uploads into the namespace at once: try again later";
            return https::text(StatusCode::SERVICE_UNAVAILABLE, text);
        };
        tracing::info!(namespace, name, "an upload begins");
        match self.pass_on(request, body, grant, target).await {
            Ok(answer) => {
                tracing::info!(namespace, name, status = %answer.status(), "an upload ended");
                answer
            }
            Err(error) => {
                let error = &*error as &dyn std::error::Error;
                tracing::warn!(namespace, name, error, "an upload was not passed on");
                let text = "the pod that takes the upload cannot be reached: try again";
                https::text(StatusCode::BAD_GATEWAY, text)
            }
        }
    }

    /// What the bearer of a request may do.
    async fn grant(&self, headers: &HeaderMap) -> Result<Grant, Answer> {
        let token = headers.get(header::AUTHORIZATION).and_then(bearer);
        let refused = |text| https::text(StatusCode::UNAUTHORIZED, text);
        let Some(token) = token else {
            let text = "send the token of an UploadTokenRequest: Authorization: Bearer TOKEN";
            return Err(refused(text));
        };
        let key = self.keys.key().await.map_err(|error| {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(error, "tokens cannot be verified");
            let text = "tokens cannot be verified now: try again";
            https::text(StatusCode::SERVICE_UNAVAILABLE, text)
        })?;
        let grant = key.verify(token, SystemTime::now());
        grant.ok_or_else(|| refused("the token is invalid or has expired: ask for another one"))
    }

    /// Where the claim's pod takes the upload.
    async fn target(&self, grant: &Grant) -> Result<IpAddr, Answer> {
        let claims: Api<PersistentVolumeClaim> =
            Api::namespaced(self.client.clone(), &grant.namespace);
        let found = claims.get_opt(&grant.name).await.map_err(|error| {
            tracing::error!(%error, "the API server does not answer a request of ours");
            let text = "the API server did not answer: try again";
            https::text(StatusCode::SERVICE_UNAVAILABLE, text)
        })?;
        let (status, text) = match found.map(|claim| state(&claim, &grant.uid)) {
            Some(State::Ready(address)) => return Ok(address),
            Some(State::NotReady) => (
                StatusCode::SERVICE_UNAVAILABLE,
                "the claim's pod is not ready: wait for the phase UploadReady",
            ),
            Some(State::Filled) => (StatusCode::BAD_REQUEST, "the claim is filled already"),
            Some(State::NoTarget) => (StatusCode::BAD_REQUEST, "the claim waits for no upload"),
            None => (StatusCode::BAD_REQUEST, "the claim is gone"),
        };
        Err(https::text(status, text))
    }

    async fn pass_on(
        &self,
        request: &Parts,
        body: Incoming,
        grant: &Grant,
        target: IpAddr,
    ) -> anyhow::Result<Answer> {
        let bundle = self.authority.authority().await?.bundle;
        let tls = client_config(&bundle, Arc::clone(&self.certificate))?;
        let name = server_name(&grant.uid);
        let server = ServerName::try_from(name.clone()).context("the claim has no valid id")?;
        let connect = async {
            let stream = TcpStream::connect((target, PORT)).await?;
            TlsConnector::from(Arc::new(tls))
                .connect(server, stream)
                .await
        };
        let stream = timeout(CONNECT_TIMEOUT, connect)
            .await
            .context("the pod does not answer")?
            .context("failed to connect to the pod")?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        let mut connection = Connection(Some(tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "the connection to a pod failed");
            }
        })));
        let mut forwarded = Request::new(body);
        *forwarded.method_mut() = Method::POST;
        *forwarded.uri_mut() = request.uri.path().parse()?;
        let headers = forwarded.headers_mut();
        headers.insert(header::HOST, HeaderValue::from_str(&name)?);
        for name in [header::CONTENT_TYPE, header::CONTENT_LENGTH] {
            if let Some(value) = request.headers.get(&name) {
                headers.insert(name, value.clone());
            }
        }
        let answer = sender
            .send_request(forwarded)
            .await
            .context("the pod or the client broke off")?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), MAX_ANSWER).collect().await;
        let body = body.map_err(|error| anyhow::anyhow!(error))?.to_bytes();
        if let Some(connection) = connection.0.take() {
            tokio::spawn(https::lingered(connection));
        }
        Ok(plain(status, body))
    }
}

/// Whether a path is that of an archive with files.
fn is_archive(path: &str) -> bool {
    matches!(path, "/v1beta1/upload-archive" | "/v1alpha1/upload-archive")
}

/// What a request leads to.
enum Judged {
    Answer(Answer),
    Target(Grant, IpAddr),
}

/// A connection that ends with who waits for it.
struct Connection(Option<tokio::task::JoinHandle<()>>);

impl Drop for Connection {
    fn drop(&mut self) {
        if let Some(task) = self.0.take() {
            task.abort();
        }
    }
}

/// An answer that no browser takes for a page.
fn plain(status: StatusCode, body: Bytes) -> Answer {
    let mut answer = https::text(status, "");
    *answer.body_mut() = Full::new(body);
    let no_sniff = HeaderValue::from_static("nosniff");
    answer
        .headers_mut()
        .insert(header::X_CONTENT_TYPE_OPTIONS, no_sniff);
    answer
}

/// The token in a header.
fn bearer(value: &HeaderValue) -> Option<&str> {
    let (scheme, token) = value.to_str().ok()?.split_once(' ')?;
    scheme
        .eq_ignore_ascii_case("bearer")
        .then(|| token.trim_start_matches(' '))
}

/// What a claim says of its upload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Ready(IpAddr),
    NotReady,
    Filled,
    NoTarget,
}

fn state(claim: &PersistentVolumeClaim, uid: &str) -> State {
    let annotation = |name: &str| {
        let all = claim.metadata.annotations.as_ref()?;
        all.get(name).map(String::as_str)
    };
    if claim.metadata.uid.as_deref() != Some(uid) || annotation(TARGET).is_none() {
        return State::NoTarget;
    }
    if annotation(PHASE) == Some("Succeeded") {
        return State::Filled;
    }
    let address = annotation(ADDRESS).and_then(|address| address.parse().ok());
    match address.filter(|_| annotation(READY) == Some("true")) {
        Some(address) => State::Ready(address),
        None => State::NotReady,
    }
}

fn client_config(
    bundle: &str,
    certificate: Arc<dyn ResolvesClientCert>,
) -> anyhow::Result<ClientConfig> {
    let mut roots = RootCertStore::empty();
    for authority in CertificateDer::pem_slice_iter(bundle.as_bytes()) {
        let authority = authority.context("the authority is no PEM")?;
        roots.add(authority).context("the authority is invalid")?;
    }
    let provider = Arc::new(ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_client_cert_resolver(certificate);
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_token_is_taken_from_its_header_alone() {
        let of = |text: &'static str| {
            let value = HeaderValue::from_static(text);
            bearer(&value).map(str::to_owned)
        };
        assert_eq!(of("Bearer a.b.c").as_deref(), Some("a.b.c"));
        assert_eq!(of("bearer  a").as_deref(), Some("a"));
        for text in ["", "Bearer", "Basic a", "a.b.c"] {
            assert_eq!(of(text), None, "{text}");
        }
    }

    #[test]
    fn a_claim_is_sent_to_only_while_its_pod_is_ready() {
        let of = |annotations: serde_json::Value| {
            let claim = json!({ "metadata": { "uid": "u", "annotations": annotations } });
            state(&serde_json::from_value(claim).unwrap(), "u")
        };
        let ready = json!({ TARGET: "", READY: "true", ADDRESS: "10.0.0.1" });
        assert_eq!(of(ready.clone()), State::Ready([10, 0, 0, 1].into()));
        let claim = json!({ "metadata": { "uid": "v", "annotations": ready } });
        let other = state(&serde_json::from_value(claim).unwrap(), "u");
        assert_eq!(other, State::NoTarget, "a later claim of the same name");
        assert_eq!(
            of(json!({ READY: "true", ADDRESS: "10.0.0.1" })),
            State::NoTarget
        );
        for not_ready in [
            json!({ TARGET: "" }),
            json!({ TARGET: "", READY: "false", ADDRESS: "10.0.0.1" }),
            json!({ TARGET: "", READY: "true" }),
            json!({ TARGET: "", READY: "true", ADDRESS: "h:80" }),
        ] {
            assert_eq!(of(not_ready.clone()), State::NotReady, "{not_ready}");
        }
        let filled = json!({ TARGET: "", PHASE: "Succeeded", READY: "true" });
        assert_eq!(of(filled), State::Filled);
    }
}
