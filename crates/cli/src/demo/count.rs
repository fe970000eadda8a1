//! The verdict, counted from tables, files and broker. The counters of the programs are not used.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde::Serialize;

use super::roles::Payment;
use super::stage::Stage;
use super::tables::Tables;
use crate::common::{Output, failed, tabled};
use oncebox::app::AppError;

/// What was counted after the demo, and whether the promise was kept.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(super) struct Verdict {
    messages: u64,
    ledger_entries: u64,
    emails: u64,
    email_files: u64,
    payments_minor: i64,
    ledger_minor: i64,
    /// Twice the broker's records, for two consumers. What it delivers again is not counted.
    deliveries: u64,
    /// Deliveries that had no effect, with the repeated ones that came too late to be delivered.
    duplicates_suppressed: u64,
    kills: u32,
    lost: u64,
    doubled: u64,
    out_of_order: u64,
    seconds: f64,
}

#[derive(Debug, Clone)]
pub(super) struct PaymentRow {
    pub(super) message_id: String,
    pub(super) payment: Payment,
}

impl Verdict {
    /// True where every count agrees, to the cent.
    pub(super) fn agrees(&self) -> bool {
        self.messages == self.ledger_entries
            && self.messages == self.emails
            && self.messages == self.email_files
            && self.payments_minor == self.ledger_minor
            && self.lost == 0
            && self.doubled == 0
            && self.out_of_order == 0
    }

    pub(super) fn print(&self, output: Output) -> Result<(), AppError> {
        if output == Output::Json {
            let mut value = serde_json::to_value(self).map_err(failed)?;
            value["verdict"] = self.in_words().into();
            data!("{value}");
            return Ok(());
        }
        let of_all = self.messages.to_string();
        let rows = [
            ("payments taken", of_all.clone(), of_all.clone()),
            ("ledger entries", self.ledger_entries.to_string(), of_all.clone()),
            ("e-mail rows", self.emails.to_string(), of_all.clone()),
            ("e-mails sent (.eml files)", self.email_files.to_string(), of_all),
            ("sum of payments", money(self.payments_minor), money(self.payments_minor)),
            ("sum of the ledger", money(self.ledger_minor), money(self.payments_minor)),
            ("lost", self.lost.to_string(), "0".into()),
            ("doubled", self.doubled.to_string(), "0".into()),
            ("out of order", self.out_of_order.to_string(), "0".into()),
        ];
        tabled(
            ["counted", "", "should be"],
            rows.into_iter().map(|(what, count, should)| [what.to_owned(), count, should]),
        )?;
        data!(
            "{} deliveries for {} effects: {} duplicates suppressed; {} killed with SIGKILL; {:.1} s",
            self.deliveries,
            self.ledger_entries + self.emails,
            self.duplicates_suppressed,
            if self.kills == 1 { "1 process".to_owned() } else { format!("{} processes", self.kills) },
            self.seconds
        );
        data!("{}", self.in_words());
        Ok(())
    }

    fn in_words(&self) -> &'static str {
        if self.agrees() { "every effect exactly once" } else { "THE COUNTS DO NOT AGREE" }
    }
}

fn money(minor: i64) -> String {
    format!("{}.{:02} EUR", minor / 100, minor % 100)
}

