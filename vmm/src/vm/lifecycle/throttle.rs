//! Slows the vCPUs of a VM down whose guest writes faster than its memory is sent.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::vm::vcpu::VcpuContext;

/// A part of each of these the vCPUs stand still.
const PERIOD: Duration = Duration::from_millis(100);

/// Percent of the first step, of each further one, and of the last.
const FIRST: u8 = 20;
const STEP: u8 = 10;
const MOST: u8 = 90;

/// How far vCPUs are slowed down. They are as fast as before when this is dropped.
#[derive(Debug)]
pub(super) struct Throttle {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    percent: AtomicU8,
    is_over: AtomicBool,
    /// Wakes the thread at the end.
    end: (Mutex<()>, Condvar),
}

impl Shared {
    /// Waits; false at the end.
    fn wait(&self, time: Duration) -> bool {
        let guard = self.end.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_going_on = |(): &mut ()| !self.is_over.load(Ordering::SeqCst);
        let waited = self.end.1.wait_timeout_while(guard, time, is_going_on);
        drop(waited);
        !self.is_over.load(Ordering::SeqCst)
    }
}

impl Throttle {
    pub(super) fn new() -> Self {
        Self {
            shared: Arc::default(),
            thread: None,
        }
    }

    /// Slows the vCPUs down by one more step. Returns the percentage of time that they stand still.
    pub(super) fn more(&mut self, context: &VcpuContext) -> std::io::Result<u8> {
        let percent = match self.shared.percent.load(Ordering::SeqCst) {
            0 => FIRST,
            percent => (percent + STEP).min(MOST),
        };
        self.shared.percent.store(percent, Ordering::SeqCst);
        if self.thread.is_none() {
            let (shared, context) = (self.shared.clone(), context.clone());
            let body = move || hold_again_and_again(&shared, &context);
            let thread = std::thread::Builder::new().name("vm-throttle".to_owned());
            self.thread = Some(thread.spawn(body)?);
        }
        Ok(percent)
    }
}

fn hold_again_and_again(shared: &Shared, context: &VcpuContext) {
    let mut goes_on = true;
    while goes_on {
        let percent = shared.percent.load(Ordering::SeqCst);
        let held = PERIOD * percent.into() / 100;
        context.control.hold(true);
        context.peers.kick();
        goes_on = shared.wait(held);
        context.control.hold(false);
        goes_on = goes_on && shared.wait(PERIOD - held);
    }
}

impl Drop for Throttle {
    fn drop(&mut self) {
        let guard = self.shared.end.0.lock();
        self.shared.is_over.store(true, Ordering::SeqCst);
        drop(guard);
        self.shared.end.1.notify_all();
        if let Some(thread) = self.thread.take() {
            // It only waits and kicks.
            let _ = thread.join();
        }
    }
}
