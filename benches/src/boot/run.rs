//! One boot: start, wait for init's line, sample, end.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};

use super::peers::{Guest, Peer};
use super::sample::{self, Sample};

/// The line that the guest's init writes.
const LINE: &[u8] = b"init";

/// Boots once.
pub(super) fn boot(peer: &Peer, guest: &Guest, directory: &Path) -> Result<Sample> {
    let messages = directory.join("stderr");
    let began = Instant::now();
    let mut child = Running(
        peer.command()
            // Open and silent: monitors that read their stdin block.
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(File::create(&messages)?)
            .spawn()
            .with_context(|| format!("{} cannot be started", peer.program.display()))?,
    );
    let mut console = child.0.stdout.take().context("stdout was not kept")?;
    if let Err(seen) = wait_for_line(&mut console)? {
        let messages = fs::read_to_string(&messages).unwrap_or_default();
        let last: Vec<&str> = messages.lines().chain(seen.lines()).rev().take(8).collect();
        bail!(
            "it ended before the guest's init ran; its last words: {}",
            last.into_iter().rev().collect::<Vec<_>>().join(" / ")
        );
    }
    let to_init = began.elapsed();
    sample::take(child.0.id(), peer.kind, guest.memory_mib, to_init)
}

/// Kills the process when dropped.
pub(crate) struct Running(pub(crate) Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Reads up to the line, or returns what was read instead.
fn wait_for_line(console: &mut impl Read) -> Result<Result<(), String>> {
    let mut seen = Vec::new();
    let mut line_began = 0;
    let mut buffer = [0; 4096];
    loop {
        let count = console.read(&mut buffer)?;
        if count == 0 {
            return Ok(Err(String::from_utf8_lossy(&seen).into_owned()));
        }
        for byte in buffer.iter().take(count) {
            if *byte != b'\n' {
                seen.push(*byte);
                continue;
            }
            let line = seen.get(line_began..).unwrap_or_default();
            if line.trim_ascii() == LINE {
                return Ok(Ok(()));
            }
            seen.push(b'\n');
            line_began = seen.len();
        }
    }
}

/// Raises this process's priority while it lives, so that it runs before all others when it is
/// ready: a sample shows the state at init's line, not some time slices later. Without the
/// permission to do that, the scheduler decides.
pub(crate) fn ahead_of_others() -> sample::Priority {
    sample::Priority::raise()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_is_found_among_others_and_its_lack_is_told() {
        let mut console: &[u8] = b"early message\r\ninit\r\nlater";
        assert_eq!(wait_for_line(&mut console).unwrap(), Ok(()));
        let mut console: &[u8] = b"Kernel panic: no init\r\n";
        let seen = wait_for_line(&mut console).unwrap().unwrap_err();
        assert!(seen.contains("Kernel panic"));
    }
}
