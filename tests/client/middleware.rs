//! The same rules on a client of `reqwest-middleware`.

use std::time::Duration;

use oncebox::client::{Client, ClientError, ClientOptions};
use oncebox::operation::Key;
use reqwest_middleware::ClientBuilder;

use super::server::{Server, Step, client, quick, say};

#[tokio::test]
async fn m110_the_middleware_sends_again_under_one_key_and_gives_it() {
    let server = Server::start([Step::DropAfter, say(503, &[], ""), Step::Cut]).await;
    let client = client();
    let http = ClientBuilder::new(client.reqwest()).with(client.middleware()).build();
    let url = format!("{}/payments", server.origin);
    let response = http.post(&url).body("{\"amountMinor\":100}").send().await.unwrap();
    let key = response.extensions().get::<Key>().unwrap().clone();
    assert_eq!((response.status().as_u16(), response.url().as_str()), (201, url.as_str()));
    assert_eq!(response.text().await.unwrap(), format!(r#"{{"key":"{}"}}"#, key.as_str()));
    assert_eq!((server.all_the_same(), server.effects()), (4, vec![key.as_str().to_owned()]));
    // A key of the caller's is kept, and what needs none gets none.
    let given = "order-7-0123456789abcdef";
    http.post(&url).header("idempotency-key", given).body("{}").send().await.unwrap();
    assert_eq!(server.effects()[1], given);
    let has_key = || server.came().last().unwrap().headers.contains_key("idempotency-key");
    http.get(&url).send().await.unwrap();
    assert!(!has_key());
    http.put(&url).body("{}").send().await.unwrap();
    assert!(!has_key(), "a PUT is repeatable by itself");
    http.patch(&url).body("{}").send().await.unwrap();
    assert!(has_key(), "a PATCH is not");
    let before = server.came().len();
    server.next([Step::DropAfter]);
    let kept = http.put(&url).header("idempotency-key", given).body("{}").send().await.unwrap();
    assert_eq!((kept.extensions().get::<Key>().unwrap().as_str(), server.came().len() - before), (given, 2));
}

// A 302 turned the POST into a GET, which is answered with 200: nothing was done. Shown by: not
// comparing the URLs.
#[tokio::test]
async fn o26_a_2xx_from_another_url_is_no_end_where_the_client_below_follows_redirects() {
    let server =
        Server::start((0..200).map(|at| {
            if at % 2 == 0 { say(302, &[("location", "/login")], "") } else { say(200, &[], "please log in") }
        }))
        .await;
    let options = ClientOptions { total: Duration::from_secs(2), ..quick() };
    let middleware = Client::new(options).unwrap().middleware();
    let http = ClientBuilder::new(reqwest::Client::new()).with(middleware).build();
    let error = http.post(format!("{}/payments", server.origin)).body("{}").send().await.unwrap_err();
    let reqwest_middleware::Error::Middleware(error) = error else { panic!("{error}") };
    let error = error.downcast::<ClientError>().unwrap();
    assert!(matches!(error, ClientError::OutcomeUnknown { .. }), "{error}");
    assert!(server.came().iter().any(|came| came.line.starts_with("GET /login")), "it was followed");
}

#[tokio::test]
async fn m110_a_body_that_cannot_be_sent_twice_is_refused_before_the_first_send() {
    let server = Server::start([]).await;
    let client = client();
    let http = ClientBuilder::new(client.reqwest()).with(client.middleware()).build();
    let mut request =
        reqwest::Request::new(reqwest::Method::POST, format!("{}/payments", server.origin).parse().unwrap());
    // A body of another response is a stream.
    let other = Server::start([say(200, &[], "streamed")]).await;
    let streamed = reqwest::get(&other.origin).await.unwrap();
    *request.body_mut() = Some(streamed.into());
    let error = http.execute(request).await.unwrap_err();
    assert!(error.to_string().contains("cannot be sent twice"), "{error}");
    assert!(server.came().is_empty());
}
