//! A host and an agent communicate over a socket with the generated client and server.

use std::sync::Arc;

use podvisor_agent_protocol::api::{
    Agent, AgentClient, CreateContainerRequest, CreateContainerResponse, WaitProcessRequest,
    WaitProcessResponse, create_agent,
};
use podvisor_agent_protocol::{AgentError, ErrorKind, ExitStatus, limits};
use ttrpc::asynchronous::transport::{Listener, Socket};
use ttrpc::asynchronous::{Client, Server, TtrpcContext};
use ttrpc::context;

/// Answers the requests of the test below.
struct Scripted;

#[async_trait::async_trait]
impl Agent for Scripted {
    async fn create_container(
        &self,
        _: &TtrpcContext,
        request: CreateContainerRequest,
    ) -> ttrpc::Result<CreateContainerResponse> {
        Err(AgentError::new(ErrorKind::CommandNotFound, request.container_id).into())
    }

    async fn wait_process(
        &self,
        _: &TtrpcContext,
        _: WaitProcessRequest,
    ) -> ttrpc::Result<WaitProcessResponse> {
        let status = Some(ExitStatus::Signal(9).into());
        Ok(WaitProcessResponse {
            status,
            ..Default::default()
        })
    }
}

async fn connected() -> (Server, AgentClient, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("agent.sock");
    let listener = tokio::net::UnixListener::bind(&path).unwrap();
    let mut server = Server::new()
        .add_listener(Listener::from(listener))
        .register_service(create_agent(Arc::new(Scripted)));
    server.start().await.unwrap();
    let stream = tokio::net::UnixStream::connect(&path).await.unwrap();
    (
        server,
        AgentClient::new(Client::new(Socket::new(stream))),
        dir,
    )
}

#[tokio::test]
async fn errors_keep_their_kind_and_statuses_their_value() {
    let (_server, client, _dir) = connected().await;

    let request = CreateContainerRequest {
        container_id: "web".into(),
        ..Default::default()
    };
    let error = client
        .create_container(context::with_timeout(0), &request)
        .await
        .unwrap_err();
    assert_eq!(
        AgentError::from(error),
        AgentError::new(ErrorKind::CommandNotFound, "web")
    );

    let answer = client
        .wait_process(context::with_timeout(0), &WaitProcessRequest::new())
        .await
        .unwrap();
    assert_eq!(ExitStatus::try_from(&answer), Ok(ExitStatus::Signal(9)));
}

#[tokio::test]
async fn a_method_that_the_agent_lacks_is_an_error_and_not_a_hang() {
    let (_server, client, _dir) = connected().await;
    let error = client
        .shutdown(context::with_timeout(0), &Default::default())
        .await
        .unwrap_err();
    assert_eq!(AgentError::from(error).kind, ErrorKind::Internal);
}

#[tokio::test]
async fn a_message_over_the_limit_is_refused_and_the_connection_lives_on() {
    let (_server, client, _dir) = connected().await;
    let request = CreateContainerRequest {
        spec_json: vec![b' '; 5 << 20],
        ..Default::default()
    };
    client
        .create_container(context::with_timeout(0), &request)
        .await
        .unwrap_err();

    let request = CreateContainerRequest {
        spec_json: vec![b' '; limits::SPEC_BYTES],
        ..Default::default()
    };
    let error = client
        .create_container(context::with_timeout(0), &request)
        .await
        .unwrap_err();
    assert_eq!(AgentError::from(error).kind, ErrorKind::CommandNotFound);
}
