//! The OpenAPI document as a test reads it, and values made from its schemas.

use std::collections::BTreeMap;

use proptest::strategy::{Strategy, ValueTree};
use proptest::string::string_regex;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use serde_json::{Map, Value};

use crate::kit::Http;

/// What is said of one answer.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    media: Option<String>,
    required: Vec<String>,
}

/// An operation of the document.
#[derive(Debug, Clone)]
pub(crate) struct Operation {
    pub(crate) method: String,
    /// The path, its parameter in braces.
    pub(crate) path: String,
    /// What the key must be, where one is asked for.
    pub(crate) key: Option<Value>,
    /// The schema of its one path parameter.
    pub(crate) id: Option<Value>,
    /// The schema of its JSON body.
    pub(crate) body: Option<Value>,
    pub(crate) is_secured: bool,
    answers: BTreeMap<u16, Answer>,
}

impl Operation {
    /// All of them.
    pub(crate) fn all(document: &Value) -> Vec<Self> {
        let mut found = Vec::new();
        for (path, methods) in document["paths"].as_object().unwrap() {
            for (method, operation) in methods.as_object().unwrap() {
                found.push(Self::of(method, path, operation));
            }
        }
        found
    }

    fn of(method: &str, path: &str, operation: &Value) -> Self {
        let none = Vec::new();
        let parameters = operation["parameters"].as_array().unwrap_or(&none);
        let schema = |place: &str, name: &str| {
            let found = parameters.iter().find(|one| one["in"] == place && one["name"] == name);
            found.map(|parameter| parameter["schema"].clone())
        };
        let answers = operation["responses"].as_object().unwrap().iter().map(|(status, said)| {
            let content = said["content"].as_object().and_then(|content| content.iter().next());
            let names = content.and_then(|(_, media)| media["schema"]["required"].as_array());
            let required = names.unwrap_or(&none).iter().map(|name| name.as_str().unwrap().to_owned()).collect();
            (status.parse().unwrap(), Answer { media: content.map(|(media, _)| media.clone()), required })
        });
        Self {
            method: method.to_uppercase(),
            path: path.to_owned(),
            key: schema("header", "Idempotency-Key"),
            id: schema("path", "id"),
            body: operation["requestBody"]["content"]["application/json"]["schema"]
                .as_object()
                .cloned()
                .map(Value::from),
            is_secured: operation["security"].is_array(),
            answers: answers.collect(),
        }
    }

    /// The status is declared; so is the content type, but for 202, which has two kinds of answer;
    /// and the members that the schema requires are there.
    pub(crate) fn declares(&self, answer: &Http) {
        let about = || format!("{} {}: {answer:?} {}", self.method, self.path, String::from_utf8_lossy(&answer.body));
        let said = self.answers.get(&answer.status).unwrap_or_else(|| panic!("not declared: {}", about()));
        if answer.status != 202 {
            assert_eq!(answer.header("content-type"), said.media.as_deref(), "{}", about());
        }
        if !said.required.is_empty() {
            let body: Map<String, Value> =
                serde_json::from_slice(&answer.body).unwrap_or_else(|_| panic!("{}", about()));
            for name in &said.required {
                assert!(body.contains_key(name), "{name} is missing: {}", about());
            }
        }
    }
}

/// Makes values of schemas, from a seed.
pub(crate) struct Sampler {
    pub(crate) chance: fastrand::Rng,
    runner: TestRunner,
}

impl Sampler {
    pub(crate) fn new(seed: u64) -> Self {
        let mut chance = fastrand::Rng::with_seed(seed);
        let mut bytes = [0; 32];
        chance.fill(&mut bytes);
        let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
        Self { chance, runner: TestRunner::new_with_rng(Config::default(), rng) }
    }

    /// One of these.
    pub(crate) fn one<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.chance.usize(..of.len())]
    }

    /// A value that a schema allows.
    pub(crate) fn value(&mut self, schema: &Value) -> Value {
        match schema["type"].as_str() {
            Some("object") => {
                let required: Vec<&str> =
                    schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
                let mut members = Map::new();
                for (name, inner) in schema["properties"].as_object().unwrap() {
                    if required.contains(&name.as_str()) || self.chance.bool() {
                        members.insert(name.clone(), self.value(inner));
                    }
                }
                Value::Object(members)
            }
            Some("integer") => {
                self.integer(schema["minimum"].as_i64().unwrap(), schema["maximum"].as_i64().unwrap()).into()
            }
            Some("string") => self.text(schema).into(),
            other => panic!("a schema of type {other:?}"),
        }
    }

    /// A text that a schema allows: by its pattern.
    pub(crate) fn text(&mut self, schema: &Value) -> String {
        let pattern = schema["pattern"].as_str().unwrap_or(".{1,40}");
        let pattern = pattern.trim_start_matches('^').trim_end_matches('$');
        string_regex(pattern).unwrap().new_tree(&mut self.runner).unwrap().current()
    }

    /// The small ones, and those at which readers differ.
    fn integer(&mut self, least: i64, greatest: i64) -> i64 {
        const DOUBLES_END: i64 = 1 << 53;
        let edge = *self.one(&[least, greatest, greatest - 1, DOUBLES_END - 1, DOUBLES_END, DOUBLES_END + 1]);
        if self.chance.u8(..4) == 0 { edge } else { least.max(0) + self.chance.i64(1..1_000) }
    }

    /// Bytes of any kind.
    pub(crate) fn bytes(&mut self, most: usize) -> Vec<u8> {
        let length = self.chance.usize(..=most);
        std::iter::repeat_with(|| self.chance.u8(..)).take(length).collect()
    }
}
