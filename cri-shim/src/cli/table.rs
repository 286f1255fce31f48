//! Plain tables as docker and crictl print them: a heading in capitals, columns padded with spaces,
//! no lines.

use unicode_width::UnicodeWidthStr as _;

/// Spaces between two columns.
const GAP: usize = 3;

/// Rows of text under a heading.
#[derive(Debug)]
pub(super) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Creates an empty table with its heading.
    pub(super) fn new<'a>(heading: impl IntoIterator<Item = &'a str>) -> Self {
        Self {
            rows: vec![heading.into_iter().map(str::to_owned).collect()],
        }
    }

    /// Adds a row below the others, with as many cells as the heading has. Control characters are
    /// replaced by spaces: names come from registries.
    pub(super) fn row(&mut self, row: impl IntoIterator<Item = String>) {
        let clean = |text: String| text.replace(char::is_control, " ");
        self.rows.push(row.into_iter().map(clean).collect());
    }

    /// Returns the table as text, each row terminated by a newline, without trailing spaces.
    pub(super) fn render(&self) -> String {
        let columns = self.rows.first().map_or(0, Vec::len);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.width()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let mut text = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for (cell, width) in row.iter().zip(&widths) {
                line.push_str(cell);
                let padding = width + GAP - cell.width();
                line.extend(std::iter::repeat_n(' ', padding));
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_by_what_a_terminal_shows() {
        let mut table = Table::new(["NAME", "SIZE"]);
        table.row(["a".to_owned(), "1".to_owned()]);
        table.row(["grüße".to_owned(), "23".to_owned()]);
        table.row(["日本".to_owned(), "4".to_owned()]);
        table.row(["e\u{301}".to_owned(), "5".to_owned()]);
        let text = "NAME    SIZE\na       1\ngrüße   23\n日本    4\ne\u{301}       5\n";
        assert_eq!(table.render(), text);
    }

    #[test]
    fn a_row_stays_one_line() {
        let mut table = Table::new(["NAME"]);
        table.row(["a\n\x1b[31mb".to_owned()]);
        assert_eq!(table.render(), "NAME\na  [31mb\n");
    }
}
