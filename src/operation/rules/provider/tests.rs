//! Pure: no I/O, no clock.
//! The rules of providers, one test for each. The random histories are in `model.rs`.

use super::super::record::tests::at;
use super::*;

const WINDOW: KeyWindow = KeyWindow { retention: Duration::from_secs(100), max_in_flight: Duration::from_secs(20) };
const ALL: [Strategy; 5] =
    [Strategy::Key(WINDOW), Strategy::Query, Strategy::KeyAndQuery(WINDOW), Strategy::None, Strategy::Repeatable];

fn sends(begun: u32) -> Sends {
    Sends { first_sent_at: (begun > 0).then(|| at(0)), begun }
}

/// Evidence of sends 1, 2, .. at 0 s.
fn evidence(verdicts: &[Verdict]) -> Evidence {
    let row = |(send, verdict): (u32, &Verdict)| Proof { send: Some(send), verdict: *verdict, at: at(0) };
    Evidence::of((1..).zip(verdicts).map(row))
}

fn with(status: u16, change: impl FnOnce(&mut bool, &mut bool, &mut bool, &mut Matches)) -> Verdict {
    let (mut listed, mut in_progress, mut replayed, mut matches) = (false, false, false, Matches::default());
    change(&mut listed, &mut in_progress, &mut replayed, &mut matches);
    Answer::Status { status, listed, in_progress, replayed, matches, retry_after: None }.verdict()
}

// Shown by: calling any 2xx a success.
#[test]
fn o7_a_success_is_a_2xx_of_our_amount_currency_and_reference() {
    let (amount, currency, reference) = (true, true, true);
    for status in [200, 201, 202, 204, 299] {
        assert_eq!(with(status, |_, _, _, matches| *matches = Matches::ALL), Verdict::Succeeded);
        for other in [
            Matches { amount: false, currency, reference },
            Matches { amount, currency: false, reference },
            Matches { amount, currency, reference: false },
        ] {
            assert_eq!(with(status, |_, _, _, matches| *matches = other), Verdict::Mismatch);
        }
    }
    for strategy in ALL {
        let step = strategy.next(sends(1), &evidence(&[Verdict::Mismatch]), at(1));
        assert_eq!(step, Step::Operator(Gap::Mismatch));
    }
}

// Shown by: taking 404 on a resend for a failure; 429 for one; 3xx for one.
#[test]
fn o7_a_failure_is_a_listed_refusal_or_the_answer_to_the_only_send() {
    for status in 400..=499 {
        let unlisted = Answer::status(status).verdict();
        let expected = match status {
            409 | 425 | 429 => Verdict::Wait(Duration::from_secs(2)),
            408 => Verdict::Indefinite,
            _ => Verdict::Refused,
        };
        assert_eq!(unlisted, expected, "{status}");
        assert_eq!(with(status, |listed, _, _, _| *listed = true), Verdict::Failed, "{status}");
        assert_eq!(with(status, |_, in_progress, _, _| *in_progress = true).name(), "wait", "{status}");
    }
    for status in (100..200).chain(300..400).chain(500..600) {
        assert_eq!(with(status, |listed, _, _, _| *listed = true), Verdict::Indefinite, "{status}");
    }
    assert_eq!(with(500, |_, _, replayed, _| *replayed = true), Verdict::StoredError);
    assert_eq!(Answer::NoAnswer.verdict(), Verdict::Indefinite);

    let failed = Some(Settled::Failed);
    assert_eq!(evidence(&[Verdict::Refused]).settled(sends(1)), failed);
    assert_eq!(evidence(&[Verdict::Indefinite, Verdict::Refused]).settled(sends(2)), None);
    assert_eq!(evidence(&[Verdict::Refused]).settled(sends(2)), None, "another send was begun since");
    assert_eq!(evidence(&[Verdict::NotSent, Verdict::Refused]).settled(sends(2)), failed, "the only one that left");
    assert_eq!(evidence(&[Verdict::Indefinite, Verdict::Failed]).settled(sends(2)), failed);
}

// Shown by: counting rows instead of sends.
#[test]
fn o7_what_did_not_leave_was_not_sent_and_may_be_sent_whatever_the_strategy() {
    for strategy in ALL {
        assert_eq!(strategy.next(sends(0), &Evidence::default(), at(0)), Step::Send);
        assert_eq!(strategy.next(sends(1), &evidence(&[Verdict::NotSent]), at(9_999)), Step::Send);
    }
    let twice = Proof { send: Some(1), verdict: Verdict::NotSent, at: at(0) };
    let evidence = Evidence::of([twice, twice]);
    assert_eq!(Strategy::None.next(sends(2), &evidence, at(0)), Step::Operator(Gap::NoMeans));
    assert!(!Answer::NotConnected.counts() && Answer::NoAnswer.counts(), "a provider that is away counts no attempt");
}

