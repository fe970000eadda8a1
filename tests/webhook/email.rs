//! E-mails, sent by phased operations to files and to a mail server (O28).

use oncebox::operation::phased::email::{Emails, SendEmail};
use oncebox::operation::{Delivery, DriveSettings};
use oncebox::sender::EmailTransport;
use uuid::Uuid;

use crate::service::Service;
use crate::settings;
use crate::smtp::{LOST, message_ids, smtp, smtp_at};

async fn start(transport: EmailTransport, settings: DriveSettings) -> Service {
    let emails = Emails::new(transport, "shop@example.com").unwrap();
    Service::over(Emails::endpoint(), emails.flow().unwrap(), settings).await
}

fn email(recipient: &str, subject: &str) -> SendEmail {
    SendEmail { recipient: recipient.into(), subject: subject.into(), body: "Thank you.".into() }
}

const TO: &str = "someone@example.com";

// Shown by: composing at each send (another Date), and a Message-ID that each send makes.
#[tokio::test]
async fn o28_an_e_mail_whose_answer_is_lost_is_possibly_sent_and_goes_again_under_one_message_id() {
    let (url, taken) = smtp(&[451, LOST, LOST]).await;
    let service = start(EmailTransport::smtp(&url).unwrap(), settings()).await;
    let event = Uuid::now_v7();
    let (first, second) =
        tokio::join!(service.ask(event, email(TO, "Receipt")), service.ask(event, email(TO, "Receipt")));
    drop((first, second));
    service.becomes("it is sent", |state| state == Delivery::Sent).await;
    let emails = taken.lock().unwrap().clone();
    assert_eq!(emails.len(), 4);
    assert!(emails.iter().all(|email| email == &emails[0]), "the same bytes: {emails:?}");
    assert!(message_ids(&emails)[0].ends_with("@oncebox.invalid>"), "{emails:?}");
    // Asked for again, it is not sent again; another event is another e-mail.
    assert_eq!(service.outcome(event, email(TO, "Receipt")).await, 200);
    assert_eq!(taken.lock().unwrap().len(), 4);
    assert_eq!(service.outcome(Uuid::now_v7(), email(TO, "Receipt")).await, 200);
    let ids = message_ids(&taken.lock().unwrap());
    assert_ne!(ids[3], ids[4]);
}

// Shown by: calling the refusal of a later try refused; counting a try that was answered with 4xx;
// a refusal of a later try that is not in vain (it is sent again at once, for ever).
#[tokio::test]
async fn o28_only_the_only_trys_refusal_is_one_and_a_doubt_ends_dead() {
    let (url, taken) = smtp(&[550, 451]).await;
    let service = start(EmailTransport::smtp(&url).unwrap(), settings()).await;
    let event = Uuid::now_v7();
    assert_eq!(service.outcome(event, email(TO, "Receipt")).await, 422);
    assert_eq!(service.becomes("it is refused", |_| true).await, Delivery::Refused);
    assert_eq!(taken.lock().unwrap().len(), 2);
    // After a doubt nobody knows.
    let (url, taken) = smtp(&[[550; 200].as_slice(), &[LOST]].concat()).await;
    let few = DriveSettings { attempts_max: 2, ..settings() };
    let service = start(EmailTransport::smtp(&url).unwrap(), few).await;
    service.ask(Uuid::now_v7(), email(TO, "Receipt")).await;
    let dead = service.becomes("it is dead", |state| matches!(state, Delivery::Dead(_))).await;
    assert_eq!(dead, Delivery::Dead(u32::try_from(taken.lock().unwrap().len()).unwrap()));
}

// Shown by: taking every 5xx for a refusal of the e-mail; leaving out the credentials.
#[tokio::test]
async fn o28_credentials_that_a_server_does_not_take_refuse_no_e_mail() {
    // It says so when it has the text.
    let (url, taken) = smtp(&[534, 535]).await;
    let service = start(EmailTransport::smtp(&url).unwrap(), settings()).await;
    assert_eq!(service.outcome(Uuid::now_v7(), email(TO, "Receipt")).await, 200);
    assert_eq!(taken.lock().unwrap().len(), 3);
    // Or at once, when it is told them.
    let (url, taken) = smtp_at("AUTH", &[535, 535]).await;
    let service = start(EmailTransport::smtp(&url.replace("//", "//a:b@")).unwrap(), settings()).await;
    assert_eq!(service.outcome(Uuid::now_v7(), email(TO, "Receipt")).await, 200);
    assert_eq!(taken.lock().unwrap().len(), 1);
}

// A refusal by policy may be about us, and no later try brings the extension for such an address.
// Shown by: counting neither (they waited for ever).
#[tokio::test]
async fn o28_what_fails_before_the_text_until_somebody_changes_something_ends_dead() {
    let few = || DriveSettings { attempts_max: 2, ..settings() };
    let (url, taken) = smtp_at("RCPT", &[554; 200]).await;
    let service = start(EmailTransport::smtp(&url).unwrap(), few()).await;
    service.ask(Uuid::now_v7(), email(TO, "Receipt")).await;
    service.becomes("it is dead", |state| state == Delivery::Dead(0)).await;
    // The server offers no SMTPUTF8.
    let service = start(EmailTransport::smtp(&url).unwrap(), few()).await;
    service.ask(Uuid::now_v7(), email("größe@example.com", "Receipt")).await;
    service.becomes("it is dead", |state| state == Delivery::Dead(0)).await;
    assert!(taken.lock().unwrap().is_empty());
    // A 4xx counts nothing.
    let (url, _) = smtp_at("RCPT", &[554, 451, 451, 451, 451, 451]).await;
    let service = start(EmailTransport::smtp(&url).unwrap(), few()).await;
    assert_eq!(service.outcome(Uuid::now_v7(), email(TO, "Receipt")).await, 200);
}

#[tokio::test]
async fn o28_what_did_not_leave_waits_and_what_cannot_be_composed_is_refused() {
    // Bound and never listening: nobody else gets the port meanwhile.
    let reserved = tokio::net::TcpSocket::new_v4().unwrap();
    reserved.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let url = format!("smtp://{}", reserved.local_addr().unwrap());
    let service = start(EmailTransport::smtp(&url).unwrap(), settings()).await;
    service.ask(Uuid::now_v7(), email(TO, "Receipt")).await;
    service.becomes("it waits", |state| state == Delivery::Waiting).await;
    assert_eq!(service.outcome(Uuid::now_v7(), email("nobody", "Receipt")).await, 422);
}

#[tokio::test]
async fn o28_into_files_an_e_mail_is_there_once_and_a_subject_adds_no_header() {
    let directory = tempfile::tempdir().unwrap();
    let service = start(EmailTransport::files(directory.path().join("out")), settings()).await;
    let event = Uuid::now_v7();
    for _ in 0..3 {
        assert_eq!(service.outcome(event, email(TO, "Receipt\r\nBcc: other@example.com")).await, 200);
    }
    let files: Vec<_> =
        std::fs::read_dir(directory.path().join("out")).unwrap().map(|file| file.unwrap().path()).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    let email = std::fs::read_to_string(&files[0]).unwrap();
    assert!(email.contains("Thank you.") && !email.lines().any(|line| line.starts_with("Bcc:")), "{email}");
}
