//! Claims beside many stored keys, and beside their purge.
//!
//! Two databases take turns: one has a fifth of the keys of the other, which also has what the
//! measurements before left in it.

use std::time::Duration;

use uuid::Uuid;

use super::Load;
use super::bed::Bed;
use super::crowd::crowd;
use super::figure::Figure;
use super::pay::CLIENTS;
use super::started::Started;
use super::yard::Yard;
use crate::common::failed;
use crate::progress::Rounds;
use oncebox::app::AppError;
use oncebox::operation::{Fingerprint, Identity, Key, KeyFormat, Mode, OperationName, PrincipalMark, Retention, Scope};
use oncebox::store::{Basis, KeyClaim};

/// The operation whose keys are stored and purged.
pub(super) const OLD: &str = "bench_old";
/// How many rows one statement fills in.
pub(super) const FILL: u64 = 100_000;
/// How many keys one purge takes.
const PURGE: u32 = 1_000;

pub(super) async fn measure<S: Yard>(bed: &mut Bed<S>, load: Load, stored: u64) -> Result<Vec<Figure>, AppError> {
    let many = bed.store.clone();
    let (few, own) = bed.beside().await?;
    let measured = beside(&many, &few, load, stored).await;
    few.close().await;
    own.drop_it::<S>().await?;
    measured
}

async fn beside<S: Yard>(many: &S, few: &S, load: Load, stored: u64) -> Result<Vec<Figure>, AppError> {
    fill(few, stored / 5).await?;
    fill(many, stored).await?;
    let (mut size, mut purge) = (Vec::new(), Vec::new());
    for store in [many, few] {
        claims(store, load.messages).await?;
    }
    for _ in Rounds::start("keys", load.rounds) {
        let alone = claims(many, load.messages).await?;
        size.push((alone, claims(few, load.messages).await?));
        purge.push((beside_purge(many, load.messages).await?, alone));
    }
    Ok(vec![
        Figure::beside("http.keys", "claims/s", "beside a fifth of the stored keys", &size).wanted(">= 0.75"),
        Figure::beside("http.purge", "claims/s", "while nothing is purged", &purge),
    ])
}

async fn fill<S: Yard>(store: &S, count: u64) -> Result<(), AppError> {
    for step in Rounds::start("keys to begin with", u32::try_from(count.div_ceil(FILL)).unwrap_or(u32::MAX)) {
        let from = u64::from(step) * FILL;
        store.fill_keys(from, count.min(from + FILL)).await?;
    }
    Ok(())
}

fn claim() -> Result<KeyClaim, AppError> {
    let scope = Scope::new("t1", "p1").map_err(failed)?;
    let operation: OperationName = "bench_claim".parse().map_err(failed)?;
    let key = Key::parse(Uuid::now_v7().to_string().as_bytes(), KeyFormat::Opaque).map_err(failed)?;
    let zeros = "0".repeat(64);
    Ok(KeyClaim {
        identity: Identity::new(&scope, operation, key),
        principal: format!("sha256:{zeros}").parse::<PrincipalMark>().map_err(failed)?,
        fingerprint: format!("1:sha256:{zeros}").parse::<Fingerprint>().map_err(failed)?,
        mode: Mode::Edge,
        operation_id: Uuid::now_v7(),
        owner: Uuid::now_v7(),
        lease: Duration::from_secs(30),
    })
}

/// Claims of new keys per second, each in a transaction of its own.
async fn claims<S: Yard>(store: &S, count: usize) -> Result<f64, AppError> {
    let store = store.clone();
    let one = move |_| {
        let store = store.clone();
        async move {
            match store.claim(&claim()?, Basis::New).await? {
                Some(_) => Ok(()),
                None => Err(AppError::failed("a new key was taken already")),
            }
        }
    };
    crowd(CLIENTS, count, one).await
}

/// Claims of new keys per second while old keys are purged, batch after batch.
async fn beside_purge<S: Yard>(store: &S, count: usize) -> Result<f64, AppError> {
    let purged = store.clone();
    let operation: OperationName = OLD.parse().map_err(failed)?;
    let purge = Started::begin(move |stop| async move {
        let mut taken = 0;
        while !stop.is_cancelled() {
            taken += purged.purge_keys(&operation, &Retention::default(), Duration::from_secs(60), PURGE).await?;
        }
        Ok::<u64, oncebox::StoreError>(taken)
    });
    let claimed = claims(store, count).await;
    if purge.stop().await? == 0 {
        return Err(AppError::failed("there was nothing to purge beside the claims: `--stored` is too small"));
    }
    claimed
}
