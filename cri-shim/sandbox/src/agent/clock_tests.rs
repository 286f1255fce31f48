//! What a guest's agent is told about the time.

use std::os::unix::net::UnixStream as StdUnixStream;

use podvisor_agent_protocol::api::{
    ConfigureRequest, ConfigureResponse, ReadClockResponse, SetClockRequest, SetClockResponse,
};
use tokio::net::UnixStream;
use ttrpc::proto::{Codec as _, Message, MessageHeader};
use ttrpc::{Request, Response};

use super::*;

const HOUR_NS: i64 = 3600 * 1_000_000_000;

/// An agent, and its guest's end of the connection.
async fn agent() -> (Agent, UnixStream) {
    let (ours, guest) = StdUnixStream::pair().unwrap();
    guest.set_nonblocking(true).unwrap();
    let agent = Agent::connect(Mux::to(ours)).await.unwrap();
    (agent, UnixStream::from_std(guest).unwrap())
}

async fn receive(guest: &mut UnixStream) -> Message<Request> {
    Message::read_from(guest).await.unwrap()
}

async fn answer(guest: &mut UnixStream, asked: &Message<Request>, payload: Vec<u8>) {
    let payload = Response {
        payload,
        ..Response::default()
    };
    let header = MessageHeader::new_response(asked.header.stream_id, payload.size());
    let reply = Message { header, payload };
    reply.write_to(guest).await.unwrap();
}

#[tokio::test]
async fn a_guest_is_told_the_hosts_time_when_it_is_configured() {
    let (agent, mut guest) = agent().await;
    let told = async {
        let asked = receive(&mut guest).await;
        assert_eq!(asked.payload.method, "Configure");
        let done = ConfigureResponse::default().encode().unwrap();
        answer(&mut guest, &asked, done).await;
        let request = ConfigureRequest::decode(asked.payload.payload).unwrap();
        request.unix_time_ns
    };
    let before = now_ns();
    let config = GuestConfig::default();
    let (configured, told) = tokio::join!(agent.configure(&config, &[]), told);
    configured.unwrap();
    assert!((before..=now_ns()).contains(&told), "{told}");
}

/// A guest whose clock is off by `off_ns`: it tells its time until its clock is to be set, and
/// returns by what.
async fn set_by(guest: &mut UnixStream, off_ns: i64, follows_host: bool) -> i64 {
    loop {
        let asked = receive(guest).await;
        if asked.payload.method == "SetClock" {
            let done = SetClockResponse::default().encode().unwrap();
            answer(guest, &asked, done).await;
            let request = SetClockRequest::decode(asked.payload.payload).unwrap();
            return request.gain_ns;
        }
        assert_eq!(asked.payload.method, "ReadClock");
        let reading = ReadClockResponse {
            unix_time_ns: now_ns().saturating_add_signed(off_ns),
            follows_host,
            ..ReadClockResponse::default()
        };
        answer(guest, &asked, reading.encode().unwrap()).await;
    }
}

#[tokio::test]
async fn a_guests_clock_is_set_by_what_it_is_off() {
    for off_ns in [-HOUR_NS, HOUR_NS] {
        let (agent, mut guest) = agent().await;
        let begin = now_ns();
        let (done, gain) = tokio::join!(agent.set_clock(), set_by(&mut guest, off_ns, false));
        done.unwrap();
        // A reading is not more exact than its duration.
        let tolerance = now_ns().saturating_sub(begin);
        assert!(gain.abs_diff(-off_ns) <= tolerance, "{off_ns}: {gain}");
    }
}

#[tokio::test]
async fn a_guests_clock_that_follows_the_hosts_is_only_read() {
    let (agent, mut guest) = agent().await;
    tokio::select! {
        done = agent.set_clock() => done.unwrap(),
        gain = set_by(&mut guest, -HOUR_NS, true) => panic!("it is set by {gain}"),
    }
}
