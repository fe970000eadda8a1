//! Pure: no I/O, no clock.
//! The longest time that a setting may have.
//!
//! Guarantee: a time of at most [`LONGEST`] can be added to every instant of this process and of a
//! database. With a longer one the addition may panic, or each statement that writes it may fail.
//!
//! Not here: which settings are checked, and how the error reaches the user.

use std::time::Duration;

use crate::error::Invalid;

/// The longest time that a setting may have: 100 years.
pub(crate) const LONGEST: Duration = Duration::from_secs(100 * 365 * 86_400);

/// Refuses the first of these settings that is longer than [`LONGEST`].
pub(crate) fn check<const N: usize>(settings: [(&'static str, Duration); N]) -> Result<(), Invalid> {
    match settings.into_iter().find(|(_, time)| *time > LONGEST) {
        Some((name, _)) => Err(Invalid::new(format!("`{name}` must be at most 100 years"))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Shown by: refusing the longest time; checking the first setting only.
    #[test]
    fn a_setting_that_is_too_long_is_refused_by_its_name() {
        let second = Duration::from_secs(1);
        assert_eq!(check([("lease", LONGEST), ("pause", Duration::ZERO)]), Ok(()));
        let error = check([("lease", LONGEST), ("pause", LONGEST + second)]).expect_err("too long");
        assert_eq!(error.to_string(), "`pause` must be at most 100 years");
    }
}
