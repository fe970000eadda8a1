//! The metrics and spans of the operation engine (M103 to M105).
//!
//! Promise: a key is shown only by its hash, and a tenant never. The label `operation` is a
//! name that the author of an operation chose. Not here: the decisions (`operation::rules`).

use std::time::Duration;

use super::record::{counter, gauge, metrics_table};

metrics_table! {
    IDEMPOTENCY_OPERATION "oncebox_idempotency_operation_info" Gauge Count "operation,mode" "1 for each protected operation, with its mode: same_tx, phased, bridged, edge; joined to the others by `operation`";
    IDEMPOTENCY_CLAIM "oncebox_idempotency_claim_count" Counter Count "operation" "claims: requests that began to execute, as the first of their key, or because the key was free again or taken over";
    IDEMPOTENCY_REPLAY "oncebox_idempotency_replay_count" Counter Count "operation,outcome" "requests that were answered with the outcome of an earlier one, or with what is left of it";
    IDEMPOTENCY_CONFLICT "oncebox_idempotency_conflict_different_request_count" Counter Count "operation" "the alert: keys that were used again with another command: a client makes keys wrongly";
    IDEMPOTENCY_PRINCIPAL "oncebox_idempotency_principal_mismatch_count" Counter Count "operation" "keys that were used by another principal of the tenant";
    IDEMPOTENCY_IN_PROGRESS "oncebox_idempotency_in_progress_count" Counter Count "operation" "requests that were answered while the first of their key ran, also that one itself after its time limit";
    IDEMPOTENCY_IN_PROGRESS_AGE "oncebox_idempotency_in_progress_age_max" Gauge Seconds "" "the alert: the age of the oldest operation without an outcome, of this process or committed";
    IDEMPOTENCY_EXPIRED "oncebox_idempotency_expired_retry_count" Counter Count "operation,then" "the alert: requests under a key whose time was over: the lifetime is shorter than clients retry";
    IDEMPOTENCY_UNKNOWN "oncebox_idempotency_unknown_state_count" Gauge Count "" "the alert: operations of which nobody knows whether they happened";
    IDEMPOTENCY_TAKEOVER "oncebox_idempotency_takeover_count" Counter Count "operation,kind" "claims that were taken over from a process that is gone, or run again; kind `recovery`: phased operations that a worker or a request took up";
    IDEMPOTENCY_RECOVERY "oncebox_idempotency_recovery_count" Counter Count "operation" "requests that met an operation whose outcome is being found out, or needs an operator";
    IDEMPOTENCY_REJECTED "oncebox_idempotency_rejected_count" Counter Count "operation,code" "requests that were refused with this code of the engine";
    IDEMPOTENCY_STORE_ERROR "oncebox_idempotency_store_error_count" Counter Count "operation,stage" "times that the store did not answer, or gave what cannot be read, by stage";
    IDEMPOTENCY_COMMIT_UNKNOWN "oncebox_idempotency_commit_unknown_count" Counter Count "operation" "commits that were not answered, because the connection was lost: the request gets 503, or the driver of a phased operation looks for the outcome";
    IDEMPOTENCY_ENDED "oncebox_idempotency_transaction_ended_count" Counter Count "operation" "the alert: handlers that ended the transaction of their operation";
    IDEMPOTENCY_CONTRADICTION "oncebox_idempotency_evidence_conflict_count" Counter Count "operation" "the alert: times that evidence was found to contradict itself or a decision; see `oncebox operations list --conflicts`";
    IDEMPOTENCY_HEARTBEAT_LOST "oncebox_idempotency_heartbeat_lost_count" Counter Count "operation" "leases lost while their handler ran";
    IDEMPOTENCY_LOCK_TIMEOUT "oncebox_idempotency_lock_timeout_count" Counter Count "operation" "the alert: requests that were refused because their key stayed locked: by an open transaction of another process, or for as long as the route waits";
    IDEMPOTENCY_PURGED "oncebox_idempotency_purged_count" Counter Count "kind" "what was forgotten at the end of its time: `bodies`, and `keys`, each with its operation, intents and evidence";
}

