//! The figures of several runs as few.

use std::fmt::{self, Display};

use serde::Serialize;

/// The figures of several runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Spread {
    /// The lower of the two in the middle.
    pub(crate) median: f64,
    pub(crate) least: f64,
    pub(crate) most: f64,
}

impl Spread {
    /// Computes the spread of `values` in any order; 0 if there are none.
    pub(crate) fn of(values: impl Iterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        Self {
            median: percentile(&values, 50),
            least: values.first().copied().unwrap_or(0.0),
            most: values.last().copied().unwrap_or(0.0),
        }
    }
}

impl Display for Spread {
    /// The median, and the range in parentheses if there is one.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [median, least, most] = [self.median, self.least, self.most].map(figure);
        let text = match least == most {
            true => median,
            false => format!("{median} ({least}–{most})"),
        };
        f.pad(&text)
    }
}

/// Formats a figure with its significant digits.
fn figure(value: f64) -> String {
    match value.abs() < 1000.0 {
        true => format!("{value:.1}"),
        false => format!("{value:.0}"),
    }
}

/// Returns the value that `percent` of the sorted `values` do not exceed; 0 if there are none.
pub(crate) fn percentile(values: &[f64], percent: usize) -> f64 {
    let rank = (values.len() * percent).div_ceil(100).max(1);
    values.get(rank - 1).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_is_of_figures_that_occurred_and_shows_its_range_where_there_is_one() {
        let spread = Spread::of([30.0, 10.0, 2000.4, 20.0].into_iter());
        assert_eq!(
            [spread.least, spread.median, spread.most],
            [10.0, 20.0, 2000.4]
        );
        assert_eq!(spread.to_string(), "20.0 (10.0–2000)");
        assert_eq!(Spread::of([7.25].into_iter()).to_string(), "7.2");
        assert_eq!(Spread::of(std::iter::empty()).median, 0.0);
    }

    #[test]
    fn percentiles_are_values_that_occurred() {
        let values: Vec<f64> = (1..=20).map(f64::from).collect();
        assert_eq!(percentile(&values, 50), 10.0);
        assert_eq!(percentile(&values, 90), 18.0);
        assert_eq!(percentile(&[7.0], 90), 7.0);
        assert_eq!(percentile(&[], 50), 0.0);
    }
}
