//! Cases of e-mail rows: one row for each unique key, leases, and outcomes of a send.

use std::time::Duration;

use super::trial::{LEASE, eventually, moved, new_entry};
use super::{Connection, Fixture, Trial};
use oncebox::store::{EmailOutcome, EmailToSend, Enqueue, Inbox, Mailbox, NewEmail, Operator, RowLease};

fn failed(error: &str) -> EmailOutcome {
    EmailOutcome::Failed { error: error.into(), possibly_sent: 0 }
}

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

/// An e-mail is leased by one sender. It is then sent, tried again later, or failed for good.
pub async fn emails_are_leased_once_and_settled<F: Fixture>(trial: &Trial<F>) {
    for key in ["1", "2", "3"] {
        queue(trial, key).await;
    }
    let mut takers = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let store = trial.store.clone();
        takers.spawn(async move { store.lease_emails(2, &RowLease::new(LEASE)).await.unwrap() });
    }
    let mut leased: Vec<EmailToSend> = takers.join_all().await.concat();
    leased.extend(trial.store.lease_emails(10, &RowLease::new(LEASE)).await.unwrap());
    leased.sort_by(|a, b| a.unique_key.cmp(&b.unique_key));
    assert_eq!(leased.iter().map(|email| email.unique_key.as_str()).collect::<Vec<_>>(), ["1", "2", "3"]);
    for leased in &leased {
        let given = email(&leased.unique_key);
        assert_eq!((&leased.recipient, &leased.subject, &leased.body), (&given.recipient, &given.subject, &given.body));
        assert_eq!(leased.attempt, 1);
    }
    let store = &trial.store;
    assert!(store.settle_email(&leased[0], &EmailOutcome::Sent).await.unwrap());
    assert!(!store.settle_email(&leased[0], &EmailOutcome::Sent).await.unwrap(), "it is settled");
    assert!(store.settle_email(&leased[1], &failed("550 no such user")).await.unwrap());
    let (after, error) = (Duration::from_millis(30), "450 busy".to_owned());
    let again = EmailOutcome::Again { after, error, possibly_sent: 0 };
    assert!(store.settle_email(&leased[2], &again).await.unwrap());
    assert_eq!(store.emails_pending().await.unwrap(), 1);
    let retried =
        eventually("it is due again", || async { store.lease_emails(10, &RowLease::new(LEASE)).await.unwrap().pop() })
            .await;
    assert_eq!((retried.unique_key.as_str(), retried.attempt), ("3", 2));
    assert!(store.settle_email(&retried, &EmailOutcome::NotTried).await.unwrap());
    let given_back = store.lease_emails(10, &RowLease::new(LEASE)).await.unwrap().pop().expect("due at once");
    assert_eq!((given_back.email_id, given_back.attempt), (retried.email_id, 2), "a try that was none is not counted");
    assert!(!queue(trial, "1").await, "a sent one keeps its key");
    let lease = RowLease::new(LEASE);
    assert!(store.lease_emails(10, &lease).await.unwrap().is_empty(), "it is leased");
    assert_eq!(store.give_back_emails(&lease).await.unwrap(), 0, "another lease is not touched");
    assert!(store.settle_email(&given_back, &EmailOutcome::NotTried).await.unwrap());
    assert_eq!(store.lease_emails(10, &lease).await.unwrap().len(), 1);
    assert_eq!(store.give_back_emails(&lease).await.unwrap(), 1);
    assert_eq!(store.lease_emails(10, &RowLease::new(LEASE)).await.unwrap()[0].attempt, 2);
}

/// The sender died, so another one leases the e-mail. The unique key, from which the Message-ID is
/// made, stays the same.
pub async fn an_interrupted_email_is_leased_again_under_the_same_key<F: Fixture>(trial: &Trial<F>) {
    queue(trial, "k").await;
    let store = &trial.store;
    let dead = store.lease_emails(1, &RowLease::new(Duration::from_millis(30))).await.unwrap().remove(0);
    let second = eventually("the lease has ended", || async {
        store.lease_emails(1, &RowLease::new(LEASE)).await.unwrap().pop()
    })
    .await;
    assert_eq!((second.email_id, &second.unique_key, second.attempt), (dead.email_id, &dead.unique_key, 2));
    assert_ne!(second.lease, dead.lease);
    assert!(!store.settle_email(&dead, &failed("no")).await.unwrap());
    assert!(store.settle_email(&second, &EmailOutcome::Sent).await.unwrap());
    assert_eq!(store.emails_pending().await.unwrap(), 0);
}

