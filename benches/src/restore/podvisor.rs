//! podvisor, by the program that links its library (`agent-podvisor`).

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};

use super::Args;
use crate::boot::{Kind, Running, Sample, Stage, take};

#[derive(Debug)]
pub(super) struct Podvisor {
    program: PathBuf,
    directory: PathBuf,
    memory_mib: u64,
    /// Its arguments for booting, and for cloning.
    boot: Vec<String>,
    restore: Vec<String>,
    snapshot: String,
}

/// A process that was started.
struct Started {
    process: Running,
    began: Instant,
    messages: PathBuf,
}

impl Podvisor {
    pub(super) fn stage(args: &Args, stage: &Stage) -> Result<Self> {
        let snapshot = stage.path().join("snapshot").display().to_string();
        Ok(Self {
            program: stage.copy(&args.program)?,
            directory: stage.path().to_owned(),
            memory_mib: args.memory,
            boot: vec![
                "boot".to_owned(),
                args.transport.word().to_owned(),
                stage.copy(&args.kernel)?.display().to_string(),
                stage.copy(&args.initramfs)?.display().to_string(),
                format!("{}MiB", args.memory),
                args.cmdline(),
            ],
            restore: vec!["restore".to_owned(), snapshot.clone()],
            snapshot,
        })
    }

    /// Boots until the agent's first answer.
    pub(super) fn boot(&self) -> Result<Sample> {
        self.run(&self.boot)
    }

    /// Boots, and leaves a snapshot for [`Self::restore`].
    pub(super) fn snapshot(&self) -> Result<()> {
        let mut arguments = self.boot.clone();
        arguments.push(self.snapshot.clone());
        self.run(&arguments).map(drop)
    }

    /// Clones until the agent's first answer.
    pub(super) fn restore(&self) -> Result<Sample> {
        self.run(&self.restore)
    }

    /// Starts `count` clones, each sampled when all have got their answer.
    pub(super) fn at_once(&self, count: usize) -> Result<Vec<Sample>> {
        let mut started = (0..count)
            .map(|number| self.start(&self.restore, &format!("stderr.{number}")))
            .collect::<Result<Vec<_>>>()?;
        for clone in &mut started {
            clone.wait_for_answer()?;
        }
        started.iter().map(|clone| self.sample(clone)).collect()
    }

    fn run(&self, arguments: &[String]) -> Result<Sample> {
        let mut started = self.start(arguments, "stderr")?;
        started.wait_for_answer()?;
        self.sample(&started)
    }

    fn start(&self, arguments: &[String], messages: &str) -> Result<Started> {
        let messages = self.directory.join(messages);
        let began = Instant::now();
        let process = Running(
            Command::new(&self.program)
                .args(arguments)
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(File::create(&messages)?)
                .spawn()
                .with_context(|| format!("{} cannot be started", self.program.display()))?,
        );
        Ok(Started {
            process,
            began,
            messages,
        })
    }

    fn sample(&self, started: &Started) -> Result<Sample> {
        let elapsed = started.began.elapsed();
        let pid = started.process.0.id();
        take(pid, Kind::Podvisor, self.memory_mib, elapsed)
    }
}

impl Started {
    fn wait_for_answer(&mut self) -> Result<()> {
        let stdout = self.process.0.stdout.as_mut();
        let mut line = String::new();
        BufReader::new(stdout.context("stdout was not kept")?).read_line(&mut line)?;
        if line.trim() != "answered" {
            let messages = fs::read_to_string(&self.messages)?;
            bail!("podvisor was not measured: {}", messages.trim());
        }
        Ok(())
    }
}
