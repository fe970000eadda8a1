//! E-mails, sent by phased operations to files and to a mail server (O28).

use std::time::Duration;

use oncebox::policy::operation::delivery::Delivery;
use oncebox::policy::operation::key::KeyFormat;
use oncebox::policy::operation::{Key, Scope};
use oncebox::runtime::operation::phased::email::{EmailTransport, Emails, SendEmail, delivery};
use oncebox::runtime::operation::phased::{Door, DriveSettings, Recovery, RecoveryOptions};
use oncebox::runtime::operation::{Answered, Engine, KeyGiven, Registered};
use oncebox::sqlx;
use oncebox::store::sqlite::SqliteStore;
use oncebox::store::{Base, Phases, Schema, StoreOptions};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::smtp::{LOST, message_ids, smtp};
use crate::support::eventually;
use crate::{SOON, settings};

/// A service that sends e-mails, with a worker.
struct Service {
    store: SqliteStore,
    door: Door<SqliteStore>,
    endpoint: Registered,
    worker: JoinHandle<Result<(), oncebox::StoreError>>,
    _directory: tempfile::TempDir,
}

impl Drop for Service {
    fn drop(&mut self) {
        self.worker.abort();
    }
}

impl Service {
    async fn start(transport: EmailTransport, settings: DriveSettings) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite://{}", directory.path().join("test.db").display());
        let store = SqliteStore::connect(&StoreOptions { create: true, ..StoreOptions::new(url) }).await.unwrap();
        store.migrate().await.unwrap();
        let emails = Emails::new(transport, "shop@example.com").unwrap();
        let engine = Engine::builder(store.clone()).build();
        let endpoint = engine.protect(Emails::endpoint()).unwrap();
        let door = Door::builder(&engine, store.deployment().await.unwrap()).settings(settings);
        let door = door.register(emails.flow().unwrap(), &endpoint).unwrap().build();
        let every = RecoveryOptions { every: Duration::from_millis(20), ..RecoveryOptions::default() };
        let recovery = Recovery::new(&door, every, oncebox::observe::Health::default());
        let worker = tokio::spawn(recovery.run(CancellationToken::new()));
        Self { store, door, endpoint, worker, _directory: directory }
    }

    async fn send(&self, event: Uuid, recipient: &str, subject: &str) -> Answered {
        let key = KeyGiven::Given(Key::parse(event.to_string().as_bytes(), KeyFormat::UuidV7).unwrap());
        let email = SendEmail { recipient: recipient.into(), subject: subject.into(), body: "Thank you.".into() };
        let scope = Some(Scope::new("t1", "payments").unwrap());
        self.door.execute_phased(&self.endpoint, scope, key, email, Duration::from_millis(10)).await
    }

    /// The status of its outcome, asked for until it is there.
    async fn status(&self, event: Uuid, recipient: &str, subject: &str) -> u16 {
        eventually("an outcome", SOON, || async {
            match self.send(event, recipient, subject).await {
                Answered::Reply { reply, .. } => Some(reply.status),
                Answered::Problem(problem) => {
                    assert!(problem.code.retryable(), "{problem:?}");
                    None
                }
            }
        })
        .await
    }

    async fn becomes(&self, what: &str, wanted: impl Fn(Delivery) -> bool) -> Delivery {
        eventually(what, SOON, || async {
            let ids: Vec<Vec<u8>> = sqlx::query_scalar("select operation_id from oncebox_operation")
                .fetch_all(self.store.pool())
                .await
                .unwrap();
            let id = Uuid::from_slice(ids.first()?).unwrap();
            let stored = self.store.operation(id).await.unwrap()?;
            delivery(&stored).filter(|&state| wanted(state))
        })
        .await
    }
}

const TO: &str = "someone@example.com";

