//! A tonic service over the engine, called through tonic's own client and framing, without protoc:
//! messages, codec and service are written by hand.
#![cfg(all(feature = "grpc", feature = "sqlite", feature = "client"))]
#![allow(clippy::unwrap_used)]

#[cfg(feature = "programs")]
#[path = "support/observed.rs"]
#[allow(dead_code)] // its part
mod hearing;

use std::convert::Infallible;
use std::marker::PhantomData;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::BoxFuture;
use oncebox::grpc::{KeyField, idempotent_unary, protect, refusal, reply, seen};
use oncebox::operation::resend::{Next, after_attempt};
use oncebox::operation::{
    Endpoint, Engine, EngineOptions, FingerprintWriter, IdempotentCommand, Mode, Outcome, Registered, Route, Scope,
};
use oncebox::sqlx;
use oncebox::store::sqlite::SqliteStore;
use oncebox::store::{Base, Schema, StoreOptions};
use prost::Message;
use tokio::sync::Notify;
use tonic::body::Body;
use tonic::client::GrpcService;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Server};
use tonic::{Code, Request, Response, Status};
use tonic_types::{ErrorDetails, StatusExt};

const KEY: &str = "9b2f0c64-1b5e-4f0e-8a3c-6f1d2e3a4b5c";
/// Long enough for a busy machine; a condition that holds ends the wait at once.
const SOON: Duration = Duration::from_secs(60);
const KEY_METADATA: &str = "idempotency-key";
const REPLAYED_METADATA: &str = "idempotent-replayed";
const OTHER: &str = "1c2f0c64-1b5e-4f0e-8a3c-6f1d2e3a4b5c";

#[derive(Clone, PartialEq, Eq, Message)]
struct CreatePayment {
    #[prost(string, tag = "1")]
    account_id: String,
    #[prost(int64, tag = "2")]
    amount_minor: i64,
    #[prost(string, tag = "3")]
    request_id: String,
}

#[derive(Clone, PartialEq, Eq, Message)]
struct Payment {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(int64, tag = "2")]
    amount_minor: i64,
}

impl IdempotentCommand for CreatePayment {
    const OPERATION: &'static str = "create_payment";
    const VERSION: u32 = 1;

    fn fingerprint(&self, _version: u32, writer: &mut FingerprintWriter) {
        writer.field("accountId", self.account_id.as_str());
        writer.field("amountMinor", &self.amount_minor);
    }
}

impl KeyField for CreatePayment {
    fn key_field(&self) -> &str {
        &self.request_id
    }
}

/// Messages as bytes.
struct Prost<E, D>(PhantomData<fn(E) -> D>);

impl<E, D> Default for Prost<E, D> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<E: Message + 'static, D: Message + Default + 'static> Codec for Prost<E, D> {
    type Encode = E;
    type Decode = D;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self::default()
    }

    fn decoder(&mut self) -> Self {
        Self::default()
    }
}

impl<E: Message, D> Encoder for Prost<E, D> {
    type Item = E;
    type Error = Status;

    fn encode(&mut self, item: E, into: &mut EncodeBuf<'_>) -> Result<(), Status> {
        item.encode(into).map_err(|error| Status::internal(error.to_string()))
    }
}

impl<E, D: Message + Default> Decoder for Prost<E, D> {
    type Item = D;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<D>, Status> {
        D::decode(from).map(Some).map_err(|error| Status::internal(error.to_string()))
    }
}

/// The service: one method.
#[derive(Clone)]
struct Payments {
    engine: Engine<SqliteStore>,
    endpoint: Registered,
    started: Arc<Notify>,
    go_on: Arc<Notify>,
}

impl tonic::server::UnaryService<CreatePayment> for Payments {
    type Response = Payment;
    type Future = BoxFuture<'static, Result<Response<Payment>, Status>>;

