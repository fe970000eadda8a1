//! The e-mail sender: rows out, one e-mail each, under one Message-ID.

use std::time::Duration;

use oncebox::sender::{EmailTransport, Sender, SenderOptions};
use oncebox::store::sqlite::SqliteStore;
use oncebox::store::{Base, EmailOutcome, Enqueue, Mailbox, NewEmail, RowLease};
use tokio_util::sync::CancellationToken;

use super::kit::{SOON, Sql, World, sqlite};
use super::smtp::{LATIN, LOST, MUTE, SILENT, message_ids, smtp, smtp_at};
use crate::support::eventually;

async fn queue(world: &World<SqliteStore>, key: &str, subject: &str) -> bool {
    let email = NewEmail {
        unique_key: key.into(),
        recipient: "someone@example.com".into(),
        subject: subject.into(),
        body: "Thank you.".into(),
    };
    let mut tx = world.store.pool().begin_with("BEGIN IMMEDIATE").await.unwrap();
    let new = tx.queue_email(&email).await.unwrap();
    tx.commit().await.unwrap();
    new
}

async fn send_all(world: &World<SqliteStore>, transport: EmailTransport) {
    send_within(world, transport, 5).await;
}

async fn send_within(world: &World<SqliteStore>, transport: EmailTransport, attempts_max: u32) {
    let options = SenderOptions { attempts_max, until_empty: true, ..SenderOptions::new("shop@example.com") };
    let sender = Sender::new(world.store.clone(), transport, options, world.health.clone()).unwrap();
    tokio::time::timeout(SOON, sender.run(CancellationToken::new())).await.unwrap().unwrap();
}

#[tokio::test]
async fn one_unique_key_is_one_file_and_a_subject_adds_no_header() {
    let world = sqlite().await;
    assert!(queue(&world, "receipt_1", "Receipt\r\nBcc: other@example.com").await);
    assert!(!queue(&world, "receipt_1", "again").await, "the unique key is there already");
    assert!(queue(&world, "receipt_2", "Receipt").await);
    let directory = tempfile::tempdir().unwrap();
    send_all(&world, EmailTransport::files(directory.path())).await;
    send_all(&world, EmailTransport::files(directory.path())).await;
    let files: Vec<_> = std::fs::read_dir(directory.path()).unwrap().map(|file| file.unwrap().path()).collect();
    assert_eq!(files.len(), 2, "{files:?}");
    for file in files {
        assert_eq!(file.extension().unwrap(), "eml");
        let email = std::fs::read_to_string(file).unwrap();
        assert!(!email.lines().any(|line| line.starts_with("Bcc:")), "{email}");
    }
}

#[tokio::test]
async fn an_e_mail_whose_sender_died_is_sent_by_the_next_one_and_the_late_word_changes_nothing() {
    let world = sqlite().await;
    let (url, taken) = smtp(&[]).await;
    queue(&world, "receipt_1", "Receipt").await;
    // A sender that died with the row in hand: its lease runs out, and the row is due again.
    let leased = world.store.lease_emails(1, &RowLease::new(Duration::from_millis(50))).await.unwrap();
    assert_eq!(leased.len(), 1);
    send_all(&world, EmailTransport::smtp(&url).unwrap()).await;
    // What the dead one says now changes nothing.
    let late = EmailOutcome::Failed { error: "late".into(), possibly_sent: 0 };
    assert!(!world.store.settle_email(&leased[0], &late).await.unwrap());
    queue(&world, "receipt_2", "Receipt").await;
    send_all(&world, EmailTransport::smtp(&url).unwrap()).await;
    let ids = message_ids(&taken.lock().unwrap());
    assert_eq!(ids.len(), 2);
    assert_ne!(ids[0], ids[1]);
}

#[tokio::test]
async fn a_4xx_is_tried_again_under_the_same_message_id_and_a_5xx_is_failed() {
    let world = sqlite().await;
    let (url, taken) = smtp(&[451]).await;
    queue(&world, "receipt_1", "Receipt").await;
    send_all(&world, EmailTransport::smtp(&url).unwrap()).await;
    let ids = message_ids(&taken.lock().unwrap());
    assert_eq!((ids.len(), &ids[0]), (2, &ids[1]));
    let (url, taken) = smtp(&[550, 451]).await;
    queue(&world, "receipt_2", "Receipt").await;
    send_all(&world, EmailTransport::smtp(&url).unwrap()).await;
    assert_eq!(taken.lock().unwrap().len(), 2);
    assert_eq!(world.store.texts("select state from oncebox_email order by email_id").await, ["sent", "failed"]);
    // It is known of each try that it did not arrive, and the error says so (O28).
    let errors = world.store.texts("select coalesce(error, 'none') from oncebox_email order by email_id").await;
    assert!(errors[0] == "none" && errors[1].starts_with("refused: "), "{errors:?}");
}