// Shown by: composing at each send (another Date), and a Message-ID that each send makes.
#[tokio::test]
async fn o28_an_e_mail_whose_answer_is_lost_is_possibly_sent_and_goes_again_under_one_message_id() {
    let (url, taken) = smtp(&[451, LOST, LOST]).await;
    let service = Service::start(EmailTransport::smtp(&url).unwrap(), settings()).await;
    let event = Uuid::now_v7();
    let (first, second) = tokio::join!(service.send(event, TO, "Receipt"), service.send(event, TO, "Receipt"));
    drop((first, second));
    service.becomes("it is sent", |state| state == Delivery::Sent).await;
    let emails = taken.lock().unwrap().clone();
    assert_eq!(emails.len(), 4);
    assert!(emails.iter().all(|email| email == &emails[0]), "the same bytes: {emails:?}");
    assert!(message_ids(&emails)[0].ends_with("@oncebox.invalid>"), "{emails:?}");
    // Asked for again, it is not sent again; another event is another e-mail.
    assert_eq!(service.status(event, TO, "Receipt").await, 200);
    assert_eq!(taken.lock().unwrap().len(), 4);
    assert_eq!(service.status(Uuid::now_v7(), TO, "Receipt").await, 200);
    let ids = message_ids(&taken.lock().unwrap());
    assert_ne!(ids[3], ids[4]);
}

// Shown by: calling the refusal of a later try refused; counting a try that was answered with 4xx; a refusal of a later try that is
// not in vain (it is sent again at once, for ever).
#[tokio::test]
async fn o28_only_the_only_trys_refusal_is_one_and_a_doubt_ends_dead() {
    let (url, taken) = smtp(&[550, 451]).await;
    let service = Service::start(EmailTransport::smtp(&url).unwrap(), settings()).await;
    let event = Uuid::now_v7();
    assert_eq!(service.status(event, TO, "Receipt").await, 422);
    assert_eq!(service.becomes("it is refused", |_| true).await, Delivery::Refused);
    assert_eq!(taken.lock().unwrap().len(), 2);
    // After a doubt nobody knows.
    let (url, taken) = smtp(&[[550; 200].as_slice(), &[LOST]].concat()).await;
    let few = DriveSettings { attempts_max: 2, ..settings() };
    let service = Service::start(EmailTransport::smtp(&url).unwrap(), few).await;
    service.send(Uuid::now_v7(), TO, "Receipt").await;
    let dead = service.becomes("it is dead", |state| matches!(state, Delivery::Dead(_))).await;
    assert_eq!(dead, Delivery::Dead(u32::try_from(taken.lock().unwrap().len()).unwrap()));
}

// Shown by: taking every 5xx for a refusal of the e-mail.
#[tokio::test]
async fn o28_credentials_that_a_server_does_not_take_refuse_no_e_mail() {
    let (url, taken) = smtp(&[534, 535]).await;
    let service = Service::start(EmailTransport::smtp(&url).unwrap(), settings()).await;
    assert_eq!(service.status(Uuid::now_v7(), TO, "Receipt").await, 200);
    assert_eq!(taken.lock().unwrap().len(), 3);
}

#[tokio::test]
async fn o28_what_did_not_leave_waits_and_what_cannot_be_composed_is_refused() {
    // Bound and never listening: nobody else gets the port meanwhile.
    let reserved = tokio::net::TcpSocket::new_v4().unwrap();
    reserved.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let url = format!("smtp://{}", reserved.local_addr().unwrap());
    let service = Service::start(EmailTransport::smtp(&url).unwrap(), settings()).await;
    service.send(Uuid::now_v7(), TO, "Receipt").await;
    service.becomes("it waits", |state| state == Delivery::Waiting).await;
    assert_eq!(service.status(Uuid::now_v7(), "nobody", "Receipt").await, 422);
}

#[tokio::test]
async fn o28_into_files_an_e_mail_is_there_once_and_a_subject_adds_no_header() {
    let directory = tempfile::tempdir().unwrap();
    let service = Service::start(EmailTransport::Files(directory.path().join("out")), settings()).await;
    let event = Uuid::now_v7();
    for _ in 0..3 {
        assert_eq!(service.status(event, TO, "Receipt\r\nBcc: other@example.com").await, 200);
    }
    let files: Vec<_> =
        std::fs::read_dir(directory.path().join("out")).unwrap().map(|file| file.unwrap().path()).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    let email = std::fs::read_to_string(&files[0]).unwrap();
    assert!(email.contains("Thank you.") && !email.lines().any(|line| line.starts_with("Bcc:")), "{email}");
}
