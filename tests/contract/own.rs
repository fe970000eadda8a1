//! Messages that a database cannot take, with codes that look like its own distress: each stops its
//! own key only, and is dead in the end.

use oncebox::HandlerError;
use uuid::Uuid;

use super::kit::{Act, Does, SOON, Sql, World, consumer_options, on_mariadb, on_postgres, sqlite};
use crate::support::eventually;

/// Of two keys, one has a message that fails in this statement each time.
async fn is_counted<S: Sql>(world: World<S>, statement: &'static str) {
    world.deliver_all(&["a1", "b1", "a2", "b2"]);
    let act = move |name: &str, _: &oncebox::Message| if name == "a1" { Act::Run(statement) } else { Act::Done };
    let consumer = world.consumer(consumer_options(), Does(act));
    world.until_consumer("dead after its attempts", |ledger| (ledger.dead, ledger.held) == (1, 1)).await;
    assert_eq!(world.dead().await[0].reason, "attempts");
    world.until_effects(&["b1", "b2"]).await;
    consumer.end().await;
}

const TEMPORARY_FILES: &str =
    "do $$ begin raise exception 'temporary file size exceeds temp_file_limit' using errcode = '53400'; end $$";
const SORT_MEMORY: &str = "signal sqlstate 'HY001' set mysql_errno = 1038, message_text = 'Out of sort memory, consider increasing server sort buffer size'";

#[tokio::test]
async fn a_statement_that_always_asks_for_too_much_is_a_failure_of_its_message() {
    on_postgres("asks_too_much", |world| is_counted(world, TEMPORARY_FILES)).await;
    on_mariadb("asks_too_much", |world| is_counted(world, SORT_MEMORY)).await;
}

#[tokio::test]
async fn a_statement_that_always_ends_its_connection_is_a_failure_of_its_message() {
    on_postgres("ends_connection", |world| is_counted(world, "select pg_terminate_backend(pg_backend_pid())")).await;
    on_mariadb("ends_connection", |world| is_counted(world, "kill connection_id()")).await;
}

/// Stored without its content, which its coordinates lead to; the next message of the partition is
/// handled.
async fn is_stored_without_content<S: Sql>(world: World<S>, payload: Vec<u8>) {
    let id = Uuid::now_v7().to_string();
    let headers = [("ce_id", id.as_bytes()), ("ce_type", b"made".as_slice()), ("ce_source", b"test".as_slice())];
    world.broker.append("t", Some(b"a".as_slice()), &headers, Some(payload.as_slice()));
    world.deliver_all(&["b1"]);
    let act = |name: &str, _: &oncebox::Message| match name {
        "b1" => Act::Done,
        _ => Act::Fail(HandlerError::terminal("no")),
    };
    let consumer = world.consumer(consumer_options(), Does(act));
    world.until_consumer("dead", |ledger| ledger.dead == 1).await;
    let dead = world.dead().await.remove(0);
    assert_eq!((dead.reason.as_str(), dead.message_id.to_string(), dead.payload.len()), ("unstorable", id, 0));
    let error = dead.error.unwrap_or_default();
    assert!(error.contains("only in the broker, at t"), "{error}");
    world.until_effects(&["b1"]).await;
    consumer.end().await;
}

#[tokio::test]
async fn a_message_that_cannot_be_stored_does_not_stop_its_partition_on_postgres() {
    on_postgres("unstorable", |world| async move {
        let refuse = "create function refuse() returns trigger language plpgsql as $$ begin
            if octet_length(new.payload) > 0 then raise exception 'too large'; end if; return new; end $$;
            create trigger refuse before insert on oncebox.waiting for each row execute function refuse()";
        world.run(refuse).await;
        is_stored_without_content(world, b"a1".to_vec()).await;
    })
    .await;
}

#[tokio::test]
async fn a_message_that_cannot_be_stored_does_not_stop_its_partition_on_sqlite() {
    let world = sqlite().await;
    let refuse = "create trigger refuse before insert on oncebox_waiting when length(new.payload) > 0
        begin select raise(abort, 'too large'); end";
    world.run(refuse).await;
    is_stored_without_content(world, b"a1".to_vec()).await;
}

/// Larger than a packet of the server may be: it ends the connection, in the handler and when the
/// message is to be stored.
#[tokio::test]
async fn a_message_that_cannot_be_stored_does_not_stop_its_partition_on_mariadb() {
    on_mariadb("unstorable", |world| async move {
        let packet: usize = world.store.texts("select cast(@@max_allowed_packet as char)").await[0].parse().unwrap();
        is_stored_without_content(world, vec![b'x'; packet + 1_000]).await;
    })
    .await;
}

