//! Pauses of the guest, during which its clock stands still.

use std::sync::atomic::{AtomicBool, Ordering};

use tracing::debug;

use super::super::agent::Agent;

/// Whether the guest is paused, and what follows from that for its clock.
#[derive(Debug, Default)]
pub(super) struct Pauses {
    is_paused: AtomicBool,
}

impl Pauses {
    /// Pauses the guest by `pause`.
    pub(super) async fn pause<E>(
        &self,
        pause: impl Future<Output = Result<(), E>>,
    ) -> Result<(), E> {
        pause.await?;
        self.is_paused.store(true, Ordering::Release);
        Ok(())
    }

    /// Resumes the guest by `resume`, and sets its clock.
    pub(super) async fn resume<E>(
        &self,
        resume: impl Future<Output = Result<(), E>>,
        agent: &Agent,
    ) -> Result<(), E> {
        resume.await?;
        self.is_paused.store(false, Ordering::Release);
        self.set_clock(agent).await;
        Ok(())
    }

    pub(super) fn is_paused(&self) -> bool {
        self.is_paused.load(Ordering::Acquire)
    }

    /// Sets the guest's clock, unless the guest is paused and cannot answer.
    pub(super) async fn set_clock(&self, agent: &Agent) {
        if self.is_paused() {
            return;
        }
        if let Err(error) = agent.set_clock().await {
            debug!(%error, "the guest's clock is not set");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::ready;
    use std::os::unix::net::UnixStream as StdUnixStream;

    use podvisor_agent_protocol::api::{ReadClockResponse, SetClockResponse};
    use tokio::net::UnixStream;
    use ttrpc::proto::{Codec as _, Message, MessageHeader};
    use ttrpc::{Request, Response};

    use super::super::super::agent::Mux;
    use super::*;

    /// A guest that answers until its agent is dropped, and returns what it was asked. Its clock
    /// stands at 1970.
    async fn answer(guest: StdUnixStream) -> Vec<String> {
        guest.set_nonblocking(true).unwrap();
        let mut guest = UnixStream::from_std(guest).unwrap();
        let mut asked = Vec::new();
        while let Ok(message) = Message::<Request>::read_from(&mut guest).await {
            let method = message.payload.method;
            let payload = match method.as_str() {
                "ReadClock" => ReadClockResponse::default().encode(),
                _ => SetClockResponse::default().encode(),
            };
            let payload = Response {
                payload: payload.unwrap(),
                ..Response::default()
            };
            let header = MessageHeader::new_response(message.header.stream_id, payload.size());
            let reply = Message { header, payload };
            reply.write_to(&mut guest).await.unwrap();
            asked.push(method);
        }
        asked
    }

    /// What a guest is asked by `work`.
    async fn asked(work: impl AsyncFnOnce(Pauses, &Agent)) -> Vec<String> {
        let (ours, guest) = StdUnixStream::pair().unwrap();
        let agent = Agent::connect(Mux::to(ours)).await.unwrap();
        let guest = tokio::spawn(answer(guest));
        work(Pauses::default(), &agent).await;
        drop(agent);
        guest.await.unwrap()
    }

    #[tokio::test]
    async fn a_guests_clock_is_set_when_the_guest_goes_on() {
        let asked = asked(async |pauses, agent| {
            pauses.pause(ready(Ok::<_, ()>(()))).await.unwrap();
            assert!(pauses.is_paused());
            pauses.resume(ready(Ok::<_, ()>(())), agent).await.unwrap();
            assert!(!pauses.is_paused());
        });
        let asked = asked.await;
        assert_eq!(
            asked.last().map(String::as_str),
            Some("SetClock"),
            "{asked:?}"
        );
    }

    #[tokio::test]
    async fn a_paused_guest_is_asked_nothing_and_one_that_does_not_pause_is_not_paused() {
        let asked = asked(async |pauses, agent| {
            pauses.pause(ready(Err(()))).await.unwrap_err();
            assert!(!pauses.is_paused());
            pauses.pause(ready(Ok::<_, ()>(()))).await.unwrap();
            pauses.set_clock(agent).await;
            pauses.resume(ready(Err(())), agent).await.unwrap_err();
            assert!(pauses.is_paused());
        });
        assert!(asked.await.is_empty());
    }
}
