//! Output that a client has not read yet.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;

/// Most bytes that a client may be behind.
pub(super) const LIMIT: usize = 1 << 20;

/// What a piece of output counts in addition to its bytes: its own memory.
const PIECE: usize = 128;

/// The clients whose reading delays the end of the process.
#[derive(Debug, Default)]
pub(super) struct Readers {
    /// The number of pieces that they have not got yet.
    pub(super) unread: usize,
    /// They are no longer waited for.
    pub(super) are_let_go: bool,
}

impl Readers {
    pub(super) fn are_behind(&self) -> bool {
        self.unread > 0 && !self.are_let_go
    }
}

/// A piece that a client has not got yet, until this is dropped.
#[derive(Debug)]
struct Unread(Arc<watch::Sender<Readers>>);

impl Unread {
    fn new(readers: &Arc<watch::Sender<Readers>>) -> Self {
        readers.send_modify(|readers| readers.unread += 1);
        Self(Arc::clone(readers))
    }
}

impl Drop for Unread {
    fn drop(&mut self) {
        self.0.send_modify(|readers| readers.unread -= 1);
    }
}

/// A piece of output for a client.
#[derive(Debug)]
pub(super) struct OutputPiece {
    bytes: Arc<[u8]>,
    /// Set for a client whose reading delays the end of the process.
    _unread: Option<Unread>,
}

impl OutputPiece {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// The queue between a process's output and one client's file.
#[derive(Debug)]
pub(super) struct Backlog {
    state: Mutex<State>,
    changed: Condvar,
    readers: Option<Arc<watch::Sender<Readers>>>,
}

#[derive(Debug, Default)]
struct State {
    pieces: VecDeque<OutputPiece>,
    /// What the pieces count.
    cost: usize,
    /// The number of pieces that were taken out.
    taken: u64,
    /// No more pieces come.
    is_complete: bool,
    /// The client takes no more.
    is_gone: bool,
    /// The client is no longer waited for.
    is_let_go: bool,
}

/// Whether a piece is in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pushed {
    Queued,
    /// The queue is full.
    Full,
    /// The client takes no more.
    Gone,
}

