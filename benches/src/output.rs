//! What every measurement ends with: criteria, a table on stdout, and JSON.

use std::fmt::{self, Display};
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde::Serialize;

/// A figure and what it may be at most.
#[derive(Debug, Serialize)]
pub(crate) struct Criterion {
    pub(crate) what: &'static str,
    pub(crate) limit: f64,
    pub(crate) value: f64,
    pub(crate) holds: bool,
}

impl Criterion {
    pub(crate) fn at_most(what: &'static str, limit: f64, value: f64) -> Self {
        Self {
            what,
            limit,
            value,
            holds: value <= limit,
        }
    }
}

impl Display for Criterion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = if self.holds { "holds" } else { "DOES NOT HOLD" };
        let Self {
            what, value, limit, ..
        } = self;
        write!(f, "{what}: {value:.2}, at most {limit}: {verdict}")
    }
}

/// In milliseconds.
pub(crate) fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// The value that `percent` of the sorted `values` do not exceed; 0 of none.
pub(crate) fn percentile(values: &[f64], percent: usize) -> f64 {
    let rank = (values.len() * percent).div_ceil(100).max(1);
    values.get(rank - 1).copied().unwrap_or(0.0)
}

/// Prints the table, and writes JSON to the file `json`. With `-` that goes to stdout and the table to stderr.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_occurred() {
        let values: Vec<f64> = (1..=20).map(f64::from).collect();
        assert_eq!(percentile(&values, 50), 10.0);
        assert_eq!(percentile(&values, 90), 18.0);
        assert_eq!(percentile(&[7.0], 90), 7.0);
        assert_eq!(percentile(&[], 50), 0.0);
    }
}