    fn call(&mut self, mut request: Request<CreatePayment>) -> Self::Future {
        let this = self.clone();
        // What an interceptor does that has verified who calls.
        if let Some(tenant) = request.metadata().get("authorization").and_then(|value| value.to_str().ok()) {
            let scope = Scope::new(tenant, "user-7").unwrap();
            request.extensions_mut().insert(scope);
        }
        Box::pin(async move {
            let (started, go_on) = (Arc::clone(&this.started), Arc::clone(&this.go_on));
            idempotent_unary(&this.engine, &this.endpoint, request, move |command: &CreatePayment, mut tx| {
                let (started, go_on) = (Arc::clone(&started), Arc::clone(&go_on));
                Box::pin(async move {
                    if command.account_id == "slow" {
                        started.notify_one();
                        go_on.notified().await;
                    }
                    let id = tx.operation_id().to_string();
                    let insert = sqlx::query("insert into payment (id, amount) values (?, ?)");
                    insert.bind(&id).bind(command.amount_minor).execute(tx.connection()).await?;
                    if command.account_id == "careless" {
                        return Ok(Outcome::Rejected { answer: refusal(&Status::ok("refused")), binding: true });
                    }
                    if command.amount_minor > 1_000 {
                        let mut details = ErrorDetails::new();
                        details.set_error_info("INSUFFICIENT_FUNDS", "payments.example", []);
                        let refused = Status::with_error_details(Code::FailedPrecondition, "no funds", details);
                        return Ok(Outcome::Rejected { answer: refusal(&refused), binding: true });
                    }
                    let payment = Payment { id, amount_minor: command.amount_minor };
                    Ok(Outcome::Completed(reply(&payment).header("location", "payments/7")))
                })
            })
            .await
        })
    }
}

impl tonic::codegen::Service<http::Request<Body>> for Payments {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let this = self.clone();
        Box::pin(async move {
            let mut grpc = tonic::server::Grpc::new(Prost::<Payment, CreatePayment>::default());
            Ok(grpc.unary(this, request).await)
        })
    }
}

struct World {
    service: Payments,
    store: SqliteStore,
    _directory: tempfile::TempDir,
}

impl World {
    async fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite://{}", directory.path().join("test.db").display());
        let store = SqliteStore::connect(&StoreOptions { create: true, ..StoreOptions::new(url) }).await.unwrap();
        store.migrate().await.unwrap();
        sqlx::query("create table payment (id text primary key, amount integer)").execute(store.pool()).await.unwrap();
        let engine = Engine::new(store.clone(), EngineOptions::default());
        let endpoint = protect(&engine, Endpoint::typed::<CreatePayment>(Route::new(Mode::Transactional))).unwrap();
        let service = Payments { engine, endpoint, started: Arc::default(), go_on: Arc::default() };
        Self { service, store, _directory: directory }
    }

    async fn payments(&self) -> i64 {
        sqlx::query_scalar("select count(*) from payment").fetch_one(self.store.pool()).await.unwrap()
    }

    /// A call of tenant `t1`, with a key in the metadata unless it is empty.
    async fn call(&self, key: &str, command: CreatePayment) -> Result<Response<Payment>, Status> {
        call(self.service.clone(), Some("t1"), key, command).await
    }
}

async fn call(
    service: Payments,
    tenant: Option<&'static str>,
    key: &str,
    command: CreatePayment,
) -> Result<Response<Payment>, Status> {
    call_through(service, tenant, key, command, None).await
}

/// A call through anything that carries one, perhaps with a deadline in its `grpc-timeout`.
async fn call_through<T>(
    through: T,
    tenant: Option<&'static str>,
    key: &str,
    command: CreatePayment,
    deadline: Option<Duration>,
) -> Result<Response<Payment>, Status>
where
    T: GrpcService<Body>,
    T::Error: std::fmt::Debug,
    T::ResponseBody: tonic::codegen::Body<Data = tonic::codegen::Bytes> + Send + 'static,
    <T::ResponseBody as tonic::codegen::Body>::Error: Into<tonic::codegen::StdError>,
{
    let mut client = tonic::client::Grpc::new(through);
    let mut request = Request::new(command);
    if let Some(deadline) = deadline {
        request.set_timeout(deadline);
    }
    if !key.is_empty() {
        request.metadata_mut().insert(KEY_METADATA, key.parse().unwrap());
    }
    if let Some(tenant) = tenant {
        request.metadata_mut().insert("authorization", tenant.parse().unwrap());
    }
    client.ready().await.unwrap();
    let path = http::uri::PathAndQuery::from_static("/payments.Payments/CreatePayment");
    client.unary(request, path, Prost::<CreatePayment, Payment>::default()).await
}

