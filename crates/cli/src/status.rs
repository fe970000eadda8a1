//! `oncebox status`: counts what is in the tables, and shows what is stuck as far as the database
//! alone can tell.

use std::time::Duration;

use clap::Args;

use super::common::{CommonArgs, Output, bound, failed, limit, tabled};
use super::consumers::{COLUMNS, row, seen};
use super::stuck::{Stuck, stuck_by};
use oncebox::app::AppError;
use oncebox::store::{Duties, Status, Store};

/// What counts as stuck, and how much is shown.
#[derive(Debug, Clone, Args)]
pub(super) struct StatusArgs {
    /// A message that is pending, held or waiting for longer than this is stuck, and so is an
    /// e-mail, an operation or a key that waits for longer
    #[arg(long, value_name = "TIME", default_value = "1m", value_parser = oncebox::app::config::parse_duration)]
    older_than: Duration,
    /// At most this many shards, consumers, and lines about what is stuck
    #[arg(long, default_value_t = 100, value_parser = limit::<usize>())]
    limit: usize,
}

pub(super) async fn run(args: &StatusArgs, common: &CommonArgs, output: Output) -> Result<(), AppError> {
    on_store!(common, Store::into_duties, |store, settings| show(&*store, args, output).await)
}

async fn show(store: &dyn Duties, args: &StatusArgs, output: Output) -> Result<(), AppError> {
    let mut status = store.status().await?;
    // Of all that is there, also of what is not shown.
    let mut stuck = stuck(&status, args.older_than);
    bound(&mut status.shards, args.limit, "shards");
    bound(&mut status.consumers, args.limit, "consumers");
    bound(&mut stuck, args.limit, "things are stuck");
    match output {
        Output::Json => {
            let mut value = serde_json::to_value(&status).map_err(failed)?;
            value["stuck"] = stuck.into();
            data!("{value}");
        }
        Output::Table => {
            print(&status)?;
            for one in stuck {
                data!("stuck: {one}");
            }
            data!("`oncebox doctor` says why something is stuck; it asks the broker and the handlers too");
        }
    }
    Ok(())
}

/// What is stuck, as `doctor` finds it too, in one line each.
fn stuck(status: &Status, older_than: Duration) -> Vec<String> {
    let line = |one: &Stuck<'_>| match one {
        Stuck::Outbox { is_old, without_owner } => {
            let pending = is_old.then(|| age(status.pending, "pending", status.oldest_pending_age_seconds));
            let nobody = (!without_owner.is_empty()).then(|| format!("no publisher owns shard {without_owner}"));
            pending.into_iter().chain(nobody).collect::<Vec<_>>().join(", and ")
        }
        Stuck::Held => age(status.held, "held", status.oldest_held_age_seconds),
        Stuck::Waiting(consumer) => {
            let what = if consumer.held > 0 { "waiting or held" } else { "waiting" };
            let of_it = age(consumer.waiting + consumer.held, what, consumer.oldest_waiting_age_seconds);
            format!("consumer {}: {of_it}", consumer.name)
        }
        Stuck::Absent(consumer) => {
            format!("consumer {}: no process of it runs, the last was there {}", consumer.name, seen(consumer))
        }
        Stuck::Unattended(one) => one.detail.clone(),
    };
    stuck_by(status, older_than).iter().map(line).collect()
}

fn age(count: u64, state: &str, seconds: f64) -> String {
    match count {
        1 => format!("1 message {state} for {seconds:.0} s"),
        _ => format!("{count} messages {state}, the oldest for {seconds:.0} s"),
    }
}

