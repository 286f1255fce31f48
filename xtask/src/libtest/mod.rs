//! Programs of tests: runs them, prints what they print, and counts.

mod count;

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Instant;

use anyhow::Result;

use crate::process;
pub(crate) use count::Count;

/// Runs a command with libtest's output, prints it, and counts.
pub(crate) fn read(command: &mut Command, name: &str, expected: usize) -> Result<Count> {
    let (mut count, status) = read_labelled(command, |_| None)?;
    count.complete(name, expected, status.success(), &status.to_string());
    Ok(count)
}

/// Like [`read`], but the count is not settled. A line for which `label` returns a label is not
/// printed: the following lines are, each after that label.
pub(crate) fn read_labelled(
    command: &mut Command,
    label: impl Fn(&str) -> Option<String>,
) -> Result<(Count, ExitStatus)> {
    let mut group = process::Group::spawn(command.stdout(Stdio::piped()))?;
    let mut count = Count::default();
    let mut shown_behind = String::new();
    let mut since = Instant::now();
    if let Some(stdout) = group.child().stdout.take() {
        for line in BufReader::new(stdout).split(b'\n') {
            let line = line?;
            let text = String::from_utf8_lossy(&line);
            if let Some(label) = label(&text) {
                shown_behind = label;
                continue;
            }
            let mut out = std::io::stdout().lock();
            out.write_all(shown_behind.as_bytes())?;
            out.write_all(&line)?;
            out.write_all(b"\n")?;
            if count.line(&text, since.elapsed()) {
                since = Instant::now();
            }
        }
    }
    Ok((count, group.wait()?))
}
