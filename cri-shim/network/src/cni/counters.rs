//! Traffic counters of the interfaces of a pod.

use std::fs;
use std::path::Path;

use super::error::CniError;
use super::netns;
use crate::tap::is_tap_name;

/// The kernel's table of this thread's network namespace.
const TABLE: &str = "/proc/thread-self/net/dev";

/// Counters of one interface, as seen from the pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct InterfaceCounters {
    /// Name in the network namespace and in the guest.
    pub name: String,
    /// Traffic into the pod.
    pub received: Direction,
    /// Traffic out of the pod.
    pub sent: Direction,
}

/// One direction of an interface, since the pod has the interface.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Direction {
    /// Bytes of whole frames.
    pub bytes: u64,
    /// Frames.
    pub packets: u64,
    /// Frames with an error.
    pub errors: u64,
    /// Frames that there was no room for.
    pub dropped: u64,
}

/// Reads the counters of a namespace's interfaces, except for loopback and taps.
pub(super) fn read(path: &Path) -> Result<Vec<InterfaceCounters>, CniError> {
    netns::enter(path, || {
        let text = fs::read_to_string(TABLE).map_err(CniError::io("read", TABLE))?;
        Ok(parse(&text))
    })
}

/// Parses two lines of headings, then lines of `NAME: ` and sixteen figures: eight per direction.
fn parse(text: &str) -> Vec<InterfaceCounters> {
    let interfaces = text.lines().skip(2).filter_map(|line| {
        let (name, figures) = line.split_once(':')?;
        let figures = figures.split_ascii_whitespace();
        let figures: Vec<u64> = figures.map_while(|figure| figure.parse().ok()).collect();
        let direction = |at: usize| {
            let [bytes, packets, errors, dropped] = *figures.get(at..at + 4)? else {
                return None;
            };
            Some(Direction {
                bytes,
                packets,
                errors,
                dropped,
            })
        };
        Some(InterfaceCounters {
            name: name.trim().to_owned(),
            received: direction(0)?,
            sent: direction(8)?,
        })
    });
    let is_guests = |name: &str| name != "lo" && !is_tap_name(name);
    interfaces.filter(|i| is_guests(&i.name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_table_is_read_without_loopback_and_taps() {
        let text = "\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop
    lo:     100       1    0    0    0     0          0         0      100       1    0    0
  eth0: 1024 10 1 2 0 0 0 0 2048 20 3 4 0 0 0 0
podvisor0: 1 1 0 0 0 0 0 0 1 1 0 0 0 0 0 0
 odd
";
        let counters = parse(text);
        assert_eq!(counters.len(), 1);
        let [eth0] = &counters[..] else {
            panic!("{counters:?}");
        };
        assert_eq!(eth0.name, "eth0");
        let direction = |bytes, packets, errors, dropped| Direction {
            bytes,
            packets,
            errors,
            dropped,
        };
        assert_eq!(eth0.received, direction(1024, 10, 1, 2));
        assert_eq!(eth0.sent, direction(2048, 20, 3, 4));
        assert_eq!(parse(""), []);
    }
}