fn payment(amount_minor: i64) -> CreatePayment {
    CreatePayment { account_id: "acc-7".to_owned(), amount_minor, request_id: String::new() }
}

fn reason(status: &Status) -> String {
    status.get_details_error_info().map(|info| info.reason).unwrap_or_default()
}

// Shown by: leaving the metadata out of the answer; a key of the field that is not read.
#[tokio::test]
async fn m109_a_second_call_has_no_effect_and_gets_the_same_message() {
    let world = World::new().await;
    let first = world.call(KEY, payment(100)).await.unwrap();
    assert_eq!(first.metadata().get(REPLAYED_METADATA), None);
    assert_eq!(first.metadata().get("location").unwrap(), "payments/7");
    let in_field = CreatePayment { request_id: KEY.to_owned(), ..payment(100) };
    for (key, command) in [(KEY, payment(100)), ("", in_field.clone()), (KEY, in_field)] {
        let again = world.call(key, command).await.unwrap();
        assert_eq!(again.get_ref(), first.get_ref());
        assert_eq!(again.metadata().get(REPLAYED_METADATA).unwrap(), "true");
        assert_eq!(again.metadata().get("location"), first.metadata().get("location"));
    }
    assert_eq!(world.payments().await, 1);
}

#[tokio::test]
async fn m109_what_cannot_be_run_has_a_status_with_its_reason() {
    let world = World::new().await;
    world.call(KEY, payment(100)).await.unwrap();
    let both = CreatePayment { request_id: OTHER.to_owned(), ..payment(100) };
    for (key, command, code, why) in [
        (KEY, payment(101), Code::FailedPrecondition, "IDEMPOTENCY_KEY_REUSED_WITH_DIFFERENT_REQUEST"),
        ("", payment(100), Code::InvalidArgument, "IDEMPOTENCY_KEY_REQUIRED"),
        ("short", payment(100), Code::InvalidArgument, "IDEMPOTENCY_KEY_INVALID"),
        (KEY, both, Code::InvalidArgument, "IDEMPOTENCY_KEY_INVALID"),
    ] {
        let status = world.call(key, command).await.unwrap_err();
        assert_eq!((status.code(), reason(&status).as_str()), (code, why), "{status}");
    }
    let nobody = call(world.service.clone(), None, OTHER, payment(100)).await.unwrap_err();
    assert_eq!((nobody.code(), reason(&nobody).as_str()), (Code::PermissionDenied, "IDEMPOTENCY_SCOPE_REQUIRED"));
    // Another tenant's key is another key.
    call(world.service.clone(), Some("t2"), KEY, payment(100)).await.unwrap();
    assert_eq!(world.payments().await, 2);
}

// Shown by: a refusal that keeps the status `OK`: its client takes it for a payment without an id.
#[tokio::test]
async fn m109_a_refusal_whose_status_is_ok_reaches_the_client_as_an_error() {
    let world = World::new().await;
    let careless = CreatePayment { account_id: "careless".to_owned(), ..payment(100) };
    for replayed in [None, Some("true")] {
        let refused = world.call(KEY, careless.clone()).await.unwrap_err();
        assert_eq!((refused.code(), refused.message()), (Code::Unknown, "refused"));
        assert_eq!(refused.metadata().get(REPLAYED_METADATA).map(|value| value.to_str().unwrap()), replayed);
    }
    assert_eq!(world.payments().await, 0);
}

