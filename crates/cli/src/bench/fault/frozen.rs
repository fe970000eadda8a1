//! A peer is frozen with its transactions open: the rate of the other consumer, from the moment at
//! which it has the partitions of the peer.

use super::peer::Peer;
use super::running::drain;
use crate::bench::Load;
use crate::bench::bed::Bed;
use crate::bench::figure::Figure;
use crate::bench::yard::{ACCOUNTS, Yard};
use crate::progress::Rounds;
use oncebox::app::AppError;

pub(super) async fn measure<S: Yard>(bed: &mut Bed<S>, load: Load) -> Result<Figure, AppError> {
    // Each key has its own account, so the frozen process locks only rows of its own keys.
    let load = Load { keys: load.keys.min(ACCOUNTS as u32), ..load };
    let mut pairs = Vec::new();
    for _ in Rounds::start("a frozen peer", load.rounds) {
        let (topic, names) = bed.filled("frozen", &["plain", "frozen"], load).await?;
        let plain = survivor(bed, &names[0], &topic, load.messages).await?;
        let peer = Peer::halted(bed, &names[1], &topic, 1).await?;
        peer.freeze();
        let frozen = survivor(bed, &names[1], &topic, load.messages).await;
        peer.kill().await?;
        pairs.push((frozen?, plain));
    }
    let against = "the same consumer without a peer";
    Ok(Figure::beside("fault.frozen_peer", "effects/s", against, &pairs).wanted(">= 0.5"))
}

/// Effects per second of the first third of the messages. The keys of the frozen process wait: up
/// to a batch of each of its lanes. Of 1,000 keys these may be half.
async fn survivor<S: Yard>(bed: &Bed<S>, name: &str, topic: &str, messages: usize) -> Result<f64, AppError> {
    let before = bed.store.effects().await?;
    Ok(drain(bed, name, topic, before + messages / 3).await?.rate(before))
}
