//! `oncebox keys` and `oncebox operations`: what they list and show, what they do, and what they
//! refuse for safety (exit code 4).

use std::time::Duration;

use oncebox::operation::{Identity, Key, KeyFormat, Mode, Resource, Retention, Scope, Stage};
use oncebox::store::sqlite::SqliteStore;
use oncebox::store::{
    Answer, AnswerBody, Base, Basis, Begun, Driven, FIRST_POINT, KeptBody, KeyClaim, Keys, NewEvidence, NewIntent,
    NewOperation, Phases, RunOutcome, Sealed, StoreOptions,
};
use serde_json::{Value, json};

use crate::kit::{Place, block_on};

const LEASE: Duration = Duration::from_secs(600);

/// Works on the database of a place as a service does.
fn with<T>(place: &Place, work: impl AsyncFnOnce(&SqliteStore) -> T) -> T {
    block_on(async {
        let store = SqliteStore::connect(&StoreOptions::new(place.database())).await.unwrap();
        let done = work(&store).await;
        store.close().await;
        done
    })
}

fn claim(mode: Mode, key: &str) -> KeyClaim {
    let scope = Scope::new("t1", "user-7").unwrap();
    let key = Key::parse(format!("{key}-0123456789abcdef").as_bytes(), KeyFormat::Opaque).unwrap();
    KeyClaim {
        identity: Identity::new(&scope, "create_note".parse().unwrap(), key),
        principal: format!("sha256:{}", "0b".repeat(32)).parse().unwrap(),
        fingerprint: format!("1:sha256:{}", "07".repeat(32)).parse().unwrap(),
        mode,
        operation_id: uuid::Uuid::now_v7(),
        owner: uuid::Uuid::now_v7(),
        lease: LEASE,
    }
}

fn completed() -> RunOutcome {
    let kept = KeptBody { headers: Vec::new(), bytes: b"{}".to_vec(), format: 0, kid: None };
    let resource = Some(Resource { kind: "note".into(), id: "7".into(), location: Some("/notes/7".into()) });
    RunOutcome::Completed(Answer { status: 201, schema_version: 1, body: AnswerBody::Kept(kept), resource })
}