/// An event of the engine that is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Noted {
    /// The request claims the key and executes.
    Acquired,
    /// The outcome of an earlier request is answered, or what is left of it: `completed`,
    /// `failure`, `reference`, `reconstructed`, `tombstone`.
    Replayed(&'static str),
    /// The first request under the key still runs.
    InProgress,
    /// The key was used with another command.
    Mismatch,
    /// The key was used by another principal.
    PrincipalMismatch,
    /// The record has expired: `executed`, `rejected`.
    Expired(&'static str),
    /// A claim of another run is taken over: `bridged`, `repeatable`, `reclaim`.
    TakenOver(&'static str),
    /// The outcome is being found out, or only an operator can find it out.
    Recovering,
    /// A worker or request takes up a phased operation that no process drove.
    TakenUp,
    /// The request was refused with this code.
    Rejected(&'static str),
    /// The store did not answer, had no connection to spare (`admit`), or gave what cannot be read,
    /// at this stage: `admit`, `find`, `claim`, `execute`, `complete`, `commit`, `recover`,
    /// `replay`.
    StoreError(&'static str),
    /// The outcome of a commit is not known.
    CommitUnknown,
    /// A handler ended the transaction of its operation: an alarm.
    TransactionEnded,
    /// The lease was lost while the handler ran.
    HeartbeatLost,
    /// The request was refused because its key stayed locked.
    LockTimeout,
    /// The evidence of a provider contradicts itself, or contradicts a decision (O8): an alarm.
    Contradiction,
}

/// Counts an event. Some events also get a span or a log line.
pub(crate) fn noted(operation: &str, key: &str, noted: Noted) {
    let counted = |name: &'static str| counter!(name, "operation" => operation.to_owned()).increment(1);
    let labelled = |name: &'static str, label: &'static str, value: &'static str| {
        counter!(name, "operation" => operation.to_owned(), label => value).increment(1);
    };
    match noted {
        Noted::Acquired => {
            counted(IDEMPOTENCY_CLAIM);
            tracing::info_span!("idempotency.acquire", operation, key).in_scope(|| tracing::debug!("claimed"));
        }
        Noted::Replayed(outcome) => {
            labelled(IDEMPOTENCY_REPLAY, "outcome", outcome);
            tracing::info_span!("idempotency.replay", operation, key).in_scope(|| tracing::info!(outcome, "replayed"));
        }
        Noted::InProgress => {
            counted(IDEMPOTENCY_IN_PROGRESS);
            tracing::info_span!("idempotency.in_progress", operation, key).in_scope(|| tracing::debug!("in progress"));
        }
        Noted::Mismatch | Noted::PrincipalMismatch => {
            let other = noted == Noted::PrincipalMismatch;
            counted(if other { IDEMPOTENCY_PRINCIPAL } else { IDEMPOTENCY_CONFLICT });
            tracing::info_span!("idempotency.mismatch", operation, key).in_scope(|| match other {
                true => tracing::warn!(operation, key, principal = other, "the key was used by another principal"),
                false => tracing::warn!(operation, key, principal = other, "the key was used with a different request"),
            });
        }
        Noted::Expired(then) => labelled(IDEMPOTENCY_EXPIRED, "then", then),
        Noted::TakenOver(kind) => {
            labelled(IDEMPOTENCY_TAKEOVER, "kind", kind);
            tracing::info_span!("idempotency.recovery", operation, key)
                .in_scope(|| tracing::warn!(operation, key, kind, "taken over"));
        }
        Noted::Recovering => {
            counted(IDEMPOTENCY_RECOVERY);
            tracing::info_span!("idempotency.recovery", operation, key)
                .in_scope(|| tracing::info!("outcome not known yet"));
        }
        Noted::TakenUp => {
            labelled(IDEMPOTENCY_TAKEOVER, "kind", "recovery");
            tracing::info_span!("idempotency.recovery", operation, key).in_scope(|| tracing::debug!("taken up"));
        }
        Noted::Rejected(code) => labelled(IDEMPOTENCY_REJECTED, "code", code),
        Noted::StoreError(stage) => labelled(IDEMPOTENCY_STORE_ERROR, "stage", stage),
        Noted::CommitUnknown => counted(IDEMPOTENCY_COMMIT_UNKNOWN),
        Noted::TransactionEnded => {
            counted(IDEMPOTENCY_ENDED);
            tracing::error!(
                operation,
                key,
                "a handler ended the transaction of its operation: what it wrote may stand without an outcome"
            );
        }
        Noted::HeartbeatLost => {
            counted(IDEMPOTENCY_HEARTBEAT_LOST);
            tracing::warn!(operation, key, "the lease was lost while the handler ran");
        }
        Noted::LockTimeout => counted(IDEMPOTENCY_LOCK_TIMEOUT),
        Noted::Contradiction => {
            counted(IDEMPOTENCY_CONTRADICTION);
            tracing::error!(operation, key, "evidence contradicts itself or a decision: a person must look");
        }
    }
}

/// What a purge deletes when its lifetime is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Forgotten {
    /// The bodies of answers. Their keys stay known.
    Bodies,
    /// The keys, each with everything that is known of its operation.
    Keys,
}

pub(crate) fn forgotten(what: Forgotten, count: u64) {
    let kind = match what {
        Forgotten::Bodies => "bodies",
        Forgotten::Keys => "keys",
    };
    counter!(IDEMPOTENCY_PURGED, "kind" => kind).increment(count);
}

/// Sets the gauge with the operation's mode, and sets its counters to 0 before the first request,
/// but for those of takeovers, refusals and errors of the store. The gauges of what is open are not
/// set: a 0 that nobody has counted would hide an alert.
pub(crate) fn operation_starts(operation: &str, mode: &'static str) {
    let name = || operation.to_owned();
    gauge!(IDEMPOTENCY_OPERATION, "operation" => name(), "mode" => mode).set(1.0);
    for outcome in ["completed", "failure", "reference", "reconstructed", "tombstone"] {
        counter!(IDEMPOTENCY_REPLAY, "operation" => name(), "outcome" => outcome).increment(0);
    }
    for then in ["executed", "rejected"] {
        counter!(IDEMPOTENCY_EXPIRED, "operation" => name(), "then" => then).increment(0);
    }
    for counted in [
        IDEMPOTENCY_CLAIM,
        IDEMPOTENCY_CONFLICT,
        IDEMPOTENCY_PRINCIPAL,
        IDEMPOTENCY_IN_PROGRESS,
        IDEMPOTENCY_COMMIT_UNKNOWN,
        IDEMPOTENCY_ENDED,
        IDEMPOTENCY_CONTRADICTION,
        IDEMPOTENCY_LOCK_TIMEOUT,
        IDEMPOTENCY_RECOVERY,
        IDEMPOTENCY_HEARTBEAT_LOST,
    ] {
        counter!(counted, "operation" => name()).increment(0);
    }
    forgotten(Forgotten::Bodies, 0);
    forgotten(Forgotten::Keys, 0);
}

pub(crate) fn operations_stand(oldest_in_progress: Option<Duration>, unknown: u64) {
    gauge!(IDEMPOTENCY_IN_PROGRESS_AGE).set(oldest_in_progress.unwrap_or_default().as_secs_f64());
    gauge!(IDEMPOTENCY_UNKNOWN).set(unknown as f64);
}

#[cfg(all(test, feature = "programs"))]
mod tests {
    use super::*;

    // Shown by: setting the gauges to 0 at the registration of an operation.
    #[test]
    fn m103_nothing_is_shown_as_open_or_unknown_before_it_was_counted() {
        let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
        let shown = recorder.handle();
        metrics::with_local_recorder(&recorder, || {
            operation_starts("charge", "phased");
            let gauges = [IDEMPOTENCY_IN_PROGRESS_AGE, IDEMPOTENCY_UNKNOWN];
            assert!(!gauges.iter().any(|gauge| shown.render().contains(gauge)), "{}", shown.render());
            operations_stand(None, 7);
            assert!(shown.render().contains(&format!("{IDEMPOTENCY_UNKNOWN} 7")), "{}", shown.render());
        });
    }

    // Shown by: leaving the counter out of `noted`, or out of the counters that start at 0.
    #[test]
    fn o8_contradictions_are_counted_and_shown_before_the_first() {
        let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
        let shown = recorder.handle();
        metrics::with_local_recorder(&recorder, || {
            operation_starts("charge", "phased");
            for count in [0, 1, 2] {
                let line = format!("oncebox_idempotency_evidence_conflict_count{{operation=\"charge\"}} {count}");
                assert!(shown.render().contains(&line), "{}", shown.render());
                noted("charge", "ab12", Noted::Contradiction);
            }
        });
    }
}
