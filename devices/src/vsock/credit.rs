//! Flow control (§5.10.6.3): either side announces how much it buffers (`buf_alloc`) and how much
//! it has consumed so far (`fwd_cnt`, modulo 2³²); the other never has more in flight.

/// The credit of the guest: what it may send to the host.
#[derive(Debug)]
pub(super) struct Inbound {
    buf_alloc: u32,
    received: u32,
    forwarded: u32,
    /// `forwarded` as the guest knows it.
    advertised: u32,
}

/// The guest sent more than its credit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CreditViolation;

impl Inbound {
    pub(super) fn new(buf_alloc: u32) -> Self {
        Self {
            buf_alloc,
            received: 0,
            forwarded: 0,
            advertised: 0,
        }
    }

    pub(super) fn buf_alloc(&self) -> u32 {
        self.buf_alloc
    }

    /// Bytes received and not yet forwarded.
    pub(super) fn in_flight(&self) -> u32 {
        self.received.wrapping_sub(self.forwarded)
    }

    /// Counts `len` bytes from the guest.
    pub(super) fn receive(&mut self, len: u32) -> Result<(), CreditViolation> {
        match self.in_flight().checked_add(len) {
            Some(held) if held <= self.buf_alloc => {
                self.received = self.received.wrapping_add(len);
                Ok(())
            }
            _ => Err(CreditViolation),
        }
    }

    /// Counts `len` of the received bytes as forwarded, but never more than are in flight.
    pub(super) fn forward(&mut self, len: u32) {
        self.forwarded = self.forwarded.wrapping_add(len.min(self.in_flight()));
    }

    /// Returns the value for `fwd_cnt` of a packet that is sent now.
    pub(super) fn advertise(&mut self) -> u32 {
        self.advertised = self.forwarded;
        self.forwarded
    }

    /// Whether the guest should be sent a credit update: not after every byte, but once half of the
    /// buffer or more became free without its knowledge.
    pub(super) fn update_due(&self) -> bool {
        let untold = self.forwarded.wrapping_sub(self.advertised);
        untold != 0 && untold >= self.buf_alloc >> 1
    }
}

/// The limit of bytes in flight, whatever the guest grants: so counts modulo 2³² stay comparable.
const MAX_IN_FLIGHT: u32 = 1 << 30;

/// The credit of the host: what it may send to the guest.
#[derive(Debug)]
pub(super) struct Outbound {
    buf_alloc: u32,
    consumed: u32,
    sent: u32,
}

/// The guest claims to have consumed bytes that were never sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CreditLie;

impl Outbound {
    /// Nothing may be sent until the guest has announced its buffer.
    pub(super) fn new() -> Self {
        Self {
            buf_alloc: 0,
            consumed: 0,
            sent: 0,
        }
    }

    /// Applies the credit fields of any packet from the guest. A count that is older than the last
    /// known one (Linux's threads overtake one another) is ignored.
    pub(super) fn update(&mut self, buf_alloc: u32, fwd_cnt: u32) -> Result<(), CreditLie> {
        let in_flight = self.sent.wrapping_sub(fwd_cnt);
        if in_flight > u32::MAX >> 1 {
            return Err(CreditLie);
        }
        self.buf_alloc = buf_alloc;
        if in_flight <= self.in_flight() {
            self.consumed = fwd_cnt;
        }
        Ok(())
    }

    /// Bytes that were sent and that the guest has not consumed, as far as known.
    pub(super) fn in_flight(&self) -> u32 {
        self.sent.wrapping_sub(self.consumed)
    }

    /// Bytes that may be sent now.
    pub(super) fn free(&self) -> u32 {
        self.buf_alloc
            .min(MAX_IN_FLIGHT)
            .saturating_sub(self.in_flight())
    }

