//! Containers whose process has ended and whose readers have not got all of its output yet.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use podvisor_agent_protocol::api::{WaitProcessResponse, wait_process_response::Status};
use tokio::time::timeout;
use ttrpc::proto::{Codec as _, Message, MessageHeader};
use ttrpc::{Request, Response};

use super::super::agent::{Agent, Mux};
use super::super::stdio::{GuestStreams, StreamSet};
use super::super::types::{ProcessExit, RestartPolicy, Started, StdioFds};
use super::container::Container;
use super::output::ContainerStreams;
use super::restart::Processes;

/// Longer than anything here takes.
const LONG: Duration = Duration::from_secs(120);

/// More than fits into a reader's socket, and less than a reader may be behind.
const OUTPUT: usize = 600 << 10;

const CODE: i32 = 3;

/// A container whose process has written its output and ended, and its reader, which is waited for.
async fn ended() -> (Arc<Container>, UnixStream) {
    let (ours, guest) = UnixStream::pair().unwrap();
    guest.set_nonblocking(true).unwrap();
    let mut guest = tokio::net::UnixStream::from_std(guest).unwrap();
    let agent = Agent::connect(Mux::to(ours)).await.unwrap();
    let (mut process, output) = UnixStream::pair().unwrap();
    let streams = GuestStreams {
        input: None,
        output: Some(Arc::new(output)),
        errors: None,
    };
    let streams = ContainerStreams::start(streams, None, false, false).unwrap();
    let (reader, file) = UnixStream::pair().unwrap();
    let files = StdioFds {
        stdout: Some(file.into()),
        ..StdioFds::default()
    };
    streams.attach(files, true).unwrap();
    let set = StreamSet {
        stdin: false,
        stdout: true,
        stderr: false,
    };
    let processes = Processes::new(RestartPolicy::Never, set, None);
    let container = Container::new("c".to_owned(), 1, streams, processes, None);
    let container = Arc::new(container);
    let started = Started {
        pid: 1,
        started_at_ns: 1,
    };
    container.started(started, &agent, |_| async {});
    let writes = tokio::task::spawn_blocking(move || process.write_all(&[b'x'; OUTPUT]));
    writes.await.unwrap().unwrap();
    let wait = Message::<Request>::read_from(&mut guest).await.unwrap();
    let answer = WaitProcessResponse {
        status: Some(Status::ExitCode(CODE.try_into().unwrap())),
        ..WaitProcessResponse::default()
    };
    let payload = Response {
        payload: answer.encode().unwrap(),
        ..Response::default()
    };
    let header = MessageHeader::new_response(wait.header.stream_id, payload.size());
    let answer = Message { header, payload };
    answer.write_to(&mut guest).await.unwrap();
    (container, reader)
}

async fn exit(container: &Container) -> ProcessExit {
    let mut exit = container.exit(None).unwrap();
    let exit = exit.wait_for(Option::is_some).await.unwrap();
    exit.unwrap()
}

#[tokio::test]
async fn a_container_has_ended_when_its_slow_reader_has_all_of_the_output() {
    let (container, mut reader) = ended().await;
    let early = timeout(Duration::from_millis(500), exit(&container)).await;
    assert!(early.is_err(), "{early:?}");
    let reads = tokio::task::spawn_blocking(move || {
        let mut bytes = Vec::new();
        reader.read_to_end(&mut bytes).map(|_| bytes.len())
    });
    let exit = timeout(LONG, exit(&container)).await.unwrap();
    assert_eq!(exit.code, CODE);
    assert_eq!(reads.await.unwrap().unwrap(), OUTPUT);
}

#[tokio::test]
async fn readers_of_a_container_that_is_killed_are_let_go() {
    let (container, _reader) = ended().await;
    container.hurry_readers().await;
    let exit = timeout(LONG, exit(&container)).await.unwrap();
    assert_eq!(exit.code, CODE);
}

#[tokio::test]
async fn a_machines_end_waits_for_readers_until_they_are_let_go_and_changes_no_exit() {
    let (container, _reader) = ended().await;
    while container.has_ended().is_none() {
        tokio::task::yield_now().await;
    }
    let gone = container.guest_is_gone();
    tokio::pin!(gone);
    let early = timeout(Duration::from_millis(500), &mut gone).await;
    assert!(early.is_err());
    container.detach_readers().await;
    timeout(LONG, gone).await.unwrap();
    let exit = exit(&container).await;
    assert_eq!((exit.code, exit.of_machine), (CODE, false));
}

#[tokio::test]
async fn a_program_that_runs_when_its_machine_ends_has_ended_with_it() {
    let (container, output) = Container::sample("c");
    drop(output);
    container.guest_is_gone().await;
    let exit = exit(&container).await;
    assert_eq!((exit.code, exit.of_machine), (137, true));
}
