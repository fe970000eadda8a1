//! Pure: no I/O, no clock.
//! The canonical form of a command: the bytes of which a fingerprint is the hash (M18 to M24).
//!
//! Guarantees:
//!
//! * Every value has a type tag, and each part of a command, list or map stands after its length.
//!   So two different commands never give the same bytes, whatever their texts contain.
//! * Whole numbers are exact at every size. A number has the same form for every width of its type,
//!   so widening a field changes no fingerprint. Amounts are [`Decimal`]s. A float has no canonical
//!   form and does not compile:
//!
//! ```compile_fail
//! oncebox::operation::FingerprintWriter::default().field("amount", &10.5_f64);
//! ```
//!
//! * The order in which fields are written does not matter, nor does the order of a map.
//!
//! Not here: validation and defaults, which must come first (a missing `channel` and `"web"` must
//! be the same command), and the hash ([`fingerprint`](super::fingerprint)).

use std::collections::{BTreeMap, HashMap};

use uuid::Uuid;

use super::decimal::Decimal;
use super::framed::framed;

/// Collects the fields of a command, or of a record inside it.
#[derive(Debug, Clone, Default)]
pub struct FingerprintWriter {
    fields: Vec<(Vec<u8>, Vec<u8>)>,
}

/// Takes one value. Made by [`FingerprintWriter::field`], and for each element of a list or map.
///
/// Texts, numbers, truth values, amounts, options, lists and maps write themselves, so a type
/// around one of them says `self.0.write(out)`.
#[derive(Debug)]
pub struct ValueWriter<'a> {
    out: &'a mut Vec<u8>,
}

/// A value that can be part of a fingerprint.
pub trait FingerprintValue {
    /// Writes this value, by exactly one call.
    fn write(&self, out: ValueWriter<'_>);
}

/// Bytes as one value, not as a list of numbers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bytes<'a>(pub &'a [u8]);

impl FingerprintWriter {
    /// Adds a field. Its name belongs to the contract: renaming it changes every fingerprint.
    pub fn field(&mut self, name: &str, value: &(impl FingerprintValue + ?Sized)) -> &mut Self {
        self.fields.push((name.as_bytes().to_vec(), encoded(value)));
        self
    }

    /// The bytes of all fields, sorted by name. A name that was written twice is there twice.
    pub(super) fn finish(mut self) -> Vec<u8> {
        self.fields.sort_unstable();
        framed(self.fields.iter().flat_map(|(name, value)| [name.as_slice(), value]))
    }
}

impl ValueWriter<'_> {
    fn put(self, tag: u8, content: &[u8]) {
        self.out.push(tag);
        self.out.extend_from_slice(content);
    }

    /// A byte string, written as it is.
    pub fn bytes(self, bytes: &[u8]) {
        self.put(b'b', bytes);
    }

    /// A map, sorted by the canonical bytes of the keys.
    fn map<'v, K, V>(self, entries: impl IntoIterator<Item = (&'v K, &'v V)>)
    where
        K: FingerprintValue + ?Sized + 'v,
        V: FingerprintValue + ?Sized + 'v,
    {
        let mut entries: Vec<_> = entries.into_iter().map(|(key, value)| (encoded(key), encoded(value))).collect();
        entries.sort_unstable();
        self.put(b'm', &framed(entries.iter().flat_map(|(key, value)| [key.as_slice(), value])));
    }

    /// A record inside the command.
    pub fn record(self, fields: impl FnOnce(&mut FingerprintWriter)) {
        let mut writer = FingerprintWriter::default();
        fields(&mut writer);
        self.put(b'r', &writer.finish());
    }
}

fn encoded(value: &(impl FingerprintValue + ?Sized)) -> Vec<u8> {
    let mut out = Vec::new();
    value.write(ValueWriter { out: &mut out });
    out
}

impl<T: FingerprintValue + ?Sized> FingerprintValue for &T {
    fn write(&self, out: ValueWriter<'_>) {
        (**self).write(out);
    }
}

impl FingerprintValue for str {
    fn write(&self, out: ValueWriter<'_>) {
        out.put(b's', self.as_bytes());
    }
}

impl FingerprintValue for String {
    fn write(&self, out: ValueWriter<'_>) {
        self.as_str().write(out);
    }
}

impl FingerprintValue for Bytes<'_> {
    fn write(&self, out: ValueWriter<'_>) {
        out.bytes(self.0);
    }
}

impl FingerprintValue for bool {
    fn write(&self, out: ValueWriter<'_>) {
        out.put(if *self { b't' } else { b'f' }, &[]);
    }
}

impl FingerprintValue for Decimal {
    fn write(&self, out: ValueWriter<'_>) {
        out.put(b'd', self.to_string().as_bytes());
    }
}

impl FingerprintValue for Uuid {
    fn write(&self, out: ValueWriter<'_>) {
        self.to_string().write(out);
    }
}

macro_rules! whole_numbers {
    ($($number:ty)*) => {
        $(impl FingerprintValue for $number {
            fn write(&self, out: ValueWriter<'_>) {
                out.put(b'i', self.to_string().as_bytes());
            }
        })*
    };
}

whole_numbers!(i8 i16 i32 i64 i128 u8 u16 u32 u64);

/// An absent value differs from any default, so fill in defaults before. A present one differs from
/// the bare value, so an absent value inside a present one (null in a patch) differs from an absent
/// one.
impl<T: FingerprintValue> FingerprintValue for Option<T> {
    fn write(&self, out: ValueWriter<'_>) {
        match self {
            None => out.put(b'n', &[]),
            Some(value) => out.put(b'o', &encoded(value)),
        }
    }
}

