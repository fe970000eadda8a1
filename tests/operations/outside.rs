//! The provider of the examples, asked directly: what a client of it sees of one key, and of the
//! faults that one request orders by its header. The sweep and the tests of a phased operation
//! build on it.

use serde_json::{Value, json};

use super::kit::*;
use crate::provider::ProviderProcess;

struct Direct(ProviderProcess);

impl Direct {
    /// A charge under a key; with a fault where one is named. None: no answer came.
    async fn charge(&self, key: &str, amount: i64, fault: Option<&str>) -> Option<(u16, Value)> {
        let body = json!({"amountMinor": amount, "currency": "EUR", "reference": "order-1"});
        let mut request = post(&format!("{}/charges", self.0.url), key, body.to_string());
        if let Some(fault) = fault {
            request = request.header("provider-fault", fault);
        }
        let answer = Http::of(request.send().await.ok()?).await;
        Some((answer.status, answer.json()))
    }

    /// What its books have under a key; none: it does not say.
    async fn finds(&self, key: &str, fault: Option<&str>) -> Option<usize> {
        let mut request = client().get(format!("{}/charges?key={key}", self.0.url));
        if let Some(fault) = fault {
            request = request.header("provider-fault", fault);
        }
        let answer = send(request).await;
        (answer.status == 200).then(|| answer.json()["charges"].as_array().unwrap().len())
    }
}

// Shown by: answering the first charge whatever the body says.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_provider_takes_one_charge_for_a_key_and_refuses_the_key_with_another_body() {
    let provider = Direct(ProviderProcess::start());
    let (status, first) = provider.charge(K1, 700, None).await.unwrap();
    assert_eq!((status, &first["amountMinor"], &first["reference"]), (201, &json!(700), &json!("order-1")));
    assert_eq!(provider.charge(K1, 700, None).await, Some((201, first)), "the same charge, not another");
    let (status, other) = provider.charge(K1, 701, None).await.unwrap();
    assert_eq!((status, &other["code"]), (409, &json!("key_reused")));
    let currency = json!({"amountMinor": 700, "currency": "USD", "reference": "order-1"}).to_string();
    let currency = send(post(&format!("{}/charges", provider.0.url), K1, currency)).await;
    assert_eq!((currency.status, &currency.json()["code"]), (409, &json!("key_reused")));
    assert_eq!((provider.finds(K1, None).await, provider.0.count().await), (Some(1), (1, 1)));
}

// Shown by: reading no header.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fault_in_the_header_is_of_one_request() {
    let provider = Direct(ProviderProcess::start());
    let code = |answer: &Option<(u16, Value)>| answer.as_ref().map(|(status, body)| (*status, body["code"].clone()));
    // How the answer looks, and whether the charge was taken.
    let faults = [
        ("drop_before", None, 0),
        ("drop_after", None, 1),
        ("error_before", Some((500, "internal")), 0),
        ("error_after", Some((500, "internal")), 1),
        ("in_progress", Some((409, "in_progress")), 0),
        ("refuse_keys", Some((400, "key_refused")), 0),
        ("decline", Some((402, "card_declined")), 0),
    ];
    let mut taken = 0;
    for (fault, answers, takes) in faults {
        let key = format!("{K1}-{fault}");
        let answer = provider.charge(&key, 700, Some(fault)).await;
        let answers = answers.map(|(status, code)| (status, json!(code)));
        assert_eq!(code(&answer), answers, "{fault}");
        assert_eq!(provider.finds(&key, None).await, Some(takes), "{fault}");
        // The next request is free of it; what was declined stays so.
        let (status, _) = provider.charge(&key, 700, None).await.unwrap();
        assert_eq!(status, if fault == "decline" { 402 } else { 201 }, "{fault}");
        taken += i64::from(status == 201);
    }
    let (status, wrong) = provider.charge(K2, 700, Some("wrong_amount")).await.unwrap();
    assert_eq!((status, &wrong["amountMinor"]), (201, &json!(701)));
    let (status, again) = provider.charge(K2, 700, Some("forget_keys")).await.unwrap();
    assert!(status == 201 && again["id"] != wrong["id"], "it has forgotten the key: {again}");
    assert_eq!((provider.finds(K2, Some("no_query")).await, provider.finds(K2, None).await), (None, Some(2)));
    assert_eq!(provider.0.count().await, (taken + 2, taken + 1));
    let unknown = provider.charge(&format!("{K2}-2"), 700, Some("no such fault")).await;
    assert_eq!(unknown.map(|(status, _)| status), Some(201));
}
