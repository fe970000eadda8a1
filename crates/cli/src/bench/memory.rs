//! How much memory the publisher uses while it drains a large outbox: the real program, in a
//! separate process.

use std::process::Stdio;
use std::time::{Duration, Instant};

use super::Load;
use super::bed::Bed;
use super::figure::Figure;
use super::usage::resident_peak;
use super::work::Maker;
use super::yard::Yard;
use crate::common::failed;
use crate::place;
use oncebox::app::AppError;

/// The outbox has this many times the messages of a round.
const TIMES: usize = 3;
const DEADLINE: Duration = Duration::from_secs(600);

pub(super) async fn measure<S: Yard>(bed: &mut Bed<S>, load: Load) -> Result<Figure, AppError> {
    let (topic, _) = bed.topic("memory", &["sink"]).await?;
    super::relay::fill(&bed.store, &Maker::new(&topic, load), load.messages * TIMES).await?;
    let mut publisher = place::this_program()?
        .arg("--config")
        .arg(bed.config_file()?)
        .args(["run", "publisher", "--until-empty"])
        .stdout(Stdio::null())
        .spawn()
        .map_err(|error| AppError::failed(format!("the publisher cannot be started: {error}")))?;
    let process = publisher.id().ok_or_else(|| AppError::failed("the publisher has ended at once"))?;
    let (mut peak, began) = (0.0_f64, Instant::now());
    loop {
        let ended = publisher.try_wait().map_err(failed)?;
        if let Some(status) = ended {
            if !status.success() {
                return Err(AppError::failed(format!("the publisher failed: {status}")));
            }
            break;
        }
        // The process may end between the two readings. The peak so far is then the peak.
        if let Ok(bytes) = resident_peak(process) {
            peak = peak.max(bytes);
        }
        if began.elapsed() > DEADLINE {
            return Err(AppError::failed(format!("the publisher was not done within {DEADLINE:?}")));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let left = bed.store.status().await?.pending;
    if left > 0 {
        return Err(AppError::failed(format!("the publisher left {left} messages behind")));
    }
    Ok(Figure::alone("relay.memory", "MB", &[peak / 1e6]).wanted("<= 64"))
}
