//! Commands and their fingerprints: one for all spellings of a document, another for every other
//! document; what two readers may read differently has none (M18 to M24, O21).

use std::ops::RangeInclusive;

use crate::operation::rules::fingerprint::Comparison;
use crate::operation::rules::json::{DEPTH_MAX, DUPLICATE_MEMBER, LONE_SURROGATE};
use crate::operation::rules::raw::{RawCommand, Target};
use crate::operation::rules::{Canonical, Decimal, Fingerprint, FingerprintWriter, Fingerprinter, Keyring};
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Map, Value};

const SAFE: i64 = (1 << 53) - 1;

/// A document of JSON, as it is and not as somebody writes it.
pub(crate) fn document() -> impl Strategy<Value = Value> {
    let whole = prop_oneof![-3_i64..12, -SAFE..=SAFE, select(vec![SAFE, SAFE - 1, -SAFE])];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        whole.prop_map(Value::from),
        "[ab\"\\\\/\u{0}-\u{1f}\u{7f}\u{e9}\u{2028}\u{d7ff}\u{e000}\u{10000}\u{10ffff}]{0,4}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        let members = prop::collection::btree_map("[ab\\\\\u{e9}\u{e000}\u{10000}]{0,2}", inner.clone(), 0..4);
        prop_oneof![
            prop::collection::vec(inner, 0..4).prop_map(Value::from),
            members.prop_map(|members| Value::Object(members.into_iter().collect::<Map<_, _>>())),
        ]
    })
}

/// Writes a document in one of the many ways, by chance.
pub(crate) struct Scribe {
    chance: fastrand::Rng,
    /// In the object of this number, counted from the first that is written, a member stands twice.
    twice_in: Option<usize>,
    objects: usize,
}

impl Scribe {
    pub(crate) fn of(seed: u64) -> Self {
        Self { chance: fastrand::Rng::with_seed(seed), twice_in: None, objects: 0 }
    }

    fn blanks(&mut self) -> String {
        let blank = |chance: &mut fastrand::Rng| *chance.choice(&[' ', '\t', '\n', '\r']).unwrap();
        (0..self.chance.usize(..3)).map(|_| blank(&mut self.chance)).collect()
    }

    pub(crate) fn value(&mut self, value: &Value) -> String {
        let inner = match value {
            Value::Array(values) => {
                let values: Vec<String> = values.iter().map(|value| self.value(value)).collect();
                format!("[{}{}]", self.blanks(), values.join(","))
            }
            Value::Object(members) => self.object(members),
            Value::String(text) => self.text(text),
            other => other.to_string(),
        };
        format!("{}{inner}{}", self.blanks(), self.blanks())
    }

    fn object(&mut self, members: &Map<String, Value>) -> String {
        let number = self.objects;
        self.objects += 1;
        let mut written: Vec<String> = Vec::new();
        let mut names: Vec<&str> = members.keys().map(String::as_str).collect();
        if self.twice_in == Some(number) {
            let doubled = *names.first().unwrap_or(&"a");
            names.push(doubled);
            if names.len() == 1 {
                names.push(doubled);
            }
        }
        self.chance.shuffle(&mut names);
        for name in names {
            let value = members.get(name).unwrap_or(&Value::Null);
            let value = self.value(value);
            written.push(format!("{}{}{}:{value}", self.blanks(), self.text(name), self.blanks()));
        }
        format!("{{{}{}}}", self.blanks(), written.join(","))
    }

    fn text(&mut self, text: &str) -> String {
        let mut out = String::from("\"");
        for character in text.chars() {
            let short = match character {
                '"' => Some('"'),
                '\\' => Some('\\'),
                '/' => Some('/'),
                '\u{8}' => Some('b'),
                '\u{c}' => Some('f'),
                '\n' => Some('n'),
                '\r' => Some('r'),
                '\t' => Some('t'),
                _ => None,
            };
            let may_stand = character >= ' ' && character != '"' && character != '\\';
            match (short, self.chance.u8(..3)) {
                (Some(short), 0) => out.extend(['\\', short]),
                (_, 1) if may_stand => out.push(character),
                _ => {
                    let upper = self.chance.bool();
                    for unit in character.encode_utf16(&mut [0; 2]) {
                        out.push_str(&if upper { format!("\\u{unit:04X}") } else { format!("\\u{unit:04x}") });
                    }
                }
            }
        }
        out.push('"');
        out
    }
}

fn read(body: &str) -> Result<RawCommand, String> {
    let command = RawCommand::new(Target::new(Vec::new(), Vec::new())).body("application/json", body.as_bytes());
    command.map_err(|why| why.to_string())
}

fn fingerprinter(readable: RangeInclusive<u32>, write: u32, keyring: Keyring) -> Fingerprinter {
    Fingerprinter::new("pay".parse().unwrap(), readable, Some(write), keyring).unwrap()
}

