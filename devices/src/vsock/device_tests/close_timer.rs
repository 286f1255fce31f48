//! Connections that are over for the host, and that the guest does not end.

use super::*;

impl Rig {
    /// Lets the time that the guest has be over, and the device see that.
    fn run_out(&mut self) {
        self.expire();
        self.run();
    }

    fn expire(&self) {
        assert!(self.device.mux.close_timer().runs());
        self.device.mux.close_timer().expire();
        while !self.backend_readable() {
            std::thread::yield_now();
        }
    }

    /// The seconds that the guest has left, if the timer runs.
    fn left(&self) -> Option<i64> {
        let close_timer = self.device.mux.close_timer();
        close_timer.runs().then(|| close_timer.left())
    }
}

#[test]
fn a_connection_that_the_guest_does_not_end_is_reset_after_its_time() {
    let mut rig = Rig::ready();
    let (ports, host) = rig.open_from_guest(1);
    let (others, mut other) = rig.open_from_guest(2);
    assert_eq!(rig.left(), None);
    drop(host);
    rig.run();
    assert_eq!(rig.expect(Op::Shutdown).0.flags, SHUTDOWN_BOTH);
    // The first time may be over soon: the second one is as long as it should be.
    for _ in 0..2 {
        assert_eq!(rig.left(), Some(8));
        rig.expect_nothing();
        rig.run_out();
    }
    assert_eq!(rig.expect(Op::Reset).0.dst_port, ports.guest);
    assert_eq!((rig.device.statistics(), rig.left()), ((1, 0, 0, 0), None));
    // Its ports are free again, and the other connection goes on.
    rig.send(ports, Op::Data);
    rig.expect(Op::Reset);
    rig.data(others, b"still");
    assert_eq!(read(&mut other, 5), b"still");
}

#[test]
fn a_connection_that_the_guest_ends_in_time_is_not_reset() {
    let mut rig = Rig::ready();
    let (ports, host) = rig.open_from_guest(1);
    drop(host);
    rig.run();
    rig.expect(Op::Shutdown);
    rig.run_out();
    rig.send(ports, Op::Reset);
    rig.run_out();
    rig.expect_nothing();
    assert_eq!((rig.device.statistics().0, rig.left()), (0, None));
    assert_eq!(rig.counter("resets_sent"), 0);
}

#[test]
fn half_closed_and_unread_streams_have_all_time() {
    let mut rig = Rig::ready();
    let (_, half) = rig.open_from_guest(1);
    half.shutdown(Shutdown::Write).unwrap();
    let (unread, mut gone) = rig.open_from_guest(2);
    rig.credit(unread, 0, 0);
    gone.write_all(b"unread").unwrap();
    drop(gone);
    rig.drain();
    assert_eq!((rig.device.statistics().0, rig.left()), (2, None));
    rig.credit(unread, 100, 0);
    rig.drain();
    assert_eq!(rig.left(), Some(8));
}

#[test]
fn a_guest_without_credit_is_told_that_a_program_left_without_a_word() {
    let mut rig = Rig::ready();
    let (quiet, host) = rig.open_from_guest(1);
    // The program does not read this.
    rig.data(quiet, b"unread");
    rig.credit(quiet, 0, 0);
    drop(host);
    rig.run();
    assert_eq!(rig.expect(Op::Shutdown).0.flags, SHUTDOWN_BOTH);
    rig.expect_nothing();
    assert_eq!(rig.left(), Some(8));
}

#[test]
fn the_time_of_a_guest_that_stood_still_begins_anew() {
    let mut rig = Rig::ready();
    let (_, host) = rig.open_from_guest(1);
    drop(host);
    rig.run();
    rig.expect(Op::Shutdown);
    rig.run_out();
    rig.expire();
    for queue in stop(&mut rig.device) {
        rig.device.start_queue(queue).unwrap();
    }
    assert!(!rig.backend_readable());
    assert_eq!(rig.left(), Some(8));
    rig.run();
    rig.expect_nothing();
    rig.run_out();
    rig.expect(Op::Reset);
}

#[test]
fn a_guest_that_never_answers_a_program_that_is_gone_is_reset() {
    let mut rig = Rig::ready();
    let mut stream = rig.device.connect(1).unwrap();
    stream.write_all(b"left").unwrap();
    drop(stream);
    rig.run();
    rig.expect(Op::Request);
    rig.run_out();
    assert_eq!(rig.device.statistics().0, 1);
    rig.run_out();
    rig.expect(Op::Reset);
    assert_eq!((rig.device.statistics().0, rig.left()), (0, None));
}
