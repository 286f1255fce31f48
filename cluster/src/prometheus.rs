//! Metrics in Prometheus' text format.

use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};

/// A metric: its name, and what it says. Names that end in `_total` are counters, others gauges.
pub(crate) type Metric = (&'static str, &'static str);

/// Samples by name, as `{labels} value`.
#[derive(Debug, Default)]
pub(crate) struct Samples(BTreeMap<&'static str, String>);

impl Samples {
    pub(crate) fn add(&mut self, name: &'static str, labels: &[(&str, &str)], value: impl Display) {
        let text = self.0.entry(name).or_default();
        text.push_str(name);
        for (index, (label, value)) in labels.iter().enumerate() {
            let opens = if index == 0 { '{' } else { ',' };
            let _ = write!(text, "{opens}{label}=\"");
            for letter in value.chars() {
                match letter {
                    '\\' => text.push_str("\\\\"),
                    '"' => text.push_str("\\\""),
                    '\n' => text.push_str("\\n"),
                    letter => text.push(letter),
                }
            }
            text.push('"');
        }
        if !labels.is_empty() {
            text.push('}');
        }
        let _ = writeln!(text, " {value}");
    }

    /// The text of those that have samples, in the order of the list.
    pub(crate) fn text(mut self, metrics: &[Metric]) -> String {
        let mut text = String::new();
        for (name, help) in metrics {
            if let Some(samples) = self.0.remove(name) {
                let kind = match name.ends_with("_total") {
                    true => "counter",
                    false => "gauge",
                };
                let _ = write!(
                    text,
                    "# HELP {name} {help}\n# TYPE {name} {kind}\n{samples}"
                );
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_counts_is_a_counter_and_what_has_no_samples_is_left_out() {
        let mut samples = Samples::default();
        samples.add("a_total", &[("b", "c\"d")], 1.5);
        let text = samples.text(&[("a_total", "Of a."), ("e", "Of e.")]);
        let expected = "# HELP a_total Of a.\n# TYPE a_total counter\na_total{b=\"c\\\"d\"} 1.5\n";
        assert_eq!(text, expected);
    }
}
