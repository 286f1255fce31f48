//! A client and a server over a socket.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use podvisor_node_api::messages::{
    ConsoleInput, ConsoleMessage, Data, DumpMemoryAnswer, DumpMemoryRequest, DumpState,
    PlugDiskRequest, PortForwardInput, ResizeVmAnswer, ResizeVmRequest, ResolveMigrationRequest,
    SendMigrationInput, SendMigrationMessage, SendMigrationOpen, SetLinksRequest, StopRequest,
    UnplugDiskAnswer, UnplugDiskRequest, Vm, VmChange, VmEvent, VmList, VmName,
};
use podvisor_node_api::{AnswerStream, Node, NodeClient, NodeServer};
use tokio::net::UnixListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tokio_stream::{StreamExt as _, iter};
use tonic::transport::Server;
use tonic::{Code, Status, Streaming};

/// A node that notes its calls, and whose consoles say what is typed.
#[derive(Default)]
struct Noted {
    calls: Mutex<Vec<String>>,
}

impl Noted {
    fn note(&self, call: impl Into<String>) -> Result<(), Status> {
        self.calls.lock().unwrap().push(call.into());
        Ok(())
    }
}

fn web() -> VmName {
    VmName::new("n", "web", "1")
}

#[tonic::async_trait]
impl Node for Noted {
    async fn list_vms(&self) -> Result<VmList, Status> {
        let vm = Vm {
            vm: Some(web()),
            ..Vm::default()
        };
        Ok(VmList { vms: vec![vm] })
    }

    async fn watch_vms(&self) -> Result<AnswerStream<VmEvent>, Status> {
        let all = VmChange::All(self.list_vms().await?);
        let event = |change| {
            Ok(VmEvent {
                change: Some(change),
            })
        };
        let events = [event(all), event(VmChange::Removed(web()))];
        Ok(AnswerStream::new(iter(events)))
    }

    async fn pause(&self, vm: VmName) -> Result<(), Status> {
        self.note(format!("pause {}", vm.name))
    }

    async fn unpause(&self, _: VmName) -> Result<(), Status> {
        Err(Status::failed_precondition("it is not paused"))
    }

    async fn soft_reboot(&self, vm: VmName) -> Result<(), Status> {
        self.note(format!("soft reboot {}", vm.name))
    }

    async fn reset(&self, vm: VmName) -> Result<(), Status> {
        self.note(format!("reset {}", vm.name))
    }

    async fn stop(&self, request: StopRequest) -> Result<(), Status> {
        self.note(format!("stop in {} s", request.grace_seconds))
    }

    async fn console(&self, input: Streaming<ConsoleInput>) -> Result<AnswerStream<Data>, Status> {
        let echo = input.filter_map(|input| match input {
            Ok(ConsoleInput {
                message: Some(ConsoleMessage::Data(data)),
            }) => Some(Ok(Data { data })),
            Ok(_) => None,
            Err(error) => Some(Err(error)),
        });
        Ok(AnswerStream::new(echo))
    }

    async fn port_forward(
        &self,
        _: Streaming<PortForwardInput>,
    ) -> Result<AnswerStream<Data>, Status> {
        Err(Status::failed_precondition("nothing listens there"))
    }

    async fn send_migration(
        &self,
        input: Streaming<SendMigrationInput>,
    ) -> Result<AnswerStream<Data>, Status> {
        let said = input.map(|input| match input?.message {
            Some(SendMigrationMessage::Open(open)) => {
                let open = format!("{} in {} ms", open.migration, open.downtime_ms);
                Ok(Data { data: open.into() })
            }
            Some(SendMigrationMessage::Data(data)) => Ok(Data { data }),
            None => Ok(Data::default()),
        });
        Ok(AnswerStream::new(said))
    }

    async fn resolve_migration(&self, request: ResolveMigrationRequest) -> Result<(), Status> {
        self.note(format!(
            "resolve {}, run: {}",
            request.migration, request.run
        ))
    }

    async fn plug_disk(&self, request: PlugDiskRequest) -> Result<(), Status> {
        self.note(format!("plug {}", request.pod_uid))
    }

    async fn unplug_disk(&self, request: UnplugDiskRequest) -> Result<UnplugDiskAnswer, Status> {
        let UnplugDiskRequest {
            serial,
            limit_seconds,
            ..
        } = request;
        self.note(format!("unplug {serial} in {limit_seconds} s"))?;
        Ok(UnplugDiskAnswer { is_forced: true })
    }

    async fn resize_vm(&self, request: ResizeVmRequest) -> Result<ResizeVmAnswer, Status> {
        let ResizeVmRequest { vcpus, memory, .. } = request;
        self.note(format!("{vcpus} CPUs, {memory} bytes"))?;
        Ok(ResizeVmAnswer { memory: 5 })
    }

    async fn dump_memory(&self, request: DumpMemoryRequest) -> Result<DumpMemoryAnswer, Status> {
        let DumpMemoryRequest { file, pod_uid, .. } = request;
        self.note(format!("dump to {file} of {pod_uid}"))?;
        Ok(DumpMemoryAnswer {
            state: DumpState::Writing.into(),
            done: 3,
            total: 4,
            message: String::new(),
        })
    }

