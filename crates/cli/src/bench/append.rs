//! Enqueuing: many messages in one statement, and what a message adds to a business transaction.

use std::sync::Arc;
use std::time::Instant;

use uuid::Uuid;

use super::Load;
use super::bed::Bed;
use super::crowd::crowd;
use super::figure::Figure;
use super::relay::{BULK, fill, rate};
use super::work::Maker;
use super::yard::{ACCOUNTS, Yard};
use crate::progress::Rounds;
use oncebox::StoreError;
use oncebox::app::AppError;

pub(super) async fn measure<S: Yard>(bed: &mut Bed<S>, load: Load) -> Result<Vec<Figure>, AppError> {
    let (topic, _) = bed.topic("append", &[]).await?;
    let maker = Arc::new(Maker::new(&topic, load));
    // Warms the connections up: a new connection of PostgreSQL compiles functions and reads its
    // catalogue once, not for each transaction.
    for message in [Message::Enqueued, Message::ByHand, Message::None] {
        business(bed, &maker, message, S::WRITERS * 50).await?;
    }
    let (mut bulk, mut ten, mut by_hand, mut of_none) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for _ in Rounds::start("append", load.rounds) {
        bulk.push((in_bulk(bed, &maker, load.messages).await?, row_by_row(bed, &maker, load.messages / 10).await?));
        ten.push((transactions(bed, &maker, 10, 200).await?, transactions(bed, &maker, 1, 200).await?));
        let count = load.messages / 4;
        let enqueued = business(bed, &maker, Message::Enqueued, count).await?;
        by_hand.push((enqueued, business(bed, &maker, Message::ByHand, count).await?));
        of_none.push((enqueued, business(bed, &maker, Message::None, count).await?));
    }
    Ok(vec![
        Figure::beside("append.bulk", "rows/s", "row by row in one transaction", &bulk).wanted(">= 8"),
        Figure::beside("append.ten", "ms", "a transaction with one message", &ten).wanted("<= 1.8"),
        Figure::beside(
            "append.business",
            "transactions/s",
            "the same transactions with a bare INSERT of the same columns into a plain table",
            &by_hand,
        )
        .wanted(">= 0.95"),
        Figure::beside(
            "append.business.of_none",
            "transactions/s",
            "the same business transactions without a message",
            &of_none,
        ),
    ])
}

/// What a business transaction writes besides its account.
#[derive(Debug, Clone, Copy)]
enum Message {
    Enqueued,
    /// A row of the same columns, in a plain table with a primary key and an index on the id.
    ByHand,
    None,
}

async fn in_bulk<S: Yard>(bed: &Bed<S>, maker: &Maker, count: usize) -> Result<f64, AppError> {
    let (count, began) = (count.next_multiple_of(BULK), Instant::now());
    fill(&bed.store, maker, count).await?;
    Ok(rate(count, began.elapsed()))
}

async fn row_by_row<S: Yard>(bed: &Bed<S>, maker: &Maker, count: usize) -> Result<f64, AppError> {
    let began = Instant::now();
    for _ in 0..count.div_ceil(BULK) {
        let mut tx = bed.store.pool().begin().await.map_err(StoreError::from)?;
        for _ in 0..BULK {
            oncebox::store::enqueue(&mut *tx, maker.message()).await?;
        }
        oncebox::store::commit(tx).await?;
    }
    Ok(rate(count.div_ceil(BULK) * BULK, began.elapsed()))
}

/// Milliseconds of a transaction with one business write and this many messages.
async fn transactions<S: Yard>(bed: &Bed<S>, maker: &Maker, messages: usize, count: usize) -> Result<f64, AppError> {
    let began = Instant::now();
    for at in 0..count {
        let mut tx = bed.store.pool().begin().await.map_err(StoreError::from)?;
        S::business(&mut tx, at as i64 % ACCOUNTS).await?;
        oncebox::store::enqueue_all(&mut *tx, (0..messages).map(|_| maker.message()).collect()).await?;
        oncebox::store::commit(tx).await?;
    }
    Ok(began.elapsed().as_secs_f64() * 1e3 / count as f64)
}

/// Business transactions per second with as many writers as make sense.
async fn business<S: Yard>(bed: &Bed<S>, maker: &Arc<Maker>, message: Message, count: usize) -> Result<f64, AppError> {
    let (store, maker) = (bed.store.clone(), Arc::clone(maker));
    let one = move |_| {
        let (store, maker) = (store.clone(), Arc::clone(&maker));
        async move {
            let mut tx = store.pool().begin().await.map_err(StoreError::from)?;
            S::business(&mut tx, fastrand::i64(0..ACCOUNTS)).await?;
            match message {
                Message::Enqueued => {
                    oncebox::store::enqueue(&mut *tx, maker.message()).await?;
                }
                Message::ByHand => S::append_by_hand(&mut tx, Uuid::now_v7(), maker.message()).await?,
                Message::None => {}
            }
            Ok(oncebox::store::commit(tx).await?)
        }
    };
    crowd(S::WRITERS, count, one).await
}
