//! Decisions stay (R18), and shards: buckets are no property of the rows.

use std::collections::BTreeSet;
use std::time::Duration;

use oncebox::NewMessage;
use oncebox::store::{
    ActContext, DeadFilter, Diversion, LeaseRequest, Mark, Operator, OperatorAct, Outbox, enqueue_all,
};
use uuid::Uuid;

use crate::postgres::{Database, with_database};
use crate::relay::{Relay, message, open, payload, request, scanned_to, take};

/// Shown by not consulting the decisions: everything that was decided is sent again.
#[tokio::test]
async fn r18_a_cursor_that_was_set_back_sends_nothing_that_was_decided() {
    with_database("r18_a_cursor_that_was_set_back_sends_nothing_that_was_decided", |database| async move {
        let mut connection = database.connection().await;
        let many = ["sent", "skipped", "dead", "discarded", "released", "edited", "destination"];
        let many = many.map(|text| NewMessage::text("payments", "k", text).with_key(text)).into();
        enqueue_all(&mut connection, many).await.unwrap();
        let mut session = open(&database.store, "relay").await;
        let batch = session.read(100).await.unwrap();
        let at: Vec<i64> = batch.rows.iter().map(|row| row.position).collect();
        let dead = |holds| Diversion::Dead { reason: "too large".into(), holds };
        let destination = Diversion::HeldDestination { reason: "unknown".into() };
        let mut diverted = vec![(at[1], dead(false)), (at[6], destination)];
        diverted.extend([2, 3, 4, 5].map(|n| (at[n], dead(true))));
        session.checkpoint(Mark { through: Some(batch.batch), diverted, ..Mark::default() }).await.unwrap();
        let act = async |position: i64, act: OperatorAct| {
            let filter = DeadFilter { numbers: vec![format!("o{position}")], ..DeadFilter::default() };
            let context = ActContext { actor: "ann".into(), reason: "r".into(), dry_run: false, redrive_age_max: None };
            assert_eq!(database.store.act(&filter, &act, &context).await.unwrap().numbers.len(), 1);
        };
        act(at[3], OperatorAct::Discard).await;
        act(at[4], OperatorAct::Redrive).await;
        let id = Uuid::now_v7();
        act(at[5], OperatorAct::RedriveAs { id, payload: Some(b"better".to_vec()) }).await;
        let requests = session.requests(0, 1_000).await.unwrap();
        let asked: Vec<_> = requests.iter().map(|request| (request.position, request.discard)).collect();
        assert_eq!(asked, [(at[3], true), (at[4], false), (at[5], false)]);
        let held = session.held(&[at[5], at[4], 99_999]).await.unwrap();
        assert_eq!(held.iter().map(payload).collect::<Vec<_>>(), ["released", "better"]);
        let was = batch.rows[5].message.id.to_string();
        assert_eq!(held[1].message.id, id);
        assert_eq!(held[1].message.headers, [("oncebox-causation-id".to_owned(), was)]);
        session
            .checkpoint(Mark { released: vec![at[4], at[5]], discarded: vec![at[3]], ..Mark::default() })
            .await
            .unwrap();
        drop(session);
        let decisions: Vec<String> =
            database.value("select array_agg(decision order by position) from oncebox.decision").await;
        assert_eq!(decisions, ["skipped", "discarded", "released", "edited"]);

        database.run("update oncebox.shard set scanned_to = 0, gaps = '{}'").await;
        let mut relay = Relay::of(&database.store).await;
        assert_eq!(relay.drain().await, ["sent"], "what was decided, dead or held is not sent again");
        assert_eq!(scanned_to(&database).await, 7);
        // The message that policy skip left dead holds nothing, and is not among them.
        assert_eq!(relay.session.diverted(100).await.unwrap().len(), 2);
    })
    .await;
}

#[tokio::test]
async fn r18_decisions_go_with_the_partition_of_their_positions() {
    with_database("r18_decisions_go_with_the_partition_of_their_positions", |database| async move {
        let mut connection = database.connection().await;
        enqueue_all(&mut connection, vec![message("a"), message("b")]).await.unwrap();
        let mut relay = Relay::of(&database.store).await;
        let batch = relay.session.read(100).await.unwrap();
        let dead = Diversion::Dead { reason: "too large".into(), holds: false };
        let diverted = vec![(batch.rows[0].position, dead)];
        let mark = Mark { through: Some(batch.batch), diverted, ..Mark::default() };
        relay.session.checkpoint(mark).await.unwrap();
        assert_eq!(database.value::<i64>("select count(*) from oncebox.decision").await, 1);
        // The other positions of the partition are drawn and get no row, so the cursor passes it.
        database
            .run(
                "update oncebox.setting set value = 0 where name = 'outbox_retention_seconds';
                 select setval('oncebox.outbox_position_seq', 1000000)",
            )
            .await;
        enqueue_all(&mut connection, vec![message("next partition")]).await.unwrap();
        // A position that nobody has passed: a cursor that was set back stands below it.
        database.run("insert into oncebox.decision (position, decision) values (1000500, 'skipped')").await;
        relay.drain_until(&database, "select not exists (select 1 from oncebox.outbox_p1)").await;
        let left: Vec<i64> = database.value("select array(select position from oncebox.decision)").await;
        assert_eq!(left, [1_000_500], "those of the next partition stay");
        let kept: String = database.value("select convert_from(payload, 'UTF8') from oncebox.outbox_dead").await;
        assert_eq!(kept, "a", "a dead row stays, whatever happens to its partition");
    })
    .await;
}

