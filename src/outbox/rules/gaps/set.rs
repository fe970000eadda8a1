//! Pure: no I/O, no clock.
//! Sets of positions as ascending half-open ranges: the form of the gaps in a shard's row.
//!
//! Guarantees:
//!
//! * Ranges are ascending, disjoint, never empty and never adjacent, so equal sets are equal
//!   values.
//! * The text form is that of PostgreSQL's `int8multirange`, in both directions.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

/// The positions from `from` up to, but not including, `to`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Range {
    /// The first position of the range.
    pub from: i64,
    /// One past the last position of the range.
    pub to: i64,
}

impl Range {
    pub(crate) fn one(position: i64) -> Self {
        Self { from: position, to: position.saturating_add(1) }
    }

    pub(crate) fn is_empty(self) -> bool {
        self.from >= self.to
    }
}

/// A set of positions as ascending ranges. Its text is that of a multirange: `{[3,4),[5,6)}`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct GapSet {
    /// From the first position of each range to one past its last.
    ranges: BTreeMap<i64, i64>,
}

impl GapSet {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Adds all positions of a range. Positions that are already in the set stay.
    pub(crate) fn insert_range(&mut self, range: Range) {
        if range.is_empty() {
            return;
        }
        let (mut from, mut to) = (range.from, range.to);
        if let Some((&before, &end)) = self.ranges.range(..=from).next_back()
            && end >= from
        {
            (from, to) = (before, to.max(end));
        }
        while let Some((&next, &end)) = self.ranges.range(from..).next()
            && next <= to
        {
            to = to.max(end);
            self.ranges.remove(&next);
        }
        self.ranges.insert(from, to);
    }

    pub(crate) fn insert(&mut self, position: i64) {
        self.insert_range(Range::one(position));
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Range> + '_ {
        self.ranges.iter().map(|(&from, &to)| Range { from, to })
    }

    /// The highest position in the set; `None` if the set is empty.
    pub(crate) fn last(&self) -> Option<i64> {
        self.ranges.last_key_value().map(|(_, &to)| to - 1)
    }

    /// The part of the set at or below `scanned_to`.
    pub(crate) fn cut_at(&self, scanned_to: i64) -> Self {
        let end = scanned_to.saturating_add(1);
        self.iter().map(|range| Range { from: range.from, to: range.to.min(end) }).collect()
    }
}

impl Extend<Range> for GapSet {
    fn extend<T: IntoIterator<Item = Range>>(&mut self, ranges: T) {
        for range in ranges {
            self.insert_range(range);
        }
    }
}

impl FromIterator<Range> for GapSet {
    fn from_iter<T: IntoIterator<Item = Range>>(ranges: T) -> Self {
        let mut set = Self::new();
        set.extend(ranges);
        set
    }
}

impl fmt::Display for GapSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("{")?;
        for (index, range) in self.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(f, "{comma}[{},{})", range.from, range.to)?;
        }
        f.write_str("}")
    }
}

impl FromStr for GapSet {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse(text).ok_or_else(|| format!("not a multirange of positions: `{text}`"))
    }
}

/// Reads `{}` or `{[1,2),[5,9)}`, the only form in which PostgreSQL prints a bounded
/// `int8multirange`.
fn parse(text: &str) -> Option<GapSet> {
    let inner = text.strip_prefix('{')?.strip_suffix('}')?;
    if inner.is_empty() {
        return Some(GapSet::new());
    }
    let inner = inner.strip_prefix('[')?.strip_suffix(')')?;
    let mut set = GapSet::new();
    for part in inner.split("),[") {
        let (from, to) = part.split_once(',')?;
        let range = Range { from: from.parse().ok()?, to: to.parse().ok()? };
        if range.is_empty() {
            return None;
        }
        set.insert_range(range);
    }
    Some(set)
}
