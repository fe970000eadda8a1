//! What breaks a limit is refused in the caller's transaction, by the limit's name, at every door;
//! nothing of it is stored.

use oncebox::NewMessage;
use oncebox::sqlx::{Connection, MySqlConnection, PgConnection, SqliteConnection};

use crate::database::{Database, column, run};
use crate::kit::{Place, block_on};
use crate::support::service;

/// One message for each limit.
fn too_much() -> Vec<(&'static str, NewMessage)> {
    let message = || NewMessage::text("payments", "payment.created", "{}").with_key("acc-7");
    let with = |change: &dyn Fn(&mut NewMessage)| {
        let mut message = message();
        change(&mut message);
        message
    };
    let header = |name: &str| (name.to_owned(), "v".to_owned());
    let headers = |headers: Vec<(String, String)>| with(&|message| message.headers.clone_from(&headers));
    vec![
        ("topic", with(&|message| message.topic = "pay ments".into())),
        ("topic", with(&|message| message.topic = "t".repeat(250))),
        ("key", with(&|message| message.key = Some(String::new()))),
        ("key", with(&|message| message.key = Some("k".repeat(1_025)))),
        ("kind", with(&|message| message.kind = "k".repeat(256))),
        ("headers_max", headers((0..65).map(|number| header(&format!("h{number}"))).collect())),
        ("header_name", headers(vec![header(&"n".repeat(129))])),
        ("header_reserved", headers(vec![header("ce_id")])),
        ("header_twice", headers(vec![header("tenant"), header("Tenant")])),
        ("headers_bytes_max", headers(vec![("n".into(), "v".repeat(65_536))])),
        ("trace", headers(vec![header("traceparent")])),
        ("content_type", with(&|message| message.content_type = Some("c".repeat(256)))),
        (
            "id_skew_seconds",
            with(&|message| message.id = Some("00000000-0001-7000-8000-000000000000".parse().unwrap())),
        ),
        ("message_bytes_max", with(&|message| message.payload = vec![b'p'; 899_996])),
    ]
}

fn literal(text: Option<String>) -> String {
    text.map_or("null".to_owned(), |text| format!("'{}'", text.replace('\'', "''")))
}

/// The statement by which any other language enqueues.
fn statement(url: &str, message: &NewMessage) -> String {
    let pairs = message.headers.iter().map(|(name, value)| format!("\"{name}\":\"{value}\""));
    let headers = format!("{{{}}}", pairs.collect::<Vec<_>>().join(","));
    let (topic, kind) = (literal(Some(message.topic.clone())), literal(Some(message.kind.clone())));
    let (key, content_type) = (literal(message.key.clone()), literal(message.content_type.clone()));
    let payload = literal(Some(String::from_utf8(message.payload.clone()).unwrap()));
    let (headers, id) = (literal(Some(headers)), literal(message.id.map(|id| id.to_string())));
    if url.starts_with("postgres") {
        // Names that differ in case are two for jsonb too, so the door sees both.
        format!(
            "select oncebox.enqueue(topic => {topic}, kind => {kind}, key => {key}, payload => {payload}::text,
             headers => {headers}::jsonb, content_type => {content_type}, message_id => {id})"
        )
    } else if url.starts_with("mysql") {
        format!("call oncebox_enqueue_p({topic}, {key}, {kind}, {payload}, {content_type}, {headers}, {id}, @id)")
    } else {
        let (name, value) =
            if message.id.is_some() { (", message_id", format!(", {id}")) } else { ("", String::new()) };
        format!(
            "insert into oncebox_outbox (topic, key, kind, payload, headers, content_type{name})
             values ({topic}, {key}, {kind}, {payload}, {headers}, {content_type}{value})"
        )
    }
}

/// What the door of Rust says in a transaction that is rolled back.
fn by_rust(url: &str, message: NewMessage) -> String {
    macro_rules! refused {
        ($connection:ty) => {{
            let mut connection = <$connection>::connect(url).await.unwrap();
            let mut tx = connection.begin().await.unwrap();
            let refused = oncebox::store::enqueue(&mut *tx, message).await.unwrap_err();
            tx.rollback().await.unwrap();
            refused.to_string()
        }};
    }
    block_on(async {
        if url.starts_with("postgres") {
            refused!(PgConnection)
        } else if url.starts_with("mysql") {
            refused!(MySqlConnection)
        } else {
            refused!(SqliteConnection)
        }
    })
}

/// Shown by raising one limit in the limits table: its message is taken.
#[test]
fn what_breaks_a_limit_is_refused_by_its_name_at_every_door_and_not_stored() {
    let test = "what_breaks_a_limit_is_refused_by_its_name_at_every_door_and_not_stored";
    let servers = ["ONCEBOX_TEST_POSTGRES", "ONCEBOX_TEST_MARIADB"].map(|name| service(test, name));
    let servers: Vec<Database> = servers.iter().flatten().map(|server| Database::on(server)).collect();
    let sqlite = Place::new();
    let urls = servers.iter().map(|server| server.url.as_str()).chain([sqlite.database()]);
    for url in urls {
        let place = Place::on(Some(url), None);
        place.oncebox(&["migrate", "up"]).run().ok();
        for (limit, message) in too_much() {
            let by_sql = run(url, &statement(url, &message)).map_err(|error| error.to_string());
            let by_sql = by_sql.expect_err(limit);
            assert!(by_sql.contains(&format!("oncebox: limit {limit}: ")), "{url}: {by_sql}");
            let by_rust = by_rust(url, message);
            assert!(by_rust.starts_with(&format!("limit {limit}: ")), "{url}: {by_rust}");
        }
        let fine = NewMessage::text("payments", "payment.created", "it's fine").with_key("acc-7");
        run(url, &statement(url, &fine)).unwrap();
        let outbox = if url.starts_with("postgres") { "oncebox.outbox" } else { "oncebox_outbox" };
        let text = if url.starts_with("mysql") { "char" } else { "text" };
        assert_eq!(column(url, &format!("select cast(count(*) as {text}) from {outbox}")), ["1"], "{url}");
        place.publish();
    }
}
