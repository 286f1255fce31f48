//! Migrations between this node and others: `/v1/NAMESPACE/NAME/UID/migration/MIGRATION/…`.
//!
//! | path | verb | who | does |
//! | --- | --- | --- | --- |
//! | (nothing) | GET | controller | says how far it is |
//! | `expect` | PUT | controller | says by which certificate the source's node is known |
//! | `send` | PUT | controller | connects to the target's node, and sends the VM |
//! | `cancel`, `resolve` | PUT | controller | ends it; says where a VM in doubt runs |
//! | `stream` | GET | the source's node | carries bytes, once |
//!
//! The bytes are those of two `podvisor serve`; nothing here reads them. A node is known to another
//! by the digest of its certificate, which the controller has from the Node object: nothing but
//! the stream of that one migration is open to it, and only until it has connected.

mod carry;

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use podvisor_node_api::messages::{MigrationState, SendMigrationOpen, VmMigration, VmName};
use serde::de::DeserializeOwned;
use tokio::{net::TcpStream, time::timeout};
use tokio_rustls::{TlsConnector, rustls::pki_types::ServerName};

use super::{
    answers::{failure, limited},
    expected::Expected,
    guest::cut,
    identity::Identity,
    machines::{Machines, Pipe, Refusal},
};
use crate::{
    contact::{
        digest,
        migration::{
            ExpectRequest, MigrationReport, NodeReport, NodeState, ResolveRequest, SendRequest,
        },
    },
    https::{self, Answer, Peer},
    node_client::pinned,
    status::Failure,
};

/// What the connection is upgraded to.
const PROTOCOL: &str = "podvisor-migration";

/// How long the target's node may take to be connected to, and to answer.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);

/// Migrations of this node.
pub(super) struct Migrations {
    machines: Machines,
    identity: Identity,
    expected: Arc<Expected>,
}

/// What is asked about a migration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Asked {
    pub(super) vm: VmName,
    pub(super) migration: String,
    what: What,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Report,
    Expect,
    Send,
    Cancel,
    Resolve,
    Stream,
}

impl Asked {
    /// Reads a path; `None` if it is none of a migration.
    pub(super) fn read(method: &Method, path: &str) -> Option<Self> {
        let steps: Vec<&str> = path.strip_prefix("/v1/")?.split('/').collect();
        let [namespace, name, uid, "migration", migration, rest @ ..] = steps.as_slice() else {
            return None;
        };
        if [namespace, name, uid, migration]
            .iter()
            .any(|step| step.is_empty())
        {
            return None;
        }
        let what = match (method, rest) {
            (&Method::GET, []) => What::Report,
            (&Method::PUT, ["expect"]) => What::Expect,
            (&Method::PUT, ["send"]) => What::Send,
            (&Method::PUT, ["cancel"]) => What::Cancel,
            (&Method::PUT, ["resolve"]) => What::Resolve,
            (&Method::GET, ["stream"]) => What::Stream,
            _ => return None,
        };
        Some(Self {
            vm: VmName::new(*namespace, *name, *uid),
            migration: (*migration).to_owned(),
            what,
        })
    }

    /// Whether another node asks, and not the controller.
    pub(super) fn is_of_a_node(&self) -> bool {
        self.what == What::Stream
    }
}

impl Migrations {
    pub(super) fn new(machines: Machines, identity: Identity, expected: Arc<Expected>) -> Self {
        Self {
            machines,
            identity,
            expected,
        }
    }

