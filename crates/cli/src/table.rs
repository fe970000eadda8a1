//! How a table is laid out. Pure: no I/O, no clock.
//!
//! Promise: no word is broken, so ids can be copied. A column that is empty in every row is left
//! out. Where a table does not fit the terminal, its rows are printed as blocks of lines.

use comfy_table::{ColumnConstraint, ContentArrangement, Table, Width};

/// One rule, below the header.
const STYLE: &str = "     ══            ";
/// The longest rule where the width of the reader is not known.
const RULE_MAX: usize = 100;
/// On a terminal narrower than this no cell is wrapped: such a table is a block of lines for
/// each row.
const WRAPPED_FROM: usize = 100;
/// A column that wraps its texts is at least as wide as this.
const TEXT_MIN: usize = 30;
/// The space beside the text of a cell, left and right.
const PADDING: usize = 2;

/// The table as text. `width` is that of the terminal; none where every row is to be one line.
pub(super) fn laid_out(header: &[&str], rows: &[Vec<String>], width: Option<usize>) -> String {
    let is_shown = |column: &usize| rows.is_empty() || rows.iter().any(|row| !row[*column].is_empty());
    let shown: Vec<usize> = (0..header.len()).filter(is_shown).collect();
    let mut table = Table::new();
    table.load_preset(STYLE).set_header(shown.iter().map(|&column| header[column]));
    table.add_rows(rows.iter().map(|row| shown.iter().map(|&column| &row[column])));
    let widths: Vec<usize> = table.column_max_content_widths().into_iter().map(usize::from).collect();
    let least: Vec<usize> = shown.iter().zip(&widths).map(|(&column, &widest)| least(rows, column, widest)).collect();
    // With a column between each two.
    let all = |columns: &[usize]| columns.iter().map(|column| column + PADDING + 1).sum::<usize>().saturating_sub(1);
    match width {
        Some(width) if all(&widths) > width => {
            if width < WRAPPED_FROM || all(&least) > width {
                return blocks(header, rows);
            }
            table.set_content_arrangement(ContentArrangement::Dynamic).set_width(narrow(width));
            for (column, least) in table.column_iter_mut().zip(least) {
                column.set_constraint(ColumnConstraint::LowerBoundary(Width::Fixed(narrow(least + PADDING))));
            }
        }
        _ => {}
    }
    let most = width.unwrap_or(RULE_MAX);
    // A cell begins with a space.
    let line = |line: String| match line.starts_with('═') {
        true => line.chars().take(most).collect(),
        false => line.trim_end().to_owned(),
    };
    table.lines().map(line).collect::<Vec<_>>().join("\n")
}

/// The least width of a column: all of it where it is narrow, otherwise its longest word.
fn least(rows: &[Vec<String>], column: usize, widest: usize) -> usize {
    let words = rows.iter().flat_map(|row| row[column].split_whitespace());
    let longest = words.map(|word| word.chars().count()).max().unwrap_or_default();
    widest.min(longest.max(TEXT_MIN))
}

fn narrow(width: usize) -> u16 {
    u16::try_from(width).unwrap_or(u16::MAX)
}

/// A block of lines for each row: what is empty is left out, and the terminal wraps what is long.
fn blocks(header: &[&str], rows: &[Vec<String>]) -> String {
    let width = header.iter().map(|name| name.len()).max().unwrap_or_default() + PADDING;
    let line = |(name, cell): (&&str, &String)| match name.is_empty() {
        true => cell.clone(),
        false => format!("{name:<width$}{cell}"),
    };
    let block = |row: &Vec<String>| {
        let cells = header.iter().zip(row).filter(|(_, cell)| !cell.is_empty());
        cells.map(line).collect::<Vec<_>>().join("\n")
    };
    rows.iter().map(block).collect::<Vec<_>>().join("\n\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: [&str; 5] = ["number", "id", "sent as", "error", "to do"];

    fn row(number: &str, error: &str) -> Vec<String> {
        [number, "01990000-0000-7000-8000-000000000001", "", error, "mend what the error names, then redrive it"]
            .map(str::to_owned)
            .into()
    }

    fn widest(text: &str) -> usize {
        text.lines().map(|line| line.chars().count()).max().expect("it has a line")
    }

    /// Shown by: the width of the terminal left out; the least width of a column left out.
    #[test]
    fn a_table_fits_its_terminal_breaks_no_word_and_leaves_empty_columns_out() {
        let long = "the payload at `/amountMinor`: nothing stands there, ".repeat(3);
        let rows = [row("o1", long.trim_end()), row("o2", "short")];
        for width in [60, 99, 100, 112, 113, 120, 150, 200, 400] {
            let table = laid_out(&HEADER, &rows, Some(width));
            for (column, cells) in rows.iter().enumerate() {
                for word in cells.iter().flat_map(|cell| cell.split_whitespace()) {
                    assert!(table.contains(word), "{width}: {word} of {column} in\n{table}");
                }
            }
            assert!(!table.contains("sent as"), "{table}");
            let is_table = table.contains('═');
            assert_eq!(is_table, width >= 113, "{width}:\n{table}");
            assert!(!is_table || widest(&table) <= width, "{width}:\n{table}");
            assert!(table.lines().all(|line| line == line.trim_end()), "{table}");
        }
        let fits = laid_out(&["consumer", "dead"], &[vec!["ledger".to_owned(), "3".to_owned()]], Some(40));
        assert_eq!(fits, " consumer   dead\n═════════════════\n ledger     3");
    }

    /// Shown by: a rule as long as the longest row.
    #[test]
    fn without_a_terminal_a_row_is_one_line_and_the_rule_has_an_end() {
        let table = laid_out(&HEADER, &[row("o1", &"a long error ".repeat(40))], None);
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!((lines.len(), lines[1].chars().count()), (3, RULE_MAX), "{table}");
        assert_eq!(laid_out(&["number", "id"], &[], None).lines().next(), Some(" number   id"));
    }
}
