//! The description of a metric. A recorder gets it, and a test compares it with the page of them.

pub(super) use metrics::Unit;

/// The kind of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A number that only rises while the process runs.
    Counter,
    /// A value that may rise and fall.
    Gauge,
    /// A distribution of many values, for example of durations.
    Histogram,
}

/// A metric: its name, kind, unit and labels, and why an operator needs it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Metric {
    /// The full name, for example `oncebox_published_total`.
    pub name: &'static str,
    /// Whether it is a counter, a gauge or a histogram.
    pub kind: Kind,
    /// The unit of its value: a count, or seconds.
    pub unit: Unit,
    /// The names of its labels, separated by commas; empty if it has none. A recorder is not told
    /// them, but the test of the alerts asks.
    #[cfg(test)]
    pub labels: &'static str,
    /// Why an operator needs it.
    pub about: &'static str,
}

pub(super) fn describe(metric: &Metric) {
    match metric.kind {
        Kind::Counter => metrics::describe_counter!(metric.name, metric.unit, metric.about),
        Kind::Gauge => metrics::describe_gauge!(metric.name, metric.unit, metric.about),
        Kind::Histogram => metrics::describe_histogram!(metric.name, metric.unit, metric.about),
    }
}
