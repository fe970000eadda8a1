//! Reads JSON as serde does, but accepts only an object for a struct.
//!
//! The derived `Deserialize` of a struct also accepts an array of its fields in their order. No
//! operation has promised that form: the schema of a command says object, and a field that is added
//! later would change the meaning of the array. So an array is refused wherever a struct is
//! expected, at every depth: inside lists, maps, options, newtypes and variants. Lists and tuples
//! stay arrays.
//!
//! Not covered: content that serde itself buffers first, which is that of untagged and internally
//! tagged enums, of adjacently tagged ones whose tag comes last, and of flattened members. Not
//! here: what a command checks of its values.

use std::fmt;

use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, EnumAccess, Error, MapAccess, SeqAccess, Unexpected,
    VariantAccess, Visitor,
};

/// Reads a complete JSON body as [`TypedOperation`](super::TypedOperation) does, for your own
/// handlers: a struct only from an object.
///
/// # Errors
/// The errors of `serde_json`.
pub fn read_json<T: DeserializeOwned>(body: &[u8]) -> Result<T, serde_json::Error> {
    let mut reader = serde_json::Deserializer::from_slice(body);
    let value = T::deserialize(Strict(&mut reader))?;
    reader.end()?;
    Ok(value)
}

/// A deserializer (or a part of one) that accepts only objects for structs.
struct Strict<T>(T);

struct Visits<V> {
    visitor: V,
    for_struct: bool,
}

fn visits<V>(visitor: V) -> Visits<V> {
    Visits { visitor, for_struct: false }
}

macro_rules! pass_on {
    ($($method:ident($($name:ident: $of:ty),*))*) => {
        $(fn $method<V: Visitor<'de>>(self, $($name: $of,)* visitor: V) -> Result<V::Value, D::Error> {
            self.0.$method($($name,)* visits(visitor))
        })*
    };
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for Strict<D> {
    type Error = D::Error;

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.0.deserialize_struct(name, fields, Visits { visitor, for_struct: true })
    }

    pass_on! {
        deserialize_any() deserialize_bool() deserialize_i8() deserialize_i16() deserialize_i32() deserialize_i64()
        deserialize_i128() deserialize_u8() deserialize_u16() deserialize_u32() deserialize_u64() deserialize_u128()
        deserialize_f32() deserialize_f64() deserialize_char() deserialize_str() deserialize_string() deserialize_bytes()
        deserialize_byte_buf() deserialize_option() deserialize_unit() deserialize_unit_struct(name: &'static str)
        deserialize_newtype_struct(name: &'static str) deserialize_seq() deserialize_tuple(len: usize)
        deserialize_tuple_struct(name: &'static str, len: usize) deserialize_map()
        deserialize_enum(name: &'static str, variants: &'static [&'static str]) deserialize_identifier()
        deserialize_ignored_any()
    }

    fn is_human_readable(&self) -> bool {
        self.0.is_human_readable()
    }
}

macro_rules! hand_on {
    ($($method:ident($of:ty))*) => {
        $(fn $method<E: Error>(self, value: $of) -> Result<V::Value, E> {
            self.visitor.$method(value)
        })*
    };
}

impl<'de, V: Visitor<'de>> Visitor<'de> for Visits<V> {
    type Value = V::Value;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.visitor.expecting(formatter)
    }

    hand_on! {
        visit_bool(bool) visit_i8(i8) visit_i16(i16) visit_i32(i32) visit_i64(i64) visit_i128(i128) visit_u8(u8)
        visit_u16(u16) visit_u32(u32) visit_u64(u64) visit_u128(u128) visit_f32(f32) visit_f64(f64) visit_char(char)
        visit_str(&str) visit_borrowed_str(&'de str) visit_string(String) visit_bytes(&[u8])
        visit_borrowed_bytes(&'de [u8]) visit_byte_buf(Vec<u8>)
    }

    fn visit_none<E: Error>(self) -> Result<V::Value, E> {
        self.visitor.visit_none()
    }

    fn visit_unit<E: Error>(self) -> Result<V::Value, E> {
        self.visitor.visit_unit()
    }

    fn visit_some<D: Deserializer<'de>>(self, inner: D) -> Result<V::Value, D::Error> {
        self.visitor.visit_some(Strict(inner))
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, inner: D) -> Result<V::Value, D::Error> {
        self.visitor.visit_newtype_struct(Strict(inner))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, elements: A) -> Result<V::Value, A::Error> {
        if self.for_struct {
            return Err(Error::invalid_type(Unexpected::Seq, &self.visitor));
        }
        self.visitor.visit_seq(Strict(elements))
    }

    fn visit_map<A: MapAccess<'de>>(self, members: A) -> Result<V::Value, A::Error> {
        self.visitor.visit_map(Strict(members))
    }

    fn visit_enum<A: EnumAccess<'de>>(self, variant: A) -> Result<V::Value, A::Error> {
        self.visitor.visit_enum(Strict(variant))
    }
}

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for Strict<S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<S::Value, D::Error> {
        self.0.deserialize(Strict(deserializer))
    }
}

