//! Machines that move between two sandboxes' processes, with a guest of a few instructions that
//! counts, and a connection that is cut where it hurts.

#[path = "migration/disks.rs"]
mod disks;
#[path = "migration/plugged.rs"]
mod plugged;
#[path = "migration/sizes.rs"]
mod sizes;
mod support;

use std::fs::File;
use std::io::{PipeWriter, Read, Write as _};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;
use std::time::Duration;

use podvisor_cri::machine::{DiskContents, DiskMove, MachineDisk};
use podvisor_cri::sandbox::{
    BootMachine, IncomingMachine, MigrationInfo, MigrationState, RefusalKind, SandboxClient,
    SendMachine,
};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};
use support::own_os::{attach, config, info_of, kernel_that_counts, says};
use support::pod::{Pod, eventually, launch};
use tokio::time::timeout;

const ID: &str = "vm";
const MIGRATION: &str = "m-1";

/// Most CPUs that any machine here has.
const MAX_VCPUS: u8 = 2;

/// A sandbox, and the end that types on its machine's console.
struct Side {
    pod: Pod,
    sandbox: SandboxClient,
    process: OwnedFd,
    typing: PipeWriter,
}

/// Sandboxes outlive those that launch them.
impl Drop for Side {
    fn drop(&mut self) {
        let killed = pidfd_send_signal(&self.process, Signal::KILL);
        assert!(matches!(killed, Ok(()) | Err(Errno::SRCH)), "{killed:?}");
    }
}

impl Side {
    async fn new(boot: impl FnOnce(&Pod) -> BootMachine) -> Self {
        let pod = Pod::default();
        let mut launched = config(&pod);
        launched.max_vcpus = MAX_VCPUS;
        let sandbox = launch(launched).await.unwrap();
        let pid = Pid::from_raw(sandbox.pid() as i32).unwrap();
        let process = pidfd_open(pid, PidfdFlags::empty()).unwrap();
        sandbox.boot_machine(boot(&pod)).await.unwrap();
        let typing = attach(&sandbox, ID).await;
        Self {
            pod,
            sandbox,
            process,
            typing,
        }
    }

    /// One whose machine boots.
    async fn booted() -> Self {
        let side = Self::new(machine).await;
        says(&side.pod, ID, 1).await;
        side
    }

    /// One that waits for a machine.
    async fn waiting(limit: Duration) -> Self {
        Self::new(|pod| incoming(pod, limit)).await
    }

    /// Types a byte, and waits for the letter that comes.
    async fn counts(&mut self, letter: char) {
        self.typing.write_all(b"x").unwrap();
        let line = format!("stdout F {letter}\n");
        eventually("the next letter", || self.pod.log(ID).contains(&line)).await;
    }

    async fn until(&self, state: MigrationState) -> MigrationInfo {
        let mut seen = 0;
        let wait = async {
            loop {
                let info = self.sandbox.migration_after(ID, seen).await.unwrap();
                if info.state == state {
                    return info;
                }
                assert!(!info.state.is_final(), "{info:?}");
                seen = info.version;
            }
        };
        timeout(support::PATIENCE, wait).await.unwrap()
    }

    async fn send(&self, connection: UnixStream) {
        let send = SendMachine::new(MIGRATION);
        let sent = self.sandbox.send_machine(ID, send, connection.into());
        sent.await.unwrap();
    }

    async fn receive(&self, connection: UnixStream) {
        let received = self
            .sandbox
            .receive_machine(ID, MIGRATION, connection.into());
        received.await.unwrap();
    }

    /// Its machine has ended; returns the exit code and the message.
    async fn ended(&self) -> (i32, Option<String>) {
        let exit = timeout(support::PATIENCE, self.sandbox.wait(ID, None)).await;
        let code = exit.unwrap().unwrap().code;
        (code, info_of(&self.sandbox, ID).await.message)
    }

