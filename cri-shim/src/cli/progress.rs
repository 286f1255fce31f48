//! The progress of a pull on stderr: bars on a terminal, lines elsewhere.

use std::collections::HashMap;
use std::io::{self, Write as _};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use podvisor_images::{Digest, PullEvent};
use tokio::sync::mpsc::UnboundedReceiver;

/// Hexadecimal digits of a layer's digest that are shown, as in docker.
const SHORT_DIGEST: usize = 12;

/// How progress is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    /// Not at all.
    Quiet,
    /// One line for each step.
    Lines,
    /// One line for each step, but none for the result.
    Steps,
    /// One bar for each layer.
    Bars,
}

impl Progress {
    /// Returns the style that is suitable for stderr.
    pub(super) fn for_stderr() -> Self {
        if super::terminal::is_terminal(io::stderr()) {
            Self::Bars
        } else {
            Self::Lines
        }
    }

    /// Returns the style for work without downloads.
    pub(super) fn for_steps(quiet: bool) -> Self {
        if quiet { Self::Quiet } else { Self::Steps }
    }

    /// Shows events until there are no more.
    pub(super) async fn show(self, mut events: UnboundedReceiver<PullEvent>) {
        let mut bars = Bars::default();
        while let Some(event) = events.recv().await {
            match self {
                Self::Quiet => {}
                Self::Steps if matches!(event, PullEvent::Done { .. }) => {}
                Self::Lines | Self::Steps => {
                    if let Some(line) = line(&event) {
                        // A failure to print progress is not an error.
                        let _ = writeln!(io::stderr(), "{line}");
                    }
                }
                Self::Bars => bars.apply(&event),
            }
        }
        bars.finish();
    }
}

fn short(digest: &Digest) -> String {
    digest.hex().chars().take(SHORT_DIGEST).collect()
}

fn plural(count: usize, word: &str) -> String {
    let ending = if count == 1 { "" } else { "s" };
    format!("{count} {word}{ending}")
}

/// Returns the line for an event, if there is one. Control characters are removed from a registry's
/// text.
fn line(event: &PullEvent) -> Option<String> {
    let text = match event {
        PullEvent::Resolving { reference } => format!("Pulling {reference}"),
        PullEvent::Resolved { manifest, layers } => {
            format!("Resolved {manifest}, {}", plural(layers.len(), "layer"))
        }
        PullEvent::Verified { key } => format!("Signed by the key {key}"),
        PullEvent::LayerPresent { layer } => format!("{}: already here", short(layer)),
        PullEvent::LayerWaiting { layer } => {
            format!("{}: waiting for another pull", short(layer))
        }
        PullEvent::LayerDone { layer } => format!("{}: fetched", short(layer)),
        PullEvent::Unpacking { layer } => format!("{}: unpacking", short(layer)),
        PullEvent::RootfsWaiting => "Waiting for another pull or load of this image".to_owned(),
        PullEvent::DiskWaiting => "Waiting for another pull".to_owned(),
        PullEvent::Retrying { reason, attempt } => format!("Attempt {attempt}: {reason}"),
        PullEvent::Done { id, new: true } => format!("Pulled {id}"),
        PullEvent::Done { id, new: false } => format!("Up to date: {id}"),
        _ => return None,
    };
    Some(text.replace(char::is_control, " "))
}

#[derive(Debug)]
struct Bars {
    all: MultiProgress,
    layers: HashMap<Digest, ProgressBar>,
    heading: Option<ProgressBar>,
    disk: Option<ProgressBar>,
}

impl Default for Bars {
    fn default() -> Self {
        Self {
            all: MultiProgress::with_draw_target(ProgressDrawTarget::stderr()),
            layers: HashMap::new(),
            heading: None,
            disk: None,
        }
    }
}

impl Bars {
    fn apply(&mut self, event: &PullEvent) {
        match event {
            PullEvent::Resolved { layers, .. } => {
                self.say(event);
                for (layer, size) in layers {
                    self.add(layer, *size);
                }
            }
            PullEvent::LayerBytes { layer, done, total } => {
                if let Some(bar) = self.layers.get(layer) {
                    bar.set_length(*total);
                    bar.set_position(*done);
                    bar.set_message("fetching");
                }
            }
            PullEvent::DiskBytes { done, total } => self.disk(*done, *total),
            PullEvent::LayerPresent { layer } => self.state(layer, "already here", true),
            PullEvent::LayerWaiting { layer } => {
                self.state(layer, "waiting for another pull", false);
            }
            PullEvent::LayerDone { layer } => self.state(layer, "fetched", true),
            PullEvent::Unpacking { layer } => self.state(layer, "unpacking", true),
            PullEvent::Done { .. } => {
                for bar in self.layers.values() {
                    bar.set_message("done");
                }
                self.say(event);
            }
            _ => self.say(event),
        }
    }

    /// Prints an event's line above the bars.
    fn say(&mut self, event: &PullEvent) {
        let Some(line) = line(event) else {
            return;
        };
        let heading = self.heading.get_or_insert_with(|| {
            let bar = self.all.insert(0, ProgressBar::new_spinner());
            bar.set_style(style("{msg}"));
            bar
        });
        heading.set_message(line);
    }

    fn add(&mut self, layer: &Digest, size: u64) {
        let bar = self.all.add(ProgressBar::new(size));
        bar.set_style(style(
            "{prefix} [{bar:30}] {bytes:>10}/{total_bytes:<10} {msg}",
        ));
        bar.set_prefix(short(layer));
        bar.set_message("waiting");
        self.layers.insert(*layer, bar);
    }

    /// Updates the single bar of a disk image; without a total if the server does not send one.
    fn disk(&mut self, done: u64, total: Option<u64>) {
        let bar = self.disk.get_or_insert_with(|| {
            let bar = self.all.add(ProgressBar::no_length());
            bar.set_style(style("[{bar:30}] {bytes:>10}/{total_bytes:<10} {eta}"));
            bar
        });
        if let Some(total) = total {
            bar.set_length(total);
        }
        bar.set_position(done);
    }

    fn state(&self, layer: &Digest, message: &'static str, complete: bool) {
        if let Some(bar) = self.layers.get(layer) {
            if complete && let Some(length) = bar.length() {
                bar.set_position(length);
            }
            bar.set_message(message);
        }
    }

    /// Leaves the bars on the terminal as they are.
    fn finish(&self) {
        for bar in self.layers.values().chain(&self.heading).chain(&self.disk) {
            bar.abandon();
        }
    }
}

/// Returns a bar's style; indicatif's default if it does not understand the template.
fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("=> ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_step_has_a_line_and_bytes_have_none() {
        let layer = Digest::of(b"layer");
        let resolved = PullEvent::Resolved {
            manifest: Digest::of(b""),
            layers: vec![(layer, 3)],
        };
        assert!(line(&resolved).unwrap().ends_with(", 1 layer"));
        let done = PullEvent::LayerDone { layer };
        assert_eq!(
            line(&done).unwrap(),
            format!("{}: fetched", &layer.hex()[..12])
        );
        let bytes = PullEvent::LayerBytes {
            layer,
            done: 1,
            total: 3,
        };
        assert_eq!(line(&bytes), None);
    }

    #[test]
    fn a_registrys_words_cannot_play_with_the_terminal() {
        let retry = PullEvent::Retrying {
            reason: "\x1b[2Jgone".to_owned(),
            attempt: 2,
        };
        assert_eq!(line(&retry).unwrap(), "Attempt 2:  [2Jgone");
    }
}
