//! Cases of e-mail rows: one row for each unique key, claims, and outcomes of a send.

use std::time::Duration;

use super::trial::{eventually, in_a_day, new_entry};
use super::{Connection, Fixture, Trial};
use oncebox::store::{Claim, EmailOutcome, EmailToSend, Enqueue, Inbox, Mailbox, NewEmail};

const CLAIM: Duration = Duration::from_secs(600);

fn email(key: &str) -> NewEmail {
    NewEmail {
        unique_key: key.to_owned(),
        recipient: "ann@example.org".to_owned(),
        subject: format!("Receipt {key}, ä😀"),
        body: "Hello\n'Ann' \"ä\"\n".to_owned(),
    }
}

async fn queue<F: Fixture>(trial: &Trial<F>, key: &str) -> bool {
    let mut tx = trial.begin().await;
    let queued = tx.queue_email(&email(key)).await.unwrap();
    tx.commit().await.unwrap();
    queued
}

/// Keys that differ only in case or in a space at the end are different.
pub async fn an_email_is_one_row_for_its_unique_key<F: Fixture>(trial: &Trial<F>) {
    assert!(queue(trial, "receipt_payment_pay_789").await);
    assert!(!queue(trial, "receipt_payment_pay_789").await);
    assert!(queue(trial, "Receipt_payment_pay_789").await);
    assert!(queue(trial, "receipt_payment_pay_789 ").await);
    assert_eq!(trial.store.emails_pending().await.unwrap(), 3);
}

/// An e-mail is queued only if its transaction commits: a handler that failed sends nothing.
pub async fn an_email_goes_with_its_transaction<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    for commit in [false, true] {
        let mut tx = trial.store.begin(consumer).await.unwrap();
        tx.admit(&[new_entry()]).await.unwrap();
        let connection: &mut Connection<F> = tx.connection().unwrap();
        assert!(connection.queue_email(&email("k")).await.unwrap());
        assert!(!connection.queue_email(&email("k")).await.unwrap());
        if commit {
            tx.commit().await.unwrap();
        } else {
            tx.rollback().await.unwrap();
        }
        assert_eq!(trial.store.emails_pending().await.unwrap(), u64::from(commit));
    }
}

/// An e-mail is claimed by one sender. It is then sent, tried again later, or failed for good.
pub async fn emails_are_claimed_once_and_settled<F: Fixture>(trial: &Trial<F>) {
    for key in ["1", "2", "3"] {
        queue(trial, key).await;
    }
    let mut claimers = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let store = trial.store.clone();
        claimers.spawn(async move { store.claim_emails(2, &Claim::new(CLAIM)).await.unwrap() });
    }
    let mut claimed: Vec<EmailToSend> = claimers.join_all().await.concat();
    claimed.extend(trial.store.claim_emails(10, &Claim::new(CLAIM)).await.unwrap());
    claimed.sort_by(|a, b| a.unique_key.cmp(&b.unique_key));
    assert_eq!(claimed.iter().map(|email| email.unique_key.as_str()).collect::<Vec<_>>(), ["1", "2", "3"]);
    for claimed in &claimed {
        let given = email(&claimed.unique_key);
        assert_eq!(
            (&claimed.recipient, &claimed.subject, &claimed.body),
            (&given.recipient, &given.subject, &given.body)
        );
        assert_eq!(claimed.attempt, 1);
    }
    let store = &trial.store;
    assert!(store.settle_email(&claimed[0], &EmailOutcome::Sent).await.unwrap());
    assert!(!store.settle_email(&claimed[0], &EmailOutcome::Sent).await.unwrap(), "it is settled");
    assert!(store.settle_email(&claimed[1], &EmailOutcome::Failed("550 no such user".into())).await.unwrap());
    let again = EmailOutcome::Again { after: Duration::from_millis(30), error: "450 busy".into() };
    assert!(store.settle_email(&claimed[2], &again).await.unwrap());
    assert_eq!(store.emails_pending().await.unwrap(), 1);
    let retried =
        eventually("it is due again", || async { store.claim_emails(10, &Claim::new(CLAIM)).await.unwrap().pop() })
            .await;
    assert_eq!((retried.unique_key.as_str(), retried.attempt), ("3", 2));
    assert!(store.settle_email(&retried, &EmailOutcome::NotTried).await.unwrap());
    let given_back = store.claim_emails(10, &Claim::new(CLAIM)).await.unwrap().pop().expect("due at once");
    assert_eq!((given_back.email_id, given_back.attempt), (retried.email_id, 2), "a try that was none is not counted");
    assert!(!queue(trial, "1").await, "a sent one keeps its key");
    let claim = Claim::new(CLAIM);
    assert!(store.claim_emails(10, &claim).await.unwrap().is_empty(), "it is claimed");
    assert_eq!(store.give_back_emails(&claim).await.unwrap(), 0, "another claim is not touched");
    assert!(store.settle_email(&given_back, &EmailOutcome::NotTried).await.unwrap());
    assert_eq!(store.claim_emails(10, &claim).await.unwrap().len(), 1);
    assert_eq!(store.give_back_emails(&claim).await.unwrap(), 1);
    assert_eq!(store.claim_emails(10, &Claim::new(CLAIM)).await.unwrap()[0].attempt, 2);
}

/// The sender died, so another one claims the e-mail. The unique key, from which the Message-ID is
/// made, stays the same.
pub async fn an_interrupted_email_is_claimed_again_under_the_same_key<F: Fixture>(trial: &Trial<F>) {
    queue(trial, "k").await;
    let store = &trial.store;
    let dead = store.claim_emails(1, &Claim::new(Duration::from_millis(30))).await.unwrap().remove(0);
    let second =
        eventually("the claim has ended", || async { store.claim_emails(1, &Claim::new(CLAIM)).await.unwrap().pop() })
            .await;
    assert_eq!((second.email_id, &second.unique_key, second.attempt), (dead.email_id, &dead.unique_key, 2));
    assert_ne!(second.claim, dead.claim);
    assert!(!store.settle_email(&dead, &EmailOutcome::Failed("no".into())).await.unwrap());
    assert!(store.settle_email(&second, &EmailOutcome::Sent).await.unwrap());
    assert_eq!(store.emails_pending().await.unwrap(), 0);
}

/// The clock was a day ahead when the claim was made.
pub async fn r22_a_claim_of_an_email_that_ends_later_than_any_claim_can_is_over<F: Fixture>(trial: &Trial<F>) {
    queue(trial, "claimed").await;
    let store = &trial.store;
    assert_eq!(store.claim_emails(1, &Claim::new(CLAIM)).await.unwrap().len(), 1);
    queue(trial, "tried").await;
    let tried = store.claim_emails(1, &Claim::new(CLAIM)).await.unwrap().remove(0);
    let later = EmailOutcome::Again { after: CLAIM, error: "450 busy".into() };
    assert!(store.settle_email(&tried, &later).await.unwrap());
    trial.run(&format!("update {} set due_at = {}", trial.table("email"), in_a_day::<F>())).await;
    let again: Vec<_> = store.claim_emails(9, &Claim::new(CLAIM)).await.unwrap();
    let again: Vec<_> = again.into_iter().map(|email| email.unique_key).collect();
    assert_eq!(again, ["claimed"], "what waits for its next try goes on waiting");
}