    fn pid(&self) -> Victim {
        Pid::from_raw(self.sandbox.pid() as i32)
    }

    async fn powers_off(mut self) {
        self.typing.write_all(b"p").unwrap();
        assert_eq!(self.ended().await, (0, None));
        self.sandbox.shutdown(Duration::ZERO).await.unwrap();
    }
}

fn machine(pod: &Pod) -> BootMachine {
    BootMachine {
        memory: 64 << 20,
        log: Some(pod.open_log(ID)),
        ..BootMachine::new(ID, kernel_that_counts(pod))
    }
}

fn incoming(pod: &Pod, limit: Duration) -> BootMachine {
    let migration = MIGRATION.to_owned();
    BootMachine {
        incoming: Some(IncomingMachine { migration, limit }),
        ..machine(pod)
    }
}

/// What a message is cut by: its kind, and whether it still arrives.
#[derive(Clone, Copy, PartialEq)]
enum Cut {
    Never,
    Instead(u32),
    After(u32),
}

const HELLO: u32 = 1;
const PAGES: u32 = 2;
const ROUND: u32 = 4;
const STATE: u32 = 5;
const RUN: u32 = 6;
const ACCEPT: u32 = 16;
const READY: u32 = 18;
const RUNNING: u32 = 19;

/// A process that is killed when the connection is cut.
type Victim = Option<Pid>;

/// Copies the messages of one direction, until one at which both directions end.
fn copy(
    mut from: UnixStream,
    mut to: UnixStream,
    start: usize,
    (cut, victim): (Cut, Victim),
) -> JoinHandle<()> {
    std::thread::spawn(move || {
        let mut begin = vec![0; start];
        let mut begun = from
            .read_exact(&mut begin)
            .and_then(|()| to.write_all(&begin));
        let mut header = [0; 16];
        while begun.is_ok() && from.read_exact(&mut header).is_ok() {
            let word = |at: usize| u32::from_le_bytes(*header[at..].first_chunk().unwrap());
            let mut contents = vec![0; word(4) as usize];
            let read = from.read_exact(&mut contents);
            if cut == Cut::Instead(word(0)) || read.is_err() {
                break;
            }
            begun = to.write_all(&header).and_then(|()| to.write_all(&contents));
            if cut == Cut::After(word(0)) {
                break;
            }
        }
        if let Some(victim) = victim.filter(|_| cut != Cut::Never) {
            // Where both directions are cut, it may be gone.
            let killed = kill_process(victim, Signal::KILL);
            assert!(matches!(killed, Ok(()) | Err(Errno::SRCH)), "{killed:?}");
        }
        for end in [&from, &to] {
            let _ = end.shutdown(Shutdown::Both);
        }
    })
}

/// A connection for both sides that is cut.
fn connection(out: Cut, back: Cut, victim: Victim) -> (UnixStream, UnixStream) {
    let (source, near) = UnixStream::pair().unwrap();
    let (target, far) = UnixStream::pair().unwrap();
    let both = (near.try_clone().unwrap(), far.try_clone().unwrap());
    copy(both.0, both.1, 12, (out, victim));
    copy(far, near, 0, (back, victim));
    (source, target)
}

const LONG: Duration = Duration::from_secs(300);

/// Both sides of a migration over a connection.
async fn moving(out: Cut, back: Cut) -> (Side, Side) {
    moving_until_killed(out, back, |_, _| None).await
}

/// The same; where it is cut, a process is killed.
async fn moving_until_killed(
    out: Cut,
    back: Cut,
    victim: impl FnOnce(&Side, &Side) -> Victim,
) -> (Side, Side) {
    let mut source = Side::booted().await;
    source.counts('A').await;
    let target = Side::waiting(LONG).await;
    let (one, other) = connection(out, back, victim(&source, &target));
    target.receive(other).await;
    source.send(one).await;
    (source, target)
}