/// Shown by: counting each try. The first one's sender died, the second one was refused, and the
/// third one's answer was lost.
#[tokio::test]
async fn o28_only_tries_that_may_have_arrived_are_counted_as_possibly_sent() {
    let world = sqlite().await;
    let (url, taken) = smtp(&[550, LOST, 451]).await;
    queue(&world, "receipt_1", "Receipt").await;
    assert_eq!(world.store.lease_emails(1, &RowLease::new(Duration::ZERO)).await.unwrap().len(), 1);
    send_all(&world, EmailTransport::smtp(&url).unwrap()).await;
    assert_eq!(taken.lock().unwrap().len(), 3);
    let said = world.store.texts("select state || ' ' || attempts || ' ' || error from oncebox_email").await;
    assert!(said[0].starts_with("failed 4 dead, possibly sent 2 times: "), "{said:?}");
}

/// Shown by: one e-mail at a time. The others waited until each silence was over, and after each of
/// its tries anew.
#[tokio::test]
async fn a_recipient_for_whom_the_server_says_nothing_stops_no_other() {
    let world = sqlite().await;
    let (url, taken) = smtp(&[MUTE; 6]).await;
    for key in 0..6 {
        queue(&world, &format!("silent_{key}"), "Receipt").await;
    }
    let transport = EmailTransport::smtp(&url).unwrap();
    let options = SenderOptions::new("shop@example.com");
    let sender = Sender::new(world.store.clone(), transport, options, world.health.clone()).unwrap();
    let stop = CancellationToken::new();
    let running = tokio::spawn({
        let stop = stop.clone();
        async move { sender.run(stop).await }
    });
    eventually("six are silent", SOON, || async { (taken.lock().unwrap().len() == 6).then_some(()) }).await;
    assert!(world.health.is_ready(), "{:?}", world.health.lines());
    for key in 0..10 {
        queue(&world, &format!("receipt_{key}"), "Receipt").await;
    }
    let states = "select state || coalesce(' ' || error, '') || ' ' || count(*) from oncebox_email group by state, error order by state";
    let states = eventually("ten are sent", SOON, || async {
        Some(world.store.texts(states).await).filter(|states| states.contains(&"sent 10".to_owned()))
    })
    .await;
    assert_eq!(states, ["pending 6", "sent 10"], "not one of the silences is over");
    running.abort();
}

/// Shown by: a sender that takes a refusal beside other dialogues for one of everything.
#[tokio::test]
async fn a_server_that_allows_few_connections_is_used_with_few() {
    let world = sqlite().await;
    let (heard, _hearing) = super::observed::hear();
    let (url, taken) = smtp_at("the greeting", &[421; 5]).await;
    for key in 0..8 {
        queue(&world, &format!("receipt_{key}"), "Receipt").await;
    }
    send_all(&world, EmailTransport::smtp(&url).unwrap()).await;
    assert_eq!(taken.lock().unwrap().len(), 8);
    assert_eq!(world.store.texts("select state || attempts from oncebox_email group by 1").await, ["sent1"]);
    let said = heard.said();
    assert!(said.iter().all(|said| said.level > tracing::Level::WARN), "it waited for its server: {said:?}");
}

/// Shown by: counters that begin with the first e-mail. It gave no increase.
#[tokio::test]
async fn a_sender_shows_each_outcome_before_its_first_e_mail() {
    let (heard, _hearing) = super::observed::hear();
    let world = sqlite().await;
    send_all(&world, EmailTransport::smtp("smtp://127.0.0.1:1").unwrap()).await;
    for outcome in ["sent", "refused", "possibly-sent", "waiting", "dead"] {
        assert!(heard.shows("oncebox_emails_total", &[("outcome", outcome)]), "{outcome}");
    }
}