fn are_one(a: &impl Canonical, b: &impl Canonical) -> bool {
    let fingerprinter = fingerprinter(1..=1, 1, Keyring::plain());
    let comparison = fingerprinter.compare(&fingerprinter.write(a), b);
    assert_eq!(comparison == Comparison::Equal, fingerprinter.write(a) == fingerprinter.write(b));
    comparison == Comparison::Equal
}

/// A document beside another one: the same, or with one leaf changed, or any.
fn pair() -> impl Strategy<Value = (Value, Value)> {
    (document(), document(), 0_u8..3, any::<prop::sample::Index>()).prop_map(|(one, other, kind, at)| match kind {
        0 => (one.clone(), one),
        1 => {
            let mut near = one.clone();
            let mut places = Vec::new();
            leaves(&mut near, &mut places);
            if !places.is_empty() {
                let index = at.index(places.len());
                let place = places.swap_remove(index);
                *place = match &*place {
                    Value::Null => Value::Bool(false),
                    Value::Bool(value) => Value::Bool(!value),
                    Value::Number(number) => Value::from(number.as_i64().unwrap().saturating_sub(1).max(-SAFE)),
                    Value::String(text) => Value::String(format!("{text}a")),
                    _ => unreachable!("a leaf"),
                };
            }
            (one, near)
        }
        _ => (one, other),
    })
}

fn leaves<'v>(value: &'v mut Value, found: &mut Vec<&'v mut Value>) {
    match value {
        Value::Array(values) => values.iter_mut().for_each(|value| leaves(value, found)),
        Value::Object(members) => members.values_mut().for_each(|value| leaves(value, found)),
        leaf => found.push(leaf),
    }
}

proptest! {
    #![proptest_config(super::cases(3_000))]

    /// Shown by: not sorting members.
    #[test]
    fn m19_no_spelling_changes_a_fingerprint_and_every_other_value_does((one, other) in pair(), seeds in any::<[u64; 2]>()) {
        let [mut first, mut second] = seeds.map(Scribe::of);
        let written = [first.value(&one), second.value(&other)];
        let commands = [read(&written[0]), read(&written[1])].map(|command| command.expect("it is JSON"));
        prop_assert_eq!(are_one(&commands[0], &commands[1]), one == other, "{:?}", written);
    }

    /// Shown by: letting the second one stand.
    #[test]
    fn m21_a_member_that_stands_twice_anywhere_is_refused(value in document(), seed in any::<u64>(), at in any::<prop::sample::Index>()) {
        let whole = serde_json::json!({"b": value});
        let mut counting = Scribe::of(seed);
        counting.value(&whole);
        let mut scribe = Scribe { twice_in: Some(at.index(counting.objects)), ..Scribe::of(seed) };
        let written = scribe.value(&whole);
        prop_assert!(read(&written).is_err_and(|why| why.contains(DUPLICATE_MEMBER)), "{}", written);
    }

    /// Shown by: a bound of 2^53.
    #[test]
    fn m24_a_whole_number_is_taken_up_to_what_every_reader_holds_and_none_is_rounded(
        edge in select(vec![0, 1_i128 << 53, -(1_i128 << 53), 1 << 63, 1 << 64, -(1 << 63), i128::MAX, i128::MIN + 21]),
        off in -20_i128..=20, depth in 0_usize..4,
    ) {
        let number = edge.saturating_add(off);
        let wrapped = |text: &str| format!("{}{text}{}", "[".repeat(depth), "]".repeat(depth));
        let read_whole = read(&wrapped(&number.to_string()));
        let is_safe = number.unsigned_abs() <= SAFE.unsigned_abs().into();
        prop_assert_eq!(read_whole.is_ok(), is_safe, "{}", number);
        for tail in [".0", "e0", "E+0", ".5", "e-1"] {
            let tailed = read(&wrapped(&format!("{number}{tail}"))).expect("it is taken");
            let is_whole = read_whole.as_ref().is_ok_and(|whole| are_one(&tailed, whole));
            prop_assert!(!is_whole, "it stays as it was written");
        }
        // The typed writer is exact beyond: neighbours differ.
        struct Whole(i128);
        impl Canonical for Whole {
            fn write_canonical(&self, _: u32, writer: &mut FingerprintWriter) {
                writer.field("n", &self.0);
            }
        }
        prop_assert!(are_one(&Whole(number), &Whole(number)) && !are_one(&Whole(number), &Whole(number - 1)));
    }

    /// Shown by: replacing what is half by U+FFFD.
    #[test]
    fn m19_half_of_a_surrogate_pair_is_refused_wherever_it_stands(
        before in "[a\u{e9}\u{10000}]{0,3}", half in 0xd800_u16..0xe000, after in "[a\u{e9}]{0,3}", is_name in any::<bool>(),
    ) {
        let text = format!("\"{before}\\u{half:04x}{after}\"");
        let written = if is_name { format!("{{{text}:1}}") } else { format!("[{text}]") };
        prop_assert!(read(&written).is_err_and(|why| why.contains(LONE_SURROGATE)), "{}", written);
    }

    /// Shown by: one level more than the bound.
    #[test]
    fn m19_nesting_ends_at_its_bound(depth in 120_usize..140, open in select(vec!["[", "{\"a\":"])) {
        let (close, core) = if open == "[" { ("]", "") } else { ("}", "0") };
        let nested = read(&format!("{}{core}{}", open.repeat(depth), close.repeat(depth)));
        prop_assert_eq!(nested.is_ok(), depth <= DEPTH_MAX);
    }

    /// Shown by: keeping zeros behind the point.
    #[test]
    fn m24_two_amounts_have_one_fingerprint_if_and_only_if_they_are_one_amount(
        numbers in prop::array::uniform2((-12_i64..12, 0_u32..4, 0_usize..3, 0_usize..3)),
    ) {
        struct Amount(Decimal);
        impl Canonical for Amount {
            fn write_canonical(&self, _: u32, writer: &mut FingerprintWriter) {
                writer.field("amount", &self.0);
            }
        }
        let amounts = numbers.map(|(unscaled, scale, zeros_before, zeros_after)| {
            let digits = format!("{:0>width$}", unscaled.unsigned_abs(), width = scale as usize + 1);
            let (whole, fraction) = digits.split_at(digits.len() - scale as usize);
            let sign = if unscaled < 0 { "-" } else { "" };
            let fraction = format!("{fraction}{}", "0".repeat(zeros_after));
            let point = if fraction.is_empty() { "" } else { "." };
            Amount(format!("{sign}{}{whole}{point}{fraction}", "0".repeat(zeros_before)).parse().unwrap())
        });
        let exact = numbers.map(|(unscaled, scale, ..)| unscaled * 10_i64.pow(3 - scale));
        prop_assert_eq!(are_one(&amounts[0], &amounts[1]), exact[0] == exact[1]);
    }
}