#[tokio::test]
async fn a_machine_goes_on_in_another_process_where_it_was() {
    let disk = tempfile::NamedTempFile::new().unwrap();
    disk.as_file().set_len(1 << 20).unwrap();
    let with_disk = |boot: BootMachine| BootMachine {
        disks: vec![MachineDisk {
            contents: DiskContents::Raw {
                file: File::options()
                    .read(true)
                    .write(true)
                    .open(disk.path())
                    .unwrap(),
                is_read_only: false,
            },
            serial: "shared".to_owned(),
            moves: DiskMove::Shared,
        }],
        ..boot
    };
    let mut source = Side::new(|pod| with_disk(machine(pod))).await;
    source.counts('A').await;
    source.counts('B').await;
    assert_eq!(source.sandbox.migration(ID).await.unwrap(), None);
    let mut target = Side::new(|pod| with_disk(incoming(pod, LONG))).await;
    let waits = target.until(MigrationState::Waiting).await;
    assert_eq!(
        (waits.migration.as_str(), waits.ended_at_ns),
        (MIGRATION, 0)
    );
    // Nothing is there that could be done to it.
    assert!(target.sandbox.reset_machine(ID).await.is_err());
    let (one, other) = UnixStream::pair().unwrap();
    target.receive(other.try_clone().unwrap()).await;
    let second = target.sandbox.receive_machine(ID, MIGRATION, other.into());
    assert_eq!(
        second.await.unwrap_err().kind(),
        Some(RefusalKind::WrongState)
    );
    source.send(one).await;
    let left = source.until(MigrationState::Done).await;
    assert!(
        left.downtime_ns > 0 && left.bytes_total == 64 << 20,
        "{left:?}"
    );
    assert_eq!(source.ended().await, (0, None));
    // Whoever asked for it may end.
    target.sandbox = SandboxClient::connect(&target.pod.dir()).await.unwrap();
    let came = target.until(MigrationState::Done).await;
    assert!(came.ended_at_ns >= came.started_at_ns, "{came:?}");
    target.counts('C').await;
    // It had said that it is ready where it was.
    assert!(!target.pod.log(ID).contains("ready"));
    target.powers_off().await;
    source.sandbox.shutdown(Duration::ZERO).await.unwrap();
}

#[tokio::test]
async fn one_copy_goes_on_when_the_other_side_is_silent() {
    // It runs there, and nobody here hears so.
    let (mut source, mut target) = moving(Cut::Never, Cut::Instead(RUNNING)).await;
    source.until(MigrationState::InDoubt).await;
    target.until(MigrationState::Done).await;
    target.counts('B').await;
    for refused in [
        source.sandbox.resume().await,
        source.sandbox.pause().await,
        source.sandbox.reset_machine(ID).await,
        source.sandbox.cancel_migration(ID, MIGRATION).await,
        source.sandbox.resolve_migration(ID, "m-2", true).await,
        target.sandbox.resolve_migration(ID, MIGRATION, true).await,
    ] {
        assert_eq!(refused.unwrap_err().kind(), Some(RefusalKind::WrongState));
    }
    let resolved = source.sandbox.resolve_migration(ID, MIGRATION, false);
    resolved.await.unwrap();
    assert_eq!(source.ended().await, (0, None));
    assert!(source.until(MigrationState::Done).await.ended_at_ns > 0);
    target.powers_off().await;

    // It was given away, and never came.
    let (again, target) = moving(Cut::Instead(RUN), Cut::Never).await;
    source = again;
    source.until(MigrationState::InDoubt).await;
    let (code, message) = target.ended().await;
    assert!(code == 1 && message.unwrap().contains("no machine came"));
    let resolved = source.sandbox.resolve_migration(ID, MIGRATION, true);
    resolved.await.unwrap();
    source.counts('B').await;
    source.powers_off().await;
}