/// The server has it, and nobody heard that: whoever sends it again says that it is the same one.
#[tokio::test]
async fn an_e_mail_whose_answer_was_lost_is_sent_again_under_its_message_id_and_is_never_said_to_be_unsent() {
    let world = sqlite().await;
    let (url, taken) = smtp(&[LOST]).await;
    queue(&world, "receipt_1", "Receipt").await;
    send_all(&world, EmailTransport::smtp(&url).unwrap()).await;
    let ids = message_ids(&taken.lock().unwrap());
    assert_eq!((ids.len(), &ids[0]), (2, &ids[1]));
    let states = "select state || ' ' || attempts from oncebox_email order by email_id";
    assert_eq!(world.store.texts(states).await, ["sent 2"]);
    let (url, taken) = smtp(&[LOST]).await;
    queue(&world, "receipt_2", "Receipt").await;
    send_within(&world, EmailTransport::smtp(&url).unwrap(), 1).await;
    assert_eq!(taken.lock().unwrap().len(), 1);
    assert_eq!(world.store.texts(states).await, ["sent 2", "failed 1"]);
    let errors = world.store.texts("select error from oncebox_email where state = 'failed'").await;
    assert!(errors[0].starts_with("dead, possibly sent once"), "{errors:?}");
}

/// A server that serves nobody has said nothing about this e-mail. Shown by: taking every 5xx for a
/// refusal of the e-mail, and counting every try: with two tries in all, each of them fails it.
#[tokio::test]
async fn a_server_that_refuses_us_or_hangs_up_before_the_e_mail_fails_none_and_counts_no_try() {
    for (place, codes) in [
        ("the greeting", [554, LOST, 421]),
        ("MAIL", [553, LOST, 451]),
        ("EHLO", [550, LOST, 421]),
        ("AUTH", [535, LOST, 454]),
    ] {
        let world = sqlite().await;
        let (url, taken) = smtp_at(place, &codes).await;
        let url = url.replace("smtp://", "smtp://shop:right@");
        queue(&world, "receipt_1", "Receipt").await;
        queue(&world, "receipt_2", "Receipt").await;
        send_within(&world, EmailTransport::smtp(&url).unwrap(), 2).await;
        assert_eq!(taken.lock().unwrap().len(), 2, "{place}");
        let states = "select state || ' ' || attempts from oncebox_email order by email_id";
        assert_eq!(world.store.texts(states).await, ["sent 1", "sent 1"], "{place}");
    }
}

/// Shown by: a sender that is ready whatever its server does.
#[tokio::test]
async fn a_sender_whose_server_is_away_is_not_ready_says_why_and_counts_no_try_until_it_is_back() {
    let world = sqlite().await;
    let (url, taken) = smtp_at("the greeting", &[554; 3]).await;
    queue(&world, "receipt_1", "Receipt").await;
    let transport = EmailTransport::smtp(&url).unwrap();
    let options = SenderOptions::new("shop@example.com");
    let sender = Sender::new(world.store.clone(), transport, options, world.health.clone()).unwrap();
    let stop = CancellationToken::new();
    let running = tokio::spawn({
        let stop = stop.clone();
        async move { sender.run(stop).await }
    });
    eventually("it says why", SOON, || async {
        let lines = world.health.lines();
        (!world.health.is_ready() && lines.iter().any(|line| line.contains("at connecting") && line.contains("554")))
            .then_some(())
    })
    .await;
    assert!(taken.lock().unwrap().is_empty());
    let state = "select state || ' ' || attempts from oncebox_email";
    assert_eq!(world.store.texts(state).await, ["pending 0"]);
    eventually("ready again", SOON, || async {
        (world.health.is_ready() && world.store.texts(state).await == ["sent 1"]).then_some(())
    })
    .await;
    assert_eq!(taken.lock().unwrap().len(), 1);
    stop.cancel();
    tokio::time::timeout(SOON, running).await.unwrap().unwrap().unwrap();
}

/// Shown by: a state that is set only after the first e-mail.
#[tokio::test]
async fn a_sender_is_ready_once_it_has_leased_an_e_mail() {
    let world = sqlite().await;
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    queue(&world, "receipt_1", "Receipt").await;
    let transport = EmailTransport::smtp(&format!("smtp://{}", silent.local_addr().unwrap())).unwrap();
    let options = SenderOptions::new("shop@example.com");
    let sender = Sender::new(world.store.clone(), transport, options, world.health.clone()).unwrap();
    let running = tokio::spawn(async move { sender.run(CancellationToken::new()).await });
    silent.accept().await.unwrap();
    assert!(world.health.is_ready(), "{:?}", world.health.lines());
    running.abort();
}

