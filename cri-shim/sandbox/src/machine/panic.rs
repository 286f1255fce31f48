//! The last messages of a guest's kernel that panicked, read from its log in the guest's memory
//! after the machine ended. So no console is needed, which would make every guest's boot slower.
//!
//! The log is a ring of blocks (Linux 5.10 and later, `kernel/printk/printk_ringbuffer.h`), each
//! with a 64-bit number, which increases by one, and the text of a message. The panic's message is
//! recognized by its beginning, and the others are found from there by their numbers.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The beginning of a panicking kernel's first message.
const PANIC: &[u8] = b"Kernel panic - not syncing: ";

/// Physical addresses that are searched for messages: where kernels are loaded that run at their
/// preferred address, with their built-in log buffer.
const LOG_SEARCH_RANGE: std::ops::Range<u64> = 1 << 20..128 << 20;

/// Size of the memory that is searched at a time, in bytes.
const WINDOW: usize = 1 << 20;

/// Bytes of a window that are searched again with the next one: room for neighbouring messages.
const OVERLAP: usize = 64 << 10;

/// The numbers of messages that are kept before and after the panic's own. Before it, a fault's
/// report with its registers and call trace needs some 60.
const LINES_BEFORE: usize = 72;
const LINES_AFTER: usize = 24;

/// Longest message, in bytes.
const MESSAGE_MAX: usize = 1024;

/// Size of a block's number in bytes, and the alignment of blocks.
const NUMBER: usize = size_of::<u64>();

/// A kernel panic, in the guest's own words.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelPanic {
    /// The panic's own message.
    message: String,
    /// The last messages of the log, including the panic's.
    log: Vec<String>,
}

impl KernelPanic {
    /// Searches for a panic's messages in memory, which `read` reads starting at a physical
    /// address.
    pub(super) fn find(read: impl Fn(u64, &mut [u8]) -> usize) -> Option<Self> {
        let mut window = vec![0; WINDOW];
        let mut start = LOG_SEARCH_RANGE.start;
        while start < LOG_SEARCH_RANGE.end {
            let count = read(start, &mut window);
            let read = window.get(..count)?;
            if let Some(panic) = Self::within(read) {
                return Some(panic);
            }
            if count < WINDOW {
                return None;
            }
            start += (WINDOW - OVERLAP) as u64;
        }
        None
    }

    /// Applies `shown`, which gets the most characters that a message may have, to each message:
    /// for a panic that another process reports.
    pub(crate) fn map(self, shown: impl Fn(&str, usize) -> String) -> Self {
        let log = self.log.iter().take(LINES_BEFORE + 1 + LINES_AFTER);
        Self {
            message: shown(&self.message, MESSAGE_MAX),
            log: log.map(|line| shown(line, MESSAGE_MAX)).collect(),
        }
    }

    /// Returns the last messages of the kernel's log, the oldest first.
    #[must_use]
    pub fn log(&self) -> &[String] {
        &self.log
    }

    fn within(memory: &[u8]) -> Option<Self> {
        let begin: &[u8; NUMBER] = PANIC.first_chunk()?;
        // Of a length known at compile time, so that words are compared as numbers.
        let (words, _) = memory.as_chunks::<NUMBER>();
        let mut found = words.iter().enumerate().filter(|(_, word)| *word == begin);
        found.find_map(|(index, _)| Self::at(memory, index.checked_sub(1)? * NUMBER))
    }

    /// Reads the panic whose message is in the block at this offset.
    fn at(memory: &[u8], block: usize) -> Option<Self> {
        let text = memory.get(block + NUMBER..)?;
        // The format string itself is in the kernel's memory, too.
        let message = text
            .strip_prefix(PANIC)
            .filter(|rest| !rest.starts_with(b"%"))?;
        let number = number(memory, block)?;
        let mut log = Vec::new();
        let (mut next, mut after) = (block, number);
        for _ in 0..LINES_BEFORE {
            after = after.wrapping_sub(1);
            let nearest = (1..=(NUMBER + MESSAGE_MAX) / NUMBER)
                .filter_map(|words| next.checked_sub(words * NUMBER))
                .find(|at| self::number(memory, *at) == Some(after));
            let Some(at) = nearest else { break };
            log.push(shown(memory.get(at + NUMBER..next)?));
            next = at;
        }
        log.reverse();
        let (mut at, mut current) = (block, number);
        for _ in 0..=LINES_AFTER {
            current = current.wrapping_add(1);
            let text = at + NUMBER;
            let most = (text + MESSAGE_MAX).min(memory.len());
            let following = (text..most)
                .step_by(NUMBER)
                .find(|next| self::number(memory, *next) == Some(current));
            log.push(shown(memory.get(text..following.unwrap_or(most))?));
            match following {
                Some(next) => at = next,
                None => break,
            }
        }
        let end = message.len().min(MESSAGE_MAX);
        Some(Self {
            message: shown(message.get(..end)?),
            log,
        })
    }
}

/// Shows the panic's message and, if a fault of the kernel's own code led to it, which and where:
/// the message itself says then no more than `Fatal exception`.
impl fmt::Display for KernelPanic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        let before = |line: &&String| !line.as_bytes().starts_with(PANIC);
        let lines = || self.log.iter().take_while(before);
        // `[#1]` is the first of the numbered faults; some have a line of more detail before it.
        let fault = |line: &&String| line.starts_with("BUG: ") || line.contains(" [#1]");
        let Some(fault) = lines().find(fault) else {
            return Ok(());
        };
        write!(f, " ({fault}")?;
        if let Some(place) = lines().find(|line| line.starts_with("RIP: ")) {
            write!(f, ", {place}")?;
        }
        f.write_str(")")
    }
}