    /// Answers; who asks is known to be whom it has to be, but for the stream's certificate.
    pub(super) async fn answer(
        &self,
        request: Request<Incoming>,
        asked: Asked,
        peer: &Peer,
    ) -> Result<Answer, Failure> {
        let Asked {
            vm,
            migration,
            what,
        } = asked;
        match what {
            What::Report => {
                let found = self.find(&vm, &migration).await?;
                let report = NodeReport {
                    is_expected: self.expected.has(&vm, &migration),
                    migration: found.as_ref().map(report),
                };
                Ok(https::json(StatusCode::OK, &serde_json::json!(report)))
            }
            What::Expect => {
                let with: ExpectRequest = body(request).await?;
                let found = self.find(&vm, &migration).await?;
                if found.map(|found| found.state()) != Some(MigrationState::Waiting) {
                    return Err(Failure::conflict("the VM does not wait for that migration"));
                }
                if !self.expected.add(vm, migration, with.certificate) {
                    return Err(Failure::too_many("too many migrations are expected"));
                }
                Ok(https::accepted())
            }
            What::Send => {
                let with: SendRequest = body(request).await?;
                self.send(vm, migration, with).await?;
                Ok(https::accepted())
            }
            What::Cancel => {
                self.expected.take(&vm, &migration, None);
                let done = limited(self.machines.cancel_migration(&vm, &migration)).await;
                done.map_err(|refusal| failure(&refusal))?;
                Ok(https::accepted())
            }
            What::Resolve => {
                let with: ResolveRequest = body(request).await?;
                let done = self.machines.resolve_migration(&vm, &migration, with.run);
                limited(done).await.map_err(|refusal| failure(&refusal))?;
                Ok(https::accepted())
            }
            What::Stream => self.receive(request, vm, migration, peer).await,
        }
    }

    /// The migration, if the VM has it.
    async fn find(&self, vm: &VmName, migration: &str) -> Result<Option<VmMigration>, Failure> {
        let vms = limited(self.machines.migrations(vm)).await;
        let vms = vms.map_err(|refusal| failure(&refusal))?;
        if vms.is_empty() {
            return Err(failure(&Refusal::NotFound));
        }
        let mut all = vms.into_iter().flatten();
        Ok(all.find(|found| found.migration == migration))
    }

    /// Connects to the target's node, and has the VM sent there.
    async fn send(&self, vm: VmName, migration: String, with: SendRequest) -> Result<(), Failure> {
        if self.find(&vm, &migration).await?.is_some() {
            return Err(Failure::conflict("that migration was begun before"));
        }
        let target = timeout(CONNECT_TIMEOUT, self.connect(&vm, &migration, &with)).await;
        let target = target
            .unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()))
            .map_err(|error| {
                Failure::internal(format!("failed to connect to {}: {error}", with.address))
            })?;
        let open = SendMigrationOpen {
            vm: Some(vm),
            migration,
            auto_converge: with.auto_converge,
            force: with.force,
            bandwidth_bytes_per_second: with.bandwidth,
            progress_timeout_s: with.progress_timeout,
            completion_timeout_s: with.completion_timeout,
            ..SendMigrationOpen::default()
        };
        let pipe = limited(self.machines.send_migration(open)).await;
        let pipe = pipe.map_err(|refusal| failure(&refusal))?;
        tokio::spawn(carry::carry(target, pipe));
        Ok(())
    }

    async fn connect(
        &self,
        vm: &VmName,
        migration: &str,
        with: &SendRequest,
    ) -> std::io::Result<TokioIo<hyper::upgrade::Upgraded>> {
        let other = std::io::Error::other::<hyper::Error>;
        let certificate = self.identity.for_clients().map_err(std::io::Error::other)?;
        let tls = pinned::config(&with.certificate, certificate).map_err(std::io::Error::other)?;
        let stream = TcpStream::connect(with.address).await?;
        stream.set_nodelay(true)?;
        let name = ServerName::IpAddress(with.address.ip().into());
        let stream = TlsConnector::from(Arc::new(tls))
            .connect(name, stream)
            .await?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(other)?;
        tokio::spawn(connection.with_upgrades());
        let VmName {
            namespace,
            name,
            uid,
        } = vm;
        let request = Request::get(format!(
            "/v1/{namespace}/{name}/{uid}/migration/{migration}/stream"
        ))
        .header(header::HOST, "node")
        .header(header::CONNECTION, "Upgrade")
        .header(header::UPGRADE, PROTOCOL)
        .body(Full::new(Bytes::new()))
        .map_err(std::io::Error::other)?;
        let answer = sender.send_request(request).await.map_err(other)?;
        if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
            let status = answer.status();
            return Err(std::io::Error::other(format!("it answers {status}")));
        }
        Ok(TokioIo::new(
            hyper::upgrade::on(answer).await.map_err(other)?,
        ))
    }

    /// Takes the bytes of the source's node.
    async fn receive(
        &self,
        mut request: Request<Incoming>,
        vm: VmName,
        migration: String,
        peer: &Peer,
    ) -> Result<Answer, Failure> {
        let certificate = peer
            .certificates
            .first()
            .map(|certificate| digest(certificate));
        let protocol = request.headers().get(header::UPGRADE);
        if protocol.map(HeaderValue::as_bytes) != Some(PROTOCOL.as_bytes()) {
            return Err(Failure::bad_request(format!("upgrade to {PROTOCOL}")));
        }
        if certificate.is_none() || !self.expected.take(&vm, &migration, certificate.as_deref()) {
            return Err(Failure::forbidden("nobody is expected by that certificate"));
        }
        peer.recognize();
        let pipe = limited(self.machines.receive_migration(vm, &migration)).await;
        let pipe: Pipe = pipe.map_err(|refusal| failure(&refusal))?;
        let upgraded = hyper::upgrade::on(&mut request);
        tokio::spawn(async move {
            match upgraded.await {
                Ok(source) => carry::carry(TokioIo::new(source), pipe).await,
                Err(error) => tracing::debug!(%error, "a migration's stream did not begin"),
            }
        });
        let mut answer = Response::new(Full::new(Bytes::new()));
        *answer.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        for (name, value) in [(header::CONNECTION, "Upgrade"), (header::UPGRADE, PROTOCOL)] {
            answer
                .headers_mut()
                .insert(name, HeaderValue::from_static(value));
        }
        Ok(answer)
    }
}

