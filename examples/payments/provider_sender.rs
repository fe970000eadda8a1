//! Tells the outside provider of payments, the second half: rows out, over HTTP, at least once
//! each.
//!
//! A request whose answer did not come may have been booked or not; there is no way to know but to
//! ask. So it is sent again with the same key, and the provider, which knows the key, answers as it
//! did the first time. Two senders at once, or one that is killed between answer and update, are
//! the same case: one more request under a key that is known.

use std::error::Error;
use std::time::Duration;

use oncebox::pace::{Pace, sleep_unless};
use oncebox::store::Base;
use oncebox::{StoreError, sqlx};
use reqwest::{Client, StatusCode, Url, redirect};
use tokio_util::sync::CancellationToken;

use crate::Database;

/// What is known after a try.
enum CallOutcome {
    /// The provider has it, under this reference.
    Delivered(String),
    /// The provider will never take it: a person must look.
    Refused(String),
    /// Not known: no answer, half an answer, or one that says nothing of this request.
    Unknown(String),
}

/// The provider, and how it is reached.
pub(crate) struct ProviderSender {
    http: Client,
    url: Url,
}

impl ProviderSender {
    /// A sender to this URL; an answer that takes longer than `timeout` counts as lost.
    pub(crate) fn new(url: Url, timeout: Duration) -> Result<Self, reqwest::Error> {
        let http = Client::builder().timeout(timeout).redirect(redirect::Policy::none()).build()?;
        Ok(Self { http, url })
    }

    /// Sends what is pending until it is told to stop.
    pub(crate) async fn run(&self, db: &Database, stop: &CancellationToken) -> Result<(), StoreError> {
        let mut pace = Pace::new(Duration::from_millis(100), Duration::from_secs(10));
        while !stop.is_cancelled() {
            match self.send_some(db, stop).await {
                Ok(Some(0)) => {
                    pace.wait(stop).await;
                }
                Ok(Some(_)) => pace.worked(),
                Ok(None) => {
                    pace.worked();
                    sleep_unless(stop, Duration::from_millis(100)).await;
                }
                // The database is away: wait for it.
                Err(error) if error.is_transient() => {
                    tracing::warn!(%error, "waiting for the database");
                    pace.wait(stop).await;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// How many of the first pending rows could be settled; none where nothing is pending. What
    /// failed most often comes last, so that one bad row does not stand in the way of others.
    async fn send_some(&self, db: &Database, stop: &CancellationToken) -> Result<Option<usize>, StoreError> {
        let pending: Vec<(String, String)> = sqlx::query_as(
            "select provider_key, body from provider_notification where state = 'pending'
             order by attempts, provider_key limit 20",
        )
        .fetch_all(db.pool())
        .await?;
        if pending.is_empty() {
            return Ok(None);
        }
        let mut settled = 0;
        for (key, body) in pending {
            if stop.is_cancelled() {
                break;
            }
            sqlx::query("update provider_notification set attempts = attempts + 1 where provider_key = $1")
                .bind(&key)
                .execute(db.pool())
                .await?;
            // No transaction is open here: it would hold locks for as long as the provider takes.
            let (state, reference, error) = match self.send(&key, body).await {
                CallOutcome::Delivered(reference) => ("delivered", Some(reference), None),
                CallOutcome::Refused(error) => ("refused", None, Some(error)),
                CallOutcome::Unknown(error) => ("pending", None, Some(error)),
            };
            if let Some(error) = &error {
                tracing::warn!(key, state, %error, "the provider did not take a notification");
            }
            settled += usize::from(state != "pending");
            sqlx::query(
                "update provider_notification set state = $2, reference = $3, error = $4
                 where provider_key = $1 and state = 'pending'",
            )
            .bind(&key)
            .bind(state)
            .bind(reference)
            .bind(error)
            .execute(db.pool())
            .await?;
        }
        Ok(Some(settled))
    }

    async fn send(&self, key: &str, body: String) -> CallOutcome {
        let request = self.http.post(self.url.clone()).header("Idempotency-Key", key).body(body);
        let answer = match request.header("Content-Type", "application/json").send().await {
            Ok(answer) => answer,
            // The key is no header value: nothing was sent, and nothing ever will be.
            Err(error) if error.is_builder() => return CallOutcome::Refused(said(error)),
            Err(error) => return CallOutcome::Unknown(said(error)),
        };
        let status = answer.status();
        match answer.text().await {
            Ok(reference) if status.is_success() => CallOutcome::Delivered(reference),
            Ok(text) if is_final(status) => CallOutcome::Refused(format!("{status}: {text}")),
            Ok(text) => CallOutcome::Unknown(format!("{status}: {text}")),
            Err(error) => CallOutcome::Unknown(format!("{status}: {}", said(error))),
        }
    }
}

/// Refusals of this very request. All else may pass: a 401 or 404 speaks of how we are set up, and
/// would condemn every row; a 409 says that the first request is still at work; a 5xx may come from
/// a gateway, after the provider has booked.
fn is_final(status: StatusCode) -> bool {
    matches!(status, StatusCode::BAD_REQUEST | StatusCode::PAYLOAD_TOO_LARGE | StatusCode::UNPROCESSABLE_ENTITY)
}

/// Cause after cause, without the URL, which may hold a secret.
fn said(error: reqwest::Error) -> String {
    let error = error.without_url();
    let causes = std::iter::successors(error.source(), |&cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}
