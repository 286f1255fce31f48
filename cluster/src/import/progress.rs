//! How far an import is, in Prometheus' text format.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use podvisor_images::{Digest, PullEvent};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use crate::scrape;

/// The metric: a part of 100.
pub(crate) const METRIC: &str = "kubevirt_cdi_import_progress_total";

/// How far an import is.
#[derive(Debug, Clone)]
pub(super) struct Progress {
    owner: Arc<str>,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    done: u64,
    total: Option<u64>,
    layers: HashMap<Digest, u64>,
    is_complete: bool,
}

impl Progress {
    pub(super) fn new(owner: &str) -> Self {
        // What would end the label has no place in a unique id.
        let owner: String = owner
            .chars()
            .filter(|c| c.is_ascii_alphanumeric() || *c == '-')
            .collect();
        Self {
            owner: owner.into(),
            state: Arc::default(),
        }
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// So many bytes are done.
    pub(super) fn set(&self, done: u64, total: u64) {
        self.change(|state| (state.done, state.total) = (done, Some(total)));
    }

    /// It begins again.
    pub(super) fn reset(&self) {
        self.change(|state| *state = State::default());
    }

    /// Everything is written.
    pub(super) fn finish(&self) {
        self.change(|state| state.is_complete = true);
    }

    /// Takes what a pull reports until it ends.
    pub(super) async fn follow(&self, mut events: mpsc::UnboundedReceiver<PullEvent>) {
        while let Some(event) = events.recv().await {
            match event {
                PullEvent::DiskBytes { done, total } => {
                    self.change(|state| (state.done, state.total) = (done, total));
                }
                PullEvent::Resolved { layers, .. } => {
                    let total = layers.iter().map(|(_, size)| size).sum();
                    self.change(|state| state.total = Some(total));
                }
                PullEvent::LayerBytes { layer, done, .. } => self.change(|state| {
                    state.layers.insert(layer, done);
                    state.done = state.layers.values().sum();
                }),
                PullEvent::Retrying { reason, attempt } => {
                    tracing::warn!(reason, attempt, "the transfer is tried again");
                }
                _ => {}
            }
        }
    }

    fn render(&self) -> String {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let per_cent = percent(&state);
        format!(
            "# HELP {METRIC} How much of the source has arrived, of 100.\n\
             # TYPE {METRIC} counter\n\
             {METRIC}{{ownerUID=\"{}\"}} {per_cent:.2}\n",
            self.owner
        )
    }

    pub(super) async fn serve(&self, listener: TcpListener) -> anyhow::Result<()> {
        let progress = self.clone();
        scrape::serve(listener, move || progress.render()).await
    }
}

/// Until the disk is complete, a hundredth is missing at least.
fn percent(state: &State) -> f64 {
    if state.is_complete {
        return 100.0;
    }
    match state.total {
        #[allow(clippy::cast_precision_loss, reason = "two places are shown")]
        Some(total) if total > 0 => (state.done as f64 / total as f64 * 100.0).clamp(0.0, 99.99),
        _ => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn progress_is_told_with_its_owner_and_is_100_at_the_end_alone() {
        let progress = Progress::new("a-1\"}");
        let (sender, events) = mpsc::unbounded_channel();
        for (done, total) in [(1, Some(4)), (4, Some(4)), (9, Some(4)), (9, None)] {
            sender.send(PullEvent::DiskBytes { done, total }).unwrap();
        }
        drop(sender);
        assert!(progress.render().ends_with("{ownerUID=\"a-1\"} 0.00\n"));
        progress.follow(events).await;
        let state = |done, total| State {
            done,
            total,
            ..State::default()
        };
        assert!((percent(&state(1, Some(4))) - 25.0).abs() < 0.01);
        assert!((percent(&state(9, Some(4))) - 99.99).abs() < 0.01);
        assert!(percent(&state(9, None)).abs() < 0.01);
        progress.finish();
        assert!(progress.render().ends_with(" 100.00\n"));
    }
}