impl<T: FingerprintValue> FingerprintValue for [T] {
    fn write(&self, out: ValueWriter<'_>) {
        let values: Vec<Vec<u8>> = self.iter().map(encoded).collect();
        out.put(b'l', &framed(values.iter().map(Vec::as_slice)));
    }
}

impl<T: FingerprintValue> FingerprintValue for Vec<T> {
    fn write(&self, out: ValueWriter<'_>) {
        self.as_slice().write(out);
    }
}

impl<K: FingerprintValue, V: FingerprintValue> FingerprintValue for BTreeMap<K, V> {
    fn write(&self, out: ValueWriter<'_>) {
        out.map(self);
    }
}

impl<K: FingerprintValue, V: FingerprintValue, S> FingerprintValue for HashMap<K, V, S> {
    fn write(&self, out: ValueWriter<'_>) {
        out.map(self);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A value of any shape, with its own equality to compare the bytes with.
    #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
    enum Any {
        Text(String),
        Bytes(Vec<u8>),
        Flag(bool),
        Whole(i64),
        Option(Option<Box<Any>>),
        List(Vec<Any>),
        Map(BTreeMap<String, Any>),
        Record(BTreeMap<String, Any>),
    }

    impl FingerprintValue for Any {
        fn write(&self, out: ValueWriter<'_>) {
            match self {
                Self::Text(text) => text.write(out),
                Self::Bytes(bytes) => Bytes(bytes).write(out),
                Self::Flag(flag) => flag.write(out),
                Self::Whole(number) => number.write(out),
                Self::Option(value) => value.as_deref().write(out),
                Self::List(values) => values.write(out),
                Self::Map(entries) => entries.write(out),
                Self::Record(fields) => out.record(|writer| {
                    for (name, value) in fields {
                        writer.field(name, value);
                    }
                }),
            }
        }
    }

    /// Short alphabets, so that pairs with small differences are common.
    fn value() -> impl Strategy<Value = Any> {
        let leaf = prop_oneof![
            "[bs]{0,3}".prop_map(Any::Text),
            proptest::collection::vec(b'r'..=b's', 0..3).prop_map(Any::Bytes),
            any::<bool>().prop_map(Any::Flag),
            (-2_i64..12).prop_map(Any::Whole),
            Just(Any::Option(None)),
        ];
        leaf.prop_recursive(3, 12, 3, |inner| {
            let entries = proptest::collection::btree_map("[ab]{0,2}", inner.clone(), 0..3);
            prop_oneof![
                inner.clone().prop_map(|value| Any::Option(Some(Box::new(value)))),
                proptest::collection::vec(inner, 0..3).prop_map(Any::List),
                entries.clone().prop_map(Any::Map),
                entries.prop_map(Any::Record),
            ]
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4_000))]

        // Shown by: writing `Some` as the bare value; one tag for map and record.
        #[test]
        fn m18_two_values_write_the_same_bytes_only_if_they_are_the_same(a in value(), b in value()) {
            prop_assert_eq!(encoded(&a) == encoded(&b), a == b);
        }

        // Shown by: not sorting the fields.
        #[test]
        fn m19_the_order_of_fields_does_not_matter(
            fields in proptest::collection::btree_map("[ab]{0,2}", value(), 2..5), turn in 1_usize..4,
        ) {
            let mut turned: Vec<_> = fields.iter().collect();
            turned.rotate_left(turn % fields.len());
            let write = |fields: &mut dyn Iterator<Item = (&String, &Any)>| {
                let mut writer = FingerprintWriter::default();
                for (name, value) in fields {
                    writer.field(name, value);
                }
                writer.finish()
            };
            prop_assert_eq!(write(&mut fields.iter()), write(&mut turned.into_iter()));
        }
    }

    // Shown by: writing whole numbers through f64.
    #[test]
    fn m24_whole_numbers_are_exact_and_of_no_width() {
        assert_ne!(encoded(&9_007_199_254_740_993_i64), encoded(&9_007_199_254_740_992_i64));
        assert_ne!(encoded(&u64::MAX), encoded(&(u64::MAX - 1)));
        assert_eq!(encoded(&7_u8), encoded(&7_i64));
        assert_eq!(encoded(&i128::MIN), format!("i{}", i128::MIN).into_bytes());
        assert_ne!(encoded(&7_i64), encoded("7"), "a number is no text");
        assert_ne!(encoded(&Decimal::new(7, 0)), encoded(&7_i64), "nor an amount");
    }

    // Shown by: not sorting the entries.
    #[test]
    fn m24_the_order_of_a_hash_map_does_not_matter() {
        let pairs: Vec<(String, i64)> = (0..50).map(|number| (format!("k{number}"), number)).collect();
        let hashed: HashMap<String, i64> = pairs.iter().cloned().collect();
        let sorted: BTreeMap<String, i64> = pairs.into_iter().collect();
        assert_eq!(encoded(&hashed), encoded(&sorted));
    }

    // Shown by: names and values without lengths; a list without lengths.
    #[test]
    fn m24_a_name_and_a_value_cannot_trade_bytes() {
        let write = |name: &str, value: &str| {
            let mut writer = FingerprintWriter::default();
            writer.field(name, value);
            writer.finish()
        };
        assert_ne!(write("x-a", "bc"), write("x-ab", "c"));
        assert_ne!(write("x-a", "sbc"), write("x-as", "bc"));
        assert_ne!(encoded(["a", "b"].as_slice()), encoded(["asb"].as_slice()));
    }
}
