//! Hostile hosts, for the fuzz target.

use serde_json::{Value, json};

use crate::protocol::{Command, Fault, Handler, Session};

/// The longest request that is kept.
const MOST: usize = 512;

/// A guest that does nothing, and freezes and thaws.
#[derive(Default)]
struct Nothing {
    is_frozen: bool,
}

impl Handler for Nothing {
    fn is_frozen(&self) -> bool {
        self.is_frozen
    }

    fn handle(&mut self, command: Command) -> Result<Value, Fault> {
        match command {
            Command::Thaw => self.is_frozen = false,
            Command::FreezeStatus => {}
            _ if self.is_frozen => panic!("{command:?} while file systems are frozen"),
            Command::Freeze(_) => self.is_frozen = true,
            Command::GetUsers => return Err(Fault::new("nobody is there")),
            _ => {}
        }
        Ok(json!({}))
    }
}

/// Answers all that a host writes.
///
/// # Panics
/// If an answer is none of the protocol, or a frozen guest does more than it may.
pub fn run(data: &[u8]) {
    let (mut session, mut guest) = (Session::with_limit(MOST), Nothing::default());
    let mut rest = data;
    while !rest.is_empty() {
        let (count, answer) = session.take(rest, &mut guest);
        assert!(count > 0 && count <= rest.len(), "{count}");
        rest = rest.get(count..).unwrap_or_default();
        let Some(answer) = answer else { continue };
        let line = answer.strip_prefix(&[0xff]).unwrap_or(&answer);
        let line = line.strip_suffix(b"\n").expect("an answer is a line");
        assert!(!line.contains(&b'\n') && !line.contains(&0xff));
        let answer: Value = serde_json::from_slice(line).expect("an answer is JSON");
        let is_answer = answer["return"].is_null() != answer["error"]["class"].is_null();
        assert!(is_answer, "{answer}");
    }
}