/// A key of the tower layer, with this outcome or still claimed; gives its hash.
fn edge(place: &Place, key: &str, outcome: Option<RunOutcome>) -> String {
    let claim = claim(Mode::Edge, key);
    with(place, async |store| {
        let Some(owned) = store.claim(&claim, Basis::New).await.unwrap() else { panic!("not claimed") };
        if let Some(outcome) = outcome {
            store.finish(&owned, &outcome, &Retention::default()).await.unwrap();
        }
    });
    claim.identity.digest()[..6].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// An operation whose provider was asked once, by this strategy, and that we drive.
fn asked(place: &Place, key: &str, strategy: &str) -> Driven {
    let new = NewOperation {
        claim: claim(Mode::Phased, key),
        flow: "create_charge".to_owned(),
        flow_version: 1,
        command: Sealed { bytes: b"{}".to_vec(), kid: None },
    };
    let intent = NewIntent {
        effect: "charge".to_owned(),
        strategy: strategy.to_owned(),
        provider_key: format!("op-{}", new.claim.operation_id),
        request: Sealed { bytes: b"amount=700&token=not-for-eyes".to_vec(), kid: None },
        adapter: "charges".to_owned(),
        adapter_version: 1,
        undoes: None,
    };
    with(place, async |store| {
        let begun = store.begin_first(&new, Basis::New, LEASE).await.unwrap();
        let Begun::Claimed(mut tx) = begun else { panic!("not claimed") };
        tx.advance(FIRST_POINT, "SENT", Stage::Outstanding, &[intent]).await.unwrap();
        let driven = tx.driven().clone();
        tx.commit().await.unwrap();
        driven
    })
}

fn park(place: &Place, driven: &Driven) {
    park_as(place, driven, "not-found");
}

fn park_as(place: &Place, driven: &Driven, reason: &str) {
    with(place, async |store| store.park(driven, reason).await.unwrap());
}

fn observe(place: &Place, driven: &Driven, verdict: &str) {
    let evidence = NewEvidence {
        operation_id: driven.operation_id,
        effect: "charge".to_owned(),
        epoch: driven.epoch,
        send: 1,
        kind: "answer".to_owned(),
        verdict: verdict.to_owned(),
        status: Some(402),
        bytes: Sealed { bytes: b"card_declined".to_vec(), kid: None },
    };
    with(place, async |store| store.observe(&evidence).await.unwrap());
}

fn hashes(place: &Place, filter: &[&str]) -> Vec<String> {
    let listed = place.json(&[&["keys", "list"], filter].concat());
    listed["keys"].as_array().unwrap().iter().map(|key| key["hash"].as_str().unwrap().to_owned()).collect()
}

fn ids(place: &Place, filter: &[&str]) -> Vec<String> {
    let listed = place.json(&[&["operations", "list"], filter].concat());
    let operations = listed["operations"].as_array().unwrap();
    operations.iter().map(|one| one["operation_id"].as_str().unwrap().to_owned()).collect()
}

// Shown by: `show` that inserts the key whatever was given.
/// Shown to fail: by a status and a doctor that look at messages alone: both said nothing of all
/// this, and doctor ended with 0.
#[test]
fn operations_keys_and_emails_that_nobody_carries_on_are_stuck() {
    let place = Place::migrated();
    let ago = |table: &str, column: &str| {
        place.sql(&format!("update oncebox_{table} set {column} = {column} - 7200000 where {column} is not null"));
    };
    // Its process was killed.
    asked(&place, "killed", "key");
    ago("operation", "due_at");
    ago("operation", "lease_until");
    park_as(&place, &asked(&place, "parked", "query"), "provider-mismatch");
    ago("operation", "updated_at");
    edge(&place, "unknown", Some(RunOutcome::Unknown));
    ago("idempotency_request", "created_at");
    place.sql(
        "insert into oncebox_email (unique_key, recipient, subject, body, due_at, created_at, state, settled_at)
         values ('a', 'a@b', 's', 'b', 1, unixepoch() * 1000 - 7200000, 'pending', null),
                ('b', 'a@b', 's', 'b', 1, unixepoch() * 1000, 'pending', null),
                ('c', 'a@b', 's', 'b', null, 1, 'failed', 1)",
    );
    let status = place.oncebox(&["status"]).run().ok();
    let done = place.oncebox(&["doctor", "--output", "json"]).run();
    let found: Value = serde_json::from_str(&done.stdout).unwrap();
    for (name, detail, remedy) in [
        ("e-mails: to send", "2 e-mails to send, the oldest for 72", "start `oncebox sender`"),
        ("operations: parked", "1 operation parked for 72", "`oncebox operations list --parked`"),
        ("operations: recovery", "1 operation due without a driver for 66", "start a recovery worker"),
        ("keys: unknown", "1 key of unknown outcome for 72", "`oncebox keys list --state unknown`"),
    ] {
        assert!(status.contains(&format!("stuck: {detail}")), "{detail} in {status}");
        let row = found["findings"].as_array().unwrap().iter().find(|row| row["name"] == name);
        let row = row.unwrap_or_else(|| panic!("{name} in {found}"));
        assert_eq!(row["severity"], "stuck", "{row}");
        let says = |field: &str, words: &str| row[field].as_str().is_some_and(|text| text.contains(words));
        assert!(says("detail", detail) && says("remedy", remedy), "{row}");
    }
    let failed = found["findings"].as_array().unwrap().iter().find(|row| row["name"] == "e-mails: failed").unwrap();
    assert_eq!((&failed["severity"], &failed["detail"]), (&json!("warning"), &json!("1 e-mail failed for good")));
    assert!(status.contains("2 e-mails to send (oldest 72") && status.contains(", 1 failed\n"), "{status}");
    assert!(status.contains("operations: 1 parked (oldest 72"), "{status}");
    done.ends_with(3, &["stuck"]);
}

#[test]
fn keys_are_listed_as_hashes_and_shown_whole_only_where_they_are_named() {
    let place = Place::migrated();
    let open = edge(&place, "open", None);
    let done = edge(&place, "done", Some(completed()));
    assert_eq!(hashes(&place, &[]), [open.clone(), done.clone()]);
    for (filter, count) in [
        (&["--tenant", "t1"][..], 2),
        (&["--tenant", "t2"], 0),
        (&["--operation", "create_note"], 2),
        (&["--state", "completed"], 1),
        (&["--state", "in-progress"], 1),
        (&["--state", "unknown"], 0),
        (&["--state", "expired"], 0),
        (&["--older-than", "1h"], 0),
        (&["--older-than", "0s"], 2),
        (&["--limit", "1"], 1),
    ] {
        assert_eq!(hashes(&place, filter).len(), count, "{filter:?}");
    }
    place.oncebox(&["keys", "list", "--limit", "1"]).run().ok_saying(&["hint: there may be more", "--limit"]);
    let people = place.oncebox(&["keys", "list"]).run().ok();
    assert!(people.contains(&done) && people.contains("COMPLETED"), "{people}");
    assert!(!people.contains("done-0123456789abcdef"), "a key is a secret of its client: {people}");
    let key = "done-0123456789abcdef";
    let named = ["keys", "show", key, "--tenant", "t1", "--operation", "create_note"];
    let mut by_key = place.json(&named);
    assert_eq!((&by_key["key"], &by_key["state"], &by_key["status"]), (&json!(key), &json!("COMPLETED"), &json!(201)));
    assert_eq!(by_key["resource"], json!({ "kind": "note", "id": "7", "location": "/notes/7" }));
    assert!(by_key["body_expires_at"].is_string() && by_key["error_code"].is_null(), "{by_key}");
    let people = place.oncebox(&named).run().ok();
    assert!(people.contains(key) && people.contains("/notes/7"), "{people}");
    // Who has only seen the list has the hash, and learns no key from it: neither for people nor
    // for machines.
    let by_hash = place.json(&["keys", "show", &done]);
    by_key.as_object_mut().unwrap().remove("key");
    assert_eq!(by_hash, by_key, "all but the key");
    let people = place.oncebox(&["keys", "show", &done]).run().ok();
    assert!(people.contains("COMPLETED") && !people.contains(key), "{people}");
    place.oncebox(&["keys", "show", key]).run().fails(2, &["no hash of a key", "--tenant"]);
    place.oncebox(&["keys", "show", "0000000000000000"]).run().fails(1, &["there is no key"]);
    place.oncebox(&["keys", "list", "--state", "gone"]).run().fails(2, &["no state"]);
}

// Shown by: a list that ends with the first record that cannot be read; one that leaves it out; a
// purge that says nothing of it.
#[test]
fn a_key_that_cannot_be_read_is_named_and_hides_no_other() {
    let place = Place::migrated();
    let broken = edge(&place, "broken", Some(completed()));
    place.sql("update oncebox_idempotency_request set principal = 'none'");
    let done = edge(&place, "done", Some(completed()));
    let listed = place.json(&["keys", "list"]);
    assert_eq!((&listed["keys"][0]["hash"], &listed["keys"][1]), (&json!(done), &Value::Null));
    assert_eq!(listed["unreadable"][0]["hash"], json!(broken));
    place.oncebox(&["keys", "list"]).run().ok_saying(&[broken.as_str(), "cannot be read"]);
    place.oncebox(&["keys", "show", &broken]).run().fails(1, &["cannot be read"]);
    let purge = ["keys", "purge", "--state", "completed", "--why", "as agreed", "--yes"];
    place.oncebox(&purge).run().ok_saying(&["keys that cannot be read, and stay: 1"]);
    assert_eq!(place.json(&["keys", "list"])["keys"], json!([]));
}

#[test]
fn o11_keys_are_released_and_purged_only_where_nothing_may_have_happened() {
    let place = Place::migrated();
    let open = edge(&place, "open", None);
    let unknown = edge(&place, "unknown", Some(RunOutcome::Unknown));
    let hashed = [edge(&place, "a", Some(completed())), edge(&place, "b", Some(completed()))];
    for (key, why) in [(&open, "IN_PROGRESS"), (&unknown, "unknown")] {
        place.oncebox(&["keys", "release", key, "--why", "w"]).run().fails(4, &[why]);
        // One that is refused leaves the others as they are.
        place.oncebox(&["keys", "purge", &hashed[0], key, "--why", "w", "--yes"]).run().fails(4, &[why]);
    }
    assert_eq!((hashes(&place, &[]).len(), place.audit().len()), (4, 0));
    let dry = place.json(&["keys", "release", &hashed[0], "--why", "w", "--dry-run"]);
    assert_eq!(dry, json!({ "act": "release", "dry_run": true, "hashes": [hashed[0]] }));
    assert_eq!(hashes(&place, &[]).len(), 4);
    let twice = place.oncebox(&["keys", "purge", &hashed[1], &hashed[1][..8], "--why", "w", "--dry-run"]).run();
    assert_eq!(twice.ok(), format!("would purge 1: {}\n", hashed[1]));
    place.oncebox(&["keys", "release", &hashed[0], "--why", "asked for"]).run().ok();
    place.oncebox(&["keys", "purge", "--why", "w"]).run().fails(2, &["a filter, or --all"]);
    // A filter that is given beside a hash would otherwise keep nothing from the purge.
    place.oncebox(&["keys", "purge", &hashed[1], "--tenant", "t2", "--why", "w"]).run().fails(2, &["--tenant"]);
    edge(&place, "c", Some(completed()));
    place.oncebox(&["keys", "purge", "--all", "--why", "w"]).run().fails(4, &["2 keys would be purged", "--yes"]);
    place.oncebox(&["keys", "purge", "--all", "--why", "leaving", "--yes"]).run().ok();
    assert_eq!(hashes(&place, &[]), [open, unknown]);
    assert_eq!(place.audit(), ["purge leaving", "purge leaving", "release asked for"]);
    assert_eq!(place.column("select count(*) || '' from oncebox_idempotency_purge"), ["0"], "their keys carry no time");
}

/// Shown by: the limit of the list for acts too: the rest stays, and the command ends with 0. And
/// by an act that ends with its first page, or reads that again.
#[test]
fn a_purge_of_all_goes_on_to_the_last_and_one_with_a_limit_says_what_it_leaves() {
    let place = Place::migrated();
    with(&place, async |store| {
        for number in 0..130 {
            let claim = claim(Mode::Edge, &format!("key-{number}"));
            let Some(owned) = store.claim(&claim, Basis::New).await.unwrap() else { panic!("not claimed") };
            store.finish(&owned, &completed(), &Retention::default()).await.unwrap();
        }
    });
    let open = edge(&place, "open", None);
    let purge = |more: &[&str]| place.oncebox(&[&["keys", "purge", "--why", "w"], more].concat()).run();
    purge(&["--all"]).fails(4, &["130 keys would be purged", "--yes"]);
    purge(&["--all", "--limit", "20"]).fails(4, &["20 of 130 keys would be purged", "110 more match"]);
    let said = purge(&["--all", "--dry-run"]).ok();
    assert!(said.starts_with("would purge 130: ") && said.ends_with(" and 30 more\n"), "{said}");
    purge(&["--tenant", "t1", "--dry-run"]).ok_saying(&["30 more match", "--all"]);
    let done = purge(&["--all", "--limit", "20", "--yes", "--output", "json"]).json();
    assert_eq!((done["hashes"].as_array().unwrap().len(), &done["remaining"]), (20, &json!(110)));
    // A page before all others, so that the act has to go on to a second one.
    let unreadable: String = (0..1_000)
        .map(|number| {
            format!(
                "update one set key_digest = unhex(printf('%064x', {number})), operation_id = randomblob(16);
                 insert into oncebox_idempotency_request select * from one;\n"
            )
        })
        .collect();
    place.sql(&format!(
        "begin; create table one as select * from oncebox_idempotency_request limit 1;
         update one set principal = 'none'; {unreadable} drop table one; commit"
    ));
    let done = purge(&["--all", "--yes"]);
    assert!(done.ok_saying(&["keys that cannot be read, and stay: 1000"]).starts_with("purge 110: "));
    place.sql("delete from oncebox_idempotency_request where principal = 'none'");
    assert_eq!((hashes(&place, &[]), place.audit().len()), (vec![open], 130));
}

/// While the first key is purged, a sweep deletes another one, and a client uses a third one anew.
///
/// Shown by: a key that has changed ends the act of a filter, so nothing is purged.
#[test]
fn a_purge_by_a_filter_leaves_alone_what_changed_meanwhile() {
    let place = Place::migrated();
    for by in [&["--tenant", "t1"][..], &["--all"]] {
        for number in 0..5 {
            edge(&place, &format!("key-{number}"), Some(completed()));
        }
        let last = "where key_digest = (select max(key_digest) from oncebox_idempotency_request)";
        place.sql(&format!(
            "create trigger meanwhile after delete on oncebox_idempotency_request
               when (select count(*) from oncebox_idempotency_request) = 4 begin
               delete from oncebox_idempotency_request {last};
               update oncebox_idempotency_request set epoch = epoch + 2 {last};
             end"
        ));
        let purged = place.oncebox(&[&["keys", "purge", "--why", "w", "--yes"], by].concat()).run();
        let said = purged.ok_saying(&["keys that changed or went meanwhile, and are left alone: 2"]);
        assert!(said.starts_with("purge 3: "), "{said}");
        assert_eq!(hashes(&place, &[]).len(), 1, "the one that is used anew");
        place.sql(
            "drop trigger meanwhile; delete from oncebox_idempotency_request; delete from oncebox_idempotency_body",
        );
    }
    assert_eq!(place.audit().len(), 6);
    // Who names a key means what was seen of it.
    let hash = edge(&place, "named", Some(completed()));
    let other = edge(&place, "other", Some(completed()));
    place.sql(
        "create trigger meanwhile after delete on oncebox_idempotency_request begin
           delete from oncebox_idempotency_request;
         end",
    );
    let named = place.oncebox(&["keys", "purge", &hash, &other, "--why", "w", "--yes"]).run();
    named.fails(4, &["it has changed meanwhile: look again"]);
}

/// Answers that no route gives. Shown by taking them: after `--ttl 0s` the next request executed
/// again, and status 20 was replayed as 500.
#[test]
fn o11_an_unknown_key_is_resolved_by_a_file_or_as_not_happened() {
    let place = Place::migrated();
    let done = edge(&place, "done", Some(RunOutcome::Unknown));
    let not = edge(&place, "not", Some(RunOutcome::Unknown));
    let file = place.path().join("answer.json");
    std::fs::write(&file, "{\"id\":\"n7\"}").unwrap();
    let file = file.display().to_string();
    place.oncebox(&["keys", "resolve", &done, "--why", "w"]).run().fails(2, &["--completed", "--not-happened"]);
    place
        .oncebox(&["keys", "resolve", &done, "--completed", "missing.json", "--why", "w"])
        .run()
        .fails(2, &["missing"]);
    for (option, value, why) in [
        ("--ttl", "0s", "longer than zero"),
        ("--status", "20", "200..=599"),
        ("--status", "199", "200..=599"),
        ("--status", "600", "200..=599"),
        ("--status", "302", "200 to 299, or 400 to 499"),
        ("--grpc-code", "17", "0..=16"),
    ] {
        let resolve = ["keys", "resolve", &done, "--completed", &file, option, value, "--why", "w"];
        place.oncebox(&resolve).run().fails(2, &[option, why]);
    }
    let resolve =
        ["keys", "resolve", &done, "--completed", &file, "--status", "201", "--ttl", "2h", "--why", "seen it"];
    place.oncebox(&resolve).run().ok();
    let shown = place.json(&["keys", "show", &done]);
    assert_eq!((&shown["state"], &shown["status"], &shown["body"]), (&json!("COMPLETED"), &json!(201), &json!("kept")));
    let kept = "select cast(bytes as text) || ' ' || (expires_at - (select outcome_at from oncebox_idempotency_request \
        where state = 'COMPLETED')) from oncebox_idempotency_body";
    assert_eq!(place.column(kept), ["{\"id\":\"n7\"} 7200000"]);
    place.oncebox(&resolve).run().fails(4, &["COMPLETED"]);
    place.oncebox(&["keys", "resolve", &not, "--not-happened", "--why", "looked"]).run().ok();
    assert_eq!(place.json(&["keys", "show", &not])["state"], "FAILED_RETRYABLE");
    let driven = asked(&place, "phased", "key");
    park(&place, &driven);
    let phased = &hashes(&place, &["--state", "unknown"])[0];
    let id = driven.operation_id.to_string();
    let refused = place.oncebox(&["keys", "resolve", phased, "--not-happened", "--why", "w"]).run();
    refused.fails(4, &["oncebox operations resolve", &id]);
    assert_eq!(place.audit(), ["resolve looked", "resolve seen it"]);
}

#[test]
fn operations_are_listed_and_shown_with_their_evidence_and_without_what_was_sent() {
    let place = Place::migrated();
    let driven = asked(&place, "a", "key");
    let parked = asked(&place, "b", "query");
    park(&place, &parked);
    observe(&place, &parked, "failure");
    for (filter, count) in [
        (&[][..], 2),
        (&["--flow", "create_charge"], 2),
        (&["--flow", "refund"], 0),
        (&["--tenant", "t1"], 2),
        (&["--stage", "outstanding"], 1),
        (&["--parked"], 1),
        (&["--conflicts"], 0),
        (&["--older-than", "1h"], 0),
        (&["--older-than", "0s"], 2),
        (&["--limit", "1"], 1),
    ] {
        assert_eq!(ids(&place, filter).len(), count, "{filter:?}");
    }
    let id = parked.operation_id.to_string();
    let shown = place.json(&["operations", "show", &id]);
    assert_eq!(
        (&shown["parked"], &shown["stage"], &shown["driven_until"]),
        (&json!("not-found"), &json!("UNKNOWN"), &Value::Null)
    );
    assert_eq!((&shown["effects"][0]["effect"], &shown["effects"][0]["sends"]), (&json!("charge"), &json!(1)));
    assert_eq!(
        (&shown["evidence"][0]["verdict"], &shown["evidence"][0]["seen"]),
        (&json!("failure"), &json!("card_declined"))
    );
    for output in ["table", "json"] {
        let text = place.oncebox(&["operations", "show", &id, "--output", output]).run().ok();
        assert!(text.contains("card_declined") && !text.contains("not-for-eyes"), "{text}");
    }
    let people = place.oncebox(&["operations", "list"]).run().ok();
    assert!(people.contains(&id) && people.contains("charge: open") && people.contains("not-found"), "{people}");
    assert!(place.json(&["operations", "show", &driven.operation_id.to_string()])["driven_until"].is_string());
    let unknown = "0197a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5b";
    place.oncebox(&["operations", "show", unknown]).run().fails(1, &["no operation"]);
    let judged = place.oncebox(&["operations", "judge", unknown, "--why", "w"]).run();
    judged.fails(4, &["there is nothing to judge"]);
    assert_eq!(judged.stderr.matches(unknown).count(), 1, "{}", judged.stderr);
    for command in ["show", "retry", "judge"] {
        place.oncebox(&["operations", command, "1"]).run().fails(2, &["a UUID, as `oncebox operations list` shows"]);
    }
}

#[test]
fn o6_an_operation_is_retried_as_its_worker_may_or_with_a_duplicate_accepted() {
    let place = Place::migrated();
    let (driven, mute) = (asked(&place, "a", "key"), asked(&place, "b", "none"));
    let (id, other) = (driven.operation_id.to_string(), mute.operation_id.to_string());
    let retry = ["operations", "retry", &id, "--why", "provider is back"];
    place.oncebox(&retry).run().fails(4, &["somebody drives it"]);
    park(&place, &driven);
    park(&place, &mute);
    place.oncebox(&[&retry[..], &["--dry-run"]].concat()).run().ok();
    assert_eq!(ids(&place, &["--parked"]).len(), 2);
    // One that is refused leaves the others as they are.
    place.oncebox(&["operations", "retry", &id, &other, "--why", "w", "--yes"]).run().fails(4, &["strategy `none`"]);
    assert_eq!((ids(&place, &["--parked"]).len(), place.audit().len()), (2, 0));
    assert_eq!(place.oncebox(&[&retry[..], &[&id]].concat()).run().ok(), format!("retry 1: {id}\n"), "named twice");
    assert_eq!(ids(&place, &["--parked"]), std::slice::from_ref(&other));
    place.oncebox(&["operations", "retry", &other, "--accept-duplicate", "--why", "may be twice"]).run().ok();
    let shown = place.json(&["operations", "show", &other]);
    assert_eq!(
        (&shown["evidence"][0]["kind"], &shown["evidence"][0]["verdict"]),
        (&json!("operator"), &json!("waived"))
    );
    assert!(shown["evidence"][0]["seen"].as_str().unwrap().contains("may be twice"));
    assert_eq!(place.audit(), ["retry may be twice", "retry provider is back"]);
}

#[test]
fn o9_an_operation_is_resolved_with_its_key_and_a_contradiction_is_listed() {
    let place = Place::migrated();
    let (driven, second) = (asked(&place, "a", "key"), asked(&place, "b", "key"));
    let (id, other) = (driven.operation_id.to_string(), second.operation_id.to_string());
    let file = place.path().join("answer.json");
    std::fs::write(&file, "{\"id\":\"c7\"}").unwrap();
    let file = file.display().to_string();
    let resolve = ["operations", "resolve", &id, "--succeeded", &file, "--status", "201", "--why", "asked them"];
    place.oncebox(&["operations", "resolve", &id, "--why", "w"]).run().fails(2, &["--succeeded"]);
    place.oncebox(&["operations", "resolve", &id, "--failed", &file, "--why", "w"]).run().fails(2, &["--status"]);
    for wrong in [["--ttl", "0s"], ["--status", "17"], ["--status", "402"], ["--grpc-code", "5"]] {
        let resolve = [&["operations", "resolve", &id, "--succeeded", &file, "--why", "w"], &wrong[..]].concat();
        place.oncebox(&resolve).run().fails(2, &[wrong[0]]);
    }
    place.oncebox(&resolve).run().fails(4, &["somebody drives it"]);
    observe(&place, &driven, "failure");
    let resolve = [&resolve[..], &["--take-over"]].concat();
    place.oncebox(&resolve).run().fails(4, &["the evidence of `charge` says the opposite"]);
    let resolve = [&resolve[..], &["--against-evidence"]].concat();
    place.oncebox(&[&resolve[..], &["--dry-run"]].concat()).run().ok();
    assert_eq!(ids(&place, &["--stage", "succeeded"]).len(), 0);
    place.oncebox(&resolve).run().ok();
    place.oncebox(&resolve).run().fails(4, &["no outcome is rewritten"]);
    let keys = place.json(&["keys", "list", "--state", "completed"]);
    assert_eq!((&keys["keys"][0]["operation_id"], &keys["keys"][0]["status"]), (&json!(id), &json!(201)));
    assert_eq!(ids(&place, &["--conflicts"]), [id]);
    park(&place, &second);
    place
        .oncebox(&["operations", "resolve", &other, "--happened", "refund", "--why", "w"])
        .run()
        .fails(4, &["no effect"]);
    place.oncebox(&["operations", "resolve", &other, "--happened", "charge", "--why", "in their books"]).run().ok();
    let shown = place.json(&["operations", "show", &other]);
    assert_eq!((&shown["parked"], &shown["evidence"][0]["verdict"]), (&Value::Null, &json!("success")));
    assert_eq!(place.audit(), ["resolve asked them", "resolve in their books"]);
    place.oncebox(&["operations", "judge", &other, "--why", "w"]).run().fails(4, &["no outcome to judge"]);
    place.oncebox(&["operations", "judge", &driven.operation_id.to_string(), "--why", "looked into it"]).run().ok();
    assert!(ids(&place, &["--conflicts"]).is_empty(), "judged");
}

// Shown by: a retry that deletes the reason, after which `--not-happened` needs no force; an audit
// row without it.
#[test]
fn o8_what_only_the_reason_of_a_parking_says_is_not_retried_away() {
    const SAID: &str = "evidence-not-stored: charge send 1: succeeded 201";
    let place = Place::migrated();
    let driven = asked(&place, "a", "key");
    let id = driven.operation_id.to_string();
    park_as(&place, &driven, SAID);
    for more in [&[][..], &["--accept-duplicate"]] {
        let retry = [&["operations", "retry", &id, "--why", "w"], more].concat();
        place.oncebox(&retry).run().fails(4, &["what the provider said of `charge`: success. Resolve `charge`"]);
    }
    let file = place.path().join("answer.json");
    std::fs::write(&file, "{}").unwrap();
    let file = file.display().to_string();
    let resolve = ["operations", "resolve", &id, "--why", "w"];
    for against in [&["--not-happened", "charge"][..], &["--failed", &file, "--status", "402"]] {
        let refused = place.oncebox(&[&resolve[..], against].concat()).run();
        refused.fails(4, &["the evidence of `charge` says the opposite: success"]);
    }
    assert_eq!((ids(&place, &["--parked"]).len(), place.audit().len()), (1, 0));
    place.oncebox(&[&resolve[..], &["--happened", "charge"]].concat()).run().ok();
    let was = place.column("select detail from oncebox_audit");
    assert!(was.len() == 1 && was[0].contains(SAID), "{was:?}");
}
