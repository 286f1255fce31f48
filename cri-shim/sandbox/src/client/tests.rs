use oci_spec::runtime::Spec;
use tokio::net::UnixListener;

use super::super::agent::GROUPS_MAX;
use super::super::record::{self, ExitRecord};
use super::super::types::{ContainerUser, CreateContainer};
use super::super::wire::CONTROL_SOCKET;
use super::super::wire::{Answer, Reply};
use super::*;

/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// A sandbox whose process is this one, which continues to run: it answers the first request,
/// writes this record and closes the connection.
async fn left_behind(dir: &Path, record: Option<ExitRecord>) -> SandboxClient {
    let listener = UnixListener::bind(dir.join(CONTROL_SOCKET)).unwrap();
    let file = record::create(dir).unwrap();
    let leaves = async {
        let stream = Arc::new(listener.accept().await.unwrap().0);
        let mut requests = FrameReader::new(Arc::clone(&stream));
        let hello = requests.next().await.unwrap().unwrap();
        let hello: Request = serde_json::from_slice(&hello.body).unwrap();
        let answer = Answer::Hello(Greeting {
            version: CONTROL_VERSION,
            ..Greeting::default()
        });
        let reply = Reply {
            number: hello.number,
            answer: Ok(answer),
        };
        let body = serde_json::to_vec(&reply).unwrap();
        if let Some(record) = record {
            record::write(&file, &record).unwrap();
        }
        FrameWriter::new(stream).send(&body, &[]).await.unwrap();
    };
    let (client, ()) = tokio::join!(SandboxClient::connect_within(dir, PATIENCE), leaves);
    client.unwrap()
}

/// A sandbox whose process is this one, and answers each request with `answer`.
async fn answering(dir: &Path, answer: fn() -> Answer) -> SandboxClient {
    let listener = UnixListener::bind(dir.join(CONTROL_SOCKET)).unwrap();
    tokio::spawn(async move {
        let stream = Arc::new(listener.accept().await.unwrap().0);
        let mut requests = FrameReader::new(Arc::clone(&stream));
        let mut replies = FrameWriter::new(stream);
        while let Some(request) = requests.next().await.unwrap() {
            let request: Request = serde_json::from_slice(&request.body).unwrap();
            let answer = match request.call {
                Call::Hello { version } => Answer::Hello(Greeting {
                    version,
                    missing_layers: vec![
                        "\u{1b}[2J".repeat(MAX_LAYER_NAME_CHARS);
                        MAX_MISSING_LAYERS + 1
                    ],
                    ..Greeting::default()
                }),
                _ => answer(),
            };
            let reply = Reply {
                number: request.number,
                answer: Ok(answer),
            };
            let body = serde_json::to_vec(&reply).unwrap();
            replies.send(&body, &[]).await.unwrap();
        }
    });
    SandboxClient::connect_within(dir, PATIENCE).await.unwrap()
}

#[tokio::test]
async fn a_process_does_not_set_its_own_limit_of_memory() {
    let grow = |answer, wanted| async move {
        let dir = tempfile::tempdir().unwrap();
        let client = answering(dir.path(), answer).await;
        client.grow(1 << 30, wanted, 4096, Duration::ZERO).await
    };
    // Memory in use is not taken away, though less was requested.
    assert_eq!(grow(|| Answer::Grown(4096), 0).await.unwrap(), 4096);
    for wanted in [0, 4096] {
        let refused = grow(|| Answer::Grown(u64::MAX), wanted).await.unwrap_err();
        let SandboxError::Control { source, .. } = refused else {
            panic!("{refused}");
        };
        assert!(
            source.to_string().ends_with("the possible 4096"),
            "{source}"
        );
    }
}

