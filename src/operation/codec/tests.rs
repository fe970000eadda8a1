//! Tests of the whole codec: how an answer is stored, and how it is read back.

#![allow(clippy::unwrap_used)]
use super::*;
use crate::operation::rules::record::Resource;
use crate::operation::rules::{
    FingerprintWriter, Fingerprinter, IdempotentCommand, Key, KeyFormat, Keyring, Mode, Route, Scope,
};

struct Pay(i64);

impl IdempotentCommand for Pay {
    const OPERATION: &'static str = "pay";
    const VERSION: u32 = 1;

    fn fingerprint(&self, _: u32, writer: &mut FingerprintWriter) {
        writer.field("amount", &self.0);
    }
}

fn endpoint() -> Endpoint {
    Endpoint::typed::<Pay>(Route::new(Mode::Transactional))
}

fn of(tenant: &str, key: &str, amount: i64) -> (Identity, Fingerprint) {
    let scope = Scope::new(tenant, "p1").unwrap();
    let fingerprinter = Fingerprinter::new(Pay::OPERATION.parse().unwrap(), 1..=1, None, Keyring::plain()).unwrap();
    let key = Key::parse(key.as_bytes(), KeyFormat::Opaque).unwrap();
    (Identity::new(&scope, fingerprinter.operation().clone(), key), fingerprinter.write(&Pay(amount)))
}

fn reply(body: &[u8]) -> Reply {
    Reply {
        status: 201,
        headers: vec![("content-type".to_owned(), b"application/json".to_vec()), ("date".to_owned(), b"now".to_vec())],
        body: body.to_vec(),
        schema_version: 1,
        resource: None,
        keep: Keep::Exact,
    }
}

fn kept(answer: &Answer) -> &KeptBody {
    let AnswerBody::Kept(body) = &answer.body else { panic!("{answer:?}") };
    body
}

const K1: &str = "key-0000000000000001";

// Shown by: keeping all headers; a body that is written anew.
#[test]
fn m62_status_allowed_headers_and_bytes_come_back_as_they_were() {
    let (identity, fingerprint) = of("t1", K1, 1);
    let (endpoint, sealer) = (endpoint(), Sealer::default());
    for body in [&b"{ \"id\" : 1 }\n"[..], b"", b"\xff\x00", &vec![7; 100_000]] {
        let answer = encode(&endpoint, &sealer, &identity, &fingerprint, &Kept::Whole(reply(body))).unwrap();
        let again = decode(&endpoint, &sealer, (&identity, &fingerprint), (201, 1), kept(&answer)).unwrap();
        assert_eq!((again.status, again.body.as_slice(), answer.status), (201, body, 201));
        assert_eq!(again.headers, [("content-type".to_owned(), b"application/json".to_vec())]);
    }
}

// Shown by: compressing everything; nothing.
#[cfg(feature = "compress")]
#[test]
fn a_long_body_is_kept_small() {
    let (identity, fingerprint) = of("t1", K1, 1);
    let encoded = |length: usize| {
        let body = vec![b'a'; length];
        encode(&endpoint(), &Sealer::default(), &identity, &fingerprint, &Kept::Whole(reply(&body))).unwrap()
    };
    assert!(kept(&encoded(5_000)).bytes.len() < 500);
    assert_eq!(kept(&encoded(4_096)).format, 0);
}

