//! What a claim does to the lock wait of its connection, which statements of handlers were promised
//! (O17). On MariaDB; what is sent to MySQL is the same.

use oncebox::operation::{Code, EffectTx, Outcome, Reply};
use oncebox::sqlx::query_scalar;
use oncebox::store::mysql::MySqlStore;

use super::kit::*;

const ASK: &str = "select cast(@@session.innodb_lock_wait_timeout as signed)";

// Shown by: a claim that does not give the usual wait back (the handler sees 1); a release to the
// pool that sets it to nothing (1 after the refused claim, and from then on for good).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o17_a_claim_refused_or_not_leaves_the_usual_lock_wait() {
    let test = "o17_a_claim_refused_or_not_leaves_the_usual_lock_wait";
    let Some(database) = crate::mysql::Db::new(test).await else { return };
    let world = World::on(database.store.clone(), &database.url).await;
    let other = world.with_pool_of(1).await;
    let (endpoint, there) = (world.protect(same_tx()), other.protect(same_tx()));
    let usual = other.store.number(ASK).await;
    assert!(usual > 1, "{usual}");
    let gate = Gate::closed();
    let begun = running(&world, &endpoint, K1, &gate);
    gate.begun().await;
    let asks = || {
        does::<MySqlStore, _>(|_: &Put, mut tx: EffectTx<'_, MySqlStore>| {
            Box::pin(async move {
                let seen: i64 = query_scalar(ASK).fetch_one(tx.connection()).await?;
                Ok(Outcome::Completed(Reply::json(201, &seen)?))
            })
        })
    };
    // The key is held.
    problem(run(&other, &there, K1, "a", asks()).await, Code::InProgress);
    let refused = other.store.number(ASK).await;
    gate.let_go();
    first(begun.await.unwrap());
    let seen = first(run(&other, &there, K2, "a", asks()).await);
    let inside: i64 = serde_json::from_slice(&seen.body).unwrap();
    assert_eq!([refused, inside, other.store.number(ASK).await], [usual; 3]);
}
