//! The common output of every measurement: criteria, a table on stdout, JSON, and a plot.

use std::fmt::{self, Display};
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde::Serialize;

use crate::plot::{Panel, Plot};

/// A figure and its upper or lower limit.
#[derive(Debug, Serialize)]
pub(crate) struct Criterion {
    pub(crate) what: &'static str,
    pub(crate) bound: Bound,
    pub(crate) limit: f64,
    pub(crate) value: f64,
    pub(crate) holds: bool,
}

/// On which side of its limit a figure holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Bound {
    AtMost,
    AtLeast,
}

impl Criterion {
    pub(crate) fn at_most(what: &'static str, limit: f64, value: f64) -> Self {
        Self {
            what,
            bound: Bound::AtMost,
            limit,
            value,
            holds: value <= limit,
        }
    }

    pub(crate) fn at_least(what: &'static str, limit: f64, value: f64) -> Self {
        Self {
            what,
            bound: Bound::AtLeast,
            limit,
            value,
            holds: value >= limit,
        }
    }
}

impl Display for Criterion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = if self.holds { "holds" } else { "DOES NOT HOLD" };
        let bound = match self.bound {
            Bound::AtMost => "at most",
            Bound::AtLeast => "at least",
        };
        let Self {
            what, value, limit, ..
        } = self;
        write!(f, "{what}: {value:.2}, {bound} {limit}: {verdict}")
    }
}

/// Formats a number of runs.
pub(crate) fn runs(count: usize) -> String {
    match count {
        1 => "1 run".to_owned(),
        _ => format!("{count} runs"),
    }
}

/// Converts a duration to milliseconds.
pub(crate) fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Writes a table with the figures of a plot: a column for each bar, and a line for each panel.
pub(crate) fn table(f: &mut fmt::Formatter<'_>, panels: &[Panel]) -> fmt::Result {
    write!(f, "{:34}", "")?;
    for bar in panels.iter().take(1).flat_map(|panel| &panel.bars) {
        write!(f, " {:>22}", bar.name)?;
    }
    writeln!(f)?;
    for panel in panels {
        write!(f, "{:34}", panel.title)?;
        for bar in &panel.bars {
            write!(f, " {:>22}", bar.spread)?;
        }
        writeln!(f)?;
    }
    Ok(())
}

/// Prints the table, and writes JSON to the file `json`. With `-` that goes to stdout and the table
/// to stderr.
pub(crate) fn print<R: Display + Serialize>(report: &R, json: Option<&Path>) -> Result<()> {
    if json == Some(Path::new("-")) {
        eprint!("{report}");
        println!("{}", serde_json::to_string_pretty(report)?);
        return Ok(());
    }
    print!("{report}");
    if let Some(path) = json {
        let text = serde_json::to_string_pretty(report)? + "\n";
        fs::write(path, text).with_context(|| format!("{} cannot be written", path.display()))?;
    }
    Ok(())
}

/// Writes a plot to the file `path`, if given.
pub(crate) fn draw(plot: &Plot, path: Option<&Path>) -> Result<()> {
    let Some(path) = path else {
        return Ok(());
    };
    fs::write(path, plot.to_string())
        .with_context(|| format!("{} cannot be written", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn criteria_hold_up_to_their_limit_and_say_on_which_side_it_is() {
        assert!(Criterion::at_most("a", 0.5, 0.5).holds);
        assert!(!Criterion::at_most("a", 0.5, 0.51).holds);
        assert!(Criterion::at_least("a", 2.5, 2.5).holds);
        let missed = Criterion::at_least("eight to one", 2.5, 1.125);
        let text = "eight to one: 1.12, at least 2.5: DOES NOT HOLD";
        assert_eq!(missed.to_string(), text);
        assert!(!Criterion::at_least("a", 1.0, f64::NAN).holds);
    }
}
