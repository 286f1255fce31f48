//! Guests that end while they move, users who stop or pause them meanwhile, and sources that are
//! killed: one copy goes on, or none, and each side says how it ended.

use super::*;
use crate::boot::testing::LOAD;

/// What a guest does to end.
#[derive(Clone, Copy, Debug)]
enum GuestEnd {
    Reset,
    PowerOff,
    Crash,
}

impl GuestEnd {
    const ALL: [Self; 3] = [Self::Reset, Self::PowerOff, Self::Crash];

    /// Orders it. The guest may obey here, or on the other side.
    fn order(self, guest: &Guest) {
        match self {
            Self::Reset => guest.order(Order::Out8, 0x64, 0xfe),
            Self::PowerOff => guest.order(Order::Out8, 0x600, 0x34),
            // Its loop becomes `ud2`, and it has no interrupt table.
            Self::Crash => guest.order(Order::Write32, LOAD + 5, 0x0b0f_0b0f),
        }
    }

    fn assert_is(self, exit: &VmExit) {
        let is_it = match self {
            Self::Reset => *exit == VmExit::Reset,
            Self::PowerOff => *exit == VmExit::Shutdown,
            Self::Crash => matches!(exit, VmExit::TripleFault { vcpu: 0, .. }),
        };
        assert!(is_it, "{self:?}: {exit}");
    }
}

fn exit_of(guest: &Guest) -> VmExit {
    let vm = guest.vm.clone();
    in_time("wait", move || vm.wait()).unwrap()
}

/// Moves a guest; `told` is called for each progress, `answered` as by [`Answers`]. Returns what
/// both sides say.
fn both(
    guest: &Guest,
    options: &MigrationOptions,
    answered: impl FnMut(u32),
    mut told: impl FnMut(MigrationProgress),
) -> (Result<MigrationReport, MigrateError>, Arrival) {
    let (here, there) = connection();
    let receiver = receive(there, guest.mem.clone(), |vm| vm);
    let moved = send(&guest.vm, here, options, answered, |progress| {
        told(progress);
        ControlFlow::Continue(())
    });
    (
        moved,
        in_time("the other side", move || receiver.join().unwrap()),
    )
}

/// Checks that both sides say how the VM has ended, and that the other one started nothing.
fn assert_ended(guest: &Guest, moved: Result<MigrationReport, MigrateError>, arrived: Arrival) {
    let error = moved.unwrap_err();
    let words = error.to_string();
    let MigrateError::Ended { exit } = error else {
        panic!("{error:?}")
    };
    assert_eq!(exit, exit_of(guest));
    let told = arrived.map(drop).unwrap_err();
    let ReceiveError::Stream(StreamError::Refused(reason)) = told else {
        panic!("{told:?}")
    };
    assert_eq!(reason, words);
}

/// So slow that the first round takes days.
fn slow() -> MigrationOptions {
    MigrationOptions {
        bandwidth: Some(1),
        ..MigrationOptions::default()
    }
}

#[test]
fn a_guest_that_ends_while_its_memory_is_sent_ends_here_and_at_once() {
    for end in GuestEnd::ALL {
        let guest = Guest::start(|vm| vm);
        let (moved, arrived) = both(
            &guest,
            &slow(),
            |_| (),
            |_| {
                end.order(&guest);
                guest.vm.wait_until_stopped();
            },
        );
        assert_ended(&guest, moved, arrived);
        end.assert_is(&exit_of(&guest));
    }
}

#[test]
fn a_guest_that_ends_before_it_is_accepted_or_between_rounds_ends_here() {
    for end in GuestEnd::ALL {
        for at in [0, 1, 3] {
            let guest = Guest::start(|vm| vm);
            let answered = |answer| {
                if answer == at {
                    end.order(&guest);
                    guest.vm.wait_until_stopped();
                } else if answer < at {
                    guest.runs_on();
                }
            };
            let (moved, arrived) = both(&guest, &rounds(5), answered, |_| ());
            assert_ended(&guest, moved, arrived);
            end.assert_is(&exit_of(&guest));
        }
    }
}