/// The upper half of the buckets belongs to a second shard.
async fn two_shards(database: &Database) {
    database
        .run(
            "update oncebox.shard set bucket_to = 127;
             insert into oncebox.shard (shard_id, bucket_from, bucket_to) values (1, 128, 255)",
        )
        .await;
}

/// The one of the two that sends the messages of a key.
fn shard_of(key: &str) -> i32 {
    i32::from(oncebox::message::bucket(Some(key), Uuid::nil()) >= 128)
}

async fn both_stand_at(database: &Database, position: i64) {
    let stand = format!("select bool_and(scanned_to = {position} and isempty(gaps)) from oncebox.shard");
    assert!(database.value::<bool>(&stand).await);
}

/// Two shards read one table: each sends its own buckets, both see all positions.
#[tokio::test]
async fn shards_share_a_table_and_send_each_row_once() {
    with_database("shards_share_a_table_and_send_each_row_once", |database| async move {
        two_shards(&database).await;
        assert_eq!(database.store.shards().await.unwrap(), [0, 1]);
        let mut connection = database.connection().await;
        let many: Vec<NewMessage> =
            (0..300).map(|n| NewMessage::text("t", "k", n.to_string()).with_key(n.to_string())).collect();
        enqueue_all(&mut connection, many).await.unwrap();
        let mut all = BTreeSet::new();
        let mut sizes = Vec::new();
        for shard in [0, 1] {
            let session = take(&database.store, &LeaseRequest { shard, ..request("relay") }).await;
            let mut relay = Relay { session, sent: Vec::new() };
            let sent = relay.drain().await;
            sizes.push(sent.len());
            for one in sent {
                assert!(all.insert(one.clone()), "{one} was sent by both");
                assert_eq!(shard_of(one), shard);
            }
        }
        assert_eq!(sizes.iter().sum::<usize>(), 300);
        assert!(sizes.iter().all(|size| *size > 50), "{sizes:?}");
        both_stand_at(&database, 300).await;
    })
    .await;
}

/// Lengths are read of one's own rows alone, and what is left out of the first answer is fetched
/// from one's own rows alone.
#[tokio::test]
async fn g11_large_messages_come_whole_and_in_order_to_the_shard_they_belong_to() {
    with_database("g11_large_messages_come_whole_and_in_order_to_the_shard_they_belong_to", |database| async move {
        two_shards(&database).await;
        let mut connection = database.connection().await;
        let payload = |n: usize| format!("{n} {}", "x".repeat([10, 90_000, 300_000, 5_000][n % 4]));
        let many = (0..40).map(|n| NewMessage::text("t", "k", payload(n)).with_key(n.to_string())).collect();
        enqueue_all(&mut connection, many).await.unwrap();
        let mut all = BTreeSet::new();
        for shard in [0, 1] {
            let request = LeaseRequest { shard, read_bytes: 400_000, ..request("relay") };
            let session = take(&database.store, &request).await;
            let mut relay = Relay { session, sent: Vec::new() };
            let sent = relay.drain().await;
            let numbers: Vec<usize> = sent.iter().map(|one| one.split(' ').next().unwrap().parse().unwrap()).collect();
            assert!(numbers.is_sorted(), "{numbers:?}");
            for (number, sent) in numbers.iter().zip(sent) {
                assert_eq!(shard_of(&number.to_string()), shard);
                assert!(*sent == payload(*number), "the message {number} is not whole");
                assert!(all.insert(*number));
            }
        }
        assert_eq!(all.len(), 40);
        both_stand_at(&database, 40).await;
    })
    .await;
}

/// However long the broker takes nothing, and writers of other shards go on: what was sent stays in
/// the window, and all else in one batch behind it.
///
/// Shown to fail with a batch for each read, in the session and in its cursor.
#[tokio::test]
async fn g11_rows_of_other_shards_take_no_room_while_the_broker_takes_nothing() {
    let test = "g11_rows_of_other_shards_take_no_room_while_the_broker_takes_nothing";
    with_database(test, |database| async move {
        two_shards(&database).await;
        let mut connection = database.connection().await;
        let of_shard = |shard: i32| (0..).map(|n: u32| n.to_string()).find(|key| shard_of(key) == shard).unwrap();
        let (ours, theirs) = (of_shard(0), of_shard(1));
        let message = |key: &str| NewMessage::text("t", "k", "1").with_key(key.to_owned());
        let mut session = take(
            &database.store,
            &LeaseRequest { shard: 0, owner: "relay".into(), length: Duration::from_secs(600), read_bytes: 4 << 20 },
        )
        .await;
        enqueue_all(&mut connection, vec![message(&ours)]).await.unwrap();
        let first = session.read(10).await.unwrap();
        assert_eq!(first.rows.len(), 1);
        session.checkpoint(Mark::default()).await.unwrap();
        let (mut size, mut last) = (0, 0);
        for number in 0..300 {
            enqueue_all(&mut connection, vec![message(&theirs)]).await.unwrap();
            let read = session.read(10).await.unwrap();
            assert!(read.rows.is_empty());
            last = read.batch;
            session.checkpoint(Mark::default()).await.unwrap();
            let now = format!("{session:?}").len();
            if number == 10 {
                size = now;
            }
            assert!(number < 10 || now < size + 200, "after {number} reads it holds {now} characters, at first {size}");
        }
        session.checkpoint(Mark { through: Some(first.batch), ..Mark::default() }).await.unwrap();
        let ours = "select scanned_to from oncebox.shard where shard_id = 0";
        let at_first: i64 = database.value(ours).await;
        session.checkpoint(Mark { through: Some(last), ..Mark::default() }).await.unwrap();
        assert_eq!((at_first, database.value::<i64>(ours).await), (1, 301));
    })
    .await;
}
