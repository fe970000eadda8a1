//! What a check of a database or a broker found, how serious it is, and what to do.

/// How serious a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// As it should be.
    Ok,
    /// It works, but a promise is weaker or a problem is near.
    Warning,
    /// Something waits, and no process continues it.
    Stuck,
    /// Nothing can be done now, but the condition ends by itself: programs wait.
    Waits,
    /// Breaks a promise: programs refuse to start.
    Refused,
}

/// One answer of a check: what was looked at, how it is, what to do.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Finding {
    /// What was looked at, for example `sequence cache`.
    pub name: String,
    /// How serious the finding is.
    pub severity: Severity,
    /// What was found, in words for the operator.
    pub detail: String,
    /// What to do, where something is to be done.
    pub remedy: Option<String>,
}

impl Finding {
    /// A finding without a problem.
    pub fn ok(name: impl Into<String>, detail: impl Into<String>) -> Self {
        Self { name: name.into(), severity: Severity::Ok, detail: detail.into(), remedy: None }
    }

    /// A finding of severity `Warning`, with a remedy.
    pub fn warning(name: impl Into<String>, detail: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name: name.into(), severity: Severity::Warning, detail: detail.into(), remedy: Some(remedy.into()) }
    }

    /// A finding of severity `Stuck`, with a remedy.
    pub fn stuck(name: impl Into<String>, detail: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name: name.into(), severity: Severity::Stuck, detail: detail.into(), remedy: Some(remedy.into()) }
    }

    /// A finding of severity `Waits`, with a remedy.
    pub(crate) fn waits(name: impl Into<String>, detail: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name: name.into(), severity: Severity::Waits, detail: detail.into(), remedy: Some(remedy.into()) }
    }

    /// A finding of severity `Refused`, with a remedy.
    pub fn refused(name: impl Into<String>, detail: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name: name.into(), severity: Severity::Refused, detail: detail.into(), remedy: Some(remedy.into()) }
    }
}
