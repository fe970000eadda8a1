//! Pure: no I/O, no clock.
//! Random histories of one effect against a provider: requests and answers are lost, requests
//! arrive late, processes die or lose their lease during a call, the provider fails before and
//! after the charge, and forgets keys, and an operator accepts a duplicate.
//!
//! For every kind of provider, the rules must never charge twice, and never call an effect failed
//! (or done) that is not. Plausible wrong variants of the rules must be caught: a model that misses
//! them proves nothing.

use fastrand::Rng;

use super::super::record::tests::at;
use super::*;

/// Seconds for which the provider keeps a key.
const RETENTION: i64 = 100;
/// Seconds that a request may be under way.
const FLIGHT: i64 = 20;
/// Seconds after which a caller stops waiting for an answer.
const TIMEOUT: i64 = 5;
const HISTORIES: u64 = 20_000;

/// What the provider offers, and which strategy is declared for it.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Key,
    Query,
    Both,
    Neither,
}

const KINDS: [Kind; 4] = [Kind::Key, Kind::Query, Kind::Both, Kind::Neither];

/// How the caller decides: by the rules, or by a naive variant.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Caller {
    Rules,
    /// Resends under the key at any time.
    NoWindow,
    /// Resends up to the end of the retention.
    NoFlight,
    /// Treats any 4xx as a failure.
    AnyRefusal,
    /// Judges "the only send" when the answer comes, not when it decides.
    EarlyJudge,
    /// Sends again when a query finds nothing.
    NotFoundMeansNot,
    /// Treats a timeout as a failure.
    TimeoutMeansFailed,
    /// Treats a timeout as "not sent".
    TimeoutMeansNotSent,
    /// Counts a send only when its answer came.
    CountsAfter,
    /// Treats an accepted duplicate as proof that nothing was sent before.
    WaivedMeansNotSent,
}

struct Flight {
    send: u32,
    arrives: i64,
    /// Until then a process waits for the answer.
    heard_until: Option<i64>,
    /// The waiting process has lost its lease, and writes the answer some seconds later.
    slow: bool,
}

/// A key that the provider remembers.
struct Known {
    since: i64,
    /// Until then the provider works on the first request.
    until: i64,
    answer: Answer,
}

struct World {
    rng: Rng,
    kind: Kind,
    caller: Caller,
    now: i64,
    flights: Vec<Flight>,
    known: Option<Known>,
    charges: u32,
    declines: bool,
    declined: bool,
    stores_errors: bool,
    sends: Sends,
    /// Evidence. A row with a later time was received and is not written yet.
    rows: Vec<Proof>,
    /// An operator accepted a duplicate.
    accepted: bool,
}

#[derive(Debug, Default)]
struct Count {
    doubled: u32,
    wrongly_failed: u32,
    wrongly_succeeded: u32,
    operator: u32,
}

fn charged(status: u16, replayed: bool) -> Answer {
    let matches = if status == 201 { Matches::ALL } else { Matches::default() };
    let listed = status == 402;
    Answer::Status { status, listed, in_progress: false, replayed, matches, retry_after: None }
}

impl World {
    fn chance(&mut self, percent: u32) -> bool {
        self.rng.u32(0..100) < percent
    }

    fn has_key(&self) -> bool {
        matches!(self.kind, Kind::Key | Kind::Both)
    }

    fn has_query(&self) -> bool {
        matches!(self.kind, Kind::Query | Kind::Both)
    }

    /// The provider takes a request.
    fn arrive(&mut self, now: i64) -> Answer {
        if let Some(known) = self.known.as_ref().filter(|known| now < known.since + RETENTION) {
            return match known.answer {
                _ if now < known.until => Answer::status(409),
                Answer::Status { status, .. } => charged(status, true),
                other => other,
            };
        }
        // The provider answers before it looks at the operation: credentials, rate, its own health.
        match self.rng.u32(0..100) {
            0..8 => return Answer::status(*self.rng.choice(&[400, 401, 403, 404, 422]).expect("some")),
            8..13 => return Answer::status(429),
            13..20 => return Answer::status(500),
            _ => {}
        }
        let status = if self.declines {
            self.declined = true;
            402
        } else {
            self.charges += 1;
            if self.chance(15) { 500 } else { 201 }
        };
        if self.has_key() {
            // An error after the charge is replayed as an error, or as the success that it was.
            let kept = if status == 500 && !self.stores_errors { 201 } else { status };
            let until = now + self.rng.i64(0..3);
            self.known = Some(Known { since: now, until, answer: charged(kept, false) });
        }
        charged(status, false)
    }