    async fn set_links(&self, request: SetLinksRequest) -> Result<(), Status> {
        self.note(format!("links down: {}", request.down.join(" ")))
    }
}

fn serve(socket: &Path, node: &Arc<Noted>) -> JoinHandle<()> {
    let listener = UnixListener::bind(socket).unwrap();
    let service = NodeServer::new(Arc::clone(node));
    tokio::spawn(async move {
        let incoming = UnixListenerStream::new(listener);
        let server = Server::builder().add_service(service);
        server.serve_with_incoming(incoming).await.unwrap();
    })
}

#[tokio::test]
async fn calls_reach_the_node_and_its_words_reach_the_client() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("node.sock");
    let node = Arc::new(Noted::default());
    serve(&socket, &node);
    let mut client = NodeClient::new(&socket).unwrap();
    assert_eq!(client.list_vms().await.unwrap().vms[0].vm, Some(web()));
    client.pause(web()).await.unwrap();
    client.soft_reboot(web()).await.unwrap();
    client.reset(web()).await.unwrap();
    client.stop(web(), 7).await.unwrap();
    client.resolve_migration(web(), "m", true).await.unwrap();
    client.plug_disk(web(), "keeper").await.unwrap();
    assert!(client.unplug_disk(web(), "data", 20).await.unwrap());
    assert_eq!(client.resize_vm(web(), 4, 7).await.unwrap(), 5);
    let dump = DumpMemoryRequest {
        vm: Some(web()),
        pod_uid: "keeper".to_owned(),
        file: "web.memory.dump".to_owned(),
        limit_seconds: 9,
    };
    let answer = client.dump_memory(dump).await.unwrap();
    assert_eq!(
        (answer.state(), answer.done, answer.total),
        (DumpState::Writing, 3, 4)
    );
    let down = vec!["a".to_owned(), "b".to_owned()];
    client.set_links(web(), down).await.unwrap();
    let noted = node.calls.lock().unwrap().clone();
    assert_eq!(
        noted,
        [
            "pause web",
            "soft reboot web",
            "reset web",
            "stop in 7 s",
            "resolve m, run: true",
            "plug keeper",
            "unplug data in 20 s",
            "4 CPUs, 7 bytes",
            "dump to web.memory.dump of keeper",
            "links down: a b",
        ]
    );
    let refused = client.unpause(web()).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert_eq!(refused.message(), "it is not paused");
    let unknown = client.guest_info(web()).await.unwrap_err();
    assert_eq!(unknown.code(), Code::Unimplemented);
    assert!(unknown.message().contains("GuestInfo"), "{unknown}");
    let unknown = client.cancel_migration(web(), "m").await.unwrap_err();
    assert_eq!(unknown.code(), Code::Unimplemented);
    assert!(unknown.message().contains("CancelMigration"), "{unknown}");
}

#[tokio::test]
async fn streams_go_both_ways() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("node.sock");
    serve(&socket, &Arc::new(Noted::default()));
    let mut client = NodeClient::new(&socket).unwrap();
    let mut events = client.watch_vms().await.unwrap();
    let first = events.message().await.unwrap().unwrap().change;
    assert!(matches!(first, Some(VmChange::All(list)) if list.vms.len() == 1));
    let second = events.message().await.unwrap().unwrap().change;
    assert_eq!(second, Some(VmChange::Removed(web())));
    assert_eq!(events.message().await.unwrap(), None);

    let (typed, input) = mpsc::channel(4);
    let message = |message| ConsoleInput {
        message: Some(message),
    };
    typed
        .send(message(ConsoleMessage::Open(web())))
        .await
        .unwrap();
    let mut output = client.console(ReceiverStream::new(input)).await.unwrap();
    for word in [&b"one"[..], b"two"] {
        let data = ConsoleMessage::Data(Bytes::from_static(word));
        typed.send(message(data)).await.unwrap();
        let said = timeout(Duration::from_secs(60), output.message()).await;
        assert_eq!(said.unwrap().unwrap().unwrap().data, word);
    }
    drop(typed);
    assert_eq!(output.message().await.unwrap(), None);

    let open = SendMigrationMessage::Open(SendMigrationOpen {
        vm: Some(web()),
        migration: "m".to_owned(),
        downtime_ms: 300,
        ..SendMigrationOpen::default()
    });
    let messages = [open, SendMigrationMessage::Data(Bytes::from_static(b"x"))];
    let input = messages.map(|message| SendMigrationInput {
        message: Some(message),
    });
    let mut output = client.send_migration(iter(input)).await.unwrap();
    for word in [&b"m in 300 ms"[..], b"x"] {
        assert_eq!(output.message().await.unwrap().unwrap().data, word);
    }
}

#[tokio::test]
async fn a_client_reaches_the_daemon_that_follows() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("node.sock");
    let node = Arc::new(Noted::default());
    let mut client = NodeClient::new(&socket).unwrap();
    assert_eq!(
        client.list_vms().await.unwrap_err().code(),
        Code::Unavailable
    );
    let first = serve(&socket, &node);
    client.list_vms().await.unwrap();
    first.abort();
    let _ = first.await;
    std::fs::remove_file(&socket).unwrap();
    serve(&socket, &node);
    // The first call may find the old connection.
    let _ = client.list_vms().await;
    client.list_vms().await.unwrap();
}
