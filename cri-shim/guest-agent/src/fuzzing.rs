//! Hostile agents, for the fuzz target.

use serde::de::IgnoredAny;

use crate::bounded::{List, Text};
use crate::client::read;
use crate::lines::{Item, Lines};
use crate::types::{RawCpu, RawFileSystem, RawInfo, RawInterface, RawOs, RawTimeZone, RawUser};
use crate::{files, program};

/// The longest line that is kept.
const MOST: usize = 512;

/// Reads all that an agent writes as the answer to each command.
///
/// # Panics
/// If more is kept than may be.
pub fn run(data: &[u8]) {
    let mut lines = Lines::of(MOST);
    let mut rest = data;
    while !rest.is_empty() {
        let (count, item) = lines.take(rest);
        assert!(count > 0 && count <= rest.len(), "{count}");
        rest = rest.get(count..).unwrap_or_default();
        let Some(Item::Line(line)) = item else {
            continue;
        };
        assert!(line.len() <= MOST, "a line of {} bytes", line.len());
        let _ = read::<IgnoredAny>("guest-ping", &line);
        let _ = read::<u64>("guest-fsfreeze-freeze", &line);
        let _ = read::<RawInfo>("guest-info", &line);
        let _ = read::<RawOs>("guest-get-osinfo", &line);
        let _ = read::<RawTimeZone>("guest-get-timezone", &line);
        let _ = read::<List<RawUser>>("guest-get-users", &line);
        let _ = read::<List<RawCpu>>("guest-get-vcpus", &line);
        let _ = read::<List<RawInterface>>("guest-network-get-interfaces", &line);
        let _ = read::<List<RawFileSystem>>("guest-get-fsinfo", &line);
        if let Ok(text) = read::<Text>("guest-fsfreeze-status", &line) {
            assert!(!text.0.contains(char::is_control), "{text:?}");
        }
        program::fuzz(&line);
        files::fuzz(&line);
    }
}
