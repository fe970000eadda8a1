//! Runs the demo: makes the tables, starts the processes, kills them, repeats messages, waits for
//! the end.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use uuid::Uuid;

use super::DemoArgs;
use super::count::{Verdict, count, payments};
use super::processes::Process;
use super::stage::Stage;
use super::tables::Tables;
use crate::common::failed;
use crate::sending::{outgoing, send_all};
use oncebox::StoreError;
use oncebox::app::{AppError, open_store_with};

/// The show is given up when nothing has moved for this long. A kill costs a takeover, and a loaded
/// machine is slow.
const NOTHING_MOVES: Duration = Duration::from_secs(120);

struct Show<'a, S: Tables> {
    args: &'a DemoArgs,
    stage: &'a Stage,
    store: S,
    till: Process,
    cast: Vec<Process>,
    bar: ProgressBar,
    killed: u32,
    repeated: u64,
}

pub(super) async fn show<S: Tables>(args: &DemoArgs, stage: &Stage) -> Result<Verdict, AppError> {
    let store: S = open_store_with(&stage.settings, |options| options.create = true, None).await?;
    store.migrate().await?;
    make_tables(&store, stage).await?;
    let broker = &stage.broker;
    let topic = stage.names.topic();
    broker.declare(std::slice::from_ref(&topic)).await?;
    if !broker.is_log() {
        // A queue gets only what is published after it is bound, so the queues of both consumers
        // are made before the first payment.
        for subscription in stage.names.subscriptions() {
            broker.subscriber(&subscription).await?.close().await;
        }
    }
    broker.tap(&topic).await?;

    let began = Instant::now();
    let tag = stage.names.tag.as_str();
    let messages = args.messages.to_string();
    let cast = vec![
        Process::start(stage, "ledger", &["run", "demo", "--tag", tag, "ledger"])?,
        Process::start(stage, "receipts", &["run", "demo", "--tag", tag, "receipts"])?,
        Process::start(stage, "publisher", &["run", "publisher"])?,
        Process::start(stage, "sender", &["run", "sender"])?,
    ];
    let till = Process::start(stage, "till", &["run", "demo", "--tag", tag, "till", "--messages", &messages])?;
    let mut show = Show { args, stage, store, till, cast, bar: bar(args), killed: 0, repeated: 0 };
    show.play().await?;
    let Show { store, cast, killed, bar, .. } = show;
    for process in cast {
        process.stop().await;
    }
    bar.finish_and_clear();
    let verdict = count(&store, stage, killed, began.elapsed().as_secs_f64()).await?;
    store.close().await;
    Ok(verdict)
}

async fn make_tables<S: Tables>(store: &S, stage: &Stage) -> Result<(), AppError> {
    let columns = "account_id varchar(64) not null, number bigint not null, amount_minor bigint not null";
    let payments = stage.names.payments();
    store
        .run(&format!(
            "create table {payments} (payment_id varchar(64) primary key, message_id varchar(36) not null, {columns})"
        ))
        .await?;
    // The table has no unique key, so that only the inbox prevents a second entry. A ledger of
    // one's own has one: `deploy/compose/ledger.sql`.
    let ledger = stage.names.ledger();
    store.run(&format!("create table {ledger} ({}, payment_id varchar(64) not null, {columns})", S::ENTRY_ID)).await?;
    Ok(())
}

fn bar(args: &DemoArgs) -> ProgressBar {
    let target = if args.no_progress { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
    let bar = ProgressBar::with_draw_target(Some(args.messages), target);
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} ledger entries  {msg}") {
        bar.set_style(style);
    }
    bar
}

