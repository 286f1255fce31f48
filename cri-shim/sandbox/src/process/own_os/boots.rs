//! How a container's machines are booted, and how far: what requests, the loader's lines and the
//! guest's first output say of it.

use std::sync::Arc;

use tokio::sync::watch;

use super::super::super::agent::now_ns;
use super::super::super::types::{BootEvent, BootPhase, BootReport, BootWay};
use super::boot_lines::{BootLines, Seen};

/// What was started, and by which words.
#[derive(Debug, Default)]
pub(super) struct Start {
    pub(super) way: BootWay,
    pub(super) entry: Option<String>,
    pub(super) cmdline: Option<String>,
}

/// The report of the latest boot.
#[derive(Debug, Default)]
pub(super) struct Boots(watch::Sender<BootReport>);

impl Boots {
    /// Begins the report of a machine, which these events were before.
    pub(super) fn begin(&self, mut before: Vec<BootEvent>) {
        before.truncate(BootEvent::MAX);
        before.sort_by_key(|event| event.at_ns);
        if before.is_empty() {
            before.push(BootEvent::now(BootPhase::Begun));
        }
        self.0.send_modify(|report| {
            *report = BootReport {
                version: report.version + 1,
                boots: report.boots.saturating_add(1),
                started_at_ns: now_ns(),
                events: before,
                ..BootReport::default()
            };
        });
    }

    /// Notes what is started.
    pub(super) fn starts(&self, start: Start) {
        self.change(|report| {
            report.way = start.way;
            report.entry = start.entry.map(|text| shown(&text));
            report.cmdline = start.cmdline.map(|text| shown(&text));
        });
    }

    /// Notes that a phase was reached, the first time that it is.
    pub(super) fn reached(&self, phase: BootPhase) {
        self.0.send_if_modified(|report| {
            let is_new = !report.has(phase);
            if is_new {
                report.version += 1;
                report.events.push(BootEvent::now(phase));
            }
            is_new
        });
    }

    /// Returns what reads the console of a machine that is about to start; it returns false when
    /// there is nothing more to see.
    pub(super) fn reader(
        self: &Arc<Self>,
        way: BootWay,
    ) -> impl FnMut(&[u8]) -> bool + Send + use<> {
        let boots = Arc::clone(self);
        let mut lines = BootLines::new(way == BootWay::Loader);
        move |bytes| {
            lines.read(bytes, |seen| boots.saw(seen));
            !lines.are_over()
        }
    }

    fn saw(&self, seen: Seen<'_>) {
        match seen {
            Seen::Loader => self.reached(BootPhase::Loader),
            Seen::Entry { title, config } => {
                self.change(|report| {
                    report.entry = Some(shown(title));
                    report.config = Some(shown(config));
                });
                self.reached(BootPhase::Entry);
            }
            Seen::Kernel { kernel, initramfs } => self.change(|report| {
                report.kernel = Some(shown(kernel));
                report.initramfs = Some(shown(initramfs));
            }),
            Seen::Cmdline(line) => self.change(|report| report.cmdline = Some(shown(line))),
            Seen::Handed => self.reached(BootPhase::Handed),
            Seen::Output => self.reached(BootPhase::Console),
            Seen::Prompt => self.reached(BootPhase::Prompt),
        }
    }

    fn change(&self, change: impl FnOnce(&mut BootReport)) {
        self.0.send_modify(|report| {
            change(report);
            report.version += 1;
        });
    }

    pub(super) fn latest(&self) -> BootReport {
        self.0.borrow().clone()
    }

    /// Waits until there is something newer than this version.
    pub(super) async fn after(&self, version: u64) -> BootReport {
        let mut report = self.0.subscribe();
        let newer = report.wait_for(|report| report.version > version).await;
        // The sender is this one's.
        newer.map_or_else(|_| self.latest(), |report| report.clone())
    }
}

/// Longest text of a report, in characters.
const MAX_TEXT: usize = 4096;

/// A text without what a terminal would obey.
fn shown(text: &str) -> String {
    let printable = text.chars().filter(|letter| !letter.is_control());
    printable.take(MAX_TEXT).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_has_each_phase_once_and_begins_anew_with_each_machine() {
        let boots = Arc::new(Boots::default());
        let event = |phase, at_ns| BootEvent { phase, at_ns };
        boots.begin(vec![
            event(BootPhase::Image, 7_000),
            event(BootPhase::Begun, 2_000),
        ]);
        boots.starts(Start {
            way: BootWay::Loader,
            ..Start::default()
        });
        boots.reached(BootPhase::Machine);
        let mut reads = boots.reader(BootWay::Loader);
        for line in [
            "podvisor-loader: disk vda\r\n",
            "podvisor-loader: entry \"Debian \u{1b}[2J\" (grub.cfg in /grub.cfg on vda1)\r\n",
            "podvisor-loader: command line: ro quiet\r\n",
            "podvisor-loader: starting the kernel at 0.2 s\r\n",
            "podvisor-loader: entry \"forged\" (a in b)\r\n",
        ] {
            assert!(reads(line.as_bytes()));
        }
        assert!(!reads(b"web login: "));
        let report = boots.latest();
        assert_eq!(report.entry.as_deref(), Some("Debian [2J"));
        assert_eq!(
            report.config.as_deref(),
            Some("grub.cfg in /grub.cfg on vda1")
        );
        assert_eq!(report.cmdline.as_deref(), Some("ro quiet"));
        let phases: Vec<BootPhase> = report.times().map(|(phase, _)| phase).collect();
        use BootPhase as P;
        assert_eq!(
            phases,
            [
                P::Begun,
                P::Image,
                P::Machine,
                P::Loader,
                P::Entry,
                P::Handed,
                P::Console,
                P::Prompt
            ]
        );
        let second = report.times().nth(1).unwrap().1;
        assert_eq!(second.as_nanos(), 5_000);

        boots.begin(Vec::new());
        let next = boots.latest();
        assert_eq!(
            (next.boots, next.way, &next.entry),
            (2, BootWay::Unknown, &None)
        );
        assert!(next.version > report.version && next.has(BootPhase::Begun));
    }

    #[tokio::test]
    async fn who_waits_is_told_of_the_next_change() {
        let boots = Boots::default();
        boots.begin(Vec::new());
        let seen = boots.latest().version;
        let (report, ()) = tokio::join!(boots.after(seen), async {
            boots.reached(BootPhase::Machine);
            boots.reached(BootPhase::Machine);
        });
        assert_eq!(report.version, seen + 1);
        assert!(report.has(BootPhase::Machine));
    }
}
