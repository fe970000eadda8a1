//! Bodies of answers beyond 2 KiB: the partitions that they are stored in and freed with.

use std::time::Duration;

use oncebox::StoreError;
use oncebox::operation::{Mode, Retention};
use oncebox::sqlx::{AssertSqlSafe, Executor};
use oncebox::store::{Answer, AnswerBody, Basis, Fenced, KeptBody, Keys, Owned, RunOutcome};

use crate::postgres::{Database, with_database};
use crate::support::eventually;
use crate::turns::key_claim;

const DAY: Duration = Duration::from_secs(86_400);

async fn owner(database: &Database, number: usize) -> Owned {
    database.store.claim(&key_claim(Mode::Edge, number), Basis::New).await.unwrap().unwrap()
}

fn large() -> KeptBody {
    KeptBody { bytes: vec![7; 5_000], ..KeptBody::default() }
}

/// Ends a claim with a large body that lives so long.
async fn finish(database: &Database, owner: &Owned, body: Duration) -> Result<Fenced, StoreError> {
    let answer = Answer { status: 201, schema_version: 1, body: AnswerBody::Kept(large()), resource: None };
    let retention = Retention { ttl: body, body, metadata: body };
    database.store.finish(owner, &RunOutcome::Completed(answer), &retention).await
}

/// Stores a large body that lives so long.
async fn keep(database: &Database, number: usize, body: Duration) -> Owned {
    let owner = owner(database, number).await;
    assert_eq!(finish(database, &owner, body).await.unwrap(), Fenced::Done);
    owner
}

/// The body as a replay reads it.
async fn read_back(database: &Database, owner: &Owned) -> Option<KeptBody> {
    let record = database.store.find(&owner.identity).await.unwrap().record.unwrap();
    database.store.body(&record).await.unwrap()
}

/// The partition of the only body for which this is true.
async fn partition(database: &Database, which: &str) -> String {
    let partition = format!("select tableoid::regclass::text from oncebox.idempotency_body where {which}");
    database.value(&partition).await
}

/// Drops the last ranges. Nothing ends on their days yet, so they can be made again.
pub(crate) fn drop_last(ranges: usize) -> String {
    format!(
        "do $$ declare range text; begin
            for range in select c.relname from pg_inherits i join pg_class c on c.oid = i.inhrelid
               cross join lateral regexp_match(pg_get_expr(c.relpartbound, c.oid), 'FROM \\(''([^'']+)''\\)') bound
               where i.inhparent = 'oncebox.idempotency_body'::regclass and bound is not null
               order by bound[1]::timestamptz desc limit {ranges}
            loop execute format('drop table oncebox.%I', range); end loop; end $$"
    )
}

/// Whether partitions stand ahead for more than 34 days.
const AHEAD: &str = "select exists (select from pg_inherits i join pg_class c on c.oid = i.inhrelid
     cross join lateral regexp_match(pg_get_expr(c.relpartbound, c.oid), 'TO \\(''([^'']+)''\\)') bound
     where i.inhparent = 'oncebox.idempotency_body'::regclass and bound[1]::timestamptz > now() + interval '34 days')";

/// Large bodies whose day is over go with their partition: it is emptied, then dropped. Bodies that
/// live are read back whole. In DEFAULT, which has those of days without a partition, only what is
/// over is deleted, in batches. Partitions stand ahead for 34 days.
///
/// Shown to fail: with `is_over` inverted; without the TRUNCATE; without the DROP; without the
/// ATTACH; without the DELETE, its time or its limit.
#[tokio::test]
async fn m101_large_bodies_go_with_their_partition_and_live_ones_stay() {
    let test = "m101_large_bodies_go_with_their_partition_and_live_ones_stay";
    with_database(test, |database| async move {
        database.run(&drop_last(2)).await;
        let ends_at = |number: usize, ends: &str| {
            let digest = key_claim(Mode::Edge, number).identity.digest();
            let digest: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
            format!(
                "update oncebox.idempotency_request set body_expires_at = {ends} where key_digest = '\\x{digest}';
                 update oncebox.idempotency_body set expires_at = {ends} where key_digest = '\\x{digest}'"
            )
        };
        let noon_before = "date_trunc('day', now() at time zone 'UTC') at time zone 'UTC' - interval '12 hours'";
        let live = [keep(&database, 1, DAY / 24).await, keep(&database, 2, DAY).await];
        database.run(&ends_at(2, "now() + interval '60 days'")).await;
        for (number, ends) in [(3, noon_before), (4, "now() - interval '9 days'"), (5, "now() - interval '8 days'")] {
            keep(&database, number, DAY).await;
            database.run(&ends_at(number, ends)).await;
        }
        let over = "expires_at between now() - interval '2 days' and now()";
        let past = partition(&database, over).await;
        assert!(past.starts_with("oncebox.idempotency_body_p"), "{past}");
        assert_eq!(
            partition(&database, "expires_at > now() + interval '50 days'").await,
            "oncebox.idempotency_body_default"
        );

        assert_eq!(database.store.expire_bodies(1).await.unwrap(), 1, "of DEFAULT, the oldest");
        let left = "select count(*) from oncebox.idempotency_body where expires_at < now() - interval '2 days'";
        assert_eq!(database.value::<i64>(left).await, 1);
        // A step whose lock is not free is left for a later call.
        let is_dropped = format!("select to_regclass('{past}') is null");
        eventually("the partition of the day before is dropped", Duration::from_secs(60), || async {
            database.store.expire_bodies(1).await.unwrap();
            database.value::<bool>(&is_dropped).await.then_some(())
        })
        .await;
        eventually("partitions are ahead again", Duration::from_secs(60), || async {
            database.store.expire_bodies(1).await.unwrap();
            database.value::<bool>(AHEAD).await.then_some(())
        })
        .await;
        assert_eq!(database.value::<i64>("select count(*) from oncebox.idempotency_body").await, 2);
        for owner in &live {
            assert_eq!(read_back(&database, owner).await, Some(large()));
        }
    })
    .await;
}