#[tokio::test]
async fn a_machine_goes_on_where_it_was_when_the_target_is_killed() {
    let (mut source, target) = moving(Cut::Never, Cut::After(ACCEPT)).await;
    let failed = source.until(MigrationState::Failed).await;
    assert!(failed.reason.contains("connection"), "{failed:?}");
    source.counts('B').await;
    let pid = Pid::from_raw(target.sandbox.pid() as i32).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
    // A later migration is another one.
    let next = Side::waiting(LONG).await;
    let (one, other) = UnixStream::pair().unwrap();
    next.receive(other).await;
    source.send(one).await;
    assert_eq!(source.ended().await, (0, None));
    next.until(MigrationState::Done).await;
    next.powers_off().await;
}

#[tokio::test]
async fn a_machine_goes_on_where_it_was_when_the_target_is_killed_before_it_was_given_away() {
    let never = Cut::Never;
    for (out, back) in [
        (Cut::Instead(HELLO), never),
        (Cut::After(HELLO), never),
        (never, Cut::After(ACCEPT)),
        (Cut::After(PAGES), never),
        (Cut::After(ROUND), never),
        (Cut::Instead(STATE), never),
        // Its answer may come before its end.
        (Cut::After(STATE), Cut::Instead(READY)),
        (never, Cut::Instead(READY)),
    ] {
        let (mut source, _target) = moving_until_killed(out, back, |_, target| target.pid()).await;
        source.until(MigrationState::Failed).await;
        source.counts('B').await;
        source.powers_off().await;
    }
    // Nobody but it knew whether it had begun.
    for (out, back) in [
        (Cut::Instead(RUN), never),
        (Cut::After(RUN), Cut::Instead(RUNNING)),
        (never, Cut::Instead(RUNNING)),
    ] {
        let (source, _target) = moving_until_killed(out, back, |_, target| target.pid()).await;
        source.until(MigrationState::InDoubt).await;
        assert!(source.sandbox.resume().await.is_err());
        let resolved = source.sandbox.resolve_migration(ID, MIGRATION, false);
        resolved.await.unwrap();
        assert_eq!(source.ended().await, (0, None));
        source.sandbox.shutdown(Duration::ZERO).await.unwrap();
    }
}

#[tokio::test]
async fn a_machine_whose_source_is_killed_goes_on_where_it_was_given_to_and_nowhere_else() {
    let never = Cut::Never;
    for (out, back) in [
        (Cut::After(HELLO), never),
        (never, Cut::Instead(ACCEPT)),
        (Cut::After(PAGES), never),
        (Cut::Instead(STATE), never),
        (Cut::After(STATE), never),
        (never, Cut::Instead(READY)),
        (Cut::Instead(RUN), never),
    ] {
        let (_source, target) = moving_until_killed(out, back, |source, _| source.pid()).await;
        let (code, message) = target.ended().await;
        assert!(code == 1 && message.unwrap().contains("no machine came"));
        target.sandbox.shutdown(Duration::ZERO).await.unwrap();
    }
    for (out, back) in [(Cut::After(RUN), never), (never, Cut::Instead(RUNNING))] {
        let (_source, mut target) = moving_until_killed(out, back, |source, _| source.pid()).await;
        target.until(MigrationState::Done).await;
        target.counts('B').await;
        target.powers_off().await;
    }
}

