//! What is kept of an answer, from the handler to the database and back: without what is redacted,
//! smaller, and in the end only what was made (M34, M62, M63, M67, M99).

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::http::{StatusCode, header};
use axum::routing::post as route_post;
use oncebox::http::idempotency::{IdempotencyLayer, TypedOperation};
use oncebox::operation::{Code, Endpoint, Mode, Outcome, Record, Replay, Reply, Retention, Route, StoredBody};
use oncebox::store::KeptBody;

use super::kit::*;
use super::layer::edge;

on_all! {
    m67_what_a_route_redacts_reaches_neither_the_store_nor_a_second_client,
    m67_a_long_answer_is_stored_smaller_and_comes_back_as_it_was,
    m34_m63_m99_where_the_body_is_gone_the_answer_names_what_was_made,
}

const JSON: &str = "application/json";

/// The route of either door, which answers 201 with these bytes.
#[derive(Clone)]
pub(crate) struct Answers {
    content_type: &'static str,
    pub(crate) body: Arc<Vec<u8>>,
}

impl Answers {
    pub(crate) fn new(content_type: &'static str, body: impl Into<Vec<u8>>) -> Self {
        Self { content_type, body: Arc::new(body.into()) }
    }

    /// A transactional operation.
    pub(crate) async fn typed<S: Sql>(&self, world: &World<S>, keeps: fn(Route) -> Route, gate: &Gate) -> String {
        let door = TypedOperation::<S, Put>::new(&world.engine, Endpoint::typed::<Put>(keeps(same_tx()))).unwrap();
        let (gate, answers) = (gate.clone(), self.clone());
        let handler = move |request: Request| {
            let (door, gate, answers) = (door.clone(), gate.clone(), answers.clone());
            async move {
                door.serve(request, move |_, _| {
                    let (gate, answers) = (gate.clone(), answers.clone());
                    Box::pin(async move {
                        gate.pass().await;
                        let reply = Reply::new(201).header("content-type", answers.content_type);
                        Ok(Outcome::Completed(Reply { body: answers.body.to_vec(), ..reply }))
                    })
                })
                .await
            }
        };
        serve(Router::new().route("/put", route_post(handler))).await + "/put"
    }

    pub(crate) fn router(&self, gate: &Gate) -> Router {
        let (gate, answers) = (gate.clone(), self.clone());
        let handler = move || {
            let (gate, answers) = (gate.clone(), answers.clone());
            async move {
                gate.pass().await;
                (StatusCode::CREATED, [(header::CONTENT_TYPE, answers.content_type)], answers.body.to_vec())
            }
        };
        Router::new().route("/put", route_post(handler))
    }

    /// An edge operation.
    pub(crate) async fn raw<S: Sql>(&self, world: &World<S>, keeps: fn(Route) -> Route, gate: &Gate) -> String {
        let layer = IdempotencyLayer::new(&world.engine, Endpoint::raw("put", keeps(edge()))).unwrap();
        serve(self.router(gate).route_layer(layer)).await + "/put"
    }