/// The guest stands still when it is told to end: it does so on the other side, as soon as it runs
/// there.
#[test]
fn a_guest_that_was_about_to_end_when_it_was_paused_ends_on_the_other_side() {
    for end in GuestEnd::ALL {
        let guest = Guest::start(|vm| vm);
        let (here, there) = connection();
        let receiver = std::thread::spawn(move || {
            let incoming = IncomingMigration::open(there, limits()).unwrap();
            let arrived = incoming.receive(&KvmDevice::open().unwrap()).unwrap();
            let vm = Arc::new(arrived.builder().build().unwrap());
            arrived.start(&vm).unwrap();
            let mem = vm.context.machine.memory.ram().clone();
            Guest { vm, mem }
        });
        // It counts in the page of its orders, which is thus sent again after the pause.
        let answered = |_| guest.runs_on();
        let moved = send(&guest.vm, here, &rounds(2), answered, |progress| {
            if progress.step == MigrationStep::HandingOver {
                end.order(&guest);
            }
            ControlFlow::Continue(())
        });
        let arrived = in_time("the other side", move || receiver.join().unwrap());
        moved.unwrap();
        assert_eq!(exit_of(&guest), VmExit::Moved);
        end.assert_is(&exit_of(&arrived));
    }
}

#[test]
fn a_guest_that_is_stopped_before_it_is_given_away_ends_here() {
    for at in [
        MigrationStep::Sending,
        MigrationStep::HandingOver,
        MigrationStep::GivingAway,
    ] {
        let guest = Guest::start(|vm| vm);
        let (moved, arrived) = both(
            &guest,
            &rounds(2),
            |_| {
                if !guest.vm.state().ended() {
                    guest.runs_on();
                }
            },
            |progress| {
                if progress.step == at {
                    guest.vm.stop().unwrap();
                }
            },
        );
        assert_ended(&guest, moved, arrived);
        assert_eq!(exit_of(&guest), VmExit::Stopped);
    }
}

/// The other side's end of a connection on which the VM is given away, with an answer of our own.
fn given_away(
    answer: impl FnOnce(ArrivedMigration<UnixStream>, UnixStream, Arc<Vm>) + Send + 'static,
) -> (Guest, Result<MigrationReport, MigrateError>) {
    let guest = Guest::start(|vm| vm);
    let (here, there) = connection();
    let source = guest.vm.clone();
    let receiver = std::thread::spawn(move || {
        let other = there.try_clone().unwrap();
        let incoming = IncomingMigration::open(there, limits()).unwrap();
        let arrived = incoming.receive(&KvmDevice::open().unwrap()).unwrap();
        answer(arrived, other, source);
    });
    let moved = guest.vm.migrate(here, &for_sure(), go_on);
    in_time("the other side", move || receiver.join().unwrap());
    (guest, moved)
}

#[test]
fn a_guest_that_is_stopped_while_it_is_given_away_has_moved_if_it_runs_there() {
    let (guest, moved) = given_away(|arrived, _, source| {
        let vm = arrived.builder().build().unwrap();
        let taken = arrived.take(|| {
            source.stop().unwrap();
            vm.start().map_err(Into::into)
        });
        taken.unwrap();
        assert_eq!(vm.state(), State::Running);
    });
    moved.unwrap();
    assert_eq!(exit_of(&guest), VmExit::Moved);

    // It was handed back, or nobody answers: it has ended here.
    for is_refused in [true, false] {
        let (guest, moved) = given_away(move |arrived, other, source| {
            let taken = arrived.take(|| {
                source.stop().unwrap();
                if !is_refused {
                    other.shutdown(std::net::Shutdown::Both).unwrap();
                }
                Err("no threads".into())
            });
            assert!(matches!(taken, Err(ReceiveError::Start(_))), "{taken:?}");
        });
        match moved.unwrap_err() {
            MigrateError::Stream(StreamError::Refused(_)) if is_refused => {}
            MigrateError::InDoubt(_) if !is_refused => {}
            other => panic!("{other}"),
        }
        assert_eq!(exit_of(&guest), VmExit::Stopped);
    }
}

