//! Hints between processes, on PostgreSQL: a commit that one announces is heard by the relay of
//! another. All tests of this program share its hints, so each asks again until it is its turn.

use std::time::Duration;

use oncebox::sqlx::postgres::PgListener;
use oncebox::store::{Base, Enqueue, Outbox};
use oncebox::{Message, RelayOptions};

use super::kit::{Act, Does, SOON, Sql, consumer_options, message, on_postgres, relay_options};
use super::support::{eventually, in_a_process};

const LISTENS: &str = "select pid::text from pg_stat_activity
  where datname = current_database() and query ilike 'listen%oncebox_outbox%' and application_name = 'oncebox'";

/// Shown by: a relay that does not listen, and one that listens until its connection ends. Its next
/// poll is an hour away.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_hears_what_another_process_announces_also_after_its_connection_died() {
    // What other tests of this process commit would wake the relay too.
    const ALONE: &str = "ONCEBOX_CONTRACT_HINTS_ALONE";
    if std::env::var(ALONE).is_err() {
        let test = "hints::a_relay_hears_what_another_process_announces_also_after_its_connection_died";
        let (is_well, said) = in_a_process(test, &[(ALONE, "1")]).await;
        eprint!("{said}");
        assert!(is_well, "{said}");
        return;
    }
    on_postgres("hints_relay", |world| async move {
        let hour = Duration::from_secs(3_600);
        let relay = world.relay(RelayOptions { poll_min: hour, poll_max: hour, ..relay_options() });
        for name in ["a1", "a2"] {
            let listener =
                eventually("it listens", SOON, || async { world.store.texts(LISTENS).await.first().cloned() }).await;
            let mut tx = world.store.pool().begin().await.unwrap();
            Enqueue::write(&mut *tx, vec![message("t", name)]).await.unwrap();
            tx.commit().await.unwrap();
            eventually("it is published", SOON, || async {
                assert!(world.store.announce_commits().await.unwrap());
                world.published("t").await.contains(&name.to_owned()).then_some(())
            })
            .await;
            world.run(&format!("do $$ begin perform pg_terminate_backend({listener}); end $$")).await;
            eventually("it is gone", SOON, || async {
                (!world.store.texts(LISTENS).await.contains(&listener)).then_some(())
            })
            .await;
        }
        relay.end().await;
    })
    .await;
}

/// Shown by: a consumer that tells only its own process.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_consumer_announces_the_commits_of_its_process() {
    on_postgres("hints_consumer", |world| async move {
        let mut others = PgListener::connect(&world.url).await.unwrap();
        others.listen("oncebox_outbox").await.unwrap();
        let consumer = world.consumer(consumer_options(), Does(|_: &str, _: &Message| Act::Done));
        let hinting = tokio::spawn(async {
            loop {
                oncebox::store::hint();
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        });
        tokio::time::timeout(SOON, others.recv()).await.unwrap().unwrap();
        hinting.abort();
        consumer.end().await;
    })
    .await;
}
