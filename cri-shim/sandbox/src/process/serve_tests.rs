use super::*;
use crate::wire::{Call, Request};

#[tokio::test]
async fn a_connection_too_many_is_told_so() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let ours = Arc::new(ours);
    let call = Call::IsPaused;
    let request = Request {
        number: 7,
        call,
        request: None,
    };
    let asks = async {
        let body = serde_json::to_vec(&request).unwrap();
        let mut writer = FrameWriter::new(Arc::clone(&ours));
        writer.send(&body, &[]).await.unwrap();
        let mut reader = FrameReader::new(Arc::clone(&ours));
        let reply = reader.next().await.unwrap().unwrap();
        let closed = reader.next().await.unwrap().is_none();
        (
            serde_json::from_slice::<Reply>(&reply.body).unwrap(),
            closed,
        )
    };
    let ((), (reply, closed)) = tokio::join!(refuse(theirs), asks);
    let refusal = reply.answer.unwrap_err();
    assert_eq!((reply.number, closed), (7, true));
    assert_eq!(refusal.kind, RefusalKind::ResourceExhausted);
    assert!(refusal.message.contains("connections"), "{refusal:?}");
}
