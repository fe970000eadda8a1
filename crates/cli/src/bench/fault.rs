//! Faults: what everything else achieves while one thing is stuck, frozen, failed or killed, beside
//! the same without a fault.
//!
//! Promise: both sides of a figure have the same servers, messages and round. Only a process that
//! the benchmark started is frozen or killed.

mod failed;
mod frozen;
mod killed;
mod peer;
mod running;
mod stuck;

use super::Load;
use super::bed::Bed;
use super::figure::Figure;
use super::yard::Yard;
use oncebox::app::AppError;

pub(crate) use peer::{PeerArgs, run_peer};

/// Measurements at a steady pace, or message by message, use `messages / SLOW_SHARE` messages.
const SLOW_SHARE: usize = 10;

pub(super) async fn measure<S: Yard>(bed: &mut Bed<S>, load: Load, stuck: u32) -> Result<Vec<Figure>, AppError> {
    let mut figures = Vec::new();
    // The embedded broker makes a topic with its first message, so no topic is missing.
    if bed.broker.name() != "embedded" {
        figures.extend(stuck::measure(bed, load, stuck).await?);
    }
    figures.extend(stuck::measure_silent(bed, load).await?);
    // On a store with a single writer, a process that is frozen in a transaction locks the file for
    // all.
    if S::WRITERS > 1 {
        figures.push(frozen::measure(bed, load).await?);
    }
    figures.push(failed::measure(bed, load).await?);
    figures.extend(killed::measure(bed, load).await?);
    Ok(figures)
}