// Shown by: refusing without counting.
#[cfg(feature = "programs")]
#[tokio::test]
async fn m104_m109_what_the_door_refuses_by_itself_is_counted() {
    let (heard, _hearing) = hearing::hear();
    let world = World::new().await;
    let both = CreatePayment { request_id: OTHER.to_owned(), ..payment(100) };
    let long = CreatePayment { account_id: "a".repeat(2 << 20), ..payment(100) };
    for (command, code) in [(both, "IDEMPOTENCY_KEY_INVALID"), (long, "IDEMPOTENCY_BODY_TOO_LARGE")] {
        let labels = [("operation", "create_payment"), ("code", code)];
        assert_eq!(heard.metric("oncebox_idempotency_rejected_count", &labels), 0.0, "{code}");
        assert_eq!(reason(&world.call(KEY, command).await.unwrap_err()), code);
        assert_eq!(heard.metric("oncebox_idempotency_rejected_count", &labels), 1.0, "{code}");
    }
    assert_eq!(world.payments().await, 0);
}

// Shown by: refusing nothing.
#[tokio::test]
async fn m120_m109_a_tenant_over_its_quota_gets_resource_exhausted_with_its_pause() {
    let world = World::new().await;
    world.call(KEY, payment(100)).await.unwrap();
    let engine = Engine::new(
        world.store.clone(),
        EngineOptions { stored_bytes_per_tenant_max: Some(1), ..EngineOptions::default() },
    );
    let endpoint = engine.protect(Endpoint::typed::<CreatePayment>(Route::new(Mode::Transactional))).unwrap();
    let full = Payments { engine, endpoint, ..world.service.clone() };
    let status = call(full.clone(), Some("t1"), OTHER, payment(100)).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::ResourceExhausted, "IDEMPOTENCY_QUOTA_EXCEEDED"));
    let pause = status.get_details_retry_info().and_then(|info| info.retry_delay);
    assert!(pause.is_some_and(|pause| pause >= Duration::from_secs(30)), "{status}");
    let again = call(full, Some("t1"), KEY, payment(100)).await.unwrap();
    assert_eq!(again.metadata().get(REPLAYED_METADATA).unwrap(), "true");
    assert_eq!(world.payments().await, 1);
}

// Shown by: taking any mode: each call gets UNAVAILABLE, and its client comes again for ever.
#[tokio::test]
async fn m4_a_unary_call_takes_no_operation_of_another_mode() {
    let world = World::new().await;
    for mode in [Mode::Edge, Mode::Bridged, Mode::Phased] {
        let engine = Engine::new(world.store.clone(), EngineOptions::default());
        let endpoint = || Endpoint::typed::<CreatePayment>(Route::new(mode));
        let refused = protect(&engine, endpoint()).unwrap_err().to_string();
        assert_eq!(
            refused,
            format!("the operation `create_payment` is of mode {mode}, and a unary call takes mode same_tx")
        );
        assert!(engine.protected().is_empty());
        // Registered past the door of unary calls.
        let endpoint = engine.protect(endpoint()).unwrap();
        let wrong = Payments { engine, endpoint, ..world.service.clone() };
        let status = call(wrong, Some("t1"), KEY, payment(100)).await.unwrap_err();
        assert_eq!(status.code(), Code::Internal);
        assert!(status.message().contains("`create_payment`") && status.message().contains(mode.as_str()), "{status}");
    }
    assert_eq!(world.payments().await, 0);
}

// Shown by: storing the code without the details.
#[tokio::test]
async fn m71_a_binding_refusal_is_replayed_with_its_details_and_leaves_no_effect() {
    let world = World::new().await;
    let first = world.call(KEY, payment(2_000)).await.unwrap_err();
    let again = world.call(KEY, payment(2_000)).await.unwrap_err();
    for status in [&first, &again] {
        assert_eq!((status.code(), status.message()), (Code::FailedPrecondition, "no funds"));
        assert_eq!(reason(status), "INSUFFICIENT_FUNDS");
    }
    assert_eq!(again.metadata().get(REPLAYED_METADATA).unwrap(), "true");
    assert_eq!(first.metadata().get(REPLAYED_METADATA), None);
    assert_eq!(world.payments().await, 0);
}

