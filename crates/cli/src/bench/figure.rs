//! A figure: medians over rounds, its baseline from the same rounds, and the spread.

use serde::Serialize;

use crate::common::{Output, failed, tabled};
use oncebox::app::AppError;

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Figure {
    name: &'static str,
    /// Median over the rounds.
    value: f64,
    unit: &'static str,
    /// Median of the baseline, in the same unit.
    baseline: Option<f64>,
    /// Median of value / baseline, round by round.
    ratio: Option<f64>,
    rounds: usize,
    /// The smallest ratio where there is a baseline, else the smallest value.
    min: f64,
    max: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    against: Option<&'static str>,
    /// The target for the ratio where there is a baseline, else for the value. A target with a unit
    /// is always one for the value.
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<&'static str>,
}

impl Figure {
    /// A figure with a baseline. `pairs` are (value, baseline), one for each round.
    pub(super) fn beside(name: &'static str, unit: &'static str, against: &'static str, pairs: &[(f64, f64)]) -> Self {
        let ratios: Vec<f64> = pairs.iter().map(|(value, baseline)| value / baseline).collect();
        Self {
            value: median(pairs.iter().map(|(value, _)| *value)),
            baseline: Some(median(pairs.iter().map(|(_, baseline)| *baseline))),
            ratio: Some(median(ratios.iter().copied())),
            against: Some(against),
            ..Self::alone(name, unit, &ratios)
        }
    }

    pub(super) fn alone(name: &'static str, unit: &'static str, values: &[f64]) -> Self {
        Self {
            name,
            value: median(values.iter().copied()),
            unit,
            baseline: None,
            ratio: None,
            rounds: values.len(),
            min: values.iter().copied().fold(f64::INFINITY, f64::min),
            max: values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            against: None,
            target: None,
        }
    }

    #[must_use]
    pub(super) fn wanted(self, target: &'static str) -> Self {
        Self { target: Some(target), ..self }
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        odd if odd % 2 == 1 => values[odd / 2],
        even => f64::midpoint(values[even / 2 - 1], values[even / 2]),
    }
}

/// Prints the figures: one JSON object a line, or a table.
pub(super) fn print(figures: &[Figure], output: Output) -> Result<(), AppError> {
    if output == Output::Json {
        for figure in figures {
            data!("{}", serde_json::to_string(figure).map_err(failed)?);
        }
        return Ok(());
    }
    let header = ["figure", "value", "unit", "baseline", "ratio", "min", "max", "wanted", "against"];
    let optional = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), short);
    let rows = figures.iter().map(|figure| {
        [
            figure.name.to_owned(),
            short(figure.value),
            figure.unit.to_owned(),
            optional(figure.baseline),
            optional(figure.ratio),
            short(figure.min),
            short(figure.max),
            figure.target.unwrap_or("-").to_owned(),
            figure.against.unwrap_or("-").to_owned(),
        ]
    });
    tabled(header, rows)
}

fn short(value: f64) -> String {
    match value.abs() {
        large if large >= 1_000.0 => format!("{value:.0}"),
        middle if middle >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.3}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_is_the_median_of_its_rounds_and_its_ratio_the_median_of_ratios() {
        let figure = Figure::beside("f", "rows/s", "b", &[(10.0, 5.0), (30.0, 10.0), (20.0, 20.0)]);
        assert_eq!((figure.value, figure.baseline, figure.ratio), (20.0, Some(10.0), Some(2.0)));
        assert_eq!((figure.rounds, figure.min, figure.max), (3, 1.0, 3.0));
        let alone = Figure::alone("f", "ms", &[4.0, 2.0]);
        assert_eq!((alone.value, alone.min, alone.max, alone.ratio), (3.0, 2.0, 4.0, None));
    }
}
