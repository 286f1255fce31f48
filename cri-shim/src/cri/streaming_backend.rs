//! The backend of clients' streams: processes of the node's containers, and ports of its pods.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use tracing::debug;

use super::error::{CriError, Result};
use super::node::Node;
use super::{spec, vm};
use crate::sandbox::{Exec, SandboxClient, StdioFds, TerminalSize, random_id};
use crate::streaming::{AttachRequest, Backend, BackendError, BoxFuture, ExecRequest, Process};

/// A terminal's size until its client sets one.
const DEFAULT_SIZE: TerminalSize = TerminalSize {
    rows: 24,
    columns: 80,
};

/// The node as a backend of streams.
pub(super) struct Streams(pub(super) Arc<Node>);

impl Streams {
    async fn start(&self, request: ExecRequest, stdio: StdioFds) -> Result<Process> {
        let container = self.0.settled_container(&request.container).await?;
        container.running()?;
        let client = container.pod.client()?;
        let record = container.record();
        let process = spec::exec_process(&record.process, &request.command, request.tty)?;
        let exec_id = random_id().map_err(CriError::host("make up an id"))?;
        let exec = Exec {
            exec_id: exec_id.clone(),
            process,
            user: record.user,
            supplemental_groups: record.groups,
            tty: request.tty.then_some(DEFAULT_SIZE),
            stdio,
        };
        client.exec(&container.id, exec).await?;
        Ok(process_of(client, container.id.clone(), Some(exec_id)))
    }

    async fn join(&self, request: AttachRequest, stdio: StdioFds) -> Result<Process> {
        let container = self.0.settled_container(&request.container).await?;
        container.running()?;
        let client = container.pod.client()?;
        let has_output = stdio.stdout.is_some() || stdio.stderr.is_some();
        client.attach(&container.id, stdio).await?;
        let mut process = process_of(client, container.id.clone(), None);
        if has_output {
            // An attachment ends when its output ends: with the container, or when the client has
            // closed its input.
            process.exit = Box::pin(std::future::ready(Ok(0)));
        }
        Ok(process)
    }

    async fn connect(&self, pod: &str, port: u16) -> Result<OwnedFd> {
        let pod = self.0.settled_pod(pod).await?;
        let client = pod.client()?;
        match pod.is_vm() {
            true => vm::connect(&self.0, &pod, port).await,
            false => Ok(client.port_forward(port).await?),
        }
    }
}

impl Backend for Streams {
    fn exec(
        &self,
        request: ExecRequest,
        stdio: StdioFds,
    ) -> BoxFuture<'_, Result<Process, BackendError>> {
        Box::pin(async move { Ok(self.start(request, stdio).await?) })
    }

    fn attach(
        &self,
        request: AttachRequest,
        stdio: StdioFds,
    ) -> BoxFuture<'_, Result<Process, BackendError>> {
        Box::pin(async move { Ok(self.join(request, stdio).await?) })
    }

    fn port_forward<'a>(
        &'a self,
        pod: &'a str,
        port: u16,
    ) -> BoxFuture<'a, Result<OwnedFd, BackendError>> {
        Box::pin(async move { Ok(self.connect(pod, port).await?) })
    }
}

/// Returns the exit and the terminal of a process: that of an exec, or the container's own.
fn process_of(client: SandboxClient, container: String, exec: Option<String>) -> Process {
    let exit = {
        let (client, container, exec) = (client.clone(), container.clone(), exec.clone());
        async move {
            let exit = client.wait(&container, exec.as_deref()).await?;
            // A client that is attached to the container itself only wants the output.
            Ok(exec.map_or(0, |_| exit.code))
        }
    };
    let resize = move |size| -> BoxFuture<'static, ()> {
        let (client, container, exec) = (client.clone(), container.clone(), exec.clone());
        Box::pin(async move {
            if let Err(error) = client.resize(&container, exec.as_deref(), size).await {
                debug!(%error, "the terminal keeps its size");
            }
        })
    };
    Process {
        exit: Box::pin(exit),
        resize: Box::new(resize),
        // As in other runtimes, the program continues without a reader when the client leaves.
        abandon: Box::pin(std::future::ready(())),
    }
}
