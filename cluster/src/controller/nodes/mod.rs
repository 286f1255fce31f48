//! The way to the nodes of VMs: their `podvisor-cluster node`, asked with a certificate of the
//! cluster's authority in the controller's name.

mod seen;

use http::StatusCode;
use http_body_util::BodyExt;
use kube::Client;
use serde::Serialize;
use serde_json::Value;
use tokio::sync::OnceCell;
use tokio::task::JoinHandle;

use crate::certificates::{Certificates, Publish};
use crate::contact::{CONTROLLER, Contact};
use crate::https::Answer;
use crate::node_client::{self, Path};
use crate::objects::VirtualMachineInstance;
pub use seen::{MigrationReport, NodeReport, NodeState, Seen};

/// Why a node did not do what was asked of it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub(super) enum CallError {
    /// It will not.
    #[error("{0}")]
    Refused(String),
    /// It does not answer, or failed: it is asked again.
    #[error("{0}")]
    Unreachable(String),
}

/// All nodes. The certificate is made when the first is asked.
pub(super) struct Nodes {
    client: Client,
    namespace: String,
    connection: OnceCell<Connection>,
}

struct Connection {
    nodes: node_client::Nodes,
    fresh: JoinHandle<()>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.fresh.abort();
    }
}

/// The migration of an instance.
#[derive(Debug, Clone, Copy)]
pub(super) struct Subject<'a> {
    pub(super) namespace: &'a str,
    pub(super) name: &'a str,
    pub(super) uid: &'a str,
    pub(super) migration: &'a str,
}

impl Nodes {
    /// `namespace` has the authority.
    pub(super) fn new(client: Client, namespace: &str) -> Self {
        Self {
            client,
            namespace: namespace.to_owned(),
            connection: OnceCell::new(),
        }
    }

    async fn nodes(&self) -> Result<&node_client::Nodes, CallError> {
        let connect = async || {
            let certificates = Certificates::new(
                self.client.clone(),
                &self.namespace,
                CONTROLLER,
                Publish::Nobody,
            )
            .await?;
            let nodes = node_client::Nodes::new(self.client.clone(), certificates.for_clients());
            let fresh = tokio::spawn(certificates.keep_fresh());
            Ok::<_, crate::certificates::CertificateError>(Connection { nodes, fresh })
        };
        let connection = self.connection.get_or_try_init(connect).await;
        connection
            .map(|connection| &connection.nodes)
            .map_err(|error| {
                tracing::error!(
                    error = &error as &dyn std::error::Error,
                    "failed to make the certificate that nodes are asked with"
                );
                CallError::Unreachable(error.to_string())
            })
    }

    /// What a node says of a migration.
    pub(super) async fn see(&self, node: &str, subject: Subject<'_>) -> Seen {
        if node.is_empty() {
            return Seen::NotAsked;
        }
        let rest = format!("migration/{}", subject.migration);
        let path = path(subject, &rest);
        let answer = match self.nodes().await {
            Ok(nodes) => nodes.get(node, &path).await,
            Err(error) => return Seen::Unreachable(error.to_string()),
        };
        let answer = match answer {
            Ok(answer) => answer,
            Err(failure) => return Seen::Unreachable(failure.message().to_owned()),
        };
        let status = answer.status();
        let body = body(answer).await;
        match status {
            StatusCode::OK => match serde_json::from_value::<NodeReport>(body) {
                Ok(report) => Seen::Vm(report),
                Err(error) => Seen::Unreachable(format!("its answer is invalid: {error}")),
            },
            StatusCode::NOT_FOUND => Seen::NoVm,
            status => Seen::Unreachable(message(status, &body)),
        }
    }

    /// Has a node do something.
    pub(super) async fn tell(
        &self,
        node: &str,
        subject: Subject<'_>,
        what: &str,
        with: &(impl Serialize + Sync),
    ) -> Result<(), CallError> {
        let rest = format!("migration/{}/{what}", subject.migration);
        self.put(node, &path(subject, &rest), with).await.map(drop)
    }

    /// Has the node of an instance change something of its VM, and returns its answer.
    pub(super) async fn change(
        &self,
        vmi: &VirtualMachineInstance,
        what: &str,
        with: &(impl Serialize + Sync),
    ) -> Result<Value, CallError> {
        let text = |value: &Option<String>| value.clone().unwrap_or_default();
        let meta = &vmi.metadata;
        let (namespace, name, uid) = (text(&meta.namespace), text(&meta.name), text(&meta.uid));
        let path = Path {
            namespace: &namespace,
            name: &name,
            uid: &uid,
            rest: what,
        };
        self.put(&vmi.status.node_name, &path, with).await
    }

    /// Has a node do something to a VM, and returns its answer.
    pub(super) async fn put(
        &self,
        node: &str,
        path: &Path<'_>,
        with: &(impl Serialize + Sync),
    ) -> Result<Value, CallError> {
        let with = serde_json::to_vec(with)
            .map_err(|error| CallError::Refused(format!("no JSON: {error}")))?;
        let nodes = self.nodes().await?;
        let answer = nodes.put(node, path, with.into()).await;
        let answer =
            answer.map_err(|failure| CallError::Unreachable(failure.message().to_owned()))?;
        let status = answer.status();
        if status.is_success() {
            return Ok(body(answer).await);
        }
        let message = message(status, &body(answer).await);
        Err(if matches!(status.as_u16(), 400 | 404 | 409) {
            CallError::Refused(message)
        } else {
            CallError::Unreachable(message)
        })
    }

    /// Where a node listens, and by what it is known.
    pub(super) async fn find(
        &self,
        node: &str,
    ) -> Result<(std::net::SocketAddr, Contact), CallError> {
        let nodes = self.nodes().await?;
        nodes
            .find(node)
            .await
            .map_err(|failure| CallError::Unreachable(failure.message().to_owned()))
    }
}

/// The path of something that is asked about an instance.
pub(super) fn path<'a>(subject: Subject<'a>, rest: &'a str) -> Path<'a> {
    Path {
        namespace: subject.namespace,
        name: subject.name,
        uid: subject.uid,
        rest,
    }
}

async fn body(answer: Answer) -> Value {
    let bytes = match answer.into_body().collect().await {
        Ok(body) => body.to_bytes(),
        Err(never) => match never {},
    };
    serde_json::from_slice(&bytes).unwrap_or_default()
}

/// What a node's `Status` says.
fn message(status: StatusCode, body: &Value) -> String {
    let message = body.get("message").and_then(Value::as_str);
    message.map_or_else(|| format!("the node answers {status}"), str::to_owned)
}
