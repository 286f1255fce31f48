//! `vm timings`, and `--timings` of `vm run` and `vm start`: the phases of a boot.

use std::fmt::Write as _;
use std::io::Write as _;
use std::time::Duration;

use clap::Args;
use tokio::time::{Instant, timeout_at};

use crate::boot;
use crate::cli::container::{Entry, state};
use crate::cli::signals::Signals;
use crate::cli::{FormatArgs, Globals, notice};
use crate::sandbox::{BootPhase, BootReport, BootWay, SandboxClient};

/// How long a guest may take from one phase to the next before nobody waits for it any more.
const PHASE_LIMIT: Duration = Duration::from_secs(300);

/// Columns of the picture's bars.
const BAR: usize = 40;

/// Most columns of an entry's title.
const MAX_TITLE: usize = 60;

#[derive(Debug, Args)]
pub(super) struct TimingsArgs {
    #[command(flatten)]
    shown: FormatArgs,

    /// Name or id
    #[arg(value_name = "VM")]
    vm: String,
}

pub(super) fn run(globals: &Globals, args: &TimingsArgs) -> anyhow::Result<u8> {
    let containers = globals.containers()?;
    let (name, report) = crate::cli::runtime()?.block_on(async {
        let entry = containers.find(&args.vm)?;
        let (client, ..) = state::running(&entry).await?;
        let report = client.boot_report(&entry.record.id).await?;
        anyhow::Ok((entry.record.name, report))
    })?;
    match args.shown.is_json() {
        true => crate::cli::print_json(&boot::view(&report))?,
        false => crate::cli::print(&picture(&name, &report))?,
    }
    Ok(0)
}

/// Waits until a VM has booted, and shows its phases.
pub(super) async fn wait(
    client: &SandboxClient,
    entry: &Entry,
    signals: &mut Signals,
) -> anyhow::Result<()> {
    let name = &entry.record.name;
    let mut report = client.boot_report(&entry.record.id).await?;
    // Whoever waits knows of the first one, the beginning.
    let mut told = 1;
    let mut limit = Instant::now() + PHASE_LIMIT;
    loop {
        for event in report.events.iter().skip(told) {
            notice(&format!("VM {name}: {}", event.phase.description()));
        }
        if report.events.len() > told {
            limit = Instant::now() + PHASE_LIMIT;
        }
        told = report.events.len();
        if is_over(&report) {
            break;
        }
        let next = client.boot_report_after(&entry.record.id, report.version);
        tokio::select! {
            next = timeout_at(limit, next) => match next {
                Ok(Ok(next)) => report = next,
                Ok(Err(error)) => {
                    notice(&format!("VM {name} is not waited for any more: {error}"));
                    break;
                }
                Err(_) => {
                    let seconds = PHASE_LIMIT.as_secs();
                    notice(&format!("VM {name}: no prompt after {seconds} s; it goes on"));
                    break;
                }
            },
            _ = signals.ending() => break,
        }
    }
    // There is nowhere left to report that stderr is closed.
    let _ = std::io::stderr().write_all(picture(name, &report).as_bytes());
    Ok(())
}

/// Whether no phase is to come that could be seen.
fn is_over(report: &BootReport) -> bool {
    match report.way {
        BootWay::Loader | BootWay::KeptKernel | BootWay::OwnKernel | BootWay::Firmware => {
            report.has(BootPhase::Prompt)
        }
        _ => report.has(BootPhase::Machine),
    }
}

/// Draws the phases of a boot: when each ended, how long it took, and both as a bar.
fn picture(name: &str, report: &BootReport) -> String {
    let mut text = format!("VM {name}: {}", report.way.description());
    if let Some(entry) = &report.entry {
        let title: String = entry.chars().take(MAX_TITLE).collect();
        let _ = write!(text, " ({title})");
    }
    text.push('\n');
    let times: Vec<(BootPhase, Duration)> = report.times().collect();
    let all = times.iter().map(|(_, at)| *at).max().unwrap_or_default();
    let mut before = Duration::ZERO;
    for (phase, at) in times.into_iter().skip(1) {
        let took = at.saturating_sub(before);
        let (begin, end) = (columns(before, all), columns(at, all));
        let blank = " ".repeat(begin.min(BAR - 1));
        let bar = "█".repeat((end - begin).max(1));
        let _ = writeln!(
            text,
            "  {:<28}{:>9.3} s  {:>9.3} s  {blank}{bar}",
            phase.description(),
            at.as_secs_f64(),
            took.as_secs_f64(),
        );
        before = at.max(before);
    }
    text
}

/// The columns of a bar that a part of all time takes.
fn columns(part: Duration, all: Duration) -> usize {
    let share = match all.is_zero() {
        true => 0.0,
        false => part.as_secs_f64() / all.as_secs_f64(),
    };
    // Between 0 and BAR.
    (share * BAR as f64).round() as usize
}

#[cfg(test)]
mod tests {
    use crate::sandbox::BootEvent;

    use super::*;

    fn report(way: BootWay, events: &[(BootPhase, u64)]) -> BootReport {
        let events = events.iter().map(|&(phase, ms)| BootEvent {
            phase,
            at_ns: 7 + ms * 1_000_000,
        });
        BootReport {
            way,
            entry: Some("Debian GNU/Linux".to_owned()),
            events: events.collect(),
            ..BootReport::default()
        }
    }

    #[test]
    fn each_phase_has_a_bar_where_and_as_long_as_it_was() {
        use BootPhase as P;
        let report = report(
            BootWay::KeptKernel,
            &[
                (P::Begun, 0),
                (P::Image, 1000),
                (P::Machine, 1001),
                (P::Prompt, 4000),
            ],
        );
        let bar = |blank: usize, bar: usize| format!("{}{}", " ".repeat(blank), "█".repeat(bar));
        let expected = format!(
            "VM web: by the kernel that was kept of its image (Debian GNU/Linux)\n\
             \x20 image ready                     1.000 s      1.000 s  {}\n\
             \x20 machine built                   1.001 s      0.001 s  {}\n\
             \x20 prompt on the console           4.000 s      2.999 s  {}\n",
            bar(0, 10),
            bar(10, 1),
            bar(10, 30),
        );
        assert_eq!(picture("web", &report), expected);
    }

    #[test]
    fn a_boot_is_over_at_its_prompt_and_what_continues_as_soon_as_it_runs() {
        use BootPhase as P;
        let booting = [(P::Begun, 0), (P::Machine, 1)];
        assert!(!is_over(&report(BootWay::Loader, &booting)));
        assert!(is_over(&report(BootWay::SavedState, &booting)));
        assert!(!is_over(&report(BootWay::SavedState, &booting[..1])));
        let booted = [(P::Begun, 0), (P::Prompt, 0)];
        assert!(is_over(&report(BootWay::OwnKernel, &booted)));
        // All at once, and nothing at all.
        assert_eq!(
            picture("a", &report(BootWay::Loader, &booted))
                .lines()
                .count(),
            2
        );
        assert_eq!(picture("a", &BootReport::default()).lines().count(), 1);
    }
}
