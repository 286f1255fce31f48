//! The server: one frame in, at most one out.

use std::time::{Duration, Instant};

use crate::arp;
use crate::config::{Config, InvalidConfig};
use crate::frame::{self, Payload};
use crate::limit::Limiter;
use crate::refusal::Refusal;
use crate::{router, v4, v6};

/// An Ethernet frame for the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame(Vec<u8>);

impl AsRef<[u8]> for Frame {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// What a server has done so far.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Frames that were answered.
    pub answered: u64,
    /// Messages that wait for no answer.
    pub taken: u64,
    /// Frames that break the protocol, or are not the guest's.
    pub refused: u64,
    /// Frames that came too fast to be looked at.
    pub limited: u64,
    /// IPv4 addresses that were given, or given again.
    pub leases: u64,
}

/// A server for one guest.
///
/// It holds no state but its configuration: a client's message says all that its answer depends
/// on, so that a server that is started anew goes on where another one ended.
#[derive(Debug)]
pub struct Server {
    config: Config,
    limiter: Limiter,
    counters: Counters,
}

impl Server {
    /// Creates a server.
    ///
    /// # Errors
    ///
    /// `config` is not [valid](Config::validate).
    pub fn new(config: Config) -> Result<Self, InvalidConfig> {
        config.validate()?;
        Ok(Self {
            config,
            limiter: Limiter::new(),
            counters: Counters::default(),
        })
    }

    /// Returns the frame that answers `frame`, which came from the guest at `now`.
    pub fn answer(&mut self, frame: &[u8], now: Instant) -> Option<Frame> {
        match self.try_answer(frame, now) {
            Ok(Some(frame)) => {
                self.counters.answered = self.counters.answered.saturating_add(1);
                Some(frame)
            }
            Ok(None) => {
                self.counters.taken = self.counters.taken.saturating_add(1);
                None
            }
            Err(Refusal::Rate) => {
                self.counters.limited = self.counters.limited.saturating_add(1);
                None
            }
            Err(refusal) => {
                self.counters.refused = self.counters.refused.saturating_add(1);
                // The rate of these is bounded, as that of answers is.
                tracing::debug!(%refusal, "a frame of the guest gets no answer");
                None
            }
        }
    }

    /// Like [`answer`](Self::answer), and tells why there is no answer; `Ok(None)` if the client
    /// waits for none.
    ///
    /// # Errors
    ///
    /// The frame is not one that is answered.
    pub fn try_answer(&mut self, frame: &[u8], now: Instant) -> Result<Option<Frame>, Refusal> {
        if !self.limiter.take(now) {
            return Err(Refusal::Rate);
        }
        let received = frame::parse(frame)?;
        if received.source != self.config.client {
            return Err(Refusal::OtherClient("an Ethernet frame"));
        }
        let config = &self.config;
        let answer = match received.payload {
            Payload::Arp(packet) => Some(arp::answer(config, packet)?),
            Payload::Dhcp4(message) => v4::answer(config, message)?.map(|answer| {
                let leases = u64::from(answer.is_lease);
                self.counters.leases = self.counters.leases.saturating_add(leases);
                answer.frame
            }),
            Payload::Dhcp6 { source, message } => Some(v6::answer(config, source, message)?),
            Payload::Icmp6 { source, message } => Some(router::answer(config, source, message)?),
        };
        Ok(answer.map(Frame))
    }

    /// Returns the router advertisement that is sent from time to time, if there is a router.
    #[must_use]
    pub fn announce(&self) -> Option<Frame> {
        router::announce(&self.config).map(Frame)
    }

    /// Returns the time until a frame is looked at again; `None` if that is now.
    pub fn wait(&mut self, now: Instant) -> Option<Duration> {
        self.limiter.wait(now)
    }

    /// Returns what was done so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Returns what the server gives to its guest.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::config::tests::{CLIENT, plain};
    use crate::frame::tests::{request4, request6};

    fn discover() -> Vec<u8> {
        let mut message = vec![1, 1, 6, 0];
        message.resize(28, 0);
        message.extend_from_slice(&CLIENT.0);
        message.resize(236, 0);
        message.extend_from_slice(&[99, 130, 83, 99, 53, 1, 1, 255]);
        message
    }

    fn solicit() -> Vec<u8> {
        let mut message = vec![1, 0, 0, 1, 0, 1, 0, 10, 0, 3, 0, 1];
        message.extend_from_slice(&CLIENT.0);
        message
    }

    #[test]
    fn each_protocol_is_answered_to_the_guest() {
        let mut server = Server::new(plain()).unwrap();
        let now = Instant::now();
        for frame in [request4(&discover()), request6(&solicit())] {
            let answer = server.answer(&frame, now).unwrap();
            assert_eq!(answer.as_ref()[..6], CLIENT.0);
            assert_eq!(answer.as_ref()[6..12], plain().server.0);
        }
        assert!(server.announce().is_some());
        assert_eq!(server.counters().answered, 2);
    }

    #[test]
    fn another_card_gets_nothing() {
        let mut server = Server::new(plain()).unwrap();
        let mut frame = request4(&discover());
        frame[11] = 9;
        let refusal = Refusal::OtherClient("an Ethernet frame");
        let now = Instant::now();
        assert_eq!(server.try_answer(&frame, now), Err(refusal));
        assert_eq!(server.answer(&frame, now), None);
        assert_eq!(server.counters().refused, 1);
    }

    #[test]
    fn a_flood_is_answered_up_to_its_bound() {
        let mut server = Server::new(plain()).unwrap();
        let frame = request4(&discover());
        let now = Instant::now();
        for _ in 0..10_000 {
            let _ = server.answer(&frame, now);
        }
        let counters = server.counters();
        assert_eq!(counters.answered + counters.limited, 10_000);
        assert_eq!(counters.answered, 32);
        let wait = server.wait(now).unwrap();
        assert!(server.answer(&frame, now + wait).is_some());
    }

    #[test]
    fn a_configuration_that_cannot_be_sent_is_refused() {
        let mut config = plain();
        config.host_name = Some("a\nb".to_owned());
        assert!(Server::new(config).is_err());
    }

    proptest! {
        #[test]
        fn any_frame_is_read_without_a_panic(
            kind in 0..4,
            bytes in proptest::collection::vec(any::<u8>(), 0..600),
            place in 0_usize..400,
            value: u8,
        ) {
            let mut server = Server::new(plain()).unwrap();
            let mut frame = match kind {
                0 => bytes,
                1 => request4(&discover()),
                2 => request6(&solicit()),
                _ => request6(&bytes),
            };
            if let Some(byte) = frame.get_mut(place) {
                *byte = value;
            }
            let _ = server.answer(&frame, Instant::now());
        }
    }
}