#[tokio::test]
async fn a_migration_that_does_not_get_on_is_ended_by_whoever_wants() {
    let mut source = Side::booted().await;
    // Nobody reads.
    let (one, _other) = UnixStream::pair().unwrap();
    source.send(one).await;
    let twice = SendMachine::new("m-2");
    let (three, _four) = UnixStream::pair().unwrap();
    let twice = source.sandbox.send_machine(ID, twice, three.into()).await;
    assert!(twice.unwrap_err().to_string().contains(MIGRATION));
    let refused = source.sandbox.pause().await.unwrap_err();
    assert_eq!(refused.kind(), Some(RefusalKind::WrongState));
    source.counts('A').await;
    source
        .sandbox
        .cancel_migration(ID, MIGRATION)
        .await
        .unwrap();
    source.until(MigrationState::Cancelled).await;
    let again = source.sandbox.cancel_migration(ID, MIGRATION).await;
    assert!(again.unwrap_err().to_string().contains("has ended"));

    for (limits, word) in [
        (
            SendMachine {
                progress_timeout: Duration::from_millis(50),
                ..SendMachine::new(MIGRATION)
            },
            "connection",
        ),
        (
            SendMachine {
                completion_timeout: Some(Duration::from_millis(50)),
                ..SendMachine::new(MIGRATION)
            },
            "longer than 50ms",
        ),
    ] {
        let (one, _other) = UnixStream::pair().unwrap();
        let sent = source.sandbox.send_machine(ID, limits, one.into());
        sent.await.unwrap();
        let failed = source.until(MigrationState::Failed).await;
        assert!(failed.reason.contains(word), "{failed:?}");
    }
    source.counts('B').await;

    // The guest itself.
    let (one, _other) = UnixStream::pair().unwrap();
    source.send(one).await;
    source.typing.write_all(b"p").unwrap();
    assert_eq!(source.ended().await, (0, None));
    let failed = source.until(MigrationState::Failed).await;
    assert!(failed.reason.contains("powered itself off"), "{failed:?}");
    source.sandbox.shutdown(Duration::ZERO).await.unwrap();
}

#[tokio::test]
async fn a_container_waits_for_its_machine_for_so_long_and_no_other() {
    let target = Side::waiting(Duration::from_millis(100)).await;
    let (code, message) = target.ended().await;
    let message = message.unwrap();
    assert!(code == 1 && message.contains("within 100ms"), "{message}");
    target.until(MigrationState::Failed).await;
    target.sandbox.shutdown(Duration::ZERO).await.unwrap();

    let target = Side::waiting(LONG).await;
    let (one, other) = UnixStream::pair().unwrap();
    let wrong = target.sandbox.receive_machine(ID, "m-2", other.into());
    assert_eq!(
        wrong.await.unwrap_err().kind(),
        Some(RefusalKind::WrongState)
    );
    drop(one);
    let stopped = target.sandbox.stop_container(ID, 15, LONG);
    stopped.await.unwrap();
    assert_eq!(target.ended().await.0, 1);
    target.until(MigrationState::Cancelled).await;
    target.sandbox.shutdown(Duration::ZERO).await.unwrap();
}

#[tokio::test]
async fn who_waits_for_news_of_migrations_does_not_keep_a_sandbox_from_ending() {
    let target = Side::waiting(LONG).await;
    let seen = target.until(MigrationState::Waiting).await.version;
    let watches = target.sandbox.clone();
    let news = tokio::spawn(async move {
        let cancelled = watches.migration_after(ID, seen).await.unwrap();
        let more = watches.migration_after(ID, cancelled.version).await;
        (cancelled.state, more.is_err())
    });
    let began = std::time::Instant::now();
    target
        .sandbox
        .shutdown(Duration::from_secs(60))
        .await
        .unwrap();
    let waited = began.elapsed();
    assert!(waited < Duration::from_secs(10), "{waited:?}");
    assert_eq!(news.await.unwrap(), (MigrationState::Cancelled, true));
}

#[tokio::test]
async fn a_paused_machine_arrives_paused() {
    let mut source = Side::booted().await;
    source.counts('A').await;
    source.sandbox.pause().await.unwrap();
    let mut target = Side::waiting(LONG).await;
    let (one, other) = UnixStream::pair().unwrap();
    target.receive(other).await;
    source.send(one).await;
    assert_eq!(source.ended().await, (0, None));
    target.until(MigrationState::Done).await;
    assert!(target.sandbox.is_paused().await.unwrap());
    target.sandbox.resume().await.unwrap();
    target.counts('B').await;
    target.powers_off().await;
}
