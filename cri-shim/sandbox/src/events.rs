//! Events of containers, in a file that many processes append to.
//!
//! An [`Event`] is a line of JSON, shorter than a page and written by one call, so that lines of
//! several writers do not mix. A writer never waits and never fails: an event that cannot be
//! written is lost.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{self, Write as _};

use serde::{Deserialize, Serialize};
use tracing::debug;

/// Longest line in bytes.
pub(crate) const EVENT_MAX: usize = 4096;

/// The start of each line, by which the next event is found after a line that a full disk cut off.
const BEGIN: &str = "{\"timeNano\":";

/// The kind of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)] // Docker's words.
#[non_exhaustive]
pub enum EventAction {
    Create,
    Start,
    Die,
    Restart,
    Oom,
    Pause,
    Unpause,
    Exec,
    Stop,
    Kill,
    Destroy,
    #[serde(rename = "health_status")]
    HealthStatus,
}

impl fmt::Display for EventAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Create => "create",
            Self::Start => "start",
            Self::Die => "die",
            Self::Restart => "restart",
            Self::Oom => "oom",
            Self::Pause => "pause",
            Self::Unpause => "unpause",
            Self::Exec => "exec",
            Self::Stop => "stop",
            Self::Kill => "kill",
            Self::Destroy => "destroy",
            Self::HealthStatus => "health_status",
        })
    }
}

/// Something that happened to a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Nanoseconds since 1970-01-01 UTC.
    #[serde(rename = "timeNano")]
    pub time_ns: u64,
    /// What happened.
    pub action: EventAction,
    /// The container's id.
    pub id: String,
    /// More information, with docker's names.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub attributes: BTreeMap<String, String>,
}

impl Event {
    /// Creates an event with the present time.
    #[must_use]
    pub fn now(id: &str, action: EventAction) -> Self {
        Self {
            time_ns: super::agent::now_ns(),
            action,
            id: id.to_owned(),
            attributes: BTreeMap::new(),
        }
    }

    /// Returns the event with one more attribute.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl fmt::Display) -> Self {
        self.attributes.insert(name.to_owned(), value.to_string());
        self
    }

    /// Parses a line; `None` if it is invalid.
    #[must_use]
    pub fn parse(line: &str) -> Option<Self> {
        // Within a string, its quotation marks would have backslashes before them.
        let begin = line.rfind(BEGIN)?;
        serde_json::from_str(line.get(begin..)?).ok()
    }

    /// Formats the event as a line, without attributes if it were too long.
    fn to_line(&self) -> serde_json::Result<String> {
        let line = serde_json::to_string(self)?;
        if line.len() < EVENT_MAX {
            return Ok(line + "\n");
        }
        let bare = Self {
            attributes: BTreeMap::new(),
            ..self.clone()
        };
        Ok(serde_json::to_string(&bare)? + "\n")
    }
}

/// A file of events, opened for appending.
#[derive(Debug)]
pub struct EventLog(File);

impl EventLog {
    /// Uses a file that was opened for appending.
    #[must_use]
    pub fn new(file: File) -> Self {
        Self(file)
    }

    /// Appends an event.
    pub fn append(&self, event: &Event) {
        let written = event
            .to_line()
            .map_err(io::Error::from)
            .and_then(|line| (&self.0).write_all(line.as_bytes()));
        if let Err(error) = written {
            debug!(%error, action = %event.action, "an event is lost");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event() -> Event {
        Event::now("c", EventAction::Die).with("exitCode", 3)
    }

    #[test]
    fn an_event_is_read_back_also_after_a_torn_line() {
        let line = event().to_line().unwrap();
        assert!(line.starts_with(BEGIN), "{line}");
        assert_eq!(Event::parse(&line), Some(event_of(&line)));
        let torn = format!("{}{line}", &line[..line.len() / 2]);
        assert_eq!(Event::parse(&torn), Some(event_of(&line)));
        for bad in ["", "{}", "{\"timeNano\":", "{\"timeNano\":1}"] {
            assert_eq!(Event::parse(bad), None, "{bad}");
        }
    }

    fn event_of(line: &str) -> Event {
        serde_json::from_str(line).unwrap()
    }

    #[test]
    fn a_name_that_looks_like_an_event_is_a_name() {
        let event = event().with("name", "{\"timeNano\":1,\"action\":\"die\",\"id\":\"x\"}");
        assert_eq!(Event::parse(&event.to_line().unwrap()), Some(event));
    }

    #[test]
    fn no_line_is_longer_than_a_page() {
        let long = event().with("label", "x".repeat(10_000));
        let line = long.to_line().unwrap();
        assert!(line.len() <= EVENT_MAX);
        assert!(Event::parse(&line).unwrap().attributes.is_empty());
    }

    #[test]
    fn lines_of_many_writers_do_not_mix() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = || EventLog::new(File::options().append(true).open(file.path()).unwrap());
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let log = open();
                    (0..200).for_each(|_| log.append(&event()));
                });
            }
        });
        let text = std::fs::read_to_string(file.path()).unwrap();
        assert_eq!(text.lines().filter_map(Event::parse).count(), 1600);
    }
}
