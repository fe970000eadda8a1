//! Cases of the lease and the fence: one owner, in database time, and a lost lease changes nothing
//! (R7, R22, G9).

use std::time::Duration;

use super::trial::{LEASE, eventually, lease, new_message, payloads, read_rows, taken, through};
use super::{Fixture, Trial};
use oncebox::error::StoreError;
use oncebox::store::{Diversion, LeaseAnswer, LeaseRequest, Mark, Operator, Outbox};

/// The epoch of the shard, as the operator sees it.
async fn epoch<F: Fixture>(trial: &Trial<F>) -> i64 {
    trial.store.status().await.unwrap().shards[0].epoch
}

/// Twenty owners ask for the lease at once, and one gets it.
pub async fn a_shard_has_one_owner_and_the_same_owner_takes_it_again<F: Fixture>(trial: &Trial<F>) {
    let mut asking = tokio::task::JoinSet::new();
    for number in 0..20 {
        let store = trial.store.clone();
        asking.spawn(async move {
            let answer = store.open(&lease(&format!("owner {number}"))).await.unwrap();
            match answer {
                LeaseAnswer::Taken(_) => Ok(number),
                LeaseAnswer::HeldBy { owner, left } => Err((owner, left)),
                LeaseAnswer::NoShard => panic!("there is no shard 0"),
            }
        });
    }
    let answers = asking.join_all().await;
    let winners: Vec<i32> = answers.iter().filter_map(|answer| answer.clone().ok()).collect();
    assert_eq!(winners.len(), 1, "{answers:?}");
    let (winner, epoch) = (winners[0], epoch(trial).await);
    for (owner, left) in answers.into_iter().filter_map(Result::err) {
        assert_eq!(owner, format!("owner {winner}"));
        assert!(left <= LEASE && left > Duration::ZERO);
    }
    let _again = trial.session(&format!("owner {winner}")).await;
    assert!(self::epoch(trial).await > epoch, "each ownership has an epoch of its own");
}

/// After a clean end, a standby need not wait until the lease is over.
pub async fn a_lease_that_is_given_back_is_free_at_once<F: Fixture>(trial: &Trial<F>) {
    let first = trial.session("a").await;
    let epoch = epoch(trial).await;
    first.release().await.unwrap();
    let _second = trial.session("b").await;
    let shard = trial.store.status().await.unwrap().shards[0].clone();
    assert!(shard.epoch > epoch && shard.owner.as_deref() == Some("b"), "{shard:?}");
}

/// The lease of a dead owner ends, and a standby gets it.
pub async fn a_lease_ends_by_the_clock_of_the_database<F: Fixture>(trial: &Trial<F>) {
    let _dead = trial.session("dead").await;
    let epoch = epoch(trial).await;
    let answer = trial.store.open(&lease("standby")).await.unwrap();
    assert!(matches!(answer, LeaseAnswer::HeldBy { .. }));
    // A lease that is short from its begin may be over before a slow machine has asked for it.
    F::set_lease_end(&trial.store, 1).await;
    let _standby = eventually("the standby has the lease", || async {
        match trial.store.open(&lease("standby")).await.unwrap() {
            LeaseAnswer::Taken(session) => Some(session),
            _ => None,
        }
    })
    .await;
    assert!(self::epoch(trial).await > epoch);
}

/// The clock went back after the lease was granted. Without the rule, the lease would stand for
/// hours.
pub async fn r22_a_lease_longer_than_its_length_counts_as_expired<F: Fixture>(trial: &Trial<F>) {
    let _gone = trial.session("gone").await;
    let length = i64::try_from(LEASE.as_secs()).unwrap();
    F::set_lease_end(&trial.store, length - 5).await;
    // What counts is the length with which the lease was granted, not the length that the standby
    // asks for: a shorter one takes no live lease, and a longer one makes no old lease live.
    let asks = |length| LeaseRequest { length, ..lease("standby") };
    let answer = trial.store.open(&asks(Duration::from_secs(5))).await.unwrap();
    assert!(matches!(answer, LeaseAnswer::HeldBy { .. }), "{answer:?}");
    F::set_lease_end(&trial.store, length + 3_600).await;
    let status = trial.store.status().await.unwrap();
    assert_eq!(status.shards[0].owner, None, "and the status says so");
    let _taken = taken(trial.store.open(&asks(Duration::from_secs(12_000))).await.unwrap());
}

