//! Answers that are encrypted: unreadable in the database, opened for their own request only, and
//! read beside a new key (M67, HTTP section 11).

use oncebox::operation::{Code, EngineOptions, Kid, Sealer};

use super::kept::{Answers, ask, holds, stored};
use super::kit::*;

on_all! {
    m67_a_sealed_answer_is_unreadable_in_the_database_and_opens_for_its_own_request,
    an_answer_in_plain_is_not_replayed_where_only_sealed_ones_are,
}

fn sealer(write: &str, kids: &[&str]) -> Sealer {
    let keys: Vec<(Kid, Vec<u8>)> =
        kids.iter().map(|kid| (kid.parse().unwrap(), kid.repeat(16).into_bytes())).collect();
    Sealer::encrypting(&write.parse().unwrap(), keys.iter().map(|(kid, key)| (kid.clone(), key.as_slice()))).unwrap()
}

fn sealing<S: Sql>(world: &World<S>, sealer: Sealer) -> World<S> {
    world.process(EngineOptions { sealer, ..EngineOptions::default() })
}

/// A transactional or an edge operation of this process.
async fn serves<S: Sql>(world: &World<S>, answers: &Answers, is_typed: bool, gate: &Gate) -> String {
    if is_typed {
        answers.typed(world, |route| route, gate).await
    } else {
        answers.raw(world, |route| route, gate).await
    }
}

/// Puts the stored body of one key in the place of another's.
async fn body_of_another<S: Sql>(world: &World<S>, from: &str, to: &str) {
    let digest = |key: &str| {
        let hex: String = identity("t1", key).digest().iter().map(|byte| format!("{byte:02x}")).collect();
        if S::NAME == "postgres" { format!("'\\x{hex}'::bytea") } else { format!("x'{hex}'") }
    };
    let (from, to, table) = (digest(from), digest(to), format!("{}idempotency_body", S::PREFIX));
    let sql = if S::NAME == "mysql" {
        format!(
            "update {table} b join {table} o on o.key_digest = {from} set b.bytes = o.bytes where b.key_digest = {to}"
        )
    } else {
        format!(
            "update {table} set bytes = (select o.bytes from {table} o where o.key_digest = {from}) where key_digest = {to}"
        )
    };
    world.store.exec(&sql).await;
}

// Shown by: storing it in plain; sealing it for no request in particular (the body of another key
// is answered); answering 409, as if it were gone, where another process has the key.
async fn m67_a_sealed_answer_is_unreadable_in_the_database_and_opens_for_its_own_request<S: Sql>(world: World<S>) {
    let gate = Gate::open();
    // Long enough to stand in a table of its own, whatever compression makes of it.
    let noise: String = (0..1_000).map(|_| uuid::Uuid::now_v7().simple().to_string()).collect();
    let answers = Answers::new("text/plain", format!("balance of acc-7: 4242 {noise}"));
    let sealed = |write: &str, kids: &[&str]| sealing(&world, sealer(write, kids));
    let keys = [(K1, format!("{K1}-2"), true), (K2, format!("{K2}-2"), false)];
    for (key, another, is_typed) in keys {
        let url = serves(&sealed("e1", &["e1"]), &answers, is_typed, &gate).await;
        for key in [key, another.as_str()] {
            assert_eq!(ask(&url, key).await.body, *answers.body);
            let (_, kept) = stored(&world, key).await;
            let kept = kept.unwrap();
            assert_eq!(kept.kid.as_deref(), Some("e1"));
            assert!(!holds(&kept.bytes, b"acc-7") && !holds(&kept.bytes, &noise.as_bytes()[..32]));
        }
        // Another key is written with by now.
        for write in ["e1", "e2"] {
            let url = serves(&sealed(write, &["e1", "e2"]), &answers, is_typed, &gate).await;
            let again = ask(&url, key).await;
            assert_eq!((again.status, again.is_replayed(), &again.body), (201, true, &*answers.body));
        }
        // Who has not the key cannot answer, and another one can: it is not gone, and nothing runs.
        for blind in [sealed("e2", &["e2"]), world.another_process()] {
            let url = serves(&blind, &answers, is_typed, &gate).await;
            ask(&url, key).await.is(Code::FingerprintVersionUnknown);
            send(post(&url, key, r#"{"text":"b"}"#)).await.is(Code::KeyReused);
        }
        body_of_another(&world, &another, key).await;
        ask(&url, key).await.is(Code::ResultNotRetained);
        assert!(ask(&url, &another).await.is_replayed());
    }
    assert_eq!(gate.calls(), 4);
}

// Whoever can write to the database puts an answer of his own in the place of a sealed one. Shown
// to fail: without `sealed_only` it is replayed as the service's.
async fn an_answer_in_plain_is_not_replayed_where_only_sealed_ones_are<S: Sql>(world: World<S>) {
    let gate = Gate::open();
    let answers = Answers::new("text/plain", "balance of acc-7: 4242");
    let sealing_now = sealing(&world, sealer("e1", &["e1"]));
    let strict = sealing(&world, sealer("e1", &["e1"]).sealed_only());
    let url = serves(&sealing_now, &answers, true, &gate).await;
    assert_eq!(ask(&url, K1).await.body, *answers.body);
    let strict_url = serves(&strict, &answers, true, &gate).await;
    assert!(ask(&strict_url, K1).await.is_replayed(), "a sealed one is");
    let plain_url = serves(&world.another_process(), &answers, true, &gate).await;
    assert_eq!(ask(&plain_url, K2).await.body, *answers.body);
    ask(&strict_url, K2).await.is(Code::ResultNotRetained);
    assert!(ask(&url, K2).await.is_replayed(), "by a service that was given its key a moment ago");
    assert_eq!(gate.calls(), 2, "nothing runs again");
}

// All the bytes of the file and its log. Shown by: a sealer that the engine does not use.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http_11_a_dump_of_the_database_shows_no_sealed_answer() {
    for (sealed, shows) in [(false, true), (true, false)] {
        let (world, gate) = (sqlite().await, Gate::open());
        let process = if sealed { sealing(&world, sealer("e1", &["e1"])) } else { world.another_process() };
        let secret = "balance of acc-7: 4242";
        let url = Answers::new("text/plain", secret).typed(&process, |route| route, &gate).await;
        assert_eq!(ask(&url, K1).await.body, secret.as_bytes());
        let mut dump = Vec::new();
        for file in std::fs::read_dir(world._directory.as_ref().unwrap().path()).unwrap() {
            dump.extend(std::fs::read(file.unwrap().path()).unwrap());
        }
        assert!(holds(&dump, K1.as_bytes()), "the dump has the record");
        assert_eq!(holds(&dump, b"acc-7"), shows);
    }
}
