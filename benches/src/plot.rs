//! Bar charts as SVG: medians as bars, the least and the most as whiskers, one panel per measure.
//!
//! The input is a [`Plot`] and the output is text, the same for the same figures. Nothing here
//! knows what was measured, or where the text is written.

use std::fmt::{self, Display, Write as _};

use crate::spread::Spread;

/// Several panels below a title.
#[derive(Debug)]
pub(crate) struct Plot {
    pub(crate) title: String,
    /// The number of panels next to each other.
    pub(crate) columns: usize,
    pub(crate) panels: Vec<Panel>,
}

/// One measure of everything that was measured. Its bars start at 0 and share a scale.
#[derive(Debug)]
pub(crate) struct Panel {
    pub(crate) title: String,
    pub(crate) better: Better,
    pub(crate) bars: Vec<Bar>,
}

/// Which of two figures is the better one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Better {
    Less,
    More,
}

#[derive(Debug)]
pub(crate) struct Bar {
    pub(crate) name: &'static str,
    pub(crate) spread: Spread,
}

/// The colors of bars, in their order. The first two and the next two belong together.
const COLORS: [&str; 4] = ["#1f5f99", "#6aaedb", "#a8581c", "#e3a869"];

/// Sizes in px. Viewers have different fonts, so [`CHARACTER`] is that of a wide one.
const TITLE: f64 = 16.0;
const TEXT: f64 = 12.0;
/// Width of a character, relative to the font size.
const CHARACTER: f64 = 0.66;
/// Length of the longest bar.
const BAR: f64 = 170.0;
/// Distance from one bar to the next.
const STEP: f64 = 22.0;
const THICKNESS: f64 = 14.0;
/// Half of a whisker's cap.
const CAP: f64 = 4.0;
const GAP: f64 = 8.0;
const MARGIN: f64 = 20.0;
/// Height of a panel's title and of the line that says what is better.
const HEAD: f64 = 40.0;

impl Display for Plot {
    /// Writes the SVG.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.columns.clamp(1, self.panels.len().max(1));
        let rows = self.panels.len().div_ceil(columns);
        let names = self.widest(|bar| width(bar.name, TEXT));
        let values = self.widest(|bar| width(&bar.spread.to_string(), TEXT));
        let titles = self.panels.iter().map(|panel| width(&panel.title, TEXT));
        let panel_width = titles.fold(names + GAP + BAR + GAP + values, f64::max);
        let bars = self.panels.iter().map(|panel| panel.bars.len()).max();
        let panel_height = HEAD + STEP * bars.unwrap_or(0) as f64;
        let top = MARGIN + TITLE + MARGIN;
        let across = columns as f64 * (panel_width + MARGIN) + MARGIN;
        let across = across.max(width(&self.title, TITLE) + 2.0 * MARGIN);
        let down = top + rows as f64 * (panel_height + MARGIN);

