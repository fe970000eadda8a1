//! Keys that outlive the process (O27).

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};

use oncebox::client::{Bodies, Cause, Client, ClientError, ClientOptions, JournalError, KeyJournal, Request};
use reqwest::header::HeaderMap;

use super::process::Process;
use super::server::{Server, Step, client, quick, say};
use super::support::eventually;

const DIRECTORY: &str = "ONCEBOX_TEST_JOURNAL_DIRECTORY";
const ORIGIN: &str = "ONCEBOX_TEST_JOURNAL_ORIGIN";

fn kept() -> Bodies {
    Bodies::Encrypted([7; 32])
}

fn entries(directory: &Path) -> Vec<std::path::PathBuf> {
    let all = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    all.filter(|path| path.extension().is_some_and(|kind| kind == "key")).collect()
}

/// What the process that is killed does; nothing when it is run as a test.
#[tokio::test]
async fn the_process_that_is_killed() {
    let (Ok(directory), Ok(origin)) = (std::env::var(DIRECTORY), std::env::var(ORIGIN)) else { return };
    // It still waits for its first answer when it is killed.
    let forever = Duration::from_secs(3_600);
    let options = ClientOptions { attempt_timeout: forever, total: forever, ..quick() };
    let client = Client::new(options).unwrap().with_journal(KeyJournal::open(directory, kept()).unwrap());
    let request = Request::new("POST", &format!("{origin}/payments"), "{\"amountMinor\": 100}").unwrap();
    let request = request.with_header("content-type", "application/json").unwrap();
    let request = request.with_header("authorization", "Bearer t1:user-7").unwrap();
    let never = client.send(&request).await;
    unreachable!("it was to be killed: {never:?}");
}

// Shown by: writing the journal after the first attempt; making a new key for what is pending.
#[tokio::test]
async fn o27_after_kill_9_the_next_process_goes_on_with_the_same_key_and_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start([Step::Hang]).await;
    let log = tempfile::NamedTempFile::new().unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "journal::the_process_that_is_killed", "--nocapture", "--test-threads=1"])
        .env(DIRECTORY, directory.path())
        .env(ORIGIN, &server.origin);
    let mut child = Process::start(command, log.path());
    while server.came().is_empty() {
        child.check();
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // While it lives, nobody else has the journal.
    let locked = KeyJournal::open(directory.path(), kept());
    assert!(matches!(locked, Err(JournalError::Locked(_))), "{locked:?}");
    child.kill();

    let journal = KeyJournal::open(directory.path(), kept()).unwrap();
    let pending = journal.pending().await.unwrap();
    assert_eq!(pending.len(), 1);
    assert_eq!(pending[0].body, Some(b"{\"amountMinor\": 100}".to_vec()));
    let came = server.came();
    assert_eq!(came[0].headers.get("idempotency-key").unwrap(), pending[0].key.as_str());
    let client = client().with_journal(journal.clone());
    // It begins in doubt: an answer of the second process's says nothing of what the first one did.
    server.next([say(401, &[], "")]);
    let error = client.resume(&pending[0], None, &HeaderMap::new()).await.unwrap_err();
    assert!(matches!(error, ClientError::OutcomeUnknown { cause: Cause::Answer { status: 401, .. }, .. }), "{error}");
    let mut fresh = HeaderMap::new();
    fresh.insert("authorization", "Bearer t1:user-7".parse().unwrap());
    let answer = client.resume(&pending[0], None, &fresh).await.unwrap();
    assert_eq!((answer.status, server.all_the_same()), (201, 3));
    assert_eq!(server.came()[1].headers.get("authorization"), None, "credentials are not in the journal");
    assert_eq!(server.came()[2].headers.get("content-type").unwrap(), "application/json");
    assert_eq!(server.effects(), [answer.key.as_str()]);
    assert_eq!(journal.pending().await.unwrap().len(), 1, "the application has not said that it has the result");
    client.acknowledge(&answer.key).await.unwrap();
    client.acknowledge(&answer.key).await.unwrap();
    assert!(journal.pending().await.unwrap().is_empty() && entries(directory.path()).is_empty());
}