impl<'de, A: SeqAccess<'de>> SeqAccess<'de> for Strict<A> {
    type Error = A::Error;

    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, A::Error> {
        self.0.next_element_seed(Strict(seed))
    }

    fn size_hint(&self) -> Option<usize> {
        self.0.size_hint()
    }
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Strict<A> {
    type Error = A::Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, A::Error> {
        self.0.next_key_seed(seed)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, A::Error> {
        self.0.next_value_seed(Strict(seed))
    }

    fn size_hint(&self) -> Option<usize> {
        self.0.size_hint()
    }
}

impl<'de, A: EnumAccess<'de>> EnumAccess<'de> for Strict<A> {
    type Error = A::Error;
    type Variant = Strict<A::Variant>;

    fn variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<(S::Value, Self::Variant), A::Error> {
        let (name, content) = self.0.variant_seed(seed)?;
        Ok((name, Strict(content)))
    }
}

impl<'de, A: VariantAccess<'de>> VariantAccess<'de> for Strict<A> {
    type Error = A::Error;

    fn unit_variant(self) -> Result<(), A::Error> {
        self.0.unit_variant()
    }

    fn newtype_variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<S::Value, A::Error> {
        self.0.newtype_variant_seed(Strict(seed))
    }

    fn tuple_variant<V: Visitor<'de>>(self, len: usize, visitor: V) -> Result<V::Value, A::Error> {
        self.0.tuple_variant(len, visits(visitor))
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, A::Error> {
        self.0.struct_variant(fields, Visits { visitor, for_struct: true })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, dead_code)] // fields are compared as they are shown
mod tests {
    use std::collections::BTreeMap;

    use serde::Deserialize;

    use super::read_json;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Item {
        name: String,
        amount: i64,
    }

    #[derive(Debug, Deserialize)]
    struct Newtype(Item);

    #[derive(Debug, Deserialize)]
    enum Kind {
        Plain,
        Holds(Item),
        Pair(i64, i64),
        Fields { item: Item },
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct All {
        one: Item,
        maybe: Option<Item>,
        list: Vec<Item>,
        map: BTreeMap<String, Item>,
        newtype: Newtype,
        kinds: Vec<Kind>,
        pair: (i64, String),
        big: i128,
        raw: Box<serde_json::value::RawValue>,
        free: serde_json::Value,
    }

    const OBJECT: &str = r#"{"name":"a","amount":1}"#;
    const ARRAY: &str = r#"["a",1]"#;

    fn all(item: &str, at: usize) -> String {
        let at = |place: usize| if place == at { item } else { OBJECT };
        format!(
            r#"{{"one":{},"maybe":{},"list":[{}],"map":{{"k":{}}},"newtype":{},
                "kinds":["Plain",{{"Holds":{}}},{{"Pair":[1,2]}},{{"Fields":{{"item":{}}}}}],
                "pair":[7,"x"],"big":170141183460469231731687303715884105727,"raw":[1],"free":[{{"a":[1.5]}}]}}"#,
            at(0),
            at(1),
            at(2),
            at(3),
            at(4),
            at(5),
            at(6)
        )
    }

    // Shown by: the result of serde_json itself, beside it.
    #[test]
    fn m18_an_array_is_no_struct_at_any_depth() {
        let plain = all(OBJECT, usize::MAX);
        let read: All = read_json(plain.as_bytes()).unwrap();
        assert_eq!(
            format!("{read:?}"),
            format!("{:?}", serde_json::from_str::<All>(&plain).unwrap()),
            "nothing else differs"
        );
        for place in 0..7 {
            let twisted = all(ARRAY, place);
            assert!(serde_json::from_str::<All>(&twisted).is_ok(), "serde takes it: {twisted}");
            let error = read_json::<All>(twisted.as_bytes()).unwrap_err();
            assert_eq!(error.classify(), serde_json::error::Category::Data, "{twisted}: {error}");
        }
        assert!(read_json::<Item>(ARRAY.as_bytes()).is_err(), "nor the whole body");
        assert!(
            read_json::<Kind>(format!(r#"{{"Fields":[{OBJECT}]}}"#).as_bytes()).is_err(),
            "nor the fields of a variant"
        );
    }

    // Shown by: not checking for the end of the body.
    #[test]
    fn m18_a_body_ends_behind_its_value() {
        assert!(read_json::<Item>(format!("{OBJECT} \n").as_bytes()).is_ok());
        assert!(read_json::<Item>(format!("{OBJECT}{OBJECT}").as_bytes()).is_err());
        assert!(read_json::<Item>(&OBJECT.as_bytes()[1..]).is_err());
        assert!(read_json::<Item>(OBJECT.replace('1', "1.5").as_bytes()).is_err());
    }
}