// Shown by: leaving the key, the fingerprint, and the status, out of the associated data; headers
// beside the sealed bytes; a fixed nonce.
#[cfg(feature = "encrypt")]
#[test]
fn m67_an_encrypted_body_is_unreadable_and_opens_only_for_its_own_request() {
    let (k1, k2): (crate::operation::rules::Kid, crate::operation::rules::Kid) =
        ("k1".parse().unwrap(), "k2".parse().unwrap());
    let secret = [7_u8; 32];
    let sealer = Sealer::encrypting(&k1, [(k1.clone(), &secret[..])]).unwrap();
    let (identity, fingerprint) = of("t1", K1, 1);
    let secret_body = b"{\"token\":\"abcdefgh\"}";
    let signed = || Reply {
        headers: vec![("location".to_owned(), b"https://files.example.com/7?sig=ijklmnop".to_vec())],
        ..reply(secret_body)
    };
    let answer = encode(&endpoint(), &sealer, &identity, &fingerprint, &Kept::Whole(signed())).unwrap();
    let body = kept(&answer);
    assert!(
        !format!("{:?}", body.headers).contains("sig") && !body.bytes.windows(8).any(|window| window == b"ijklmnop")
    );
    let whole = decode(&endpoint(), &sealer, (&identity, &fingerprint), (201, 1), body).unwrap();
    assert_eq!(whole.headers, signed().headers);
    for (status, version) in [(402, 1), (201, 2)] {
        let changed = decode(&endpoint(), &sealer, (&identity, &fingerprint), (status, version), body);
        assert_eq!(changed.unwrap_err(), SealError::Broken);
    }
    assert!(!body.bytes.windows(8).any(|window| window == b"abcdefgh"));
    let open = |sealer: &Sealer, of: &(Identity, Fingerprint), body: &KeptBody| {
        decode(&endpoint(), sealer, (&of.0, &of.1), (201, 1), body).map(|reply| reply.body)
    };
    assert_eq!(open(&sealer, &of("t1", K1, 1), body).unwrap(), secret_body);
    for other in [of("t2", K1, 1), of("t1", "key-0000000000000002", 1), of("t1", K1, 2)] {
        assert_eq!(open(&sealer, &other, body), Err(SealError::Broken));
    }
    let rotated = Sealer::encrypting(&k2, [(k1.clone(), &secret[..]), (k2.clone(), &[9; 32][..])]).unwrap();
    assert_eq!(open(&rotated, &of("t1", K1, 1), body).unwrap(), secret_body);
    let without = Sealer::encrypting(&k2, [(k2.clone(), &[9; 32][..])]).unwrap();
    assert_eq!(open(&without, &of("t1", K1, 1), body), Err(SealError::UnknownKid("k1".to_owned())));
    let again = encode(&endpoint(), &sealer, &identity, &fingerprint, &Kept::Whole(reply(secret_body))).unwrap();
    assert_ne!(kept(&again).bytes, body.bytes);
    assert_eq!(answer.resource, None, "it would tell the URL in plain");
    let named = Reply { resource: Some(Resource { kind: "file".into(), id: "7".into(), location: None }), ..signed() };
    let named = encode(&endpoint(), &sealer, &identity, &fingerprint, &Kept::Whole(named)).unwrap();
    assert_eq!(named.resource.unwrap().id, "7", "the handler's own words");
    let stripped = KeptBody { format: 0, ..body.clone() };
    assert_eq!(open(&sealer, &of("t1", K1, 1), &stripped), Err(SealError::Broken));
    assert!(Sealer::encrypting(&k2, [(k1, &secret[..])]).is_err());
}

/// A script in Python sealed these bytes, in the layout in which they are stored already.
///
/// Shown by: other lengths before the parts; the parts in another order; the format behind them; no
/// length before the headers.
#[cfg(feature = "encrypt")]
#[test]
fn m67_what_an_earlier_version_sealed_is_still_opened() {
    use crate::operation::port::evidence::Sealed;
    use crate::text::hex::unhex;

    let kid: crate::operation::rules::Kid = "k1".parse().unwrap();
    let sealer = Sealer::encrypting(&kid, [(kid.clone(), &[7; 32][..])]).unwrap();
    let body = "000102030405060708090a0b0c0d0e0f1011121314151617a817aba1fa1c5ba946a8ef33838cdb812baf487214f73761\
        926dc7edf3aff5e36a51e1439fe7319e6dc35d191596c781c96f604a295a681fa8c858c75eab679b";
    let body = KeptBody { headers: Vec::new(), bytes: unhex(body).unwrap(), format: 6, kid: Some("k1".to_owned()) };
    let fingerprint = format!("1:sha256:{}", "2a".repeat(32)).parse().unwrap();
    let reply = decode(&endpoint(), &sealer, (&of("t1", K1, 1).0, &fingerprint), (201, 1), &body).unwrap();
    assert_eq!(reply.headers, [("content-type".to_owned(), b"application/json".to_vec())]);
    assert_eq!(reply.body, b"{\"id\":7}");

    let command = "000102030405060708090a0b0c0d0e0f1011121314151617d335c2e1d8266cd88fac80dd90374448fa1915905f7898bd";
    let command = Sealed { bytes: unhex(command).unwrap(), kid: Some("k1".to_owned()) };
    let operation = uuid::Uuid::from_u128(7);
    assert_eq!(sealer.open(operation, "command", &command).unwrap(), b"{\"id\":7}");
}

// Shown by: keeping a body that is too long; a reference without a resource kept whole.
#[test]
fn m68_what_is_not_kept_leaves_a_tombstone_or_a_reference() {
    let (identity, fingerprint) = of("t1", K1, 1);
    let endpoint = Endpoint::typed::<Pay>(Route { kept_body_max: 10, ..Route::new(Mode::Transactional) });
    let encoded = |kept: Kept| encode(&endpoint, &Sealer::default(), &identity, &fingerprint, &kept).unwrap().body;
    assert_eq!(encoded(Kept::Whole(reply(b"12345678901"))), AnswerBody::Tombstone(Tombstone::Oversize));
    assert_eq!(encoded(Kept::Oversize(Reply::new(201))), AnswerBody::Tombstone(Tombstone::Oversize));
    assert_eq!(encoded(Kept::Stream(Reply::new(200))), AnswerBody::Tombstone(Tombstone::Stream));
    let resource = Resource { kind: "payment".into(), id: "7".into(), location: Some("/payments/7".into()) };
    let with = |keep, resource| Kept::Whole(Reply { keep, resource, ..reply(b"secret") });
    assert_eq!(encoded(with(Keep::Nothing, Some(resource.clone()))), AnswerBody::Tombstone(Tombstone::Withheld));
    assert_eq!(encoded(with(Keep::Reference, Some(resource))), AnswerBody::Reference);
    assert_eq!(encoded(with(Keep::Reference, None)), AnswerBody::Tombstone(Tombstone::Withheld));
}