#[test]
fn a_guest_that_is_paused_meanwhile_arrives_paused_and_stays_so_if_it_does_not_move() {
    let guest = Guest::start(|vm| vm);
    let answered = |answer| match answer {
        1 => guest.pause(),
        2.. => {}
        _ => guest.runs_on(),
    };
    let (moved, arrived) = both(&guest, &rounds(3), answered, |_| ());
    moved.unwrap();
    let arrived = arrived.unwrap();
    assert_eq!(exit_of(&guest), VmExit::Moved);
    assert_eq!(arrived.vm.state(), State::Created);
    arrived.vm.start().unwrap();
    arrived.runs_on();

    for at in [MigrationStep::HandingOver, MigrationStep::GivingAway] {
        let guest = Guest::start(|vm| vm);
        let (here, there) = connection();
        let receiver = receive(there, guest.mem.clone(), |vm| vm);
        let answered = |answer| {
            if answer == 0 {
                guest.pause();
            }
        };
        let moved = send(&guest.vm, here, &rounds(3), answered, |progress| {
            match progress.step == at {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        });
        assert!(matches!(moved, Err(MigrateError::Cancelled)), "{moved:?}");
        assert!(receiver.join().unwrap().is_err());
        assert_eq!(guest.vm.state(), State::Paused);
        guest.vm.resume().unwrap();
        guest.runs_on();
    }
}

/// A source's end of a connection that is lost, as by a kill, once a message of this kind was
/// written, with everything after it.
struct Killed {
    stream: UnixStream,
    last: u32,
    /// What is left of the message that is being written.
    left: usize,
    begun: bool,
    is_lost: bool,
}

impl Killed {
    fn new(stream: UnixStream, last: u32) -> Self {
        Self {
            stream,
            last,
            left: 0,
            begun: false,
            is_lost: false,
        }
    }
}

impl Read for Killed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self.is_lost {
            true => Err(io::ErrorKind::ConnectionReset.into()),
            false => self.stream.read(buffer),
        }
    }
}

impl Write for Killed {
    /// Is called with whole headers, and with whole contents.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.is_lost {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        self.stream.write_all(bytes)?;
        if !self.begun {
            self.begun = true;
            return Ok(bytes.len());
        }
        if self.left == 0 {
            let word = |at: usize| u32::from_le_bytes(*bytes[at..].first_chunk().unwrap());
            self.left = word(4) as usize;
            self.is_lost = word(0) == self.last;
        } else {
            self.left -= bytes.len();
        }
        if self.is_lost {
            self.stream.shutdown(std::net::Shutdown::Both)?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Each row of the table in docs/migration.md: announced, memory, the end of a round, paused, given
/// away.
#[test]
fn a_side_whose_source_is_killed_runs_what_was_given_to_it_and_nothing_else() {
    for (last, is_given) in [
        (1, false),
        (7, false),
        (2, false),
        (4, false),
        (5, false),
        (6, true),
    ] {
        let guest = Guest::start(|vm| vm);
        let (here, there) = connection();
        let receiver = receive(there, guest.mem.clone(), |vm| vm);
        let options = for_sure();
        let moved = guest.vm.migrate(Killed::new(here, last), &options, go_on);
        let arrived = in_time("the other side", move || receiver.join().unwrap());
        match moved.unwrap_err() {
            MigrateError::InDoubt(_) if is_given => {
                assert_eq!(guest.vm.state(), State::Paused);
                arrived.unwrap().runs_on();
            }
            MigrateError::Stream(StreamError::Io(_)) if !is_given => {
                let told = arrived.map(drop).unwrap_err();
                let is_lost = matches!(told, ReceiveError::Stream(StreamError::Io(_)));
                assert!(is_lost, "{last}: {told:?}");
                guest.runs_on();
            }
            other => panic!("{last}: {other:?}"),
        }
    }
}