    /// Moves the time on: requests arrive in order, and an answer becomes evidence if a process
    /// still waits for it.
    fn advance(&mut self, to: i64) {
        self.flights.sort_by_key(|flight| flight.arrives);
        while self.flights.first().is_some_and(|flight| flight.arrives <= to) {
            let flight = self.flights.remove(0);
            let answer = self.arrive(flight.arrives);
            if flight.heard_until.is_some_and(|until| flight.arrives <= until) && !self.chance(20) {
                let after = if flight.slow { self.rng.i64(0..20) } else { 0 };
                self.write(Some(flight.send), answer.verdict(), flight.arrives + after);
            }
        }
        self.now = self.now.max(to);
    }

    /// Adds a row that exists from this time on.
    fn write(&mut self, send: Option<u32>, verdict: Verdict, from: i64) {
        let only = self.sends.begun == 1;
        let verdict = match (self.caller, verdict) {
            (Caller::AnyRefusal, Verdict::Refused) => Verdict::Failed,
            (Caller::EarlyJudge, Verdict::Refused) if only => Verdict::Failed,
            (Caller::TimeoutMeansFailed, Verdict::Indefinite) => Verdict::Failed,
            (Caller::TimeoutMeansNotSent, Verdict::Indefinite) => Verdict::NotSent,
            (Caller::WaivedMeansNotSent, Verdict::Waived) => Verdict::NotSent,
            (_, verdict) => verdict,
        };
        if self.caller == Caller::CountsAfter && send.is_some() && verdict != Verdict::Waived {
            self.sends.begun += 1;
        }
        self.rows.push(Proof { send, verdict, at: at(from) });
    }

    fn step(&self) -> Step {
        let flight = if self.caller == Caller::NoFlight { 0 } else { FLIGHT };
        let retention = if self.caller == Caller::NoWindow { 1 << 40 } else { RETENTION };
        let seconds = |seconds: i64| Duration::from_secs(seconds.unsigned_abs());
        let window = KeyWindow { retention: seconds(retention), max_in_flight: seconds(flight) };
        let strategy = match self.kind {
            Kind::Key => Strategy::Key(window),
            Kind::Query => Strategy::Query,
            Kind::Both => Strategy::KeyAndQuery(window),
            Kind::Neither => Strategy::None,
        };
        let written = self.rows.iter().copied().filter(|row| row.at <= at(self.now));
        let step = strategy.next(self.sends, &Evidence::of(written), at(self.now));
        if self.caller == Caller::NotFoundMeansNot && step == Step::Operator(Gap::NotFound) {
            Step::Resend
        } else {
            step
        }
    }

    /// Makes a call; its process may die during it.
    fn send(&mut self) {
        self.sends.first_sent_at = self.sends.first_sent_at.or(Some(at(self.now)));
        if self.caller != Caller::CountsAfter {
            self.sends.begun += 1;
        }
        let send = self.sends.begun;
        match self.rng.u32(0..100) {
            0..10 => return, // It dies before a byte has left.
            10..20 => return self.write(Some(send), Answer::NotConnected.verdict(), self.now),
            _ => {}
        }
        let lost = self.chance(15);
        let delay = if self.chance(20) { self.rng.i64(0..=FLIGHT) } else { self.rng.i64(0..3) };
        let dies = self.chance(15);
        let slow = self.chance(15);
        let heard_until = (!dies).then_some(self.now + TIMEOUT);
        if !lost {
            self.flights.push(Flight { send, arrives: self.now + delay, heard_until, slow });
        }
        // Another process takes over at once while this call is under way. The answer becomes
        // evidence if a process receives it.
        if dies || slow {
            return;
        }
        let before = self.rows.len();
        self.advance(self.now + TIMEOUT);
        if self.rows.len() == before {
            self.write(Some(send), Answer::NoAnswer.verdict(), self.now);
        }
    }

    fn query(&mut self) {
        let answer = match self.rng.u32(0..100) {
            0..20 => QueryAnswer::Failed,
            _ if !self.has_query() => QueryAnswer::Failed,
            _ if self.charges > 0 => QueryAnswer::Done(Matches::ALL),
            _ if self.declined => QueryAnswer::Refused,
            _ => QueryAnswer::NotFound,
        };
        self.write(None, answer.verdict(), self.now);
    }

