//! A SIGKILL in the middle of a backlog: how soon the next process reaches half the usual rate,
//! from the moment at which it has the partitions.

use super::peer::Peer;
use super::running::drain;
use crate::bench::Load;
use crate::bench::bed::Bed;
use crate::bench::figure::Figure;
use crate::bench::yard::Yard;
use crate::progress::Rounds;
use oncebox::app::AppError;

/// The process is killed when it has begun `messages / KILL_AT` messages.
const KILL_AT: usize = 4;

pub(super) async fn measure<S: Yard>(bed: &mut Bed<S>, load: Load) -> Result<Vec<Figure>, AppError> {
    let (mut seconds, mut rates) = (Vec::new(), Vec::new());
    for _ in Rounds::start("after a kill", load.rounds) {
        let (topic, names) = bed.filled("killed", &["plain", "killed"], load).await?;
        let before = bed.store.effects().await?;
        let plain = drain(bed, &names[0], &topic, before + load.messages).await?;
        let plain_rate = plain.rate(before);

        let before = bed.store.effects().await?;
        let peer = Peer::halted(bed, &names[1], &topic, load.messages / KILL_AT).await?;
        peer.kill().await?;
        let killed_at = bed.store.effects().await?;
        let killed = drain(bed, &names[1], &topic, before + load.messages).await?;
        seconds.push((killed.reaches(plain_rate / 2.0), plain.reaches(plain_rate / 2.0)));
        rates.push((killed.rate(killed_at), plain_rate));
    }
    let against = "the same consumer with a new name, without a kill";
    Ok(vec![
        Figure::beside("fault.catch_up", "s", against, &seconds).wanted("<= 10 s"),
        Figure::beside("fault.catch_up.rate", "effects/s", against, &rates),
    ])
}
