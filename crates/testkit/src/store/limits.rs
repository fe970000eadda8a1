//! The one table of limit cases (R34): what each door must take and refuse, and by which name.

use uuid::Uuid;

use oncebox::error::StoreError;
use oncebox::message::NewMessage;

/// A value that a caller may give to a SQL door.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RawValue {
    /// The column or parameter is left out.
    Absent,
    /// An explicit SQL null is given.
    Null,
    /// The value is given as text.
    Text(String),
    /// The value is given as bytes.
    Bytes(Vec<u8>),
    /// A number in place of text or bytes.
    Number(i64),
}

/// A message that a caller may give to a SQL door. Headers are JSON text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawMessage {
    /// The topic as it is given to the door.
    pub topic: RawValue,
    /// The key as it is given to the door.
    pub key: RawValue,
    /// The kind as it is given to the door.
    pub kind: RawValue,
    /// Headers, as JSON text.
    pub headers: RawValue,
    /// The payload as it is given to the door: text or bytes.
    pub payload: RawValue,
    /// The content type as it is given to the door.
    pub content_type: RawValue,
    /// Message id, as text.
    pub message_id: RawValue,
}

/// One case: a message, and the names of the limits that may refuse it. Without a name, the message
/// must be taken.
#[derive(Debug, Clone)]
pub struct LimitCase {
    /// What the case tests, in a few words.
    pub name: String,
    /// The message that the door is given.
    pub message: RawMessage,
    /// The limits of which any may refuse it. Empty: the message is taken.
    pub refused_by: Vec<&'static str>,
}

impl LimitCase {
    /// Whether the door must take the message.
    #[must_use]
    pub fn is_taken(&self) -> bool {
        self.refused_by.is_empty()
    }

    /// The message for the Rust door. None where its types cannot express it.
    #[must_use]
    pub fn as_new_message(&self) -> Option<NewMessage> {
        let raw = &self.message;
        let text = |value: &RawValue| match value {
            RawValue::Text(text) => Some(text.clone()),
            _ => None,
        };
        let (topic, kind) = (text(&raw.topic)?, text(&raw.kind)?);
        let mut message = match &raw.payload {
            RawValue::Text(payload) => NewMessage::text(topic, kind, payload.clone()),
            RawValue::Bytes(payload) => NewMessage::bytes(topic, kind, payload.clone()),
            _ => return None,
        };
        message.key = match &raw.key {
            RawValue::Text(key) => Some(key.clone()),
            RawValue::Null | RawValue::Absent => None,
            _ => return None,
        };
        match &raw.headers {
            RawValue::Text(json) => message.headers = pairs(json)?,
            RawValue::Null | RawValue::Absent => {}
            _ => return None,
        }
        match &raw.content_type {
            RawValue::Text(content_type) => message.content_type = Some(content_type.clone()),
            RawValue::Null | RawValue::Absent => {}
            _ => return None,
        }
        match &raw.message_id {
            RawValue::Text(id) => message.id = Some(Uuid::try_parse(id).ok().filter(|uuid| uuid.to_string() == *id)?),
            RawValue::Null | RawValue::Absent => {}
            _ => return None,
        }
        Some(message)
    }

    /// Checks the answer of a door.
    ///
    /// # Panics
    /// Where the door took a message that it must refuse, refused one that it must take, or named
    /// another limit.
    pub fn check<T: std::fmt::Debug>(&self, answer: &Result<T, StoreError>) {
        let name = &self.name;
        match answer {
            Ok(_) => assert!(self.is_taken(), "{name}: taken, though {:?} forbids it", self.refused_by),
            Err(StoreError::Limit(error)) => assert!(
                self.refused_by.contains(&error.limit.as_ref()),
                "{name}: refused by `{error}`, not by {:?}",
                self.refused_by
            ),
            Err(error) => panic!("{name}: an error without the name of a limit: {error}"),
        }
    }
}

/// The pairs of a flat JSON object of strings, with a name that occurs twice kept twice. None where
/// the JSON is anything else.
fn pairs(json: &str) -> Option<Vec<(String, String)>> {
    struct Pairs;

    impl<'de> serde::de::Visitor<'de> for Pairs {
        type Value = Vec<(String, String)>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("an object of strings")
        }

        fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut pairs = Vec::new();
            while let Some(pair) = map.next_entry()? {
                pairs.push(pair);
            }
            Ok(pairs)
        }
    }

    let mut deserializer = serde_json::Deserializer::from_str(json);
    let pairs = serde::Deserializer::deserialize_map(&mut deserializer, Pairs).ok()?;
    deserializer.end().ok().map(|()| pairs)
}