    /// The operator may accept one duplicate some time later, when the account may be empty.
    fn accepts(&mut self) -> bool {
        if self.accepted || self.chance(50) {
            return false;
        }
        self.accepted = true;
        let later = self.rng.i64(0..2 * RETENTION);
        self.advance(self.now + later);
        self.declines |= self.chance(30);
        for send in 1..=self.sends.begun {
            self.write(Some(send), Verdict::Waived, self.now);
        }
        true
    }

    /// Runs until the effect is settled or goes to the operator (`None`).
    fn run(&mut self) -> Option<Settled> {
        for _ in 0..60 {
            // Sometimes no process works on it for a while, often until the window is about to end.
            let idle = match self.rng.u32(0..100) {
                0..3 => self.rng.i64(0..300),
                3..8 => self.rng.i64(RETENTION - 30..RETENTION),
                _ => self.rng.i64(0..10),
            };
            self.advance(self.now + idle);
            match self.step() {
                Step::Settle(settled) => return Some(settled),
                Step::Operator(_) if self.accepts() => {}
                Step::Operator(_) => return None,
                Step::Wait { until } => self.advance(until.millis() / 1_000),
                Step::Query => self.query(),
                Step::Send | Step::Resend => self.send(),
            }
        }
        None
    }
}

fn histories(kind: Kind, caller: Caller) -> Count {
    let mut count = Count::default();
    for seed in 0..HISTORIES {
        let mut rng = Rng::with_seed(seed);
        let (declines, stores_errors) = (rng.u32(0..5) == 0, rng.bool());
        let (flights, rows, known, sends) = (Vec::new(), Vec::new(), None, Sends::default());
        let (now, charges) = (1_000, 0);
        let (declined, accepted) = (false, false);
        let mut world = World {
            rng,
            kind,
            caller,
            now,
            flights,
            known,
            charges,
            declines,
            declined,
            stores_errors,
            sends,
            rows,
            accepted,
        };
        let settled = world.run();
        // All requests under way arrive.
        world.advance(i64::MAX);
        count.doubled += u32::from(world.charges > 1 && !world.accepted);
        count.wrongly_failed += u32::from(settled == Some(Settled::Failed) && world.charges > 0);
        count.wrongly_succeeded += u32::from(settled == Some(Settled::Succeeded) && world.charges == 0);
        count.operator += u32::from(settled.is_none());
    }
    count
}

#[test]
fn o5_o6_o7_no_charge_is_doubled_and_none_wrongly_failed_with_any_kind_of_provider() {
    for kind in KINDS {
        let count = histories(kind, Caller::Rules);
        let harm = (count.doubled, count.wrongly_failed, count.wrongly_succeeded);
        assert_eq!(harm, (0, 0, 0), "{kind:?}: {count:?}");
        // The rules must not simply give every effect to an operator if the provider offers means.
        let most = match kind {
            Kind::Both => HISTORIES / 10,
            Kind::Key => HISTORIES / 4,
            Kind::Query => HISTORIES / 2,
            Kind::Neither => HISTORIES * 9 / 10,
        };
        assert!(u64::from(count.operator) <= most, "{kind:?}: {count:?}");
    }
}

#[test]
fn o5_o6_o7_every_naive_variant_doubles_a_charge_or_calls_one_failed() {
    for (caller, kind) in [
        (Caller::NoWindow, Kind::Key),
        (Caller::NoWindow, Kind::Both),
        (Caller::NoFlight, Kind::Key),
        (Caller::AnyRefusal, Kind::Key),
        (Caller::EarlyJudge, Kind::Key),
        (Caller::NotFoundMeansNot, Kind::Query),
        (Caller::TimeoutMeansFailed, Kind::Neither),
        (Caller::TimeoutMeansNotSent, Kind::Neither),
        (Caller::TimeoutMeansNotSent, Kind::Query),
        (Caller::CountsAfter, Kind::Neither),
        (Caller::CountsAfter, Kind::Key),
        (Caller::WaivedMeansNotSent, Kind::Key),
        (Caller::WaivedMeansNotSent, Kind::Neither),
    ] {
        let count = histories(kind, caller);
        assert!(count.doubled + count.wrongly_failed > 0, "{caller:?} {kind:?} does no harm: {count:?}");
    }
}