// Shown by: `note` after the loop; mode 644.
#[tokio::test]
async fn o27_the_journal_is_written_before_the_first_send_and_for_the_owner_alone() {
    let directory = tempfile::tempdir().unwrap();
    let journal = KeyJournal::open(directory.path().join("keys"), Bodies::Digest).unwrap();
    let server = Server::start([Step::List(directory.path().join("keys"))]).await;
    let (sending, request) = (client().with_journal(journal.clone()), server.request());
    let (key, body) = (request.key().clone(), serde_json::json!({"accountId": "acc-7", "amountMinor": 100}));
    let task = tokio::spawn(async move { sending.send(&request).await });
    eventually("it was sent", Duration::from_secs(60), || async { (!server.came().is_empty()).then_some(()) }).await;
    let found = entries(&directory.path().join("keys"));
    assert_eq!(found.len(), 1);
    assert!(server.listed().contains(&found[0]), "it was not there when the request had come");
    assert_eq!(found[0].metadata().unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(directory.path().join("keys").metadata().unwrap().permissions().mode() & 0o777, 0o700);
    task.abort();
    let pending = journal.pending().await.unwrap().remove(0);
    assert_eq!((&pending.key, pending.method.as_str()), (&key, "POST"));
    let client = client().with_journal(journal);
    let none = HeaderMap::new();
    let missing = client.resume(&pending, None, &none).await.unwrap_err();
    assert!(matches!(missing, ClientError::Journal(JournalError::BodyNeeded)), "{missing}");
    let other = client.resume(&pending, Some(b"{}".to_vec()), &none).await.unwrap_err();
    assert!(matches!(other, ClientError::Journal(JournalError::OtherBody)), "{other}");
    assert_eq!(server.came().len(), 1, "nothing else is sent under the key");
    let body = serde_json::to_vec(&body).unwrap();
    assert_eq!(client.resume(&pending, Some(body), &none).await.unwrap().status, 201);
}

// Shown by: leaving the comparison out of `note`.
#[tokio::test]
async fn o27_a_key_keeps_its_request() {
    let directory = tempfile::tempdir().unwrap();
    let journal = KeyJournal::open(directory.path(), kept()).unwrap();
    let client = client().with_journal(journal);
    let server = Server::start([]).await;
    let request = server.request().with_key("order-7-0123456789abcdef").unwrap();
    client.send(&request).await.unwrap();
    let key = request.key().as_str();
    let url = format!("{}/payments", server.origin);
    for (method, place) in [("POST", format!("{url}/x")), ("PUT", url.clone())] {
        let elsewhere = Request::new(method, &place, "{}").unwrap().with_key(key).unwrap();
        let other = client.send(&elsewhere).await.unwrap_err();
        assert!(matches!(other, ClientError::Journal(JournalError::OtherRequest)), "{method} {place}: {other}");
    }
    let changed = Request::new("POST", &url, "{}").unwrap().with_key(key).unwrap();
    let other_body = client.send(&changed).await.unwrap_err();
    assert!(matches!(other_body, ClientError::Journal(JournalError::OtherBody)), "{other_body}");
    assert_eq!(server.came().len(), 1);
}

// Shown by: looking for the entry and naming it without holding the mutex: both were sent, or the
// second one found that its file was gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o27_of_two_requests_that_come_at_once_under_one_key_one_is_sent() {
    let directory = tempfile::tempdir().unwrap();
    let journal = KeyJournal::open(directory.path(), Bodies::Digest).unwrap();
    let client = client().with_journal(journal.clone());
    let server = Server::start([]).await;
    let url = format!("{}/payments", server.origin);
    for round in 0..100 {
        let key = format!("order-{round}-0123456789abcdef");
        let request = |body: &str| Request::new("POST", &url, body).unwrap().with_key(&key).unwrap();
        let (one, other) = (request("{\"amountMinor\":1}"), request("{\"amountMinor\":2}"));
        let ends = tokio::join!(client.send(&one), client.send(&other));
        let refused = match ends {
            (Ok(_), Err(refused)) | (Err(refused), Ok(_)) => refused,
            both => panic!("{both:?}"),
        };
        assert!(matches!(refused, ClientError::Journal(JournalError::OtherBody)), "{refused}");
    }
    assert_eq!((server.came().len(), journal.pending().await.unwrap().len()), (100, 100));
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 101, "entries and the lock, nothing unfinished");
}

// Shown by: taking the entry of this request for that of another process: the outcome was unknown.
#[tokio::test]
async fn o27_a_refusal_ends_what_only_this_request_has_sent() {
    let directory = tempfile::tempdir().unwrap();
    let client = client().with_journal(KeyJournal::open(directory.path().join("a/b"), Bodies::Digest).unwrap());
    let server = Server::start([say(401, &[], ""), say(422, &[], "")]).await;
    let request = server.request();
    assert_eq!(client.send(&request).await.unwrap().status, 401);
    let authorised = request.with_header("authorization", "Bearer t").unwrap();
    assert_eq!(client.send(&authorised).await.unwrap().status, 422);
}