        write!(
            f,
            r#"<svg xmlns="http://www.w3.org/2000/svg" role="img" font-family="sans-serif""#
        )?;
        write!(
            f,
            r#" font-size="{TEXT}" width="{across:.0}" height="{down:.0}""#
        )?;
        writeln!(f, r#" viewBox="0 0 {across:.0} {down:.0}">"#)?;
        let title = Escaped(&self.title);
        writeln!(f, "<title>{title}</title>")?;
        writeln!(f, r##"<rect width="100%" height="100%" fill="#ffffff"/>"##)?;
        let baseline = MARGIN + TITLE;
        write!(
            f,
            r#"<text x="{MARGIN}" y="{baseline}" font-size="{TITLE}""#
        )?;
        writeln!(f, r#" font-weight="bold">{title}</text>"#)?;
        for (index, panel) in self.panels.iter().enumerate() {
            let x = MARGIN + (index % columns) as f64 * (panel_width + MARGIN);
            let y = top + (index / columns) as f64 * (panel_height + MARGIN);
            writeln!(f, r#"<g transform="translate({x:.1} {y:.1})">"#)?;
            panel.write(f, names)?;
            writeln!(f, "</g>")?;
        }
        writeln!(f, "</svg>")
    }
}

impl Plot {
    fn widest(&self, of: impl Fn(&Bar) -> f64) -> f64 {
        let bars = self.panels.iter().flat_map(|panel| &panel.bars);
        bars.map(of).fold(0.0, f64::max)
    }
}

impl Panel {
    /// The bars start after names of the width `names`.
    fn write(&self, f: &mut fmt::Formatter<'_>, names: f64) -> fmt::Result {
        let better = match self.better {
            Better::Less => "less is better",
            Better::More => "more is better",
        };
        let title = Escaped(&self.title);
        writeln!(
            f,
            r#"<text x="0" y="{TEXT}" font-weight="bold">{title}</text>"#
        )?;
        let below = TEXT + 16.0;
        writeln!(
            f,
            r##"<text x="0" y="{below}" fill="#555555">{better}</text>"##
        )?;
        let left = names + GAP;
        let longest = self.bars.iter().map(|bar| bar.spread.most);
        let longest = longest.map(positive).fold(0.0, f64::max);
        // A figure that is not finite or below 0 has no bar.
        let at = |value: f64| match longest > 0.0 {
            true => left + BAR * positive(value) / longest,
            false => left,
        };
        for (index, bar) in self.bars.iter().enumerate() {
            let top = HEAD + STEP * index as f64;
            bar.write(f, left, top, COLORS[index % COLORS.len()], at)?;
        }
        let bottom = HEAD + STEP * self.bars.len() as f64;
        writeln!(
            f,
            r##"<path d="M{left:.1} {HEAD}V{bottom:.1}" stroke="#333333" fill="none"/>"##
        )
    }
}

impl Bar {
    fn write(
        &self,
        f: &mut fmt::Formatter<'_>,
        left: f64,
        top: f64,
        color: &str,
        at: impl Fn(f64) -> f64,
    ) -> fmt::Result {
        let Spread {
            median,
            least,
            most,
        } = self.spread;
        let middle = top + STEP / 2.0;
        let baseline = middle + TEXT * 0.35;
        let before = left - GAP;
        let name = Escaped(self.name);
        writeln!(
            f,
            r#"<text x="{before:.1}" y="{baseline:.1}" text-anchor="end">{name}</text>"#
        )?;
        let upper = middle - THICKNESS / 2.0;
        let length = at(median) - left;
        write!(
            f,
            r#"<rect x="{left:.1}" y="{upper:.1}" width="{length:.1}""#
        )?;
        writeln!(f, r#" height="{THICKNESS}" fill="{color}"/>"#)?;
        if least < most {
            let [from, to] = [at(least), at(most)];
            let [above, below] = [middle - CAP, middle + CAP];
            write!(f, r#"<path d="M{from:.1} {middle:.1}H{to:.1}"#)?;
            for end in [from, to] {
                write!(f, "M{end:.1} {above:.1}V{below:.1}")?;
            }
            writeln!(f, r##"" stroke="#111111" fill="none"/>"##)?;
        }
        let behind = at(most) + GAP;
        let text = self.spread.to_string();
        let value = Escaped(&text);
        writeln!(
            f,
            r#"<text x="{behind:.1}" y="{baseline:.1}">{value}</text>"#
        )
    }
}

/// Returns `value`, or 0 if it has no valid length.
fn positive(value: f64) -> f64 {
    match value.is_finite() {
        true => value.max(0.0),
        false => 0.0,
    }
}

/// Returns the approximate width of a text.
fn width(text: &str, size: f64) -> f64 {
    text.chars().count() as f64 * size * CHARACTER
}

/// Text escaped for XML, in elements and in attributes.
struct Escaped<'a>(&'a str);

impl Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for character in self.0.chars() {
            match character {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                '\'' => f.write_str("&apos;")?,
                // XML 1.0 does not allow them, not even as references.
                other if other.is_control() => f.write_char(char::REPLACEMENT_CHARACTER)?,
                other => f.write_char(other)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bar(name: &'static str, [least, median, most]: [f64; 3]) -> Bar {
        Bar {
            name,
            spread: Spread {
                median,
                least,
                most,
            },
        }
    }

    fn plot(panels: Vec<Vec<Bar>>) -> Plot {
        let panels = panels.into_iter().map(|bars| Panel {
            title: "reads, µs".to_owned(),
            better: Better::Less,
            bars,
        });
        Plot {
            title: "a <disk> & \"more\"".to_owned(),
            columns: 2,
            panels: panels.collect(),
        }
    }

    /// Returns the values of the attribute `name` in elements that start with `element`.
    fn attributes(svg: &str, element: &str, name: &str) -> Vec<f64> {
        let lines = svg.lines().filter(|line| line.starts_with(element));
        let start = format!(" {name}=\"");
        lines
            .filter_map(|line| line.split_once(&start)?.1.split('"').next()?.parse().ok())
            .collect()
    }

    #[test]
    fn bars_are_as_long_as_their_medians_and_whiskers_reach_from_least_to_most() {
        let bars = vec![
            bar("one", [40.0, 50.0, 100.0]),
            bar("two", [25.0, 25.0, 25.0]),
        ];
        let svg = plot(vec![bars]).to_string();
        assert_eq!(attributes(&svg, "<rect x", "width"), [BAR / 2.0, BAR / 4.0]);
        // A single figure has no range.
        assert_eq!(svg.matches("stroke=\"#111111\"").count(), 1);
        let left = attributes(&svg, "<rect x", "x")[0];
        let (from, to) = (left + 0.4 * BAR, left + BAR);
        assert!(svg.contains(&format!("d=\"M{from:.1} 51.0H{to:.1}M")));
        assert!(svg.contains(">50.0 (40.0–100.0)</text>"));
        assert!(svg.contains(">25.0</text>"));
    }

    #[test]
    fn text_is_escaped() {
        let svg = plot(vec![vec![bar("a'\u{0}<b>", [1.0; 3])]]).to_string();
        assert!(svg.contains("<title>a &lt;disk&gt; &amp; &quot;more&quot;</title>"));
        assert!(svg.contains(">a&apos;\u{fffd}&lt;b&gt;</text>"));
    }

    #[test]
    fn every_panel_has_its_place_and_nothing_is_outside_the_picture() {
        let name = "a monitor with a name of some length";
        let bars = || vec![bar(name, [123_456.7, 123_456.7, 223_456.7])];
        let svg = plot((0..3).map(|_| bars()).collect()).to_string();
        let across = attributes(&svg, "<svg", "width")[0];
        let down = attributes(&svg, "<svg", "height")[0];
        let places: Vec<Vec<f64>> = svg
            .lines()
            .filter_map(|line| {
                line.strip_prefix("<g transform=\"translate(")?
                    .split_once(')')
            })
            .map(|(place, _)| place.split(' ').filter_map(|n| n.parse().ok()).collect())
            .collect();
        assert_eq!(places.len(), 3);
        assert!(places[0][0] < places[1][0] && places[0][1] == places[1][1]);
        assert!(places[0][0] == places[2][0] && places[0][1] < places[2][1]);
        let value = attributes(&svg, "<text", "x")
            .into_iter()
            .fold(0.0, f64::max);
        let text = width(&bars()[0].spread.to_string(), TEXT);
        assert!(places[1][0] + value + text <= across);
        assert!(places[2][1] + HEAD + STEP <= down);
        let before = attributes(&svg, "<rect x", "x")[0] - GAP;
        assert!(before >= width(name, TEXT) - 0.1);
    }

    #[test]
    fn what_has_no_length_has_no_bar() {
        let bars = vec![
            bar("none", [0.0; 3]),
            bar("unknown", [f64::NAN; 3]),
            bar("endless", [f64::INFINITY; 3]),
            bar("below", [-1.0; 3]),
        ];
        let svg = plot(vec![bars]).to_string();
        assert_eq!(attributes(&svg, "<rect x", "width"), [0.0; 4]);
        assert_eq!(plot(Vec::new()).to_string().matches("<g ").count(), 0);
    }

    #[test]
    fn the_same_figures_give_the_same_text() {
        let make = || plot(vec![vec![bar("one", [1.0, 2.0, 3.0])]]).to_string();
        assert_eq!(make(), make());
        assert!(make().starts_with("<svg ") && make().ends_with("</svg>\n"));
    }
}
