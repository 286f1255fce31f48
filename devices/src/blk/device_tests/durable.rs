//! Requests are durable when they are completed to the driver.

use std::collections::VecDeque;
use std::sync::Mutex;

use super::*;

/// A disk that records its requests.
#[derive(Clone, Debug, Default)]
struct Journal {
    seen: Arc<Mutex<Vec<&'static str>>>,
    /// The queued requests, if it queues them.
    queued: Option<VecDeque<u16>>,
    /// Those of them that were started.
    begun: VecDeque<u16>,
    broken: bool,
}

impl Journal {
    fn later() -> Self {
        Self {
            queued: Some(VecDeque::new()),
            ..Self::default()
        }
    }

    fn seen(&self) -> Vec<&'static str> {
        std::mem::take(&mut self.seen.lock().unwrap())
    }
}

impl Disk for Journal {
    fn len(&self) -> u64 {
        8 << 20
    }

    fn try_clone(&self) -> std::io::Result<Option<Box<dyn Disk>>> {
        Ok(Some(Box::new(self.clone())))
    }

    fn submit(&mut self, _: &GuestRam, token: u16, operation: Operation<'_, '_>) -> Submitted {
        let name = match operation {
            Operation::Read { .. } => "read",
            Operation::Write { .. } => "write",
            Operation::Flush => "flush",
            Operation::Discard { .. } => "discard",
            Operation::WriteZeroes { .. } => "zero",
        };
        self.seen.lock().unwrap().push(name);
        if let Some(queued) = &mut self.queued {
            queued.push_back(token);
            return Submitted::Queued;
        }
        match name == "flush" && self.broken {
            true => Submitted::Done(Err(std::io::Error::from_raw_os_error(libc::EOPNOTSUPP))),
            false => Submitted::Done(Ok(())),
        }
    }

    fn commit(&mut self) -> std::io::Result<()> {
        if let Some(queued) = &mut self.queued {
            self.begun.append(queued);
        }
        Ok(())
    }

    fn completed(&mut self) -> Option<Completion> {
        let token = self.begun.pop_front()?;
        let result = Ok(());
        Some(Completion { token, result })
    }
}

fn rig(disk: &Journal, features: u64) -> Rig {
    Rig::with_features(BlockDevice::new(Box::new(disk.clone())), features)
}

#[test]
fn without_flushes_each_change_is_durable_when_it_is_done() {
    for disk in [Journal::default(), Journal::later()] {
        let mut rig = rig(&disk, 0);
        assert_eq!(
            (rig.write(0, 512), disk.seen()),
            (0, vec!["write", "flush"])
        );
        assert_eq!(rig.range(DISCARD, 0, 1, 0), 0);
        assert_eq!(disk.seen(), ["discard", "flush"]);
        assert_eq!(rig.range(WRITE_ZEROES, 0, 1, 0), 0);
        assert_eq!(disk.seen(), ["zero", "flush"]);
        assert_eq!((rig.read(0, 512), disk.seen()), (0, vec!["read"]));
        assert_eq!(std::iter::from_fn(|| rig.driver.take_used()).count(), 4);
        // A long one flushes once, after its last piece.
        rig.header(1, 0);
        let data = vec![(DATA, 0x4_0000); 9];
        let readable: Vec<_> = [(HEADER, 16)].into_iter().chain(data).collect();
        rig.driver.add(&readable, &[(STATUS, 1)]);
        while rig.device.on_queue(0).unwrap() == Progress::More {}
        assert_eq!(disk.seen(), ["write", "write", "write", "flush"]);
        assert_eq!(rig.status(), 0);
    }
}

#[test]
fn a_driver_that_flushes_pays_for_its_flushes_alone() {
    for disk in [Journal::default(), Journal::later()] {
        let mut rig = rig(&disk, FLUSH);
        assert_eq!(rig.write(0, 512), 0);
        assert_eq!(rig.range(DISCARD, 0, 1, 0), 0);
        assert_eq!(rig.range(WRITE_ZEROES, 0, 1, 0), 0);
        assert_eq!(disk.seen(), ["write", "discard", "zero"]);
    }
}

#[test]
fn a_flush_of_a_read_only_disk_asks_the_host_nothing() {
    let disk = Journal::default();
    let mut rig = Rig::over(BlockDevice::new(Box::new(disk.clone())).read_only());
    rig.header(4, 0);
    rig.driver.add(&[(HEADER, 16)], &[(STATUS, 1)]);
    assert_eq!(rig.device.on_queue(0).unwrap(), Progress::Idle);
    assert_eq!((rig.status(), disk.seen()), (0, vec![]));
}

#[test]
fn a_change_that_cannot_be_made_durable_is_an_error() {
    let disk = Journal {
        broken: true,
        ..Journal::default()
    };
    let mut rig = rig(&disk, 0);
    assert_eq!(rig.write(0, 512), 1);
    assert_eq!(rig.range(DISCARD, 0, 1, 0), 1);
    assert_eq!(rig.read(0, 512), 0);
}

#[test]
fn each_queue_with_a_thread_of_its_own_makes_its_changes_durable() {
    for (features, expected) in [(0, vec!["write", "flush"]), (FLUSH, vec!["write"])] {
        let disk = Journal::default();
        let device = BlockDevice::new(Box::new(disk.clone()));
        let mut rig = queue_threads::Rig::with_features(device, features);
        for queue in 0..queue_threads::QUEUES {
            rig.add(queue, 1, 0);
            rig.notify(queue);
            assert_eq!(rig.answered(queue), 0);
            assert_eq!(disk.seen(), expected, "{queue}");
        }
        rig.end();
    }
}