/// A try counts as one that may have arrived from its lease on, so that the death of its sender
/// leaves it counted. What settles or ends the lease says what is so. What was sent keeps the
/// number, and no error.
pub async fn o28_a_row_says_how_many_tries_may_have_arrived<F: Fixture>(trial: &Trial<F>) {
    queue(trial, "k").await;
    let (store, table) = (&trial.store, trial.table("email"));
    let stands = async |possibly_sent: u32, attempts: u32| {
        let row = format!("possibly_sent = {possibly_sent} and attempts = {attempts}");
        assert_eq!(trial.number(&format!("select count(*) from {table} where {row}")).await, 1, "{row}");
    };
    let lease = async |length: Duration| {
        eventually("it is leased", || async { store.lease_emails(1, &RowLease::new(length)).await.unwrap().pop() })
            .await
    };
    let again = |possibly_sent| EmailOutcome::Again { after: Duration::ZERO, error: "450 busy".into(), possibly_sent };
    let first = lease(LEASE).await;
    assert_eq!(first.possibly_sent, 0);
    stands(1, 1).await;
    assert!(store.settle_email(&first, &again(0)).await.unwrap());
    stands(0, 1).await;
    let died = lease(Duration::from_millis(30)).await;
    assert_eq!(died.possibly_sent, 0);
    let third = lease(LEASE).await;
    assert_eq!(third.possibly_sent, 1, "the try whose sender died");
    stands(2, 3).await;
    assert!(store.settle_email(&third, &EmailOutcome::NotTried).await.unwrap());
    stands(1, 2).await;
    let doubt = RowLease::new(LEASE);
    assert_eq!(store.lease_emails(1, &doubt).await.unwrap().len(), 1);
    assert_eq!(store.give_back_emails(&doubt).await.unwrap(), 1);
    stands(1, 2).await;
    assert!(store.settle_email(&lease(LEASE).await, &again(2)).await.unwrap());
    stands(2, 3).await;
    assert!(store.settle_email(&lease(LEASE).await, &EmailOutcome::Sent).await.unwrap());
    stands(2, 4).await;
    assert_eq!(trial.number(&format!("select count(*) from {table} where error is null")).await, 1);
}

/// The clock was a day ahead when the lease was made.
pub async fn r22_a_lease_of_an_email_that_ends_later_than_any_lease_can_is_over<F: Fixture>(trial: &Trial<F>) {
    queue(trial, "leased").await;
    let store = &trial.store;
    assert_eq!(store.lease_emails(1, &RowLease::new(LEASE)).await.unwrap().len(), 1);
    queue(trial, "tried").await;
    let tried = store.lease_emails(1, &RowLease::new(LEASE)).await.unwrap().remove(0);
    let later = EmailOutcome::Again { after: LEASE, error: "450 busy".into(), possibly_sent: 0 };
    assert!(store.settle_email(&tried, &later).await.unwrap());
    trial.run(&format!("update {} set due_at = {}", trial.table("email"), moved::<F>("due_at", 86_400))).await;
    let again: Vec<_> = store.lease_emails(9, &RowLease::new(LEASE)).await.unwrap();
    let again: Vec<_> = again.into_iter().map(|email| email.unique_key).collect();
    assert_eq!(again, ["leased"], "what waits for its next try goes on waiting");
}

