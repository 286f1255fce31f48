//! The loop that answers on a socket.
#![allow(unsafe_code)] // tokio watches a descriptor

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use tokio::io::unix::AsyncFd;
use tokio::time::{MissedTickBehavior, interval, sleep};

use crate::frame::MAX_FRAME;
use crate::server::{Frame, Server};

/// How often a router is announced: several times within its lifetime.
const ANNOUNCE_INTERVAL: Duration = Duration::from_secs(600);

/// Answers the guest on `socket`, which [`open_socket`](crate::open_socket) opened, until reading
/// fails; that a link is down for a while is not a failure. It only reads and writes the socket.
///
/// A guest that asks more often than it is answered is not listened to for as long, so that a
/// flood costs the host no more than what the server's bound allows.
///
/// `answered` is told each time that the guest was answered.
///
/// # Errors
///
/// The socket cannot be watched or read.
pub async fn serve(
    socket: OwnedFd,
    mut server: Server,
    mut answered: impl FnMut(&Server),
) -> io::Error {
    // SAFETY: the descriptor is owned by what watches it, and is neither closed nor replaced before
    // that ends.
    let socket = match unsafe { AsyncFd::register(socket) } {
        Ok(socket) => socket,
        Err(error) => return error.into(),
    };
    let has_router = server.announce().is_some();
    let mut announcements = interval(ANNOUNCE_INTERVAL);
    announcements.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // One byte more, to tell frames that are too long.
    let mut buffer = [0; MAX_FRAME + 1];
    loop {
        let ready = tokio::select! {
            ready = socket.readable() => ready,
            _ = announcements.tick(), if has_router => {
                if let Some(frame) = server.announce() {
                    transmit(&socket, &frame);
                }
                continue;
            }
        };
        let mut ready = match ready {
            Ok(ready) => ready,
            Err(error) => return error,
        };
        match recv(socket.as_fd(), &mut buffer, RecvFlags::empty()) {
            Ok((length, _)) => {
                let frame = buffer.get(..length).unwrap_or_default();
                if let Some(answer) = server.answer(frame, Instant::now()) {
                    transmit(&socket, &answer);
                    answered(&server);
                }
                if let Some(wait) = server.wait(Instant::now()) {
                    sleep(wait).await;
                }
            }
            Err(Errno::AGAIN) => ready.clear_ready(),
            // The tap went down, which is told once.
            Err(Errno::INTR | Errno::NETDOWN) => {}
            Err(error) => return error.into(),
        }
    }
}

/// Sends a frame; if that fails, the client asks again.
fn transmit(socket: &AsyncFd<OwnedFd>, frame: &Frame) {
    if let Err(error) = send(socket.as_fd(), frame.as_ref(), SendFlags::empty()) {
        tracing::debug!(%error, "failed to answer the guest on its tap");
    }
}