/// Of a refused recipient alone it is known that it is about this e-mail. A server may ask for
/// credentials for some recipients only, and refuse us by policy not before it knows a recipient.
/// Shown by: holding the sender for any 530; taking every 5xx at a recipient for a refusal.
#[tokio::test]
async fn a_refused_recipient_fails_its_e_mail_and_no_other() {
    let world = sqlite().await;
    let (url, taken) = smtp_at("RCPT", &[554, 550, 530]).await;
    queue(&world, "receipt_1", "Receipt").await;
    queue(&world, "receipt_2", "Receipt").await;
    send_all(&world, EmailTransport::smtp(&url).unwrap()).await;
    assert_eq!(taken.lock().unwrap().len(), 1);
    // Both are sent at once: either one meets the refusal.
    let states = "select state || ' ' || attempts from oncebox_email order by state";
    assert_eq!(world.store.texts(states).await, ["failed 1", "sent 3"]);
}

/// Shown by: a client that waits for the answer to its QUIT. The e-mail would count as possibly
/// sent, and go out once for each attempt.
#[tokio::test]
async fn an_e_mail_that_the_server_accepted_is_sent_whatever_becomes_of_the_goodbye() {
    let world = sqlite().await;
    let (url, taken) = smtp(&[SILENT, SILENT]).await;
    for key in ["receipt_1", "receipt_2"] {
        queue(&world, key, "Receipt").await;
    }
    send_all(&world, EmailTransport::smtp(&url).unwrap()).await;
    assert_eq!(taken.lock().unwrap().len(), 2, "each went out once");
    let states = "select state || ' ' || attempts from oncebox_email order by email_id";
    assert_eq!(world.store.texts(states).await, ["sent 1", "sent 1"]);
}

/// Shown by: the stream as it is. The answer could not be read, and the e-mail was possibly sent
/// five times.
#[tokio::test]
async fn an_e_mail_is_sent_whatever_bytes_the_answer_has() {
    let world = sqlite().await;
    let (url, taken) = smtp(&[LATIN; 5]).await;
    queue(&world, "receipt_1", "Receipt").await;
    send_all(&world, EmailTransport::smtp(&url).unwrap()).await;
    assert_eq!(taken.lock().unwrap().len(), 1);
    assert_eq!(world.store.texts("select state || ' ' || attempts from oncebox_email").await, ["sent 1"]);
}

/// An e-mail is personal data, and its table would grow for ever. Shown by: a sender that forgets
/// nothing.
#[tokio::test]
async fn g11_what_was_sent_is_blanked_after_its_time_and_a_repeat_is_known_until_its_key_is_forgotten() {
    let world = sqlite().await;
    let (url, _) = smtp(&[550]).await;
    queue(&world, "receipt_1", "Receipt").await;
    send_all(&world, EmailTransport::smtp(&url).unwrap()).await;
    queue(&world, "receipt_2", "Receipt").await;
    send_all(&world, EmailTransport::smtp(&url).unwrap()).await;
    let texts = "select state || ':' || recipient || subject || body || coalesce(error, '') from oncebox_email order by email_id";
    let forgets = |content_kept, keys_kept| {
        let options =
            SenderOptions { until_empty: true, content_kept, keys_kept, ..SenderOptions::new("shop@example.com") };
        let sender =
            Sender::new(world.store.clone(), EmailTransport::smtp(&url).unwrap(), options, world.health.clone());
        async move {
            tokio::time::timeout(SOON, sender.unwrap().run(CancellationToken::new())).await.unwrap().unwrap();
        }
    };
    forgets(Duration::from_secs(3_600), None).await;
    assert!(world.store.texts(texts).await.iter().all(|text| text.len() > 30), "their time is not over");
    // A time of nothing is over in the next millisecond.
    eventually("its content is blanked", SOON, || async {
        forgets(Duration::ZERO, None).await;
        (world.store.texts(texts).await[1] == "sent:").then_some(())
    })
    .await;
    let left = world.store.texts(texts).await;
    assert!(left[0].starts_with("failed:") && left[0].len() > 30, "it may have to be sent yet: {left:?}");
    assert!(!queue(&world, "receipt_2", "Receipt").await, "a repeat is known");
    forgets(Duration::ZERO, Some(Duration::from_secs(3_600))).await;
    assert!(!queue(&world, "receipt_2", "Receipt").await, "a repeat is known");
    eventually("its key is forgotten", SOON, || async {
        forgets(Duration::ZERO, Some(Duration::ZERO)).await;
        (world.store.texts(texts).await == left[..1]).then_some(())
    })
    .await;
}