// Shown by: a replayed refusal without the state of the key. A client that had lost an answer then
// never learned that its payment was refused.
#[tokio::test]
async fn o26_m109_a_client_in_doubt_ends_at_the_replayed_refusal_of_the_service() {
    let world = World::new().await;
    let careless = CreatePayment { account_id: "careless".to_owned(), ..payment(100) };
    for (key, command, code) in [(KEY, payment(2_000), Code::FailedPrecondition), (OTHER, careless, Code::Unknown)] {
        let first = world.call(key, command.clone()).await;
        assert_ne!(after_attempt(seen(&first), true), Next::Done, "it says nothing of an attempt before");
        let again = world.call(key, command).await;
        assert_eq!(again.as_ref().unwrap_err().code(), code);
        assert_eq!(after_attempt(seen(&again), true), Next::Done);
    }
    assert_eq!(world.payments().await, 0);
}

// Shown by: running the handler in the call's own future.
#[tokio::test]
async fn o27_a_call_whose_deadline_passed_goes_on_and_the_next_one_finds_its_outcome() {
    let world = World::new().await;
    let slow = CreatePayment { account_id: "slow".to_owned(), ..payment(100) };
    let calling = tokio::spawn(call(world.service.clone(), Some("t1"), KEY, slow.clone()));
    tokio::time::timeout(SOON, world.service.started.notified()).await.unwrap();
    let running = world.call(KEY, slow.clone()).await;
    let status = running.as_ref().unwrap_err();
    assert_eq!((status.code(), reason(status).as_str()), (Code::Aborted, "IDEMPOTENCY_REQUEST_IN_PROGRESS"));
    assert!(status.get_details_retry_info().unwrap().retry_delay.unwrap() >= Duration::from_secs(1));
    assert_eq!(after_attempt(seen(&running), false), Next::Again { doubt: true });
    // As a server does whose client's deadline has passed.
    calling.abort();
    assert!(calling.await.unwrap_err().is_cancelled());
    let given_up: Result<Response<Payment>, _> = Err(Status::deadline_exceeded("Timeout expired"));
    assert_eq!(after_attempt(seen(&given_up), false), Next::Again { doubt: true });
    world.service.go_on.notify_one();
    assert!(world.service.engine.drain(SOON).await);
    let answer = world.call(KEY, slow).await.unwrap();
    assert_eq!(answer.metadata().get(REPLAYED_METADATA).unwrap(), "true");
    assert_eq!((world.payments().await, after_attempt(seen(&Ok(answer)), true)), (1, Next::Done));
}

// Shown by: a permit of the call's own future, which its client may end at any time.
#[tokio::test]
async fn o29_m109_a_run_holds_the_memory_of_its_message_after_its_call_was_dropped() {
    let world = World::new().await;
    // For one message of the two.
    let options =
        EngineOptions { body_memory_max: 12, body_memory_per_tenant_max: Some(12), ..EngineOptions::default() };
    let engine = Engine::new(world.store.clone(), options);
    let endpoint = protect(&engine, Endpoint::typed::<CreatePayment>(Route::new(Mode::Transactional))).unwrap();
    let service = Payments { engine, endpoint, ..world.service.clone() };
    let slow = CreatePayment { account_id: "slow".to_owned(), ..payment(100) };
    let both = slow.encoded_len() + payment(100).encoded_len();
    assert!(both > 12 && both < 2 * 12);
    let calling = tokio::spawn(call(service.clone(), Some("t1"), KEY, slow));
    tokio::time::timeout(SOON, service.started.notified()).await.unwrap();
    calling.abort();
    assert!(calling.await.unwrap_err().is_cancelled());
    let refused = call(service.clone(), Some("t1"), OTHER, payment(100)).await.unwrap_err();
    assert_eq!(reason(&refused), "IDEMPOTENCY_BODY_MEMORY_EXCEEDED");
    service.go_on.notify_one();
    assert!(service.engine.drain(SOON).await);
    call(service, Some("t1"), OTHER, payment(100)).await.unwrap();
    assert_eq!(world.payments().await, 2);
}