    /// Both, each as a process of its own, with a key for each.
    async fn doors<S: Sql>(
        &self,
        world: &World<S>,
        keeps: fn(Route) -> Route,
        gate: &Gate,
    ) -> [(&'static str, String); 2] {
        let processes = [world.another_process(), world.another_process()];
        [(K1, self.typed(&processes[0], keeps, gate).await), (K2, self.raw(&processes[1], keeps, gate).await)]
    }
}

pub(crate) const BODY: &str = r#"{"text":"a"}"#;

pub(crate) async fn ask(url: &str, key: &str) -> Http {
    send(post(url, key, BODY)).await
}

/// What the database has of an answer.
pub(crate) async fn stored<S: Sql>(world: &World<S>, key: &str) -> (Record, Option<KeptBody>) {
    let look = world.store.find(&identity("t1", key)).await.unwrap();
    let record = look.record.unwrap();
    let kept = match look.body {
        Some(body) => Some(body),
        None => world.store.body(&record).await.unwrap(),
    };
    (record, kept)
}

pub(crate) fn holds(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

const NUMBER: &str = "4111111111111111";

// Shown by: storing it as the first client saw it.
async fn m67_what_a_route_redacts_reaches_neither_the_store_nor_a_second_client<S: Sql>(world: World<S>) {
    let gate = Gate::open();
    let body = format!(r#"{{"id":7,"card":{{"number":"{NUMBER}"}}}}"#);
    let keeps = |route: Route| Route { redacts: vec!["/card/number".to_owned(), "/absent".to_owned()], ..route };
    for (key, url) in Answers::new(JSON, body.as_str()).doors(&world, keeps, &gate).await {
        let one = ask(&url, key).await;
        assert_eq!((one.status, one.body.as_slice()), (201, body.as_bytes()), "the first client is shown it");
        let (_, kept) = stored(&world, key).await;
        let kept = kept.unwrap().bytes;
        assert!(!holds(&kept, NUMBER.as_bytes()) && holds(&kept, b"[redacted]"));
        let two = ask(&url, key).await;
        assert_eq!((two.status, two.is_replayed()), (201, true));
        assert_eq!(two.json(), serde_json::json!({"id": 7, "card": {"number": "[redacted]"}}));
    }
    // Nobody can show that there is nothing of it in what is no JSON.
    let keys = [K1, K2].map(|key| format!("{key}-text"));
    let text = format!("number={NUMBER}");
    for (key, (_, url)) in keys.iter().zip(Answers::new("text/plain", text.as_str()).doors(&world, keeps, &gate).await)
    {
        assert_eq!(ask(&url, key).await.body, text.as_bytes());
        let (record, kept) = stored(&world, key).await;
        assert!(kept.is_none() && matches!(record.answer.unwrap().body, StoredBody::Tombstone(_)));
        ask(&url, key).await.is(Code::ResultNotRetained);
    }
    assert_eq!(gate.calls(), 4);
}

// Shown by: storing it as it is; replaying it as it is stored.
async fn m67_a_long_answer_is_stored_smaller_and_comes_back_as_it_was<S: Sql>(world: World<S>) {
    let gate = Gate::open();
    let body = "a line that comes again\n".repeat(5_000);
    for (key, url) in Answers::new("text/plain", body.as_str()).doors(&world, |route| route, &gate).await {
        assert_eq!(ask(&url, key).await.body, body.as_bytes());
        let (_, kept) = stored(&world, key).await;
        let kept = kept.unwrap();
        let (least, most) = if cfg!(feature = "compress") { (1, body.len() / 10) } else { (body.len(), body.len()) };
        assert!((least..=most).contains(&kept.bytes.len()), "{kept:?}");
        let two = ask(&url, key).await;
        assert_eq!((two.status, two.is_replayed(), two.body.as_slice()), (201, true, body.as_bytes()));
        assert_eq!(two.header("content-encoding"), None);
        assert_eq!(two.header("content-length"), Some(body.len().to_string().as_str()));
    }
    assert_eq!(gate.calls(), 2);
}

const MADE: &str = "/notes/7";

/// Both doors with this route, each as a process of its own: 201 with the `Location` of what was
/// made. Behind the typed one the handler names it too.
async fn making<S: Sql>(world: &World<S>, route: &Route, body_max: usize, gate: &Gate) -> [(&'static str, String); 2] {
    let route = Route { kept_body_max: body_max, ..route.clone() };
    let typed = Endpoint::typed::<Put>(Route { mode: Mode::Transactional, ..route.clone() });
    let door = TypedOperation::<S, Put>::new(&world.another_process().engine, typed).unwrap();
    let passes = gate.clone();
    let handler = move |request: Request| {
        let (door, gate) = (door.clone(), passes.clone());
        async move {
            door.serve(request, move |_, _| {
                let gate = gate.clone();
                Box::pin(async move {
                    gate.pass().await;
                    Ok(Outcome::Completed(Reply::json(201, &"a note")?.made("note", "7", MADE)))
                })
            })
            .await
        }
    };
    let typed = serve(Router::new().route("/put", route_post(handler))).await + "/put";
    let raw = Endpoint::raw("put", Route { mode: Mode::Edge, ..route });
    let layer = IdempotencyLayer::new(&world.another_process().engine, raw).unwrap();
    let passes = gate.clone();
    let handler = move || {
        let gate = passes.clone();
        async move {
            gate.pass().await;
            (StatusCode::CREATED, [(header::LOCATION, MADE)], "a note")
        }
    };
    let raw = serve(Router::new().route("/put", route_post(handler)).route_layer(layer)).await + "/put";
    [(K1, typed), (K2, raw)]
}

// Shown by: writing the resource only of a reference; a bare tombstone where the body's time is
// over; leaving the `Location` of the layer's answers out.
async fn m34_m63_m99_where_the_body_is_gone_the_answer_names_what_was_made<S: Sql>(world: World<S>) {
    let gate = Gate::open();
    let short = Retention { body: Duration::from_millis(1), ..edge().retention };
    for (number, (body_max, retention)) in [(1_000, short), (3, edge().retention)].into_iter().enumerate() {
        let exact = Route { retention, ..edge() };
        for (door, (key, url)) in making(&world, &exact, body_max, &gate).await.into_iter().enumerate() {
            let key = format!("{key}-{number}");
            assert_eq!(ask(&url, &key).await.status, 201);
            until("the body is gone", || async {
                let body = world.record("t1", &key).await.unwrap().answer.unwrap().body;
                matches!(body, StoredBody::Tombstone(_))
            })
            .await;
            let gone = ask(&url, &key).await;
            assert_eq!(gone.is(Code::ResultNotRetained).header("location"), Some(MADE));
            let (kind, id) = [("note", "7"), ("location", MADE)][door];
            assert_eq!(gone.json()["resource"], serde_json::json!({"kind": kind, "id": id, "location": MADE}));
        }
        let refers = Route { replay: Replay::Reference, ..exact };
        for (key, url) in making(&world, &refers, body_max, &gate).await {
            let found = ask(&url, &format!("{key}-{number}")).await;
            assert_eq!((found.status, found.header("location"), found.is_replayed()), (303, Some(MADE), true));
        }
    }
    assert_eq!(gate.calls(), 4);
}