/// Each checkpoint renews the lease, so that an owner that works keeps it.
pub async fn checkpoints_renew_the_lease<F: Fixture>(trial: &Trial<F>) {
    let mut session = trial.session("a").await;
    // Less than half of its length is left, and more than the next two statements take.
    F::set_lease_end(&trial.store, i64::try_from(LEASE.as_secs() / 4).unwrap()).await;
    session.read(10).await.unwrap();
    session.checkpoint(Mark::default()).await.unwrap();
    let left = trial.store.status().await.unwrap().shards[0].lease_seconds_left;
    assert!(left > LEASE.as_secs_f64() / 2.0, "{left} s are left after a checkpoint");
}

/// Read, checkpoint, mark, divert and release are all fenced: none of them writes anything.
pub async fn g9_a_session_that_lost_its_lease_changes_nothing<F: Fixture>(trial: &Trial<F>) {
    trial.enqueue((0..4).map(|number| new_message("k", number.to_string())).collect()).await;
    let mut zombie = trial.session("zombie").await;
    let (rows, batch) = read_rows(&mut zombie, 4).await;
    let mut releasing = trial.take_over("zombie").await;
    let other = trial.take_over("owner").await;
    let before = trial.store.status().await.unwrap().shards;

    let dead = Diversion::Dead { reason: "no".into(), holds: true };
    let mark = Mark { diverted: vec![(rows[0].position, dead)], ..through(batch) };
    for outcome in [zombie.checkpoint(mark).await, zombie.checkpoint(Mark::default()).await] {
        assert!(matches!(outcome, Err(StoreError::Fenced(_))), "{outcome:?}");
    }
    let read = zombie.read(10).await;
    assert!(matches!(read, Err(StoreError::Fenced(_))), "{read:?}");
    let read = releasing.read(10).await;
    assert!(matches!(read, Err(StoreError::Fenced(_))), "{read:?}");
    for outcome in [zombie.release().await, releasing.release().await] {
        assert!(matches!(outcome, Err(StoreError::Fenced(_))), "{outcome:?}");
    }

    let after = trial.store.status().await.unwrap();
    assert_eq!((after.dead, after.held), (0, 0));
    let seen = |shards: &[oncebox::store::ShardStatus]| {
        shards.iter().map(|shard| (shard.epoch, shard.scanned_to, shard.owner.clone())).collect::<Vec<_>>()
    };
    assert_eq!(seen(&after.shards), seen(&before));
    let mut other = other;
    assert_eq!(payloads(&read_rows(&mut other, 4).await.0), ["0", "1", "2", "3"]);
}

/// The epoch or revision differs from what the session wrote: a pooler or a failover moved the
/// session to another server, or somebody restored the table.
pub async fn r7_a_shard_that_is_not_as_the_session_left_it_ends_the_session<F: Fixture>(trial: &Trial<F>) {
    trial.enqueue(vec![new_message("k", "0")]).await;
    let shard = trial.table("shard");
    for change in ["revision = revision + 1", "revision = revision - 1", "epoch = epoch - 1"] {
        let mut session = trial.session("a").await;
        let (_, batch) = read_rows(&mut session, 1).await;
        trial.run(&format!("update {shard} set {change}")).await;
        let outcome = session.checkpoint(through(batch)).await;
        assert!(matches!(outcome, Err(StoreError::Fenced(_))), "{change}: {outcome:?}");
        let read = session.read(10).await;
        assert!(matches!(read, Err(StoreError::Fenced(_))), "{change}: {read:?}");
        let outcome = session.release().await;
        assert!(matches!(outcome, Err(StoreError::Fenced(_))), "{change}: {outcome:?}");
    }
    assert_eq!(trial.store.status().await.unwrap().pending, 1);
}

/// The configuration names a shard that does not exist: `open` answers `NoShard`.
pub async fn an_unknown_shard_is_told_apart<F: Fixture>(trial: &Trial<F>) {
    assert!(trial.store.shards().await.unwrap().contains(&0));
    let answer = trial.store.open(&LeaseRequest { shard: 12_345, ..lease("a") }).await.unwrap();
    assert!(matches!(answer, LeaseAnswer::NoShard));
}