// Shown by: a window up to the retention; resending what was not found.
#[test]
fn o6_each_strategy_does_what_it_can_and_no_more() {
    let lost = evidence(&[Verdict::Indefinite]);
    let step = |strategy: Strategy, seconds| strategy.next(sends(1), &lost, at(seconds));
    for (strategy, inside, outside) in [
        (Strategy::Key(WINDOW), Step::Resend, Step::Operator(Gap::WindowOver)),
        (Strategy::KeyAndQuery(WINDOW), Step::Resend, Step::Query),
        (Strategy::Query, Step::Query, Step::Query),
        (Strategy::None, Step::Operator(Gap::NoMeans), Step::Operator(Gap::NoMeans)),
        (Strategy::Repeatable, Step::Resend, Step::Resend),
    ] {
        assert_eq!(step(strategy, 79), inside, "{strategy:?}");
        assert_eq!(step(strategy, 80), outside, "{strategy:?}");
        assert_eq!(step(strategy, -20), inside, "{strategy:?}");
        assert_eq!(step(strategy, -21), outside, "the clock went back (R22): {strategy:?}");
        let forgotten = Sends { first_sent_at: None, begun: 1 };
        assert_eq!(strategy.next(forgotten, &lost, at(0)), outside, "{strategy:?}");
    }
    let not_found = Proof { send: None, verdict: Verdict::NotFound, at: at(1) };
    let rows = Evidence::of([not_found]);
    assert_eq!(Strategy::Query.next(sends(1), &rows, at(2)), Step::Operator(Gap::NotFound));
    assert_eq!(Strategy::KeyAndQuery(WINDOW).next(sends(1), &rows, at(79)), Step::Resend);
    assert_eq!(Strategy::KeyAndQuery(WINDOW).next(sends(1), &rows, at(80)), Step::Operator(Gap::NotFound));
    let found = Proof { send: None, verdict: QueryAnswer::Done(Matches::ALL).verdict(), at: at(9) };
    let settled = Step::Settle(Settled::Succeeded);
    assert_eq!(Strategy::Query.next(sends(1), &Evidence::of([not_found, found]), at(9)), settled);
}

#[test]
fn o7_a_pause_is_kept_and_a_stored_error_ends_the_resends() {
    let wait = Verdict::Wait(Duration::from_secs(5));
    for strategy in ALL.into_iter().filter(|strategy| *strategy != Strategy::None) {
        assert_eq!(strategy.next(sends(1), &evidence(&[wait]), at(4)), Step::Wait { until: at(5) });
        assert!(!matches!(strategy.next(sends(1), &evidence(&[wait]), at(5)), Step::Wait { .. }));
    }
    let years = Some(Duration::from_secs(1 << 40));
    let matches = Matches::default();
    let later =
        Answer::Status { status: 429, listed: false, in_progress: false, replayed: false, matches, retry_after: years };
    assert_eq!(later.verdict(), Verdict::Wait(Duration::from_secs(600)), "a provider that asks for years gets minutes");
    let stuck = |count: usize| evidence(&vec![Verdict::StoredError; count]);
    assert_eq!(Strategy::Key(WINDOW).next(sends(3), &stuck(2), at(1)), Step::Resend);
    assert_eq!(Strategy::Key(WINDOW).next(sends(4), &stuck(3), at(1)), Step::Operator(Gap::StoredError));
    assert_eq!(Strategy::KeyAndQuery(WINDOW).next(sends(4), &stuck(3), at(1)), Step::Query);
    // One answer that was written three times.
    let one = Proof { send: Some(1), verdict: Verdict::StoredError, at: at(0) };
    assert_eq!(Strategy::Key(WINDOW).next(sends(1), &Evidence::of([one; 3]), at(1)), Step::Resend);
}

// The pause was written while the clock was an hour ahead. Shown by: waiting for any pause that is
// not over (nothing was sent or asked for that hour, also if an operator had it tried again).
#[test]
fn o7_a_pause_that_was_written_before_the_clock_went_back_is_over() {
    let asked = evidence(&[Verdict::Wait(Duration::from_secs(600))]);
    let step = |seconds| Strategy::Query.next(sends(1), &asked, at(seconds));
    assert_eq!(step(0), Step::Wait { until: at(600) });
    assert_eq!(step(-1), Step::Query);
    assert_eq!(step(-3_600), Step::Query);
}