fn print(status: &Status) -> Result<(), AppError> {
    let waits = &status.unattended;
    data!(
        "outbox: {} pending (oldest {:.1} s), {} held (oldest {:.1} s), {} dead; {} e-mails to send (oldest {:.1} s), {} failed",
        status.pending,
        status.oldest_pending_age_seconds,
        status.held,
        status.oldest_held_age_seconds,
        status.dead,
        status.emails_pending,
        waits.oldest_email_age_seconds,
        waits.emails_failed
    );
    if waits.operations_parked + waits.operations_undriven + waits.keys_unknown > 0 {
        data!(
            "operations: {} parked (oldest {:.1} s), {} due without a driver (oldest {:.1} s); {} keys of unknown outcome (oldest {:.1} s)",
            waits.operations_parked,
            waits.oldest_parked_age_seconds,
            waits.operations_undriven,
            waits.oldest_undriven_age_seconds,
            waits.keys_unknown,
            waits.oldest_unknown_age_seconds
        );
    }
    let shards = status.shards.iter().map(|shard| {
        [
            shard.shard.to_string(),
            format!("{}-{}", shard.buckets.0, shard.buckets.1),
            shard.scanned_to.to_string(),
            shard.gaps.to_string(),
            shard.epoch.to_string(),
            shard.owner.clone().unwrap_or_else(|| "nobody".to_owned()),
            format!("{:.1} s", shard.lease_seconds_left),
            format!("{:.1} s", shard.cursor_age_seconds),
        ]
    });
    tabled(["shard", "buckets", "cursor", "gaps", "epoch", "owner", "lease left", "cursor age"], shards)?;
    if !status.consumers.is_empty() {
        tabled(COLUMNS, status.consumers.iter().map(row))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use oncebox::store::{ConsumerStatus, ShardStatus, Unattended};

    // Shown by: leaving out any of the four.
    #[test]
    fn what_waits_for_longer_than_a_minute_and_who_is_not_there_is_stuck() {
        let minute = Duration::from_secs(60);
        let mut status = Status {
            shards: vec![ShardStatus {
                shard: 0,
                buckets: (0, 255),
                scanned_to: 7,
                gaps: 0,
                epoch: 1,
                owner: Some("host/7".to_owned()),
                lease_seconds_left: 9.0,
                cursor_age_seconds: 1.0,
            }],
            consumers: vec![ConsumerStatus {
                name: "ledger".to_owned(),
                waiting: 2,
                dead: 5,
                ..ConsumerStatus::default()
            }],
            pending: 3,
            held: 1,
            oldest_pending_age_seconds: 59.0,
            ..Status::default()
        };
        assert_eq!(stuck(&status, minute), Vec::<String>::new());
        status.oldest_held_age_seconds = 61.0;
        status.oldest_pending_age_seconds = 80.0;
        status.consumers[0].oldest_waiting_age_seconds = 62.0;
        status.consumers[0].held = 20;
        status.consumers[0].seen_seconds_ago = 65.0;
        let expected = [
            "3 messages pending, the oldest for 80 s",
            "1 message held for 61 s",
            "consumer ledger: 22 messages waiting or held, the oldest for 62 s",
            "consumer ledger: no process of it runs, the last was there 1m 5s ago",
        ];
        assert_eq!(stuck(&status, minute), expected);
        status.shards[0].owner = None;
        assert_eq!(stuck(&status, minute)[0], "3 messages pending, the oldest for 80 s, and no publisher owns shard 0");
        let fresh = Status { shards: status.shards, ..Status::default() };
        assert_eq!(stuck(&fresh, minute), ["no publisher owns shard 0"]);
        let mut left = Status {
            emails_pending: 2,
            unattended: Unattended {
                oldest_email_age_seconds: 61.0,
                emails_failed: 1,
                operations_parked: 1,
                oldest_parked_age_seconds: 62.0,
                operations_undriven: 3,
                oldest_undriven_age_seconds: 63.0,
                keys_unknown: 4,
                oldest_unknown_age_seconds: 64.0,
            },
            ..Status::default()
        };
        let expected = [
            "2 e-mails to send, the oldest for 61 s",
            "1 operation parked for 62 s",
            "3 operations due without a driver, the oldest for 63 s",
            "4 keys of unknown outcome, the oldest for 64 s",
        ];
        assert_eq!(stuck(&left, minute), expected);
        left.unattended.oldest_email_age_seconds = 59.0;
        assert_eq!(stuck(&left, minute), expected[1..]);
    }
}
