//! Moves one guest once.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::console::{Gap, Sequence, Side};
use super::control::{Control, Sent};
use super::load::Load;
use crate::monitor::{Monitor, Subject};

/// Bytes of the guest's sequence before it is sent, twice, and afterwards: the source is warm, then
/// its rate is known, and the guest really goes on.
const STEPS: usize = 300;

/// What one migration costs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Costs {
    /// Steps per second of the guest before it is sent.
    pub(super) rate: f64,
    /// From the guest's last byte at its source to the first one at its target.
    pub(super) downtime: Duration,
    /// The longest time between two of the guest's bytes at its source, after the command.
    pub(super) longest: Duration,
    /// From the command until the source knows that the guest runs at its target, or until the
    /// guest's first byte there, whichever is later.
    pub(super) total: Duration,
    /// What the source says.
    pub(super) sent: Sent,
    /// CPU of both monitors, with all that the guest does, in ns.
    pub(super) cpu: u64,
}

/// Boots a guest, and moves it.
pub(super) fn run(subject: &Subject, load: Load, dir: &Path) -> Result<Costs> {
    let socket = dir.join("migration");
    let mut sequence = Sequence::new();
    let mut source = Half::start(subject, Side::Source, &sequence, dir)?;
    let mut target = Half::start(subject, Side::Target, &sequence, dir)?;
    let costs = migrate(&mut source, &mut target, &mut sequence, load, &socket);
    // The next one listens there too.
    let _ = std::fs::remove_file(&socket);
    costs.with_context(|| {
        let [source, target] = [&source, &target].map(|half| half.monitor.messages());
        format!("the source's messages: {source:?}; the target's: {target:?}")
    })
}

fn migrate(
    source: &mut Half,
    target: &mut Half,
    sequence: &mut Sequence,
    load: Load,
    socket: &Path,
) -> Result<Costs> {
    sequence.wait_for(Side::Source, STEPS)?;
    let warm = Instant::now();
    sequence.wait_for(Side::Source, STEPS)?;
    let rate = STEPS as f64 / warm.elapsed().as_secs_f64();
    source.control.prepare(load.downtime)?;
    target.control.receive(socket)?;
    sequence.wait_for(Side::Source, 1)?;
    sequence.longest();
    let before = source.monitor.cpu()? + target.monitor.cpu()?;
    let began = Instant::now();
    source.control.send(socket, load.downtime)?;
    let sent = source.control.sent()?;
    let completed = Instant::now();
    let Gap { last, first } = sequence.gap()?;
    let longest = sequence.longest();
    let cpu = source.monitor.cpu()? + target.monitor.cpu()? - before;
    sequence.wait_for(Side::Target, STEPS)?;
    if last < began {
        bail!("the guest stood still before it was sent");
    }
    Ok(Costs {
        rate,
        downtime: first - last,
        longest,
        total: completed.max(first) - began,
        sent,
        cpu,
    })
}

/// One of the two processes.
struct Half {
    monitor: Monitor,
    control: Control,
}

impl Half {
    fn start(subject: &Subject, side: Side, sequence: &Sequence, dir: &Path) -> Result<Self> {
        let (control, end) = Control::new(subject.kind)?;
        let arguments = end.arguments(subject.kind, side);
        let messages = dir.join(format!("stderr.{side:?}"));
        let monitor = subject.start_with(&arguments, messages)?;
        let console = monitor.console.get_ref().as_fd().try_clone_to_owned()?;
        sequence.read(side, File::from(console));
        Ok(Self { monitor, control })
    }
}
