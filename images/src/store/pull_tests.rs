//! Pulls that wait.

use std::time::Instant;

use rustix::fs::{FlockOperation, flock};

use super::*;

#[tokio::test]
async fn a_name_is_looked_up_where_blocking_is_allowed() {
    let limit = Duration::from_secs(20);
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let lock = File::create(store.inner.layout.lock()).unwrap();
    flock(&lock, FlockOperation::LockExclusive).unwrap();
    let (done, waits) = std::sync::mpsc::channel::<()>();
    // Without this, a look-up that blocks this thread would hang.
    let unlock = std::thread::spawn(move || {
        let _ = waits.recv_timeout(limit);
        drop(lock);
    });
    let options = PullOptions::default().policy(PullPolicy::IfMissing);
    let (begin, moment) = (Instant::now(), Duration::from_millis(50));
    let image = store.pull("localhost/none", &options);
    assert!(tokio::time::timeout(moment, image).await.is_err());
    let disk = store.pull_disk("https://localhost/none", None, &options);
    assert!(tokio::time::timeout(moment, disk).await.is_err());
    assert!(begin.elapsed() < limit, "the look-up blocked this thread");
    drop(done);
    unlock.join().unwrap();
}

#[tokio::test(start_paused = true)]
async fn whoever_waits_for_a_suspended_process_can_give_up_and_leaves_no_thread() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("work");
    let theirs = WorkFile::try_acquire(&path).unwrap().unwrap();
    let told = AtomicBool::new(false);
    let ours = acquire(&path, || told.store(true, Ordering::Relaxed));
    let minute = Duration::from_secs(60);
    assert!(tokio::time::timeout(minute, ours).await.is_err());
    assert!(told.load(Ordering::Relaxed));
    let mut ours = pin!(acquire(&path, || {}));
    assert!(tokio::time::timeout(minute, &mut ours).await.is_err());
    drop(theirs);
    ours.await.unwrap();
}
