//! runc, with a bundle of the same busybox.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::Ends;
use crate::boot::Stage;

#[derive(Debug)]
pub(super) struct Runc {
    program: PathBuf,
    bundle: PathBuf,
    state: PathBuf,
    started: AtomicU32,
}

impl Runc {
    /// Creates a root file system and runc's own default specification, without its terminal.
    pub(super) fn stage(program: &Path, busybox: &Path, stage: &Stage) -> Result<Self> {
        let program = stage.copy(program)?;
        let bundle = stage.path().join("bundle");
        let root = bundle.join("rootfs");
        for directory in ["bin", "dev", "etc", "proc", "sys", "tmp"] {
            fs::create_dir_all(root.join(directory))?;
        }
        fs::copy(busybox, root.join("bin/busybox"))
            .with_context(|| format!("{} cannot be copied", busybox.display()))?;
        symlink("busybox", root.join("bin/true"))?;
        let made = Command::new(&program)
            .args(["spec", "--bundle"])
            .arg(&bundle)
            .status()
            .with_context(|| format!("{} cannot be started", program.display()))?;
        if !made.success() {
            bail!("`runc spec` failed ({made})");
        }
        let path = bundle.join("config.json");
        let mut spec: Value = serde_json::from_str(&fs::read_to_string(&path)?)?;
        spec["process"]["terminal"] = json!(false);
        spec["process"]["args"] = json!(["true"]);
        fs::write(&path, spec.to_string())?;
        Ok(Self {
            program,
            bundle,
            state: stage.path().join("runc-state"),
            started: AtomicU32::new(0),
        })
    }

    pub(super) fn start(&self) -> Result<Run> {
        let number = self.started.fetch_add(1, Ordering::Relaxed);
        let child = Command::new(&self.program)
            .arg("--root")
            .arg(&self.state)
            .args(["run", "--bundle"])
            .arg(&self.bundle)
            .arg(format!("bench{number}"))
            .stdin(Stdio::null())
            .spawn()
            .context("runc cannot be started")?;
        Ok(Run(child))
    }
}

pub(super) struct Run(Child);

impl Ends for Run {
    fn end(mut self) -> Result<()> {
        let status = self.0.wait()?;
        if !status.success() {
            bail!("`runc run` failed ({status})");
        }
        Ok(())
    }
}
