//! Faults: what the rest still gets while one thing is stuck, frozen, failed or killed, beside the
//! same with nothing wrong.
//!
//! Promise: both sides of a figure have the same servers, messages and round. What is frozen or
//! killed is a process that the benchmark started itself.

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

pub(crate) use peer::{Role, run_role};

/// Rows that go at a steady pace, or message by message, get this share of the messages.
const SLOW_SHARE: usize = 10;

pub(super) async fn measure<S: Yard>(bed: &mut Bed<S>, load: Load, stuck: u32) -> Result<Vec<Figure>, AppError> {
    let mut figures = Vec::new();
    // The embedded broker makes a topic with its first message: none is missing.
    if bed.broker.name() != "embedded" {
        figures.extend(stuck::measure(bed, load, stuck).await?);
    }
    figures.extend(stuck::measure_silent(bed, load).await?);
    // With a single writer, one that is frozen in its transaction locks the file for everybody.
    if S::WRITERS > 1 {
        figures.push(frozen::measure(bed, load).await?);
    }
    figures.push(failed::measure(bed, load).await?);
    figures.extend(killed::measure(bed, load).await?);
    Ok(figures)
}
