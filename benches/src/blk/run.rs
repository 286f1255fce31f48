//! Runs one guest, and measures its three ways to read.

use std::io::BufRead;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::monitor::Subject;

/// The result of one way of `benches/guest/blk.c`, and the monitor's CPU time meanwhile.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reads {
    pub(super) count: u32,
    pub(super) time: Duration,
    /// The median latency of a read.
    pub(super) latency: Duration,
    /// CPU time in ns.
    pub(super) own: u64,
    pub(super) vcpu: u64,
}

/// The results of one run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Costs {
    pub(super) single: Reads,
    pub(super) eight: Reads,
    pub(super) sequential: Reads,
}

/// Runs a guest from its start to its last line.
pub(super) fn run(subject: &Subject, dir: &Path) -> Result<Costs> {
    let mut monitor = subject.start(dir)?;
    let mut seen = String::new();
    let mut way = |name: &str| -> Result<Reads> {
        let mut line = |word: &str| {
            let rest = wait_for(&mut monitor.console, word, name, &mut seen);
            let rest = rest.with_context(|| {
                let messages = monitor.messages();
                format!("no \"{word} {name}\" came; its messages: {messages}")
            })?;
            anyhow::Ok((rest, monitor.sample()?))
        };
        let (_, before) = line("begin")?;
        let (said, after) = line("end")?;
        let [count, time, latency] =
            numbers(&said).with_context(|| format!("the guest said {said:?} of its reads"))?;
        Ok(Reads {
            count: u32::try_from(count)?,
            time: Duration::from_nanos(time),
            latency: Duration::from_nanos(latency),
            own: after.own() - before.own(),
            vcpu: after.vcpus() - before.vcpus(),
        })
    };
    Ok(Costs {
        single: way("single")?,
        eight: way("eight")?,
        sequential: way("sequential")?,
    })
}

/// Reads up to the line that starts with `word` and `way`; returns the rest of that line.
fn wait_for(
    console: &mut impl BufRead,
    word: &str,
    way: &str,
    seen: &mut String,
) -> Result<String> {
    loop {
        let mut line = String::new();
        if console.read_line(&mut line)? == 0 {
            bail!("the monitor ended: {}", seen.trim());
        }
        let rest = line.trim().strip_prefix(word).map(str::trim_start);
        if let Some(rest) = rest.and_then(|rest| rest.strip_prefix(way)) {
            return Ok(rest.trim_start().to_owned());
        }
        seen.push_str(&line);
    }
}

/// Parses numbers separated by spaces, none of them 0.
fn numbers(text: &str) -> Option<[u64; 3]> {
    let words: Option<Vec<u64>> = text
        .split(' ')
        .map(|word| word.parse().ok().filter(|number| *number > 0))
        .collect();
    words?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_found_among_others_and_have_three_numbers() {
        let mut console: &[u8] = b"a message\r\nend eight 9 9 9\r\nend single 2000 80 40\r\n";
        let mut seen = String::new();
        let rest = wait_for(&mut console, "end", "single", &mut seen).unwrap();
        assert_eq!(numbers(&rest), Some([2000, 80, 40]));
        let error = wait_for(&mut console, "end", "single", &mut seen).unwrap_err();
        assert!(error.to_string().contains("a message"));
        for text in ["", "2000 80", "2000 80 0", "2000 80 40 1", "2000 80 x"] {
            assert_eq!(numbers(text), None, "{text}");
        }
    }
}
