//! Monitors that run the same guest with one device, side by side: what the measurements of disks
//! and networks share.
//!
//! [`MonitorArgs`] are their arguments, [`Device`] is what distinguishes their guests, and
//! [`MonitorArgs::measure`] runs each monitor in turn.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::boot::{Kind, Running, Sample, Stage, process_cpu, take};
use crate::qemu::{self, Boot};

/// MiB of guest memory.
const MEMORY: u64 = 128;

const COMMAND_LINE: &str = "console=ttyS0 quiet panic=-1 reboot=k noreplace-smp";
const NO_PCI: &str = " pci=off";

#[derive(Debug, clap::Args)]
pub(crate) struct MonitorArgs {
    /// The guest's kernel, an uncompressed ELF file
    #[arg(long, value_name = "FILE")]
    kernel: PathBuf,
    /// The guest's initramfs, whose init does the work
    #[arg(long, value_name = "FILE")]
    initramfs: PathBuf,
    /// The program that runs a guest with the device by podvisor's library
    #[arg(long, value_name = "FILE")]
    podvisor: PathBuf,
    /// A QEMU to compare with
    #[arg(long, value_name = "FILE")]
    qemu: Option<PathBuf>,
    /// Rounds, in which each runs once
    #[arg(long, value_name = "N", default_value_t = 3)]
    runs: usize,
    /// Time is counted in instructions here: one nanosecond each
    #[arg(long)]
    pub(crate) icount: bool,
    /// Write the results as JSON to this file, or to stdout (`-`)
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Draw the medians as SVG in this file
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
}

/// The device of the guest, by the arguments of each monitor.
#[derive(Debug)]
pub(crate) struct Device {
    /// What the guest's init reads on the kernel's command line.
    pub(crate) parameters: String,
    /// The last arguments of podvisor's program.
    pub(crate) podvisor: Vec<String>,
    /// What QEMU has behind the device.
    pub(crate) backend: Vec<String>,
    /// QEMU's device on MMIO.
    pub(crate) mmio: String,
    /// QEMU's device on PCI.
    pub(crate) pci: String,
}

/// A monitor with the device on one transport.
#[derive(Debug)]
pub(crate) struct Subject {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    program: PathBuf,
    arguments: Vec<String>,
}

/// A monitor that runs.
pub(crate) struct Monitor {
    child: Running,
    kind: Kind,
    began: Instant,
    messages: PathBuf,
    /// The guest's serial console.
    pub(crate) console: BufReader<ChildStdout>,
}

impl MonitorArgs {
    /// Returns the monitors to compare, whose files are copied to `stage`.
    pub(crate) fn subjects(&self, stage: &Stage, device: &Device) -> Result<Vec<Subject>> {
        let (kernel, initramfs) = (stage.copy(&self.kernel)?, stage.copy(&self.initramfs)?);
        let podvisor = stage.copy(&self.podvisor)?;
        let by_podvisor = |name, transport: &str, bus| {
            let mut arguments = vec![
                transport.to_owned(),
                text(&kernel),
                text(&initramfs),
                format!("{MEMORY}MiB"),
                command_line(bus, device),
            ];
            arguments.extend(device.podvisor.iter().cloned());
            Subject {
                name,
                kind: Kind::Podvisor,
                program: podvisor.clone(),
                arguments,
            }
        };
        let mut subjects = vec![
            by_podvisor("podvisor MMIO", "mmio", NO_PCI),
            by_podvisor("podvisor PCI", "pci", ""),
        ];
        for (name, machine, on_bus, bus) in [
            ("QEMU microvm, MMIO", qemu::MICROVM, &device.mmio, NO_PCI),
            ("QEMU q35, PCI", qemu::Q35, &device.pci, ""),
        ] {
            let Some(program) = &self.qemu else { continue };
            let boot = Boot {
                kernel: &kernel,
                initramfs: &initramfs,
                memory_mib: MEMORY,
                command_line: &command_line(bus, device),
            };
            let mut arguments = qemu::arguments(machine, &boot);
            arguments.extend(device.backend.iter().cloned());
            arguments.extend(["-device".to_owned(), on_bus.clone()]);
            subjects.push(Subject {
                name,
                kind: Kind::Qemu,
                program: program.clone(),
                arguments,
            });
        }
        Ok(subjects)
    }