/// What was sent or failed is blanked in bounded pages, the oldest first, and keeps its key until
/// that is forgotten too. What is pending, or was settled later, stays whole.
pub async fn g11_an_email_that_was_settled_is_blanked_and_then_its_key_forgotten<F: Fixture>(trial: &Trial<F>) {
    let store = &trial.store;
    let sent = || EmailOutcome::Sent;
    for (key, outcome) in [("failed", failed("550 no such user")), ("1", sent()), ("2", sent()), ("3", sent())] {
        queue(trial, key).await;
        let leased = store.lease_emails(1, &RowLease::new(LEASE)).await.unwrap().remove(0);
        assert!(store.settle_email(&leased, &outcome).await.unwrap());
    }
    // They were settled within one tick of some clocks.
    let earlier = moved::<F>("settled_at", -1);
    trial
        .run(&format!("update {} set settled_at = {earlier} where unique_key in ('1', '2')", trial.table("email")))
        .await;
    queue(trial, "pending").await;
    let whole = |rows: i64| async move {
        let table = trial.table("email");
        let text = format!("select count(*) from {table} where recipient <> '' and subject <> '' and body <> ''");
        assert_eq!(trial.number(&text).await, rows, "with their content");
        let blank = format!(
            "select count(*) from {table} where recipient = '' and subject = '' and body = '' and error is null"
        );
        trial.number(&blank).await
    };
    assert_eq!(store.blank_emails(Duration::from_secs(600), 10).await.unwrap(), 0);
    assert_eq!(store.blank_emails(Duration::MAX, 10).await.unwrap(), 0);
    assert_eq!(store.forget_emails(Duration::ZERO, 10).await.unwrap(), 0, "only what is blank is forgotten");
    assert_eq!(whole(5).await, 0);
    assert_eq!(store.blank_emails(Duration::ZERO, 2).await.unwrap(), 2, "a page is bounded");
    assert_eq!(whole(3).await, 2);
    let oldest = format!("select count(*) from {} where unique_key in ('1', '2') and body = ''", trial.table("email"));
    assert_eq!(trial.number(&oldest).await, 2, "the oldest first");
    assert!(!queue(trial, "1").await && !queue(trial, "2").await, "a blank one keeps its key");
    assert_eq!(store.blank_emails(Duration::ZERO, 10).await.unwrap(), 1);
    assert_eq!(store.blank_emails(Duration::ZERO, 10).await.unwrap(), 0, "it is blank");
    assert_eq!(whole(2).await, 3, "what failed may have to be sent yet");
    assert_eq!(store.forget_emails(Duration::from_secs(600), 10).await.unwrap(), 0);
    assert_eq!(store.forget_emails(Duration::ZERO, 2).await.unwrap(), 2);
    assert_eq!(store.forget_emails(Duration::ZERO, 10).await.unwrap(), 1);
    assert!(queue(trial, "1").await, "its key is free again");
    assert!(!queue(trial, "pending").await && !queue(trial, "failed").await);
    assert_eq!(store.emails_pending().await.unwrap(), 2);
}

/// An e-mail that is not sent yet is counted, with the time since it was queued. One that is due
/// later has no age.
///
/// Shown by: the time since it was due, which each try moves.
pub async fn the_status_counts_emails_that_are_late_and_those_that_failed<F: Fixture>(trial: &Trial<F>) {
    for key in ["1", "2", "3"] {
        queue(trial, key).await;
    }
    let again = EmailOutcome::Again { after: LEASE, error: "busy".into(), possibly_sent: 0 };
    for outcome in [EmailOutcome::Sent, failed("no such user"), again] {
        let email = trial.store.lease_emails(1, &RowLease::new(LEASE)).await.unwrap().remove(0);
        assert!(trial.store.settle_email(&email, &outcome).await.unwrap());
    }
    let queued = moved::<F>("created_at", -300);
    trial.run(&format!("update {} set created_at = {queued}", trial.table("email"))).await;
    let status = trial.store.status().await.unwrap();
    assert_eq!((status.emails_pending, status.unattended.emails_failed), (1, 1));
    assert!((300.0..600.0).contains(&status.unattended.oldest_email_age_seconds), "{:?}", status.unattended);
    trial.run(&format!("update {} set attempts = 0", trial.table("email"))).await;
    let seldom = trial.store.status_since(&status).await.unwrap();
    assert_eq!(seldom.unattended, status.unattended, "it is not counted again");
    let later = trial.store.status().await.unwrap();
    assert_eq!((later.emails_pending, later.unattended.oldest_email_age_seconds), (1, 0.0), "its time has not come");
}
