//! Recovery points: the names at which an operation continues after a commit. There are two kinds,
//! because a phase before the first intent may end in ways that a later one may not.

/// A recovery point before the first intent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalPoint(pub &'static str);

/// A recovery point after an effect is settled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SettledPoint(pub &'static str);