// Shown by: keeping it of a reference only; of a failure too; guessing a kind from the URL.
#[test]
fn m34_m63_m99_the_resource_is_kept_beside_the_body_or_without_it() {
    let (identity, fingerprint) = of("t1", K1, 1);
    let endpoint = Endpoint::typed::<Pay>(Route { kept_body_max: 10, ..Route::new(Mode::Transactional) });
    let encoded = |kept: &Kept| encode(&endpoint, &Sealer::default(), &identity, &fingerprint, kept).unwrap();
    let payment = Reply::new(201).made("payment", "7", "/payments/7");
    let made = payment.resource.clone();
    let long = Reply { body: vec![b'a'; 11], ..payment.clone() };
    for kept in [
        Kept::Whole(payment.clone()),
        Kept::Whole(long),
        Kept::Oversize(payment.clone()),
        Kept::Stream(payment.clone()),
    ] {
        assert_eq!(encoded(&kept).resource, made, "{kept:?}");
    }
    assert_eq!(encoded(&Kept::Whole(Reply { keep: Keep::Nothing, ..payment })).resource, None, "the status only");
    let located =
        |status, location: &[u8]| encoded(&Kept::Oversize(Reply::new(status).header("Location", location))).resource;
    let note = Resource { kind: "location".into(), id: "/notes/7".into(), location: Some("/notes/7".into()) };
    assert_eq!(located(201, b"/notes/7"), Some(note));
    for (status, location) in [(303, &b"/notes/7"[..]), (409, b"/notes/7"), (201, b"/\xff"), (201, &[b'a'; 2_049])] {
        assert_eq!(located(status, location), None, "{status}");
    }
    for (kind, id) in [("payment", "7\0"), ("payment", "7".repeat(2_049).as_str())] {
        let odd = Reply { keep: Keep::Reference, ..Reply::new(201).made(kind, id, "/payments/7") };
        let answer = encoded(&Kept::Whole(odd));
        assert_eq!((answer.resource, answer.body), (None, AnswerBody::Tombstone(Tombstone::Withheld)));
    }
}

// Shown by: applying the first step only; a step beyond today's version.
#[test]
fn m66_an_old_answer_is_lifted_step_by_step_where_the_steps_are_there() {
    let (identity, fingerprint) = of("t1", K1, 1);
    let step = |suffix: &'static str| {
        move |mut reply: Reply| {
            reply.body.extend_from_slice(suffix.as_bytes());
            reply
        }
    };
    let body = KeptBody { bytes: b"v1".to_vec(), ..KeptBody::default() };
    let lifted = |endpoint: Endpoint| {
        let reply = decode(&endpoint, &Sealer::default(), (&identity, &fingerprint), (200, 1), &body).unwrap();
        (reply.schema_version, String::from_utf8(reply.body).unwrap())
    };
    let today = |schema_version| Endpoint::typed::<Pay>(Route { schema_version, ..Route::new(Mode::Transactional) });
    let steps = |version| today(version).upcast(1, step("+2")).upcast(2, step("+3"));
    assert_eq!(lifted(steps(3)), (3, "v1+2+3".to_owned()));
    assert_eq!(lifted(steps(2)), (2, "v1+2".to_owned()));
    assert_eq!(lifted(today(3)), (1, "v1".to_owned()), "replayed as it was stored");
}

// Shown by: storing whatever string stands there; reading the body before it is redacted.
#[test]
fn m67_only_a_plain_code_of_a_body_that_is_kept_is_stored() {
    let code = |endpoint: &Endpoint, body: &str| error_code(endpoint, &reply(body.as_bytes()));
    assert_eq!(code(&endpoint(), r#"{"code":"INSUFFICIENT_FUNDS"}"#).as_deref(), Some("INSUFFICIENT_FUNDS"));
    let long = format!(r#"{{"code":"{}"}}"#, "A".repeat(129));
    for body in [r#"{"code":"card 4111 of A. B."}"#, r#"{"code":""}"#, r#"{"code":7}"#, "no", &long] {
        assert_eq!(code(&endpoint(), body), None, "{body}");
    }
    let mut redacting = endpoint();
    redacting.route.redacts = vec!["/code".to_owned()];
    assert_eq!(code(&redacting, r#"{"code":"SECRET"}"#), None);
    for keep in [Keep::Reference, Keep::Nothing] {
        assert_eq!(error_code(&endpoint(), &Reply { keep, ..reply(br#"{"code":"A"}"#) }), None);
    }
}