/// Counts everything, after all processes have stopped.
pub(super) async fn count<S: Tables>(store: &S, stage: &Stage, kills: u32, seconds: f64) -> Result<Verdict, AppError> {
    let payments = payments(store, stage).await?;
    let ledger = store
        .rows(&format!(
            "select payment_id, payment_id, account_id, number, amount_minor from {} order by entry_id",
            stage.names.ledger()
        ))
        .await?;
    let emails = store.email_keys(&stage.names.receipt("")).await?;
    let log = stage.broker.read_all(&stage.names.topic()).await?;

    let mut entries: HashMap<&str, u64> = HashMap::new();
    for (payment, ..) in &ledger {
        *entries.entry(payment).or_default() += 1;
    }
    let mut receipts: HashMap<&str, u64> = HashMap::new();
    for key in &emails {
        *receipts.entry(key.rsplit("_receipt_").next().unwrap_or_default()).or_default() += 1;
    }
    let (mut lost, mut doubled) = (0, 0);
    for row in &payments {
        for effects in [&entries, &receipts] {
            let count = effects.get(row.payment.payment_id.as_str()).copied().unwrap_or(0);
            lost += u64::from(count == 0);
            doubled += count.saturating_sub(1);
        }
    }
    let mut arrivals = Vec::new();
    let mut seen = HashSet::new();
    for record in &log {
        let payment: Payment = serde_json::from_slice(record.payload.as_deref().unwrap_or_default())
            .map_err(|error| AppError::failed(format!("a record of the broker is no payment: {error}")))?;
        if seen.insert(payment.payment_id.clone()) {
            arrivals.push((payment.account_id, payment.number));
        }
    }
    let out_of_order = inversions(ledger.iter().map(|(_, _, account, number, _)| (account.clone(), *number)))
        + inversions(arrivals.into_iter());
    let effects = (ledger.len() + emails.len()) as u64;
    let deliveries = 2 * log.len() as u64;
    Ok(Verdict {
        messages: payments.len() as u64,
        ledger_entries: ledger.len() as u64,
        emails: emails.len() as u64,
        email_files: email_files(stage)?,
        payments_minor: payments.iter().map(|row| row.payment.amount_minor).sum(),
        ledger_minor: ledger.iter().map(|(_, _, _, _, amount)| amount).sum(),
        deliveries,
        duplicates_suppressed: deliveries.saturating_sub(effects),
        kills,
        lost,
        doubled,
        out_of_order,
        seconds,
    })
}

/// The payments as the till wrote them.
pub(super) async fn payments<S: Tables>(store: &S, stage: &Stage) -> Result<Vec<PaymentRow>, AppError> {
    let table = stage.names.payments();
    // One statement reads all rows: the till may still write, and two statements would not see the
    // same rows.
    let rows =
        store.rows(&format!("select payment_id, message_id, account_id, number, amount_minor from {table}")).await?;
    let row = |(payment_id, message_id, account_id, number, amount_minor)| PaymentRow {
        message_id,
        payment: Payment { payment_id, account_id, number, amount_minor, currency: "EUR".to_owned() },
    };
    Ok(rows.into_iter().map(row).collect())
}

/// Counts how often a number of an account is not greater than the one before it.
fn inversions(of: impl Iterator<Item = (String, i64)>) -> u64 {
    let mut last: BTreeMap<String, i64> = BTreeMap::new();
    let mut inversions = 0;
    for (account, number) in of {
        let before = last.insert(account, number).unwrap_or(0);
        inversions += u64::from(number <= before);
    }
    inversions
}

fn email_files(stage: &Stage) -> Result<u64, AppError> {
    let directory = &stage.settings.email.directory;
    let failed = |error: std::io::Error| AppError::failed(format!("{}: {error}", directory.display()));
    // A directory that the user named may have e-mails of an earlier demo: only receipts of this
    // one count.
    let subject = format!("Subject: Receipt {}", stage.names.receipt(""));
    let mut files = 0;
    for entry in std::fs::read_dir(directory).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.extension().is_some_and(|extension| extension == "eml") {
            let text = std::fs::read(&path).map_err(failed)?;
            files += u64::from(String::from_utf8_lossy(&text).contains(&subject));
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inversion_is_counted_per_account() {
        let of = |numbers: &[(&str, i64)]| {
            inversions(numbers.iter().map(|(account, number)| ((*account).to_owned(), *number)))
        };
        assert_eq!(of(&[("a", 1), ("b", 1), ("a", 2), ("b", 2)]), 0);
        assert_eq!(of(&[("a", 2), ("a", 1), ("a", 3)]), 1);
        assert_eq!(of(&[("a", 1), ("a", 1)]), 1, "a second entry is no order either");
    }

    #[test]
    fn a_verdict_agrees_only_when_every_count_does() {
        let good = Verdict {
            messages: 3,
            ledger_entries: 3,
            emails: 3,
            email_files: 3,
            payments_minor: 10,
            ledger_minor: 10,
            ..Verdict::default()
        };
        assert!(good.agrees());
        for bad in [
            Verdict { ledger_entries: 4, ..good.clone() },
            Verdict { emails: 2, ..good.clone() },
            Verdict { email_files: 2, ..good.clone() },
            Verdict { ledger_minor: 11, ..good.clone() },
            Verdict { lost: 1, ..good.clone() },
            Verdict { doubled: 1, ..good.clone() },
            Verdict { out_of_order: 1, ..good.clone() },
        ] {
            assert!(!bad.agrees(), "{bad:?}");
        }
    }
}