    /// Counts `len` bytes, at most [`Self::free`], as sent.
    pub(super) fn sent(&mut self, len: u32) {
        self.sent = self.sent.wrapping_add(len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn more_than_was_granted_is_an_overrun() {
        let mut credit = Inbound::new(100);
        credit.receive(60).unwrap();
        assert_eq!(credit.receive(41), Err(CreditViolation));
        credit.receive(40).unwrap();
        assert_eq!(credit.receive(1), Err(CreditViolation));
        assert_eq!(credit.receive(u32::MAX), Err(CreditViolation));
        credit.forward(1);
        credit.receive(1).unwrap();
    }

    #[test]
    fn the_guest_hears_of_space_when_half_was_freed() {
        let mut credit = Inbound::new(100);
        credit.receive(100).unwrap();
        credit.forward(49);
        assert!(!credit.update_due());
        credit.forward(1);
        assert!(credit.update_due());
        assert_eq!(credit.advertise(), 50);
        assert!(!credit.update_due());
    }

    #[test]
    fn consumption_of_what_was_never_sent_is_a_lie() {
        let mut credit = Outbound::new();
        assert_eq!(credit.free(), 0);
        credit.update(1000, 0).unwrap();
        credit.sent(600);
        assert_eq!(credit.update(1000, 601), Err(CreditLie));
        credit.update(1000, 600).unwrap();
        assert_eq!(credit.free(), 1000);
    }

    #[test]
    fn counts_of_half_the_range_ahead_are_lies_and_others_are_old() {
        let mut credit = Outbound::new();
        credit.update(1000, 0).unwrap();
        credit.sent(600);
        for ahead in [1, 400, 1 << 30, 1 << 31] {
            assert_eq!(credit.update(1000, 600 + ahead), Err(CreditLie), "{ahead}");
        }
        let oldest = 600u32.wrapping_sub(u32::MAX >> 1);
        credit.update(2000, oldest).unwrap();
        assert_eq!((credit.free(), credit.in_flight()), (1400, 600));
    }

    #[test]
    fn an_older_count_changes_nothing() {
        let mut credit = Outbound::new();
        credit.update(1000, 0).unwrap();
        credit.sent(800);
        credit.update(1000, 700).unwrap();
        credit.update(1000, 300).unwrap();
        assert_eq!(credit.free(), 900);
    }

    #[test]
    fn a_buffer_that_shrinks_below_what_is_in_flight_leaves_nothing() {
        let mut credit = Outbound::new();
        credit.update(1000, 0).unwrap();
        credit.sent(800);
        credit.update(10, 0).unwrap();
        assert_eq!(credit.free(), 0);
        credit.update(u32::MAX, 0).unwrap();
        assert_eq!(credit.free(), MAX_IN_FLIGHT - 800);
    }

    #[test]
    fn counts_wrap() {
        let mut inbound = Inbound::new(u32::MAX);
        let mut outbound = Outbound::new();
        outbound.update(1 << 30, 0).unwrap();
        for _ in 0..5 {
            outbound.sent(1 << 30);
            inbound.receive(1 << 30).unwrap();
            assert_eq!(outbound.free(), 0);
            inbound.forward(1 << 30);
            outbound.update(1 << 30, inbound.advertise()).unwrap();
            assert_eq!(outbound.free(), 1 << 30);
        }
    }

    proptest! {
        #[test]
        fn nothing_is_forwarded_that_was_not_received(
            steps in proptest::collection::vec((any::<bool>(), any::<u32>()), 0..64),
            buf_alloc: u32,
        ) {
            let mut credit = Inbound::new(buf_alloc);
            let (mut received, mut forwarded) = (0u64, 0u64);
            for (receive, len) in steps {
                if receive {
                    if credit.receive(len).is_ok() {
                        received += u64::from(len);
                    }
                } else {
                    forwarded += u64::from(len.min(credit.in_flight()));
                    credit.forward(len);
                }
                prop_assert!(forwarded <= received);
                prop_assert_eq!(u64::from(credit.in_flight()), received - forwarded);
                prop_assert!(credit.in_flight() <= buf_alloc);
            }
        }

        #[test]
        fn whatever_the_guest_says_no_more_than_its_buffer_is_in_flight(
            words in proptest::collection::vec((any::<u32>(), any::<u32>()), 0..64),
        ) {
            let mut credit = Outbound::new();
            for (buf_alloc, fwd_cnt) in words {
                if credit.update(buf_alloc, fwd_cnt).is_ok() {
                    let free = credit.free();
                    let step = free.min(1 << 20);
                    credit.sent(step);
                    prop_assert!(step == 0 || credit.in_flight() <= buf_alloc);
                }
            }
        }
    }
}