/// A command that has a field more in each version.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Versioned([u8; 4]);

impl Canonical for Versioned {
    fn write_canonical(&self, version: u32, writer: &mut FingerprintWriter) {
        for (number, field) in self.0.iter().enumerate().take(version as usize) {
            writer.field(&number.to_string(), field);
        }
    }
}

/// A process: the versions it reads, the one it writes, and the secrets it has of `sha256`, `k1`,
/// `k2`.
#[derive(Debug, Clone)]
struct Process {
    oldest: u32,
    newest: u32,
    writes: u32,
    kids: Vec<&'static str>,
    write_kid: &'static str,
}

impl Process {
    fn any() -> impl Strategy<Value = Self> {
        let kids = prop::sample::subsequence(vec!["k1", "k2"], 0..=2);
        (1_u32..=4, 1_u32..=4, any::<prop::sample::Index>(), kids, any::<prop::sample::Index>()).prop_map(
            |(a, b, writes, kids, write_kid)| {
                let (oldest, newest) = (a.min(b), a.max(b));
                let writes = oldest + u32::try_from(writes.index((newest - oldest + 1) as usize)).unwrap();
                let all: Vec<&'static str> = std::iter::once("sha256").chain(kids.iter().copied()).collect();
                let write_kid = all[write_kid.index(all.len())];
                Self { oldest, newest, writes, kids, write_kid }
            },
        )
    }

    fn fingerprinter(&self) -> Fingerprinter {
        let secret = |kid: &str| [kid.as_bytes()[1]; 32];
        let secrets: Vec<_> = self.kids.iter().map(|kid| (kid.parse().unwrap(), secret(kid))).collect();
        let secrets =
            secrets.iter().map(|(kid, secret): &(crate::operation::rules::Kid, _)| (kid.clone(), secret.as_slice()));
        let ring = Keyring::new(self.write_kid.parse().unwrap(), secrets).unwrap();
        fingerprinter(self.oldest..=self.newest, self.writes, ring)
    }
}

proptest! {
    #![proptest_config(super::cases(3_000))]

    /// Two processes of different ages and secrets: one stores, the other compares. Shown by:
    /// comparing under the version that the reader writes; calling what is unreadable different.
    #[test]
    fn o21_whoever_reads_judges_as_the_one_who_wrote_or_says_that_it_cannot(
        writer in Process::any(), reader in Process::any(), fields in any::<[u8; 4]>(), change in prop::option::of(0_usize..4),
    ) {
        let first = Versioned(fields);
        let mut second = first.clone();
        if let Some(at) = change {
            second.0[at] ^= 1;
        }
        let stored = writer.fingerprinter().write(&first);
        // As it comes back from a store.
        let stored: Fingerprint = stored.to_string().parse().unwrap();
        let knows = writer.write_kid == "sha256" || reader.kids.contains(&writer.write_kid);
        let expected = if writer.writes < reader.oldest {
            Comparison::TooOld
        } else if writer.writes > reader.newest || !knows {
            Comparison::Unreadable
        } else if change.is_some_and(|at| at < writer.writes as usize) {
            Comparison::Different
        } else {
            Comparison::Equal
        };
        prop_assert_eq!(reader.fingerprinter().compare(&stored, &second), expected);
    }
}