    /// Runs each subject once a round, and returns what each costs.
    pub(crate) fn measure<C>(
        &self,
        subjects: &[Subject],
        run: impl FnMut(&Subject) -> Result<C>,
    ) -> Result<Vec<Vec<C>>> {
        let named = |subject: &Subject| subject.name;
        rounds(subjects, self.runs, named, run)
    }
}

/// Runs each of several subjects once a round; each round starts with another one.
fn rounds<S, C>(
    subjects: &[S],
    count: usize,
    name: impl Fn(&S) -> &'static str,
    mut run: impl FnMut(&S) -> Result<C>,
) -> Result<Vec<Vec<C>>> {
    if count == 0 {
        bail!("--runs 0 measures nothing: give 1 or more");
    }
    let mut costs: Vec<Vec<C>> = subjects.iter().map(|_| Vec::new()).collect();
    for round in 0..count {
        for turn in 0..subjects.len() {
            let at = (round + turn) % subjects.len();
            let subject = &subjects[at];
            let cost = run(subject).with_context(|| format!("{} was not measured", name(subject)));
            costs[at].push(cost?);
        }
    }
    Ok(costs)
}

impl Subject {
    /// Starts the monitor, whose messages go to a file in `dir`.
    pub(crate) fn start(&self, dir: &Path) -> Result<Monitor> {
        self.start_with(&[], dir.join("stderr"))
    }

    /// Starts the monitor with more arguments; its messages go to the file `messages`.
    pub(crate) fn start_with(&self, more: &[String], messages: PathBuf) -> Result<Monitor> {
        let began = Instant::now();
        let mut child = Running(
            Command::new(&self.program)
                .args(&self.arguments)
                .args(more)
                // Open and silent: monitors that read their stdin block.
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(File::create(&messages)?)
                .spawn()
                .with_context(|| format!("{} cannot be started", self.program.display()))?,
        );
        let console = BufReader::new(child.0.stdout.take().context("stdout was not kept")?);
        Ok(Monitor {
            child,
            kind: self.kind,
            began,
            messages,
            console,
        })
    }
}

impl Monitor {
    /// Returns the CPU time of the process with all its threads, those that have ended too, in ns.
    pub(crate) fn cpu(&self) -> Result<u64> {
        let cpu = process_cpu(self.child.0.id());
        cpu.context("the process's CPU clock cannot be read")
    }

    /// Samples the CPU time of its threads.
    pub(crate) fn sample(&self) -> Result<Sample> {
        take(self.child.0.id(), self.kind, MEMORY, self.began.elapsed())
    }

    /// Returns what it has written to its stderr.
    pub(crate) fn messages(&self) -> String {
        let messages = std::fs::read_to_string(&self.messages).unwrap_or_default();
        messages.trim().to_owned()
    }
}

fn command_line(bus: &str, device: &Device) -> String {
    let parameters = device.parameters.as_str();
    let space = if parameters.is_empty() { "" } else { " " };
    format!("{COMMAND_LINE}{bus}{space}{parameters}")
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_round_starts_with_another_subject_and_a_failure_names_its_own() {
        let mut order = Vec::new();
        let subjects = ["a", "b", "c"];
        let costs = rounds(
            &subjects,
            2,
            |name| *name,
            |name| {
                order.push(*name);
                Ok(order.len())
            },
        );
        assert_eq!(costs.unwrap(), [vec![1, 6], vec![2, 4], vec![3, 5]]);
        assert_eq!(order, ["a", "b", "c", "b", "c", "a"]);
        let failed = rounds(
            &subjects,
            1,
            |name| *name,
            |name| match *name {
                "b" => bail!("no"),
                _ => Ok(()),
            },
        );
        assert!(
            failed
                .unwrap_err()
                .to_string()
                .contains("b was not measured")
        );
        rounds(&subjects, 0, |name| *name, |_| Ok(())).unwrap_err();
    }
}