async fn body<T: DeserializeOwned>(request: Request<Incoming>) -> Result<T, Failure> {
    let body = https::read_body(request.into_body()).await;
    let body = body.map_err(|_| Failure::bad_request("the request is too large or too slow"))?;
    serde_json::from_slice(&body)
        .map_err(|error| Failure::bad_request(format!("the request is invalid: {error}")))
}

fn report(migration: &VmMigration) -> MigrationReport {
    MigrationReport {
        state: match migration.state() {
            MigrationState::Waiting => NodeState::Waiting,
            MigrationState::Sending => NodeState::Sending,
            MigrationState::Receiving => NodeState::Receiving,
            MigrationState::HandingOver => NodeState::HandingOver,
            MigrationState::InDoubt => NodeState::InDoubt,
            MigrationState::Done => NodeState::Done,
            MigrationState::Failed => NodeState::Failed,
            MigrationState::Cancelled => NodeState::Cancelled,
            MigrationState::Unknown => NodeState::Unknown,
        },
        reason: cut(&migration.reason),
        bytes_total: migration.bytes_total,
        bytes_left: migration.bytes_left,
        downtime_ns: migration.downtime_ns,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_names_a_vm_a_migration_and_what_is_asked() {
        let read = |method, path: &str| Asked::read(&method, path);
        let asked = read(Method::PUT, "/v1/a/b/c/migration/m/send").unwrap();
        assert_eq!(asked.vm, VmName::new("a", "b", "c"));
        assert_eq!((&*asked.migration, asked.what), ("m", What::Send));
        assert!(
            read(Method::GET, "/v1/a/b/c/migration/m/stream")
                .unwrap()
                .is_of_a_node()
        );
        for path in [
            "/v1/a/b/c/migration/m/send",
            "/v1/a/b/c/migration/",
            "/v1/a/b//migration/m",
            "/v1/a/b/c/console",
            "",
        ] {
            assert_eq!(read(Method::GET, path), None, "{path}");
        }
    }
}