impl<S: Tables> Show<'_, S> {
    /// Goes on until every payment has its ledger entry and its e-mail file.
    async fn play(&mut self) -> Result<(), AppError> {
        let (mut last, mut moved_at) = (None, Instant::now());
        let mut till_done = false;
        loop {
            for process in &mut self.cast {
                process.check()?;
            }
            if !till_done && self.till.has_ended() {
                self.till.finished().await?;
                till_done = true;
            }
            let entries = self.entries().await?;
            let emails = self.store.email_keys(&self.stage.names.receipt("")).await?.len();
            let unsent = self.store.emails_pending().await?;
            self.bar.set_position(entries);
            self.bar.set_message(format!("{emails} e-mails, {} kills, {} repeated", self.killed, self.repeated));
            self.repeat_some(entries).await?;
            self.kill_one(entries).await?;
            if till_done && self.is_settled(entries, emails as u64, unsent).await? {
                return Ok(());
            }
            // The files too: of the rows without one no more than 10,000 are counted.
            let now = Some((entries, emails, unsent, self.files(), self.killed, self.repeated));
            if now != last {
                (last, moved_at) = (now, Instant::now());
            }
            if moved_at.elapsed() > NOTHING_MOVES {
                return Err(AppError::failed(format!(
                    "nothing moved for {} s at {entries} ledger entries and {emails} e-mails of {} payments",
                    NOTHING_MOVES.as_secs(),
                    self.args.messages
                )));
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Whether all effects are there, all kills were made, all duplicates were published, and the
    /// ledger does not grow any more.
    async fn is_settled(&self, entries: u64, emails: u64, unsent: u64) -> Result<bool, AppError> {
        if entries < self.args.messages || emails < self.args.messages || unsent > 0 {
            return Ok(false);
        }
        if self.killed < self.args.kills || self.repeated < self.to_repeat(self.args.messages) {
            return Ok(false);
        }
        // Waits for a second: a repeated delivery that was handled again would show now.
        let before = self.entries().await?;
        tokio::time::sleep(Duration::from_secs(1)).await;
        Ok(before == self.entries().await?)
    }

    async fn entries(&self) -> Result<u64, StoreError> {
        let entries = self.store.number(&format!("select count(*) from {}", self.stage.names.ledger())).await?;
        Ok(entries.unsigned_abs())
    }

    /// How many files the directory of the e-mails has. It may not be there yet.
    fn files(&self) -> usize {
        std::fs::read_dir(&self.stage.settings.email.directory).map_or(0, Iterator::count)
    }

    fn to_repeat(&self, entries: u64) -> u64 {
        entries * u64::from(self.args.duplicates) / 100
    }

    /// Publishes once more what the ledger has handled, with the same ids and bytes.
    async fn repeat_some(&mut self, entries: u64) -> Result<(), AppError> {
        let due = self.to_repeat(entries.min(self.args.messages)).saturating_sub(self.repeated);
        if due == 0 || (due < 20 && entries < self.args.messages) {
            return Ok(());
        }
        let handled: std::collections::HashSet<String> = self
            .store
            .texts(&format!("select payment_id from {}", self.stage.names.ledger()))
            .await?
            .into_iter()
            .collect();
        let mut known = payments(&self.store, self.stage).await?;
        known.retain(|row| handled.contains(&row.payment.payment_id));
        if known.is_empty() {
            return Ok(());
        }
        let mut messages = Vec::new();
        for _ in 0..due {
            let row = &known[fastrand::usize(..known.len())];
            let id: Uuid = row.message_id.parse().map_err(failed)?;
            messages.push(outgoing(id, row.payment.message(&self.stage.names, id)?));
        }
        send_all(&self.stage.broker, &messages).await?;
        self.repeated += due;
        Ok(())
    }

    /// Kills a process when it is time: publisher, ledger and receipts in turn, spread over the
    /// show.
    async fn kill_one(&mut self, entries: u64) -> Result<(), AppError> {
        let due_at = self.args.messages * u64::from(self.killed + 1) / u64::from(self.args.kills + 1);
        if self.killed >= self.args.kills || entries < due_at.min(self.args.messages) {
            return Ok(());
        }
        let victim = ["publisher", "ledger", "receipts"][self.killed as usize % 3];
        if let Some(process) = self.cast.iter_mut().find(|process| process.name == victim) {
            process.kill_and_restart().await?;
            self.killed += 1;
        }
        Ok(())
    }
}
