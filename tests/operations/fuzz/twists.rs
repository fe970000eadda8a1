//! What is done to a good request, and what must come of it.

use oncebox::operation::{Code, Key, KeyFormat};
use serde_json::{Value, json};

use super::document::{Operation, Sampler};
use super::wire::{Framing, Request};

/// What a twisted request must come to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Must {
    /// The engine's refusal, with nothing stored.
    Refuse(Code),
    /// One of these statuses from what stands before the operation; 0: perhaps no answer at all.
    NotReach(&'static [u16]),
    /// It is the same request as the good one.
    BeTheSame,
    /// A first request of its own, under the key of the good one: that of another tenant.
    BeAnother,
    /// Under the key of the good one, it is a mismatch.
    Mismatch,
}

/// A way to twist a request; none: it does not apply to this operation.
pub(crate) type Twist = fn(&mut Request, &Operation, &mut Sampler) -> Option<Must>;

const INVALID: Option<Must> = Some(Must::Refuse(Code::RequestInvalid));
const KEY_INVALID: Option<Must> = Some(Must::Refuse(Code::KeyInvalid));
/// The limit of bodies that the example leaves as it is.
const BODY_MAX: &str = "1048577";

/// All of them, by name.
pub(crate) const TWISTS: &[(&str, Twist)] = &[
    ("no key", |request, operation, _| {
        request.without("idempotency-key");
        operation.key.as_ref().map(|_| Must::Refuse(Code::KeyRequired))
    }),
    ("two keys", |request, operation, _| {
        let key = request.header("idempotency-key").to_vec();
        request.headers.push(("idempotency-key".to_owned(), key));
        KEY_INVALID.filter(|_| operation.key.is_some())
    }),
    ("a key that is too long", |request, operation, sampler| {
        let length = sampler.chance.usize(256..2_000);
        rekey(request, operation, vec![b'k'; length])
    }),
    ("a key that is too short", |request, operation, sampler| {
        let length = sampler.chance.usize(1..16);
        rekey(request, operation, vec![b'k'; length])
    }),
    ("an empty key", |request, operation, sampler| {
        let empty = *sampler.one(&["", "  ", "\"\""]);
        rekey(request, operation, empty.into())
    }),
    ("a key with a byte that no key has", |request, operation, sampler| {
        operation.key.as_ref()?;
        let mut key = request.header("idempotency-key").to_vec();
        let at = sampler.chance.usize(1..key.len());
        key.insert(at, *sampler.one(b" \t,;\"'/\\%+@=!\x80\xc3\xff"));
        rekey(request, operation, key)
    }),
    ("random bytes as a key", |request, operation, sampler| {
        let mut key = sampler.bytes(300);
        key.retain(|byte| !b"\r\n".contains(byte));
        let is_key = Key::parse(key.trim_ascii(), KeyFormat::Opaque).is_ok();
        let is_header = key.iter().all(|&byte| byte == b'\t' || (byte >= 0x20 && byte != 0x7f));
        rekey(request, operation, key)?;
        match (is_header, is_key) {
            (false, _) => Some(Must::NotReach(&[400])),
            (true, false) => KEY_INVALID,
            (true, true) => None,
        }
    }),
    ("a key in quotes", |request, operation, _| {
        let quoted = format!("\"{}\"", String::from_utf8_lossy(request.header("idempotency-key")));
        rekey(request, operation, quoted.into_bytes()).map(|_| Must::BeTheSame)
    }),
    ("a quoted key that goes on", |request, operation, sampler| {
        let key = String::from_utf8_lossy(request.header("idempotency-key")).into_owned();
        let after = *sampler.one(&[";a=1", ", \"x\"", "x", " \"", "\\"]);
        rekey(request, operation, format!("\"{key}\"{after}").into_bytes())
    }),
    ("a quoted key that does not end", |request, operation, sampler| {
        let key = String::from_utf8_lossy(request.header("idempotency-key")).into_owned();
        let unclosed = *sampler.one(&["", "\\\"", "\\"]);
        rekey(request, operation, format!("\"{key}{unclosed}").into_bytes())
    }),
    ("no authentication", |request, operation, _| {
        request.without("authorization");
        operation.is_secured.then_some(Must::Refuse(Code::Unauthenticated))
    }),
    ("bad authentication", |request, operation, sampler| {
        let bad =
            ["Bearer t1", "Bearer :p1", "Bearer t1:", "Basic t1:p1", "bearer", "Bearer t\u{e9}:p1", "Bearer t1:p 1"];
        request.with("authorization", *sampler.one(&bad));
        operation.is_secured.then_some(Must::Refuse(Code::Unauthenticated))
    }),
    ("another principal", |request, operation, _| {
        request.with("authorization", "Bearer t1:p2");
        operation.key.as_ref().map(|_| Must::Mismatch)
    }),
    ("another tenant", |request, operation, _| {
        request.with("authorization", "Bearer t2:p1");
        operation.key.as_ref().map(|_| Must::BeAnother)
    }),
    ("another method", |request, operation, sampler| {
        request.method = (*sampler.one(&["DELETE", "PATCH", "TRACE", "FUZZ", "GET", "OPTIONS"])).to_owned();
        (request.method != operation.method).then_some(Must::NotReach(&[405]))
    }),
    ("another path", |request, _, sampler| {
        let tail = *sampler.one(&["/", "/x/y", "%00", "%ff/..", ";a", "/../x", "//"]);
        request.target = format!("{}x{tail}", request.target.split('/').take(2).collect::<Vec<_>>().join("/"));
        Some(Must::NotReach(&[404]))
    }),
    ("more headers", |request, _, sampler| {
        let mut value = sampler.bytes(200);
        value.retain(|&byte| byte == b'\t' || (byte >= 0x20 && byte != 0x7f));
        request.headers.push(("x-fuzz".to_owned(), value));
        request.headers.push(("x-tenant-id".to_owned(), b"t2".to_vec()));
        Some(Must::BeTheSame)
    }),
    ("a header with a control byte", |request, _, sampler| {
        let byte = *sampler.one(b"\0\x01\x07\x1b\x7f");
        request.headers.push(("x-fuzz".to_owned(), vec![b'a', byte, b'b']));
        Some(Must::NotReach(&[400]))
    }),
    ("no content type", |request, operation, _| {
        request.without("content-type");
        operation.body.as_ref().map(|_| Must::Refuse(Code::UnsupportedMediaType))
    }),
    ("another content type", |request, operation, sampler| {
        let types = ["text/plain", "application/jsonx", "multipart/form-data; boundary=x", "*/*", "json", "\u{e9}", ""];
        request.with("content-type", *sampler.one(&types));
        operation.body.as_ref().map(|_| Must::Refuse(Code::UnsupportedMediaType))
    }),
    ("another spelling of the content type", |request, operation, sampler| {
        let types = ["application/json; charset=utf-8", "Application/JSON", "application/json ;x=\"y\""];
        request.with("content-type", *sampler.one(&types));
        operation.body.as_ref().map(|_| Must::BeTheSame)
    }),
    ("a body that is cut off", |request, operation, sampler| {
        operation.body.as_ref()?;
        request.framing = Framing::Cut(sampler.chance.usize(..request.body.len()));
        Some(Must::NotReach(&[0, 400]))
    }),
    ("a length that is none", |request, operation, sampler| {
        let said = *sampler.one(&["-1", "abc", "1, 2", "0x10", "99999999999999999999"]);
        request.framing = Framing::Said(said);
        operation.body.as_ref().map(|_| Must::NotReach(&[0, 400]))
    }),
    ("a body over the limit", |request, operation, sampler| {
        let said = *sampler.one(&[BODY_MAX, "9223372036854775807"]);
        request.framing = Framing::Said(said);
        operation.key.as_ref().map(|_| Must::Refuse(Code::BodyTooLarge))
    }),
    ("chunks", |request, operation, sampler| {
        request.framing = Framing::Chunked(sampler.chance.usize(1..20));
        operation.body.as_ref().map(|_| Must::BeTheSame)
    }),
    ("a trailer", |request, operation, _| {
        request.framing = Framing::Trailer;
        INVALID.filter(|_| operation.key.is_some())
    }),
    ("an early end", |request, operation, sampler| {
        operation.body.as_ref()?;
        let at = sampler.chance.usize(..request.body.len());
        request.body.truncate(at);
        INVALID
    }),
    ("more after the end", |request, operation, sampler| {
        request.body.extend_from_slice(sampler.one(&["}", " x", "{}", "\0", "null", "\u{feff}"]).as_bytes());
        INVALID.filter(|_| operation.body.is_some())
    }),
    ("a byte order mark", |request, operation, _| {
        request.body.splice(..0, *b"\xef\xbb\xbf");
        INVALID.filter(|_| operation.body.is_some())
    }),
    ("no text at all", |request, operation, sampler| {
        request.body = sampler.bytes(200);
        INVALID.filter(|_| operation.body.is_some())
    }),
    ("another JSON value", |request, operation, sampler| {
        request.body = (*sampler.one(&["null", "[]", "{}", "\"a\"", "7", "[{}]", "true"])).into();
        INVALID.filter(|_| operation.body.is_some())
    }),
    ("an array in place of the members", |request, operation, _| {
        let members = members(request)?;
        let names = operation.body.as_ref()?["required"].as_array()?;
        let values = names.iter().map(|name| members.iter().find(|(other, _)| name == other).map(|(_, value)| value));
        request.body = json!(values.collect::<Option<Vec<_>>>()?).to_string().into();
        INVALID
    }),
    ("a byte that is not UTF-8", |request, operation, sampler| {
        let at = 1 + request.body.iter().position(|&byte| byte == b'"')?;
        request.body.insert(at, *sampler.one(b"\x80\xc0\xff"));
        INVALID.filter(|_| operation.body.is_some())
    }),
    ("a member twice", |request, operation, sampler| {
        let members = members(request)?;
        let (name, value) = sampler.one(&members).clone();
        let other = if sampler.chance.bool() { value } else { json!(1) };
        let more = format!(",{}:{other}}}", json!(name));
        append(request, &more);
        INVALID.filter(|_| operation.body.is_some())
    }),
    ("a member that nobody knows", |request, _, sampler| {
        let name = *sampler.one(&["", "amount", "AccountId", "__proto__", "tenant", "text ", "\u{1f4b6}"]);
        edit(request, name, json!(1))?;
        INVALID
    }),
    ("a member that is missing", |request, operation, sampler| {
        let required = operation.body.as_ref()?["required"].as_array()?.clone();
        let name = sampler.one(&required).as_str()?.to_owned();
        let mut members = members(request)?;
        members.retain(|(other, _)| *other != name);
        write(request, &members);
        INVALID
    }),
    ("a member of another type", |request, operation, sampler| {
        let (name, is_text) = a_member(operation, sampler, |_| true)?;
        let mut others = vec![json!(null), json!([]), json!({}), json!(true), json!(1.5), json!([1])];
        others.push(if is_text { json!(7) } else { json!("7") });
        edit(request, &name, sampler.one(&others).clone())?;
        INVALID
    }),
    ("a whole number written as a float", |request, operation, sampler| {
        let (name, _) = a_member(operation, sampler, |schema| schema["type"] == "integer")?;
        let text = *sampler.one(&["10.0", "1e3", "10.5", "-0.0", "1E+2"]);
        raw(request, &name, text)?;
        INVALID
    }),
    ("a number that is none", |request, operation, sampler| {
        let (name, _) = a_member(operation, sampler, |schema| schema["type"] == "integer")?;
        let text = *sampler.one(&["010", "+1", "0x1", "1_000", "NaN", "Infinity", "--1", "1.", "\u{661}"]);
        raw(request, &name, text)?;
        INVALID
    }),
    ("a whole number out of range", |request, operation, sampler| {
        let (name, _) = a_member(operation, sampler, |schema| schema["type"] == "integer")?;
        let bounds = &operation.body.as_ref()?["properties"][&name];
        let beyond = [i128::from(bounds["minimum"].as_i64()?) - 1, i128::from(bounds["maximum"].as_i64()?) + 1];
        let mut out = beyond.map(|number| number.to_string()).to_vec();
        out.extend(["18446744073709551616".to_owned(), "9".repeat(400)]);
        raw(request, &name, &sampler.one(&out).clone())?;
        INVALID
    }),
    ("a text that is too long", |request, operation, sampler| {
        let (name, _) = a_member(operation, sampler, |schema| schema["maxLength"].is_u64())?;
        let length = sampler.chance.usize(65..5_000);
        edit(request, &name, "\u{fc}".repeat(length).into())?;
        INVALID
    }),
    ("a text of nearly the whole body", |request, operation, sampler| {
        let (name, _) = a_member(operation, sampler, |schema| schema["maxLength"].is_u64())?;
        edit(request, &name, "a".repeat((1 << 20) - 2_000).into())?;
        INVALID
    }),
    ("a text that its pattern refuses", |request, operation, sampler| {
        let (name, _) = a_member(operation, sampler, |schema| schema["pattern"].is_string())?;
        let class = operation.body.as_ref()?["properties"][&name]["pattern"].as_str()?.contains("A-Z");
        edit(request, &name, (*sampler.one(if class { &["eur", "EU", "EURO", ""] } else { &["\0", "a\0b"] })).into())?;
        INVALID
    }),
    ("half of a surrogate pair", |request, operation, sampler| {
        let (name, _) = a_member(operation, sampler, |schema| schema["type"] == "string")?;
        let text = *sampler.one(&[r#""\ud800""#, r#""\udc00""#, r#""\ud800\ud800""#, r#""\udbffa""#]);
        raw(request, &name, text)?;
        INVALID
    }),
    ("deep nesting", |request, operation, sampler| {
        let depth = *sampler.one(&[127, 128, 1_000, 100_000]);
        let open = *sampler.one(&["[", "{\"a\":"]);
        let (close, zero) = if open == "[" { ("]", "") } else { ("}", "0") };
        let (name, _) = a_member(operation, sampler, |_| true)?;
        let nested = format!("{}{zero}{}", open.repeat(depth), close.repeat(depth));
        raw(request, &name, &nested)?;
        INVALID
    }),
    ("another writing of the same JSON", |request, operation, sampler| {
        let mut members = members(request)?;
        sampler.chance.shuffle(&mut members);
        let blank = *sampler.one(&[" ", "\n", "\t", "\r\n  "]);
        let written: Vec<String> = members
            .iter()
            .map(|(name, value)| format!("{blank}{}{blank}:{blank}{}", escaped(name), rewritten(value)))
            .collect();
        request.body = format!("{{{}{blank}}}{blank}", written.join(",")).into_bytes();
        operation.body.as_ref().map(|_| Must::BeTheSame)
    }),
    ("another command", |request, operation, sampler| {
        let (name, is_text) = a_member(operation, sampler, |_| operation.key.is_some())?;
        let (_, value) = members(request)?.into_iter().find(|(other, _)| *other == name)?;
        let other = if name == "currency" {
            json!(if value == "EUR" { "USD" } else { "EUR" })
        } else if is_text {
            let text = value.as_str()?;
            json!(if text == "a" { "b" } else { "a" })
        } else {
            let number = value.as_i64()?;
            json!(if number > 1 { number - 1 } else { number + 1 })
        };
        edit(request, &name, other)?;
        Some(Must::Mismatch)
    }),
];

/// Another key, which is none.
fn rekey(request: &mut Request, operation: &Operation, key: Vec<u8>) -> Option<Must> {
    request.with("idempotency-key", key);
    KEY_INVALID.filter(|_| operation.key.is_some())
}

/// The members of the body, as they stand in the text.
fn members(request: &Request) -> Option<Vec<(String, Value)>> {
    let body: Value = serde_json::from_slice(&request.body).ok()?;
    Some(body.as_object()?.iter().map(|(name, value)| (name.clone(), value.clone())).collect())
}

fn write(request: &mut Request, members: &[(String, Value)]) {
    let members: serde_json::Map<String, Value> = members.iter().cloned().collect();
    request.body = Value::Object(members).to_string().into_bytes();
}

/// Gives a member this value.
fn edit(request: &mut Request, name: &str, value: Value) -> Option<()> {
    let mut members = members(request)?;
    members.retain(|(other, _)| other != name);
    members.push((name.to_owned(), value));
    write(request, &members);
    Some(())
}

/// Gives a member these characters as its value.
fn raw(request: &mut Request, name: &str, text: &str) -> Option<()> {
    let mut members = members(request)?;
    members.retain(|(other, _)| other != name);
    let comma = if members.is_empty() { "" } else { "," };
    write(request, &members);
    append(request, &format!("{comma}{}:{text}}}", json!(name)));
    Some(())
}

/// Goes on where the object's last brace stands.
fn append(request: &mut Request, text: &str) {
    request.body.pop();
    request.body.extend_from_slice(text.as_bytes());
}

/// A member of the schema, and whether it is a text.
fn a_member(operation: &Operation, sampler: &mut Sampler, fits: impl Fn(&Value) -> bool) -> Option<(String, bool)> {
    let properties = operation.body.as_ref()?["properties"].as_object()?;
    let fitting: Vec<(&String, &Value)> = properties.iter().filter(|(_, schema)| fits(schema)).collect();
    if fitting.is_empty() {
        return None;
    }
    let (name, schema) = *sampler.one(&fitting);
    Some((name.clone(), schema["type"] == "string"))
}

fn rewritten(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), escaped)
}

/// Every character as an escape.
fn escaped(text: &str) -> String {
    let units: String = text.encode_utf16().map(|unit| format!("\\u{unit:04X}")).collect();
    format!("\"{units}\"")
}