fn number(memory: &[u8], at: usize) -> Option<u64> {
    let bytes = memory.get(at..at.checked_add(NUMBER)?)?;
    Some(u64::from_le_bytes(bytes.try_into().ok()?))
}

/// Returns a message's text up to its end, without characters that a terminal would interpret.
fn shown(text: &[u8]) -> String {
    let text = text.split(|byte| *byte == 0).next().unwrap_or_default();
    let text = without_echo(text.trim_ascii_end());
    let text = String::from_utf8_lossy(text);
    let clean = |c: char| if c.is_control() { ' ' } else { c };
    text.trim_end().chars().map(clean).collect()
}

/// Removes the echo of a text's last two bytes. The kernel moves a message's text over its level
/// prefix, which is two bytes long, and so leaves the last two bytes after the text. The text's
/// length is stored elsewhere; so a message without a level whose end repeats itself loses two
/// bytes.
fn without_echo(text: &[u8]) -> &[u8] {
    match text.split_last_chunk::<2>() {
        Some((rest, echo)) if rest.ends_with(echo) => rest,
        _ => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A log with these messages, numbered from `first`, with other data before it.
    fn log(first: u64, messages: &[&str]) -> Vec<u8> {
        let mut memory = vec![0x5a; 4096];
        for (number, message) in (first..).zip(messages) {
            memory.extend(number.to_le_bytes());
            memory.extend(message.as_bytes());
            // The bytes that the kernel leaves there.
            memory.extend(&message.as_bytes()[message.len() - 2..]);
            memory.extend(b"\n\0");
            memory.resize(memory.len().next_multiple_of(NUMBER), 0x20);
        }
        memory.resize(WINDOW * 3, 0);
        memory
    }

    fn find(memory: &[u8], at: u64) -> Option<KernelPanic> {
        KernelPanic::find(|address, buffer| {
            let Some(offset) = address.checked_sub(LOG_SEARCH_RANGE.start) else {
                return 0;
            };
            let offset = usize::try_from(offset).unwrap();
            let mut bytes = vec![0; usize::try_from(at).unwrap()];
            bytes.extend_from_slice(memory);
            let rest = bytes.get(offset..).unwrap_or_default();
            let count = rest.len().min(buffer.len());
            buffer[..count].copy_from_slice(&rest[..count]);
            count
        })
    }

    const MESSAGES: [&str; 5] = [
        "eth0: up",
        "sysrq: Trigger a crash",
        "Kernel panic - not syncing: sysrq triggered crash",
        "CPU: 0 PID: 1 Comm: sh\u{1b}[2J",
        "Call Trace:",
    ];

    #[test]
    fn a_panics_messages_are_found_wherever_the_log_is() {
        for at in [0, 8, 4096, (WINDOW - 5000) as u64, WINDOW as u64] {
            let panic = find(&log(0xffff_fff0, &MESSAGES), at).expect("a panic");
            assert_eq!(panic.to_string(), "sysrq triggered crash", "{at}");
            let clean = "CPU: 0 PID: 1 Comm: sh [2J";
            let expected = [MESSAGES[0], MESSAGES[1], MESSAGES[2], clean, MESSAGES[4]];
            assert_eq!(panic.log(), expected, "{at}");
        }
    }

    #[test]
    fn a_panic_after_a_fault_names_it_and_its_place() {
        let page = "BUG: unable to handle page fault for address: ffffc900000d0000";
        let rip = "RIP: 0010:0xffffffff8110a0c4";
        let end = "Kernel panic - not syncing: Fatal exception in interrupt";
        let after = "Oops: unlucky: 0000 [#1] SMP";
        let told = |messages: &[&str]| find(&log(7, messages), 0).expect("a panic").to_string();
        let oops = "Oops: general protection fault: 0000 [#1] SMP NOPTI";
        assert_eq!(
            told(&[
                "up",
                page,
                "Oops: 0002 [#1] SMP",
                rip,
                "CS: 10",
                rip,
                end,
                after
            ]),
            format!("Fatal exception in interrupt ({page}, {rip})")
        );
        assert_eq!(
            told(&["up", oops, "CS: 10", end, after, rip]),
            format!("Fatal exception in interrupt ({oops})")
        );
        assert_eq!(
            told(&["up", rip, end, after]),
            "Fatal exception in interrupt"
        );
    }

    #[test]
    fn the_text_of_the_format_is_no_panic() {
        let memory = log(1, &["xx", "Kernel panic - not syncing: %s", "yy"]);
        assert_eq!(find(&memory, 0), None);
        assert_eq!(find(&log(1, &["all is well"]), 0), None);
        assert_eq!(find(&[], 0), None);
    }

    proptest::proptest! {
        #[test]
        fn whatever_the_guest_has_there_is_looked_at(
            before in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..100),
            after in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..3000),
        ) {
            let mut memory = vec![0; before.len().next_multiple_of(NUMBER) - before.len()];
            memory.extend(&before);
            memory.extend(PANIC);
            memory.extend(&after);
            if let Some(panic) = KernelPanic::within(&memory) {
                assert!(panic.log().iter().all(|line| line.len() <= MESSAGE_MAX * 3));
            }
        }
    }
}
