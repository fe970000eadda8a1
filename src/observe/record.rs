//! How metrics are named, and how a value is recorded: by the macros of `metrics`, or not at all
//! where that feature is off.

#[cfg(feature = "metrics")]
pub(super) use metrics::{counter, gauge, histogram};
#[cfg(not(feature = "metrics"))]
pub(super) use nothing::{counter, gauge, histogram};

/// The names of one subject as constants, and what is told of each to a recorder.
macro_rules! metrics_table {
    ($($konst:ident $name:literal $kind:ident $unit:ident $labels:literal $about:literal;)*) => {
        $(const $konst: &str = $name;)*

        #[cfg(feature = "metrics")]
        pub(super) const METRICS: &[$crate::observe::table::Metric] = {
            use $crate::observe::table::{Kind, Metric, Unit};
            &[$(Metric {
                name: $name,
                kind: Kind::$kind,
                unit: Unit::$unit,
                #[cfg(test)]
                labels: $labels,
                about: $about,
            },)*]
        };
    };
}
pub(super) use metrics_table;

#[cfg(not(feature = "metrics"))]
pub(super) mod nothing {
    /// Takes every value, and records none.
    pub(in crate::observe) struct Nothing;

    impl Nothing {
        pub(in crate::observe) fn increment(&self, _: u64) {}
        pub(in crate::observe) fn set(&self, _: f64) {}
        pub(in crate::observe) fn record(&self, _: f64) {}
    }

    /// Takes a name and labels as the macros of `metrics` do. The compiler reads them, and nothing
    /// runs: a label costs no allocation.
    macro_rules! nothing {
        ($name:expr $(, $label:expr => $value:expr)*) => {{
            let _ = || {
                let _ = $name;
                $(let _ = ($label, &$value);)*
            };
            $crate::observe::record::nothing::Nothing
        }};
    }
    pub(in crate::observe) use {nothing as counter, nothing as gauge, nothing as histogram};
}