/// The cases so far. Each changes one part of a valid message.
struct Cases(Vec<LimitCase>);

impl Cases {
    fn add(&mut self, name: &str, refused_by: &[&'static str], change: impl FnOnce(&mut RawMessage)) {
        let mut message = RawMessage {
            topic: RawValue::Text("payments".into()),
            key: RawValue::Text("acc-7".into()),
            kind: RawValue::Text("payment.created".into()),
            headers: RawValue::Absent,
            payload: RawValue::Text("{}".into()),
            content_type: RawValue::Absent,
            message_id: RawValue::Absent,
        };
        change(&mut message);
        self.0.push(LimitCase { name: name.to_owned(), message, refused_by: refused_by.to_vec() });
    }

    fn topic(&mut self, name: &str, topic: RawValue, refused: bool) {
        self.add(&format!("topic: {name}"), if refused { &["topic"] } else { &[] }, |raw| raw.topic = topic);
    }

    fn key(&mut self, name: &str, key: RawValue, refused: bool) {
        self.add(&format!("key: {name}"), if refused { &["key"] } else { &[] }, |raw| raw.key = key);
    }

    fn kind(&mut self, name: &str, kind: RawValue, refused: bool) {
        self.add(&format!("kind: {name}"), if refused { &["kind"] } else { &[] }, |raw| raw.kind = kind);
    }

    fn headers(&mut self, name: &str, refused_by: &[&'static str], json: &str) {
        let json = RawValue::Text(json.to_owned());
        self.add(&format!("headers: {name}"), refused_by, |raw| raw.headers = json);
    }
}

fn text(text: impl Into<String>) -> RawValue {
    RawValue::Text(text.into())
}

/// All cases of the table: good and bad values of each field.
#[must_use]
pub fn limit_cases() -> Vec<LimitCase> {
    let mut cases = Cases(Vec::new());
    topics_keys_and_kinds(&mut cases);
    headers(&mut cases);
    traces(&mut cases);
    payloads_and_content_types(&mut cases);
    message_ids(&mut cases);
    cases.0
}

fn topics_keys_and_kinds(cases: &mut Cases) {
    for good in ["a", "A-Z._-9", "...", ".a", "payments"] {
        cases.topic(good, text(good), false);
    }
    cases.topic("249 characters", text("t".repeat(249)), false);
    cases.topic("250 characters", text("t".repeat(250)), true);
    for bad in ["", ".", "..", "a b", "a/b", "a,b", "ä", "payments\n", "\npayments", "pay\0ments", "payments\0", "a\tb"]
    {
        cases.topic(&format!("{bad:?}"), text(bad), true);
    }
    cases.topic("null", RawValue::Null, true);
    cases.topic("a number", RawValue::Number(5), true);
    cases.topic("bytes", RawValue::Bytes(b"payments".to_vec()), true);

    cases.key("null", RawValue::Null, false);
    cases.key("1,024 bytes", text("k".repeat(1_024)), false);
    cases.key("1,025 bytes", text("k".repeat(1_025)), true);
    cases.key("1,024 bytes of two each", text("ä".repeat(512)), false);
    cases.key("1,026 bytes of two each", text("ä".repeat(513)), true);
    cases.key("four bytes a character", text("😀\u{10FFFF}"), false);
    cases.key("the last characters of the first plane", text("\u{FFFD}\u{FFFE}\u{FFFF}\u{D7FF}\u{E000}"), false);
    cases.key("a trailing newline, which is a character", text("k\n"), false);
    cases.key("empty", text(""), true);
    cases.key("NUL inside", text("a\0b"), true);
    cases.key("NUL at the end", text("a\0"), true);
    cases.key("a number", RawValue::Number(5), true);
    cases.key("bytes", RawValue::Bytes(b"k".to_vec()), true);

    cases.kind("255 bytes", text("k".repeat(255)), false);
    cases.kind("256 bytes", text("k".repeat(256)), true);
    cases.kind("256 bytes of two each", text("ä".repeat(128)), true);
    cases.kind("empty", text(""), true);
    cases.kind("NUL inside", text("a\0b"), true);
    cases.kind("null", RawValue::Null, true);
    cases.kind("a number", RawValue::Number(5), true);
    cases.kind("bytes", RawValue::Bytes(b"k".to_vec()), true);
}

fn headers(cases: &mut Cases) {
    let object = |pairs: Vec<String>| format!("{{{}}}", pairs.join(","));
    cases.add("headers: null", &[], |raw| raw.headers = RawValue::Null);
    cases.headers("none", &[], "{}");
    cases.headers("escapes of all kinds", &[], r#"{"a":"\"\\\/\b\f\n\r\t\u00e4\ud83d\ude00","ä":"😀"}"#);
    cases.headers("a backslash before what looks like NUL", &[], r#"{"a":"\\u0000"}"#);
    cases.headers("an empty value", &[], r#"{"a":""}"#);
    cases.headers("64", &[], &object((0..64).map(|i| format!(r#""h{i}":"v""#)).collect()));
    cases.headers("65", &["headers_max"], &object((0..65).map(|i| format!(r#""h{i}":"v""#)).collect()));
    cases.headers("a name of 128 bytes", &[], &format!(r#"{{"{}":"v"}}"#, "n".repeat(128)));
    cases.headers("a name of 129 bytes", &["header_name"], &format!(r#"{{"{}":"v"}}"#, "n".repeat(129)));
    cases.headers("an empty name", &["header_name"], r#"{"":"v"}"#);
    cases.headers("65,536 bytes", &[], &format!(r#"{{"n":"{}"}}"#, "v".repeat(65_535)));
    cases.headers("65,537 bytes", &["headers_bytes_max"], &format!(r#"{{"n":"{}"}}"#, "v".repeat(65_536)));
    cases.headers("NUL in a value", &["header_value"], r#"{"a":"b\u0000c"}"#);
    cases.headers("NUL in a name", &["header_name", "header_value"], r#"{"a\u0000b":"c"}"#);
    cases.headers("half a surrogate pair", &["headers", "header_value"], r#"{"a":"\ud83d"}"#);
    cases.headers("a number", &["header_value"], r#"{"a":5}"#);
    cases.headers("a null", &["header_value"], r#"{"a":null}"#);
    cases.headers("an object", &["header_value"], r#"{"a":{"b":"c"}}"#);
    cases.headers("an array of headers", &["headers"], r#"["a"]"#);
    cases.headers("a string", &["headers"], r#""a""#);
    cases.headers("no JSON", &["headers"], r#"{"a":"#);
    cases.headers("a name twice", &["header_twice"], r#"{"a":"1","a":"2"}"#);
    cases.headers("a name twice in another case", &["header_twice"], r#"{"tenant":"1","Tenant":"2"}"#);
    for reserved in [
        "ce_id",
        "CE_x",
        "Ce_source",
        "cloudEvents_id",
        "cloudevents:id",
        "CLOUDEVENTSx",
        "content-type",
        "Content-Type",
        "CC",
        "cc",
        "BCC",
        "Bcc",
        "x-match",
        "X-Priority",
        "x-death",
        "x-first-death-queue",
        "X-Last-Death-Reason",
        "x-delivery-count",
        "x-acquired-count",
        "x-opt-delivery-time",
        "x-stream-offset",
        "x-received-from",
        "x-original-exchange",
        "X-Original-Routing-Key",
        "x-routed-by",
        "timestamp_in_ms",
        "x-shovelled",
        "x-shovelled-by",
        "X-Shovelled-Timestamp",
        "oncebox-hash",
        "Oncebox-x",
    ] {
        cases.headers(&format!("{reserved}, reserved"), &["header_reserved"], &format!(r#"{{"{reserved}":"v"}}"#));
    }
    for free in [
        "ce",
        "cee_x",
        "cloud",
        "content_type",
        "ccc",
        "xmatch",
        "oncebox",
        "x",
        "x-tenant",
        "X-Request-Id",
        "x-deaths",
        "x-streams",
        "x-received",
        "x-shovel",
        "x-delay",
        "timestamp",
        "xtimestamp_in_ms",
    ] {
        cases.headers(&format!("{free}, not reserved"), &[], &format!(r#"{{"{free}":"v"}}"#));
    }
}

fn traces(cases: &mut Cases) {
    const GOOD: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    cases.headers("traceparent", &[], &format!(r#"{{"traceparent":"{GOOD}","tracestate":"a=b"}}"#));
    cases.headers("traceparent in another case", &[], &format!(r#"{{"Traceparent":"{GOOD}"}}"#));
    cases.headers("tracestate alone", &[], r#"{"tracestate":"a=b"}"#);
    let full: Vec<String> = (0..64).map(|i| format!(r#""h{i}":"v""#)).collect();
    cases.headers("64 beside the trace", &[], &format!(r#"{{{},"traceparent":"{GOOD}"}}"#, full.join(",")));
    let twice = format!(r#"{{"traceparent":"{GOOD}","TraceParent":"{GOOD}"}}"#);
    cases.headers("traceparent twice", &["header_twice"], &twice);
    for bad in [
        String::new(),
        "x".to_owned(),
        GOOD.to_uppercase(),
        format!("{GOOD}\\n"),
        format!("{GOOD}-"),
        GOOD.replacen("00-", "ff-", 1),
        GOOD.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32)),
        GOOD.replace("00f067aa0ba902b7", &"0".repeat(16)),
        GOOD.replace('-', "_"),
    ] {
        cases.headers(&format!("traceparent {bad:?}"), &["trace"], &format!(r#"{{"traceparent":"{bad}"}}"#));
    }
}

fn payloads_and_content_types(cases: &mut Cases) {
    cases.add("payload: empty text", &[], |raw| raw.payload = text(""));
    cases.add("payload: empty bytes", &[], |raw| raw.payload = RawValue::Bytes(Vec::new()));
    cases.add("payload: any bytes", &[], |raw| raw.payload = RawValue::Bytes((0..=255).collect()));
    cases.add("payload: no JSON, which nobody looks at", &[], |raw| raw.payload = text("{"));
    cases.add("payload: null", &["payload"], |raw| raw.payload = RawValue::Null);
    cases.add("payload: a number", &["payload"], |raw| raw.payload = RawValue::Number(5));
    // The key has 5 bytes.
    cases.add("message: 900,000 bytes", &[], |raw| raw.payload = RawValue::Bytes(vec![b'p'; 899_995]));
    cases.add("message: 900,001 bytes", &["message_bytes_max"], |raw| {
        raw.payload = RawValue::Bytes(vec![b'p'; 899_996])
    });
    cases.add("message: 900,001 bytes with headers", &["message_bytes_max"], |raw| {
        raw.payload = RawValue::Bytes(vec![b'p'; 899_994]);
        raw.headers = text(r#"{"a":"b"}"#);
    });
    cases.add("message: 900,002 bytes of text of two each", &["message_bytes_max"], |raw| {
        raw.payload = text("ä".repeat(449_999));
    });
    cases.add("content type: null", &[], |raw| raw.content_type = RawValue::Null);
    for good in ["application/json", "text/plain; charset=utf-8", "a b~"] {
        cases.add(&format!("content type: {good}"), &[], |raw| raw.content_type = text(good));
    }
    cases.add("content type: 255 bytes", &[], |raw| raw.content_type = text("c".repeat(255)));
    for (name, bad) in [("256 bytes", "c".repeat(256)), ("empty", String::new()), ("not ASCII", "text/ä".to_owned())] {
        cases.add(&format!("content type: {name}"), &["content_type"], |raw| raw.content_type = text(bad));
    }
    for (name, bad) in [("a newline", "text/plain\n"), ("NUL", "text/plain\0"), ("DEL", "text\x7f")] {
        cases.add(&format!("content type: {name}"), &["content_type"], |raw| raw.content_type = text(bad));
    }
}

fn message_ids(cases: &mut Cases) {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_secs();
    let v7 = |seconds: u64| Uuid::new_v7(uuid::Timestamp::from_unix(uuid::NoContext, seconds, 0)).to_string();
    cases.add("message id: a v7 of now", &[], |raw| raw.message_id = text(v7(now)));
    cases.add("message id: a v4 has no time", &[], |raw| {
        raw.message_id = text("9f7a4f6e-5b1d-4f0e-8a55-0d6f1f9c1a2b");
    });
    for (name, seconds) in [("a day ago", now - 86_400), ("in a day", now + 86_400), ("of 1970", 1)] {
        cases.add(&format!("message id: a v7 {name}"), &["id_skew_seconds"], |raw| raw.message_id = text(v7(seconds)));
    }
    for bad in ["", "x", "9f7a4f6e5b1d4f0e8a550d6f1f9c1a2b"] {
        cases.add(&format!("message id: {bad:?}"), &["message_id"], |raw| raw.message_id = text(bad));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oncebox::message::Limits;

    /// The Rust meaning of the limits agrees with the table, so that no adapter has to choose
    /// between the two.
    #[test]
    fn r34_the_limits_in_rust_agree_with_the_table() {
        let mut seen = 0;
        for case in limit_cases() {
            let Some(mut message) = case.as_new_message() else { continue };
            if case.refused_by.contains(&"id_skew_seconds") {
                continue; // The clock is the database's.
            }
            seen += 1;
            let answer = Limits::default().check(&mut message);
            case.check(&answer.map_err(StoreError::from));
        }
        assert!(seen > 100, "only {seen} cases reach the Rust door");
    }
}
