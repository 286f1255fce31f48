use std::future::pending;
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::*;
use crate::agent::LinkError;

/// The senders of the guest's stop and the machine's exit, and their receiver.
type Told = (
    watch::Sender<bool>,
    watch::Sender<Option<SandboxExit>>,
    Cause,
);

fn cause() -> Told {
    let (stops, stopped) = watch::channel(false);
    let (ends, exit) = watch::channel(None);
    let cause = Cause {
        stopped,
        written: exit.clone(),
        exit,
    };
    (stops, ends, cause)
}

fn lost() -> SandboxError {
    SandboxError::from(LinkError::from(ttrpc::Error::Eof))
}

#[tokio::test]
async fn a_guest_that_was_lost_because_it_ended_is_told_as_that() {
    let (_stops, ends, mut cause) = cause();
    let ends = async { ends.send(Some(SandboxExit::TripleFault)) };
    let (error, _) = tokio::join!(explained(lost(), &mut cause), ends);
    assert_eq!(error.to_string(), SandboxExit::TripleFault.to_string());
    let refused = SandboxError::refused(RefusalKind::NotFound, "no such container");
    let error = explained(refused, &mut cause).await;
    assert_eq!(error.kind(), Some(RefusalKind::NotFound));
}

#[tokio::test(start_paused = true)]
async fn how_a_guest_ended_that_runs_no_more_is_waited_for_however_long_it_takes() {
    let (stops, ends, mut cause) = cause();
    stops.send_replace(true);
    let ends = async {
        sleep(Duration::from_secs(3600)).await;
        ends.send(Some(SandboxExit::Reset))
    };
    let (error, _) = tokio::join!(explained(lost(), &mut cause), ends);
    assert_eq!(error.to_string(), SandboxExit::Reset.to_string());
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_was_lost_and_goes_on_is_told_as_lost() {
    let (_stops, _ends, mut cause) = cause();
    let error = explained(lost(), &mut cause).await;
    assert!(
        error.to_string().starts_with("lost the guest's agent"),
        "{error}"
    );
}

/// A connection whose other side never answers requests that wait, and answers all others
/// immediately. Each pending wait holds a clone of `waits`.
fn conversation(waits: &Arc<()>) -> (FrameWriter, FrameReader, Told) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (stops, ends, cause) = cause();
    let (exit, waits) = (cause.exit.clone(), Arc::clone(waits));
    let serves = converse(theirs, cause.clone(), exit, move |call, _| {
        let waits = call.is_wait().then(|| Arc::clone(&waits));
        async move {
            if waits.is_some() {
                pending::<()>().await;
            }
            Ok((Answer::Done, Vec::new()))
        }
    });
    tokio::spawn(serves);
    let ours = Arc::new(ours);
    let writer = FrameWriter::new(Arc::clone(&ours));
    (writer, FrameReader::new(ours), (stops, ends, cause))
}

async fn ask(writer: &mut FrameWriter, number: u64, call: Call) {
    let request = Request {
        number,
        call,
        request: None,
    };
    let body = serde_json::to_vec(&request).unwrap();
    writer.send(&body, &[]).await.unwrap();
}

async fn answered(reader: &mut FrameReader) -> Reply {
    let frame = timeout(Duration::from_secs(60), reader.next()).await;
    let frame = frame.expect("it is not answered").unwrap().unwrap();
    serde_json::from_slice(&frame.body).unwrap()
}

#[tokio::test]
async fn requests_that_wait_keep_no_others_waiting_and_are_bounded() {
    let waits = Arc::new(());
    let (mut writer, mut reader, _told) = conversation(&waits);
    let count = MAX_WAITS as u64;
    for number in 0..count {
        ask(&mut writer, number, Call::Ended).await;
    }
    ask(&mut writer, count, Call::List).await;
    let reply = answered(&mut reader).await;
    assert_eq!((reply.number, reply.answer.is_ok()), (count, true));
    ask(&mut writer, count, Call::Ended).await;
    let refusal = answered(&mut reader).await.answer.unwrap_err();
    assert_eq!(refusal.kind, RefusalKind::ResourceExhausted);
    assert!(refusal.message.contains("wait"), "{refusal:?}");
}

#[tokio::test]
async fn a_call_that_is_not_known_is_refused_and_the_connection_stays() {
    let (mut writer, mut reader, _told) = conversation(&Arc::default());
    for (number, call) in [
        (7, r#"{"Teleport": {"to": 1}}"#),
        (8, r#""Sleep""#),
        (9, r#"{"Start": {}}"#),
    ] {
        let body = format!(r#"{{"number": {number}, "call": {call}, "more": []}}"#);
        writer.send(body.as_bytes(), &[]).await.unwrap();
        let reply = answered(&mut reader).await;
        let refusal = reply.answer.unwrap_err();
        assert_eq!(reply.number, number);
        assert_eq!(refusal.kind, RefusalKind::InvalidArgument);
        assert!(refusal.message.contains("does not support"), "{refusal:?}");
    }
    ask(&mut writer, 10, Call::List).await;
    let reply = answered(&mut reader).await;
    assert_eq!((reply.number, reply.answer.is_ok()), (10, true));
    // Who asks without a number cannot be answered.
    writer.send(br#"{"call": "List"}"#, &[]).await.unwrap();
    assert!(reader.next().await.unwrap().is_none());
}

#[tokio::test]
async fn a_wait_that_is_abandoned_ends_and_is_not_answered() {
    let waits = Arc::new(());
    let (mut writer, mut reader, _told) = conversation(&waits);
    for number in 0..3 {
        ask(&mut writer, number, Call::AwaitPressure).await;
    }
    for number in [1, 7] {
        ask(&mut writer, 9, Call::Abandon { number }).await;
    }
    ask(&mut writer, 3, Call::List).await;
    assert_eq!(answered(&mut reader).await.number, 3);
    // Held by this test, the answering closure, and two waits.
    while Arc::strong_count(&waits) > 4 {
        tokio::task::yield_now().await;
    }
    assert_eq!(Arc::strong_count(&waits), 4);
}

/// A guest can cause this by a list from its agent.
#[tokio::test]
async fn a_reply_too_long_to_send_is_refused_and_the_next_one_comes() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (replies, outgoing) = mpsc::channel(2);
    tokio::spawn(write(FrameWriter::new(Arc::new(theirs)), outgoing));
    let groups = vec![u32::MAX; MAX_FRAME / 8];
    let user = super::super::super::types::ContainerUser {
        uid: 0,
        gid: 0,
        groups,
    };
    for (number, answer) in [(1, Answer::Created(user)), (2, Answer::Done)] {
        let reply = Reply {
            number,
            answer: Ok(answer),
        };
        replies.send((reply, Vec::new())).await.unwrap();
    }
    let mut reader = FrameReader::new(Arc::new(ours));
    for (number, is_refused) in [(1, true), (2, false)] {
        let frame = reader.next().await.unwrap().unwrap();
        let reply: Reply = serde_json::from_slice(&frame.body).unwrap();
        assert_eq!((reply.number, reply.answer.is_err()), (number, is_refused));
    }
}