// Shown by: counting the lifetime from the start of the process.
#[tokio::test]
async fn o27_a_pending_key_that_the_server_may_have_forgotten_is_not_sent() {
    let directory = tempfile::tempdir().unwrap();
    let journal = KeyJournal::open(directory.path(), kept()).unwrap();
    let server = Server::start([]).await;
    let options =
        ClientOptions { attempt_timeout: Duration::from_secs(5), lifetime: Duration::from_secs(10), ..quick() };
    let client = Client::new(options.clone()).unwrap().with_journal(journal.clone());
    client.send(&server.request()).await.unwrap();
    let pending = journal.pending().await.unwrap().remove(0);
    eventually("the key is old", Duration::from_secs(60), || async {
        (pending.first_sent_at.elapsed().unwrap() > Duration::from_millis(5_100)).then_some(())
    })
    .await;
    // Shown by: leaving the age to the journal, which the second client does not have.
    for client in [client.clone(), Client::new(options).unwrap()] {
        let error = client.resume(&pending, None, &HeaderMap::new()).await.unwrap_err();
        assert!(matches!(error, ClientError::OutcomeUnknown { cause: Cause::KeyForgotten { .. }, .. }), "{error}");
    }
    assert_eq!(server.came().len(), 1);
}

// The server may forget a key this long after the first send, whoever has written that down.
#[tokio::test]
async fn o27_an_entry_is_as_old_as_the_first_send_that_is_known_of() {
    let directory = tempfile::tempdir().unwrap();
    let journal = |name: &str| KeyJournal::open(directory.path().join(name), kept()).unwrap();
    let (first, second) = (journal("first"), journal("second"));
    // Sent before, by a client that keeps no journal, which gave up after a second.
    let server = Server::start((0..1_000).map(|_| Step::DropBefore)).await;
    let brief = || Client::new(ClientOptions { total: Duration::from_secs(1), ..quick() }).unwrap();
    let request = server.request();
    let error = brief().send(&request).await.unwrap_err();
    assert!(matches!(error, ClientError::OutcomeUnknown { .. }), "{error}");
    let now = SystemTime::now();
    brief().with_journal(first.clone()).send(&request).await.unwrap_err();
    let pending = first.pending().await.unwrap().remove(0);
    let age = now.duration_since(pending.first_sent_at).expect("it was sent before");
    assert!(age > Duration::from_millis(500), "{age:?}");
    // Gone on with by a client that keeps another journal.
    brief().with_journal(second.clone()).resume(&pending, None, &HeaderMap::new()).await.unwrap_err();
    assert_eq!(second.pending().await.unwrap()[0].first_sent_at, pending.first_sent_at);
}

// Shown by: passing over what cannot be read.
#[tokio::test]
async fn o27_an_entry_that_cannot_be_read_is_not_passed_over_and_an_unfinished_one_is_removed() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("0123.part"), "{").unwrap();
    let journal = KeyJournal::open(directory.path(), kept()).unwrap();
    assert!(!directory.path().join("0123.part").exists());
    assert!(journal.pending().await.unwrap().is_empty());
    std::fs::write(directory.path().join("0123.key"), "{").unwrap();
    let error = journal.pending().await.unwrap_err();
    assert!(matches!(error, JournalError::Unreadable { .. }), "{error}");
}

// Shown to fail: with the error that the file is gone, which hid all others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o27_what_is_acknowledged_while_the_journal_is_read_hides_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    let journal = KeyJournal::open(directory.path(), Bodies::Digest).unwrap();
    let server = Server::start([]).await;
    let client = client().with_journal(journal.clone());
    client.send(&server.request().with_key("order-that-stays-0123456789").unwrap()).await.unwrap();
    let busy = tokio::spawn(async move {
        for number in 0..200 {
            let key = format!("order-{number}-0123456789abcdef");
            let answer = client.send(&server.request().with_key(&key).unwrap()).await.unwrap();
            client.acknowledge(&answer.key).await.unwrap();
        }
    });
    while !busy.is_finished() {
        let pending = journal.pending().await.unwrap();
        assert!(pending.iter().any(|one| one.key.as_str() == "order-that-stays-0123456789"));
    }
    busy.await.unwrap();
    assert_eq!(journal.pending().await.unwrap().len(), 1);
}