/// A message without an id is stored in the transaction of its batch. Shown by: trying the batch
/// three times before it is halved, as where the database is in trouble.
#[tokio::test]
async fn a_message_that_cannot_be_stored_is_found_among_many_in_a_few_tries() {
    on_postgres("unstorable_among_many", |world| async move {
        let refuse = "create sequence tries;
            create function refuse() returns trigger language plpgsql as $$ begin
            if octet_length(new.payload) > 0 then perform nextval('tries'); raise exception 'too large'; end if;
            return new; end $$;
            create trigger refuse before insert on oncebox.waiting for each row execute function refuse()";
        world.run(refuse).await;
        let headers = [("ce_type", b"made".as_slice()), ("ce_source", b"test".as_slice())];
        world.broker.append("t", Some(b"a".as_slice()), &headers, Some(b"a1".as_slice()));
        let names: Vec<String> = (0..99).map(|n| format!("b{n}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        world.deliver_all(&names);
        let consumer = world.consumer(consumer_options(), Does(|_: &str, _: &oncebox::Message| Act::Done));
        world.until_effects(&names).await;
        world.until_consumer("dead", |ledger| ledger.dead == 1).await;
        assert_eq!(world.dead().await[0].reason, "unstorable");
        let tries: u32 = world.store.texts("select last_value::text from tries").await[0].parse().unwrap();
        // A hundred are halved seven times. Alone it is tried twice, and three failures each time
        // show that they are its own. It is stored without its content after 20 seconds of tries.
        assert!(tries <= 27, "{tries} tries");
        consumer.end().await;
    })
    .await;
}

/// A server without memory or disk takes small rows, and large ones later. Shown by: three failures
/// in a row, which follow each other quickly, as the reason to store a message without its content.
#[tokio::test]
async fn g10_a_short_trouble_of_the_server_costs_no_message_its_content() {
    on_postgres("short_trouble", |world| async move {
        let refuse = "create sequence tries; create table trouble (); insert into trouble default values;
            create function refuse() returns trigger language plpgsql as $$ begin
            if octet_length(new.payload) > 0 and exists (select from trouble) then perform nextval('tries');
            raise exception 'out of memory' using errcode = '53200'; end if; return new; end $$;
            create trigger refuse before insert on oncebox.waiting for each row execute function refuse()";
        world.run(refuse).await;
        world.deliver_all(&["a1"]);
        let fails = |_: &str, _: &oncebox::Message| Act::Fail(HandlerError::retryable("no"));
        let consumer = world.consumer(consumer_options(), Does(fails));
        eventually("it was tried more often", SOON, || async {
            let tries = world.store.texts("select last_value::text from tries").await.remove(0);
            (tries.parse::<u32>().unwrap() >= 4).then_some(())
        })
        .await;
        world.run("delete from trouble").await;
        world.until_consumer("dead after its attempts", |ledger| ledger.dead == 1).await;
        let dead = world.dead().await.remove(0);
        assert_eq!((dead.reason.as_str(), dead.payload.as_slice()), ("attempts", b"a1".as_slice()));
        consumer.end().await;
    })
    .await;
}

/// Longer than 64 kB: a foreign producer writes what it likes.
#[tokio::test]
async fn a_message_with_a_long_source_and_kind_is_stored_whole() {
    async fn is_dead_and_whole<S: Sql>(world: World<S>) {
        let long = "s".repeat(70_000);
        let id = Uuid::now_v7().to_string();
        let headers = [("ce_id", id.as_bytes()), ("ce_type", long.as_bytes()), ("ce_source", long.as_bytes())];
        world.broker.append("t", Some(b"a".as_slice()), &headers, Some(b"a1".as_slice()));
        let fails = |_: &str, _: &oncebox::Message| Act::Fail(HandlerError::terminal("no"));
        let consumer = world.consumer(consumer_options(), Does(fails));
        world.until_consumer("dead", |ledger| ledger.dead == 1).await;
        let dead = world.dead().await.remove(0);
        assert_eq!(
            (dead.reason.as_str(), dead.kind.len(), dead.payload.as_slice()),
            ("terminal", 70_000, b"a1".as_slice())
        );
        let source = format!("select cast(length(source) as char(5)) from {}waiting", S::PREFIX);
        assert_eq!(world.store.texts(&source).await, ["70000"]);
        consumer.end().await;
    }
    on_postgres("long_source", is_dead_and_whole).await;
    on_mariadb("long_source", is_dead_and_whole).await;
    is_dead_and_whole(sqlite().await).await;
}