#[tokio::test]
async fn an_answer_that_is_not_known_fails_its_call_alone() {
    let dir = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(dir.path().join(CONTROL_SOCKET)).unwrap();
    tokio::spawn(async move {
        let stream = Arc::new(listener.accept().await.unwrap().0);
        let mut requests = FrameReader::new(Arc::clone(&stream));
        let mut replies = FrameWriter::new(stream);
        loop {
            let request = next(&mut requests).await;
            let answer = match request.call {
                Call::Hello { version } => format!(r#"{{"Hello": {{"version": {version}}}}}"#),
                Call::Pause => r#"{"Paused": {"since": 1}}"#.to_owned(),
                _ => r#""Done""#.to_owned(),
            };
            let number = request.number;
            let body = format!(r#"{{"number": {number}, "answer": {{"Ok": {answer}}}}}"#);
            replies.send(body.as_bytes(), &[]).await.unwrap();
        }
    });
    let client = SandboxClient::connect_within(dir.path(), PATIENCE)
        .await
        .unwrap();
    let refused = client.pause().await.unwrap_err();
    assert!(
        matches!(
            refused,
            SandboxError::Control {
                source: FrameError::Json(_),
                ..
            }
        ),
        "{refused}"
    );
    client.resume().await.unwrap();
}

#[tokio::test]
async fn a_user_has_no_more_groups_than_linux_allows() {
    let dir = tempfile::tempdir().unwrap();
    let answer = || {
        Answer::Created(ContainerUser {
            groups: vec![0; GROUPS_MAX + 1],
            ..ContainerUser::default()
        })
    };
    let client = answering(dir.path(), answer).await;
    let image = tempfile::tempfile().unwrap();
    let container = CreateContainer::new("c", image, "0", Spec::default());
    let refused = client.create_container(container).await.unwrap_err();
    assert!(matches!(
        refused,
        SandboxError::Control {
            source: FrameError::Groups(_),
            ..
        }
    ));
}

#[tokio::test]
async fn what_a_jail_lacks_is_told_in_words_that_can_be_shown() {
    let dir = tempfile::tempdir().unwrap();
    let client = answering(dir.path(), || Answer::Done).await;
    let missing = client.missing_layers();
    assert_eq!(missing.len(), MAX_MISSING_LAYERS);
    for layer in missing {
        assert!(
            layer.starts_with(" [2J ") && layer.len() == MAX_LAYER_NAME_CHARS,
            "{layer:?}"
        );
    }
}

#[tokio::test]
async fn a_machines_end_is_known_before_its_process_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let record = ExitRecord {
        exit: SandboxExit::PoweredOff,
        containers: Vec::new(),
    };
    let client = left_behind(dir.path(), Some(record)).await;
    let ended = timeout(PATIENCE, client.machine_ended()).await;
    assert_eq!(ended.unwrap(), SandboxExit::PoweredOff);
    assert!(client.inner.exit.borrow().is_none(), "its process is here");
}

#[tokio::test(start_paused = true)]
async fn without_a_record_it_is_the_processs_end_that_counts() {
    let dir = tempfile::tempdir().unwrap();
    let client = left_behind(dir.path(), None).await;
    timeout(PATIENCE, client.machine_ended()).await.unwrap_err();
}

#[test]
fn an_end_is_known_although_the_runtime_that_connected_is_gone() {
    let runtime = || {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        builder.enable_all().build().unwrap()
    };
    let dir = tempfile::tempdir().unwrap();
    let mut process = std::process::Command::new("sleep")
        .arg("1000")
        .spawn()
        .unwrap();
    let (ours, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let (first, second) = (runtime(), runtime());
    let client = first.block_on(async {
        let stream = tokio::net::UnixStream::from_std(ours).unwrap();
        SandboxClient::over(Connection::of(stream, &process), dir.path())
    });
    let moment = Duration::from_millis(50);
    second.block_on(async {
        let mut answer = std::pin::pin!(client.wait_for(Call::Pause, Vec::new()));
        timeout(moment, &mut answer).await.unwrap_err();
        first.shutdown_background();
        let mut ended = std::pin::pin!(client.ended());
        timeout(moment, &mut ended).await.unwrap_err();
        process.kill().unwrap();
        assert_eq!(timeout(PATIENCE, ended).await.unwrap(), SandboxExit::Died);
        let machine = timeout(PATIENCE, client.machine_ended()).await.unwrap();
        assert_eq!(machine, SandboxExit::Died);
        let error = timeout(PATIENCE, answer).await.unwrap().unwrap_err();
        assert!(error.is_gone(), "{error}");
    });
    process.wait().unwrap();
}

#[tokio::test]
async fn a_process_that_knows_it_is_told_that_nobody_waits_any_more() {
    for drops_waits in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join(CONTROL_SOCKET)).unwrap();
        let process = async {
            let stream = Arc::new(listener.accept().await.unwrap().0);
            let mut requests = FrameReader::new(Arc::clone(&stream));
            let hello = next(&mut requests).await;
            let answer = Ok(Answer::Hello(Greeting {
                version: CONTROL_VERSION,
                drops_waits,
                ..Greeting::default()
            }));
            let number = hello.number;
            let body = serde_json::to_vec(&Reply { number, answer }).unwrap();
            FrameWriter::new(stream).send(&body, &[]).await.unwrap();
            requests
        };
        let connects = SandboxClient::connect_within(dir.path(), PATIENCE);
        let (client, mut requests) = tokio::join!(connects, process);
        let client = client.unwrap();
        let asked = {
            let wait = client.wait("a", Some("b"));
            tokio::select! {
                _ = wait => unreachable!("it is not answered"),
                asked = next(&mut requests) => asked,
            }
        };
        assert!(matches!(asked.call, Call::Wait { .. }), "{asked:?}");
        {
            // A call that changes something continues, and the process is not notified.
            let start = client.start_container("a");
            tokio::select! {
                _ = start => unreachable!("it is not answered"),
                told = next(&mut requests) => match drops_waits {
                    true => assert!(
                        matches!(told.call, Call::Abandon { number } if number == asked.number),
                        "{told:?}"
                    ),
                    false => assert!(matches!(told.call, Call::Start { .. }), "{told:?}"),
                },
            }
        }
        drop(client);
        while let Some(frame) = requests.next().await.unwrap() {
            let request: Request = serde_json::from_slice(&frame.body).unwrap();
            assert!(matches!(request.call, Call::Start { .. }), "{request:?}");
        }
    }
}

async fn next(requests: &mut FrameReader) -> Request {
    let frame = timeout(PATIENCE, requests.next()).await.unwrap();
    serde_json::from_slice(&frame.unwrap().unwrap().body).unwrap()
}
