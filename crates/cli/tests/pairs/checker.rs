//! What may never be seen, whatever was killed: checks over business rows, topic and effects.
//! Shares nothing with the programs.

use std::collections::{BTreeMap, BTreeSet, HashMap};

/// A payment as it was committed, or as it stands in topic or ledger.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) payment: String,
    pub(crate) account: String,
    pub(crate) number: i64,
    pub(crate) amount: i64,
}

/// Everything that was found at one moment.
#[derive(Debug, Clone, Default)]
pub(crate) struct History {
    /// Committed payments, in any order.
    pub(crate) payments: Vec<Entry>,
    /// The topic, in the order of each partition.
    pub(crate) topic: Vec<Entry>,
    /// The ledger, in order of its own numbering.
    pub(crate) ledger: Vec<Entry>,
    /// True where everything committed must have arrived.
    pub(crate) settled: bool,
}

/// Says everything that is wrong.
pub(crate) fn check(history: &History) -> Vec<String> {
    let mut wrong = Vec::new();
    let committed: HashMap<&str, &Entry> =
        history.payments.iter().map(|entry| (entry.payment.as_str(), entry)).collect();
    // No phantom, nothing changed on the way.
    for (place, entries) in [("topic", &history.topic), ("ledger", &history.ledger)] {
        for entry in entries {
            match committed.get(entry.payment.as_str()) {
                None => wrong.push(format!("{place}: {} was never committed", entry.payment)),
                Some(payment) if *payment != entry => {
                    wrong.push(format!("{place}: {} is not what was paid", entry.payment))
                }
                Some(_) => {}
            }
        }
    }
    // Once.
    let mut counts: BTreeMap<&str, u32> = BTreeMap::new();
    for entry in &history.ledger {
        *counts.entry(&entry.payment).or_default() += 1;
    }
    wrong.extend(
        counts
            .iter()
            .filter(|(_, count)| **count > 1)
            .map(|(payment, count)| format!("ledger: {payment} stands {count} times")),
    );
    // In order: first occurrences of an account in the topic, all entries of an account in the
    // ledger, without holes.
    let mut seen = BTreeSet::new();
    let first = history.topic.iter().filter(|entry| seen.insert(entry.payment.as_str()));
    wrong.extend(out_of_order("topic", first));
    wrong.extend(out_of_order("ledger", history.ledger.iter()));
    // None lost.
    if history.settled {
        for entry in &history.payments {
            if !seen.contains(entry.payment.as_str()) {
                wrong.push(format!("topic: {} is lost", entry.payment));
            }
            if !counts.contains_key(entry.payment.as_str()) {
                wrong.push(format!("ledger: {} is lost", entry.payment));
            }
        }
    }
    wrong
}

fn out_of_order<'a>(place: &str, entries: impl Iterator<Item = &'a Entry>) -> Vec<String> {
    let mut last: BTreeMap<&str, i64> = BTreeMap::new();
    let mut wrong = Vec::new();
    for entry in entries {
        let before = last.insert(&entry.account, entry.number).unwrap_or(0);
        // Numbers of an account follow each other without holes: a hole is a lost or overtaken one.
        if entry.number != before + 1 {
            wrong.push(format!("{place}: {} of {} comes after {before}", entry.number, entry.account));
        }
    }
    wrong
}

#[cfg(test)]
mod self_test {
    use super::*;

    fn valid() -> History {
        let entry = |account: usize, number: i64| Entry {
            payment: format!("p{account}-{number}"),
            account: format!("acc-{account}"),
            number,
            amount: number * 7,
        };
        let payments: Vec<Entry> =
            (0..3).flat_map(|account| (1..=5).map(move |number| entry(account, number))).collect();
        let mut topic = payments.clone();
        topic.insert(6, topic[5].clone());
        topic.push(topic[0].clone());
        History { ledger: payments.clone(), topic, payments, settled: true }
    }

    #[test]
    fn a_valid_history_with_repeated_publishes_raises_no_alarm() {
        assert_eq!(check(&valid()), Vec::<String>::new());
    }

    /// Every mutation is one that a broken relay or consumer has made; each must be flagged.
    #[test]
    fn every_mutation_of_a_valid_history_is_flagged() {
        type Mutation = (&'static str, fn(&mut History));
        let mutations: [Mutation; 10] = [
            ("lost in the topic", |history| history.topic.retain(|entry| entry.payment != "p1-5")),
            ("lost in the ledger", |history| drop(history.ledger.remove(14))),
            ("lost in the middle", |history| drop(history.ledger.remove(7))),
            ("doubled", |history| history.ledger.push(history.ledger[14].clone())),
            ("doubled in the middle", |history| history.ledger.insert(3, history.ledger[2].clone())),
            ("swapped in the ledger", |history| history.ledger.swap(1, 2)),
            ("swapped in the topic", |history| history.topic.swap(1, 2)),
            ("phantom", |history| history.ledger[3].payment = "p9-9".into()),
            ("changed amount", |history| history.ledger[3].amount += 1),
            ("changed key", |history| history.topic[3].account = "acc-9".into()),
        ];
        for (name, mutate) in mutations {
            let mut history = valid();
            mutate(&mut history);
            assert!(!check(&history).is_empty(), "{name} was not flagged");
        }
    }
}
