//! Work that has its thread wait, mostly for a disk.

use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::task::block_in_place;

/// Does `work` in this thread, whose other tasks the runtime gives to another one first. A future
/// that shares its task with the caller waits.
pub(crate) fn in_place<T>(work: impl FnOnce() -> T) -> T {
    match Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => block_in_place(work),
        // There is no other thread, or nothing that could wait.
        _ => work(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn other_tasks_of_a_runtime_with_one_worker_go_on() {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(1).build().unwrap();
        let (sender, receiver) = mpsc::channel();
        let waits = runtime.spawn(async move {
            tokio::spawn(async move { sender.send(7) });
            in_place(|| receiver.recv())
        });
        assert_eq!(runtime.block_on(waits).unwrap(), Ok(7));
    }

    #[tokio::test]
    async fn a_runtime_without_other_threads_does_the_work_too() {
        assert_eq!(in_place(|| in_place(|| 7)), 7);
    }

    #[test]
    fn no_runtime_is_needed() {
        assert_eq!(in_place(|| 7), 7);
    }
}