// Shown by: keeping only the pause that ends last (the provider was asked again at once, until the
// attempts were used up).
#[test]
fn o7_a_pause_from_before_the_clock_went_back_hides_no_later_pause() {
    let asked = |send, seconds, pause| Proof {
        send: Some(send),
        verdict: Verdict::Wait(Duration::from_secs(pause)),
        at: at(seconds),
    };
    let evidence = Evidence::of([asked(1, 0, 600), asked(2, -3_600, 60)]);
    let step = |seconds| Strategy::Query.next(sends(2), &evidence, at(seconds));
    assert_eq!(step(-3_599), Step::Wait { until: at(-3_540) });
    assert_eq!(step(-3_540), Step::Query);
}

// Shown by: settling on the last verdict.
#[test]
fn o8_evidence_that_contradicts_is_an_operators_and_rewrites_nothing() {
    let both = evidence(&[Verdict::Succeeded, Verdict::Failed]);
    assert_eq!(both.settled(sends(2)), None);
    for strategy in ALL {
        assert_eq!(strategy.next(sends(2), &both, at(1)), Step::Operator(Gap::Mismatch));
    }
    let succeeded = evidence(&[Verdict::Succeeded, Verdict::Refused, Verdict::NotFound]);
    assert_eq!(succeeded.settled(sends(3)), Some(Settled::Succeeded));
    assert!(!succeeded.contradicts(Settled::Succeeded) && succeeded.contradicts(Settled::Failed));
    assert!(evidence(&[Verdict::Failed]).contradicts(Settled::Succeeded));
    assert!(evidence(&[Verdict::Mismatch]).contradicts(Settled::Failed));
}

// Shown by: a failure after the last attempt.
#[test]
fn o9_attempts_never_turn_unknown_into_failed() {
    for step in [Step::Resend, Step::Query] {
        assert_eq!(step.within(4, 5), step);
        assert_eq!(step.within(5, 5), Step::Operator(Gap::Attempts));
    }
    // The outcome is proven; no send may have arrived; the provider asked for a pause.
    for step in [Step::Settle(Settled::Succeeded), Step::Send, Step::Wait { until: at(5) }] {
        assert_eq!(step.within(99, 5), step);
    }
}

// Shown by: counting a waived send as one that was not sent.
#[test]
fn an_accepted_duplicate_sends_again_and_its_refusal_proves_nothing_of_what_was_sent_before() {
    let proof = |send, verdict| Proof { send: Some(send), verdict, at: at(0) };
    for strategy in ALL {
        let mut rows = vec![proof(1, Verdict::Indefinite), proof(2, Verdict::Refused)];
        rows.extend([proof(1, Verdict::Waived), proof(2, Verdict::Waived)]);
        let step = |rows: &[Proof], begun| strategy.next(sends(begun), &Evidence::of(rows.iter().copied()), at(9_999));
        assert_eq!(step(&rows, 2), Step::Send, "{strategy:?}");
        assert!(!matches!(step(&rows, 3), Step::Settle(_)), "begun, and no answer: {strategy:?}");
        for refusal in [Verdict::Refused, Verdict::Failed] {
            let refused = [&rows[..], &[proof(3, refusal)]].concat();
            assert_eq!(step(&refused, 3), Step::Operator(Gap::DuplicateRefused), "{strategy:?}");
        }
        // Either it is tried again because an operator accepts another duplicate, or the first send
        // turns out to have arrived.
        rows.extend([proof(3, Verdict::Failed), proof(3, Verdict::Waived)]);
        assert_eq!(step(&rows, 3), Step::Send, "{strategy:?}");
        for happened in [1, 4] {
            let rows = [&rows[..], &[proof(happened, Verdict::Succeeded)]].concat();
            assert_eq!(step(&rows, 4), Step::Settle(Settled::Succeeded), "{strategy:?}");
        }
        // A send that never left us has no duplicate.
        let left = [proof(1, Verdict::NotSent), proof(1, Verdict::Waived), proof(2, Verdict::Refused)];
        assert_eq!(step(&left, 2), Step::Settle(Settled::Failed), "{strategy:?}");
    }
}

#[test]
fn o6_a_window_in_which_nothing_can_be_repeated_is_refused() {
    assert_eq!(WINDOW.validate(), Ok(()));
    let none = KeyWindow { max_in_flight: WINDOW.retention, ..WINDOW };
    let message = none.validate().expect_err("refused").to_string();
    assert_eq!(message, "`max_in_flight` (1m 40s) must be shorter than the provider's `retention` of keys (1m 40s)");
}

#[test]
fn verdicts_are_read_back_from_their_rows() {
    let pause = Duration::from_secs(3);
    for name in "succeeded failed refused not_sent waived wait mismatch not_found stored_error indefinite".split(' ') {
        assert_eq!(Verdict::from_row(name, pause).expect(name).name(), name);
    }
    assert_eq!(Verdict::from_row("wait", pause), Some(Verdict::Wait(pause)));
    assert_eq!(Verdict::from_row("charged_back", pause), None);
}