impl Backlog {
    /// Returns an empty queue. Pieces in it count in `readers`.
    pub(super) fn new(readers: Option<Arc<watch::Sender<Readers>>>) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            readers,
        })
    }

    /// Whether the client's reading delays the end of the process.
    pub(super) fn is_whole(&self) -> bool {
        self.readers.is_some()
    }

    /// Adds a piece if there is room.
    pub(super) fn push(&self, bytes: &Arc<[u8]>) -> Pushed {
        self.add(&mut self.state(), bytes)
    }

    /// Adds a piece as soon as there is room; [`Pushed::Full`] if the client takes nothing for
    /// `patience`, or is let go.
    pub(super) fn push_within(&self, bytes: &Arc<[u8]>, patience: Option<Duration>) -> Pushed {
        let mut state = self.state();
        let mut taken = state.taken;
        let mut due = patience.map(|patience| Instant::now() + patience);
        loop {
            let pushed = self.add(&mut state, bytes);
            if pushed != Pushed::Full || state.is_let_go {
                return pushed;
            }
            if state.taken != taken {
                taken = state.taken;
                due = patience.map(|patience| Instant::now() + patience);
            }
            state = match due {
                None => self
                    .changed
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner),
                Some(due) => {
                    let left = due.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Pushed::Full;
                    }
                    let waited = self.changed.wait_timeout(state, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    fn add(&self, state: &mut State, bytes: &Arc<[u8]>) -> Pushed {
        if state.is_gone {
            return Pushed::Gone;
        }
        let cost = bytes.len() + PIECE;
        if state.cost + cost > LIMIT {
            return Pushed::Full;
        }
        state.cost += cost;
        state.pieces.push_back(OutputPiece {
            bytes: Arc::clone(bytes),
            _unread: self.readers.as_ref().map(Unread::new),
        });
        self.changed.notify_all();
        Pushed::Queued
    }

    /// Waits for the next piece; `None` if there is none and none comes.
    pub(super) fn pop(&self) -> Option<OutputPiece> {
        let mut state = self.state();
        loop {
            if let Some(piece) = state.pieces.pop_front() {
                state.cost -= piece.bytes.len() + PIECE;
                state.taken += 1;
                self.changed.notify_all();
                return Some(piece);
            }
            if state.is_complete {
                return None;
            }
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// No more pieces come.
    pub(super) fn complete(&self) {
        self.state().is_complete = true;
        self.changed.notify_all();
    }

    /// The client takes no more.
    pub(super) fn give_up(&self) {
        let mut state = self.state();
        state.is_gone = true;
        state.cost = 0;
        state.pieces.clear();
        self.changed.notify_all();
    }

    /// Nobody waits for the client any longer, also who does so now.
    pub(super) fn let_go(&self) {
        self.state().is_let_go = true;
        self.changed.notify_all();
    }

    /// The client is waited for again, for the output of another process.
    pub(super) fn wait_again(&self) {
        self.state().is_let_go = false;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(len: usize) -> Arc<[u8]> {
        vec![b'x'; len].into()
    }

    /// Adds pieces until there is no room for another one; returns their number.
    fn fill(backlog: &Backlog, piece: &Arc<[u8]>) -> usize {
        let mut count = 0;
        while backlog.push(piece) == Pushed::Queued {
            count += 1;
        }
        count
    }

    #[test]
    fn bytes_count_and_not_only_pieces() {
        let backlog = Backlog::new(None);
        assert_eq!(fill(&backlog, &piece(1)), LIMIT / (1 + PIECE));
        let backlog = Backlog::new(None);
        assert_eq!(
            fill(&backlog, &piece(16 << 10)),
            LIMIT / ((16 << 10) + PIECE)
        );
    }

    #[test]
    fn there_is_room_again_for_what_was_taken() {
        let backlog = Backlog::new(None);
        let piece = piece(16 << 10);
        let count = fill(&backlog, &piece);
        for _ in 0..2 * count {
            assert_eq!(backlog.pop().unwrap().bytes(), &*piece);
            assert_eq!(backlog.push(&piece), Pushed::Queued);
            assert_eq!(backlog.push(&piece), Pushed::Full);
        }
    }

    #[test]
    fn a_client_that_takes_nothing_is_waited_for_as_long_as_it_was_said() {
        let backlog = Backlog::new(None);
        let piece = piece(16 << 10);
        fill(&backlog, &piece);
        let patience = Duration::from_millis(20);
        let begin = Instant::now();
        assert_eq!(backlog.push_within(&piece, Some(patience)), Pushed::Full);
        assert!(begin.elapsed() >= patience);
    }

    /// Waits with a full queue while `other` is done; returns the answer.
    fn waits(other: impl FnOnce(&Backlog)) -> Pushed {
        let backlog = Backlog::new(None);
        let piece = piece(16 << 10);
        fill(&backlog, &piece);
        std::thread::scope(|scope| {
            let pushed = scope.spawn(|| backlog.push_within(&piece, None));
            other(&backlog);
            pushed.join().unwrap()
        })
    }

    #[test]
    fn who_waits_for_a_client_goes_on_when_it_reads_is_gone_or_is_let_go() {
        assert_eq!(waits(|backlog| drop(backlog.pop())), Pushed::Queued);
        assert_eq!(waits(Backlog::give_up), Pushed::Gone);
        assert_eq!(waits(Backlog::let_go), Pushed::Full);
    }

    #[test]
    fn a_client_that_was_let_go_is_waited_for_again_when_it_is_told_so() {
        let backlog = Backlog::new(None);
        let piece = piece(16 << 10);
        fill(&backlog, &piece);
        backlog.let_go();
        assert_eq!(backlog.push_within(&piece, None), Pushed::Full);
        backlog.wait_again();
        let patience = Duration::from_millis(20);
        let begin = Instant::now();
        assert_eq!(backlog.push_within(&piece, Some(patience)), Pushed::Full);
        assert!(begin.elapsed() >= patience);
    }

    #[test]
    fn what_is_queued_comes_before_the_end() {
        let backlog = Backlog::new(None);
        backlog.push(&piece(3));
        backlog.complete();
        assert_eq!(backlog.pop().unwrap().bytes().len(), 3);
        assert!(backlog.pop().is_none());
    }

    #[test]
    fn pieces_count_as_unread_until_they_are_dropped() {
        let readers = Arc::default();
        let backlog = Backlog::new(Some(Arc::clone(&readers)));
        let piece = piece(1);
        let count = fill(&backlog, &piece);
        assert_eq!(readers.borrow().unread, count);
        let taken = backlog.pop();
        assert_eq!(readers.borrow().unread, count);
        drop(taken);
        assert_eq!(readers.borrow().unread, count - 1);
        backlog.give_up();
        assert_eq!(readers.borrow().unread, 0);
        assert_eq!(backlog.push(&piece), Pushed::Gone);
    }
}