// Shown by: taking `OUT_OF_RANGE` for a refusal; a replayed message that says `spent`, which its
// client reports with the error. The client then believed that nothing was paid.
#[tokio::test]
async fn o27_m109_an_answer_that_is_too_long_for_its_client_leaves_doubt() {
    let world = World::new().await;
    for _ in 0..2 {
        let mut client = tonic::client::Grpc::new(world.service.clone()).max_decoding_message_size(1);
        let mut request = Request::new(payment(100));
        request.metadata_mut().insert(KEY_METADATA, KEY.parse().unwrap());
        request.metadata_mut().insert("authorization", "t1".parse().unwrap());
        client.ready().await.unwrap();
        let path = http::uri::PathAndQuery::from_static("/payments.Payments/CreatePayment");
        let unread = client.unary(request, path, Prost::<CreatePayment, Payment>::default()).await;
        assert_eq!(unread.as_ref().unwrap_err().code(), Code::OutOfRange);
        assert_eq!((world.payments().await, after_attempt(seen(&unread), false)), (1, Next::Again { doubt: true }));
    }
    assert_eq!(world.call(KEY, payment(100)).await.unwrap().get_ref().amount_minor, 100);
}

/// The service behind tonic's own server on a socket, and a client that is connected to it.
async fn over_a_socket(service: Payments) -> (Channel, tokio::task::JoinHandle<()>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let served = Server::builder().serve_with_incoming(service, TcpIncoming::from(listener));
    let server = tokio::spawn(async move { served.await.unwrap() });
    let endpoint = Channel::from_shared(format!("http://{address}")).unwrap();
    (endpoint.connect().await.unwrap(), server)
}

// Shown by: running the handler in the call's own future.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o27_m109_a_deadline_on_a_socket_that_is_shorter_than_the_handler_leaves_an_outcome_to_find() {
    let world = World::new().await;
    let (channel, server) = over_a_socket(world.service.clone()).await;
    let slow = CreatePayment { account_id: "slow".to_owned(), ..payment(100) };
    let asks = |deadline| call_through(channel.clone(), Some("t1"), KEY, slow.clone(), deadline);
    // A busy machine may let the deadline pass before the handler has begun.
    let begun = async {
        let mut is_late = false;
        loop {
            let given_up = asks(Some(Duration::from_millis(300))).await;
            // By the server, or by the client at the same time: neither says anything of the
            // payment.
            let status = given_up.as_ref().unwrap_err();
            assert_eq!(after_attempt(seen(&given_up), false), Next::Again { doubt: true });
            if is_late && status.code() == Code::Aborted {
                // That of a call before, whose deadline had passed: it has begun meanwhile.
                break;
            }
            assert!([Code::DeadlineExceeded, Code::Cancelled].contains(&status.code()), "{status}");
            is_late = true;
            if tokio::time::timeout(Duration::from_millis(50), world.service.started.notified()).await.is_ok() {
                break;
            }
        }
    };
    tokio::time::timeout(SOON, begun).await.expect("a handler begins");
    let running = asks(None).await.unwrap_err();
    assert_eq!((running.code(), reason(&running).as_str()), (Code::Aborted, "IDEMPOTENCY_REQUEST_IN_PROGRESS"));
    world.service.go_on.notify_one();
    assert!(world.service.engine.drain(SOON).await);
    let answer = asks(Some(SOON)).await.unwrap();
    assert_eq!(answer.metadata().get(REPLAYED_METADATA).unwrap(), "true");
    assert_eq!((world.payments().await, answer.get_ref().amount_minor), (1, 100));
    // A refusal keeps its details on the wire, and another command its reason.
    let refused = call_through(channel.clone(), Some("t1"), OTHER, payment(2_000), None).await.unwrap_err();
    assert_eq!((refused.code(), reason(&refused).as_str()), (Code::FailedPrecondition, "INSUFFICIENT_FUNDS"));
    let other = call_through(channel, Some("t1"), KEY, payment(101), None).await.unwrap_err();
    assert_eq!(reason(&other), "IDEMPOTENCY_KEY_REUSED_WITH_DIFFERENT_REQUEST");
    assert_eq!(world.payments().await, 1);
    server.abort();
}