/// A body that is kept for longer than partitions are made ahead stays in the row of its claim
/// until its time is over. Shown to fail: with all large bodies beside it. From DEFAULT such a body
/// stops every later partition, because its day is the next one to make at last.
#[tokio::test]
async fn r8_a_body_that_outlives_the_partitions_is_in_no_partitions_way() {
    with_database("r8_a_body_that_outlives_the_partitions_is_in_no_partitions_way", |database| async move {
        database.run(&drop_last(2)).await;
        let kept = [keep(&database, 1, 32 * DAY).await, keep(&database, 2, 33 * DAY).await];
        let made = partition(&database, "true").await;
        assert!(made.starts_with("oncebox.idempotency_body_p"), "{made}");
        eventually("partitions are ahead again", Duration::from_secs(60), || async {
            database.store.expire_bodies(1).await.unwrap();
            database.value::<bool>(AHEAD).await.then_some(())
        })
        .await;
        for owner in &kept {
            assert_eq!(read_back(&database, owner).await, Some(large()));
        }
        database.run("update oncebox.idempotency_request set body_expires_at = now()").await;
        assert_eq!(database.store.expire_bodies(2).await.unwrap(), 1);
        let left = "select count(*) from oncebox.idempotency_request where body_bytes is not null";
        assert_eq!(database.value::<i64>(left).await, 0);
    })
    .await;
}

/// A body on its way to DEFAULT, for whose day a partition is made meanwhile, is refused as a
/// transient error: what is repeated writes it into the partition.
///
/// Shown to fail: without the case of `attached` (the caller gets the error of a CHECK).
#[tokio::test]
async fn r8_a_body_whose_partition_is_being_made_is_written_by_a_second_try() {
    let test = "r8_a_body_whose_partition_is_being_made_is_written_by_a_second_try";
    with_database(test, |database| async move {
        // Of the days from the thirtieth on.
        database.run(&drop_last(5)).await;
        let owner = owner(&database, 1).await;
        let mut maker = database.connection().await;
        maker.execute("begin").await.unwrap();
        let attach = "select oncebox.attach_body_range(now() + interval '30 days', now() + interval '34 days')";
        maker.execute(AssertSqlSafe(attach.to_owned())).await.unwrap();
        let writes = async { finish(&database, &owner, 31 * DAY).await };
        let commits = async {
            let waits = "select exists (select from pg_locks l join pg_stat_activity a using (pid)
                 where a.datname = current_database() and not l.granted)";
            eventually("the body waits for DEFAULT", Duration::from_secs(60), || async {
                database.value::<bool>(waits).await.then_some(())
            })
            .await;
            maker.execute("commit").await.unwrap();
        };
        let (written, ()) = tokio::join!(writes, commits);
        let error = written.unwrap_err();
        assert!(matches!(error, StoreError::Busy(_)), "{error:?}");
        assert_eq!(finish(&database, &owner, 31 * DAY).await.unwrap(), Fenced::Done);
        let made = partition(&database, "expires_at > now()").await;
        assert!(made.starts_with("oncebox.idempotency_body_p"), "{made}");
        assert_eq!(read_back(&database, &owner).await, Some(large()));
    })
    .await;
}
