//! Kafka's own tools read what we write and write what we read: kcat in both directions.

use std::io::Write;
use std::process::{Command, Stdio};

use crate::kit::*;
use oncebox::broker::Broker;

/// False where the tool is missing, which is said.
fn kcat_is_there(test: &str) -> bool {
    let there = Command::new("kcat").arg("-V").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    if !there {
        assert!(std::env::var("ONCEBOX_TEST_STRICT").as_deref() != Ok("1"), "{test} needs kcat");
        eprintln!("SKIPPED: {test} (no kcat)");
    }
    there
}

fn kcat(kafka: &Kafka, arguments: &[&str], input: &[u8]) -> String {
    let mut child = Command::new("kcat")
        .args(["-q", "-b", &kafka.servers(), "-t", &kafka.topic])
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test]
async fn kcat_reads_our_headers_key_and_bytes() {
    let name = "kcat_reads_our_headers_key_and_bytes";
    let Some(kafka) = Kafka::with_topic(name, 1).await else { return };
    if !kcat_is_there(name) {
        return;
    }
    let mut sent = message(&kafka.topic, Some("acc-7"), "{\"a\": 1}\n");
    sent.trace = Some(oncebox::message::TraceContext {
        traceparent: "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".to_owned(),
        tracestate: None,
    });
    publish_all(&kafka.broker(), vec![sent.clone()]).await;
    let shown = kcat(&kafka, &["-C", "-e", "-o", "beginning", "-f", "%k|%S|%s|%h"], b"");
    let time = sent.created_at.to_rfc3339_opts(chrono::SecondsFormat::Micros, true);
    assert_eq!(
        shown,
        format!(
            "acc-7|9|{{\"a\": 1}}\n|ce_specversion=1.0,ce_id={},ce_source=oncebox,ce_type=test.made,ce_time={time},\
             content-type=text/plain,ce_partitionkey=acc-7,\
             traceparent=00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01,tenant=t1",
            sent.id
        )
    );
}

#[tokio::test]
async fn what_kcat_writes_is_consumed() {
    let name = "what_kcat_writes_is_consumed";
    let Some(kafka) = Kafka::with_topic(name, 1).await else { return };
    if !kcat_is_there(name) {
        return;
    }
    kcat(&kafka, &["-P", "-k", "k1", "-H", "ce_id=e-1", "-H", "ce_type=made", "-H", "tenant=t1"], b"hello");
    let mut subscriber = kafka.broker().subscriber(&kafka.subscription(&unique("group"))).await.unwrap();
    let found = receive(&mut subscriber, 1).await.remove(0).arrived;
    assert_eq!((found.id.as_deref(), found.kind.as_deref()), (Some("e-1"), Some("made")));
    assert_eq!((found.key.as_deref(), found.payload.as_deref()), (Some(&b"k1"[..]), Some(&b"hello"[..])));
    assert!(found.headers.contains(&("tenant".to_owned(), b"t1".to_vec())));
    assert!(found.time.is_some(), "the record's own time");
    subscriber.close().await;
}

// rdkafka panics on such a name; the panic that is printed is the one that was caught.
// Shown: without `catch_unwind` the thread of the consumer ends here.
#[tokio::test]
async fn a_header_name_that_is_not_text_ends_nothing() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    let name = "a_header_name_that_is_not_text_ends_nothing";
    let Some(kafka) = Kafka::with_topic(name, 1).await else { return };
    if !kcat_is_there(name) {
        return;
    }
    let mut child = Command::new("kcat")
        .args(["-q", "-P", "-b", &kafka.servers(), "-t", &kafka.topic, "-H", "ce_id=e-1", "-H"])
        .arg(OsStr::from_bytes(b"\xff\xfe=x"))
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"hello").unwrap();
    assert!(child.wait().unwrap().success());
    publish_all(&kafka.broker(), vec![message(&kafka.topic, None, "after")]).await;
    let mut subscriber = kafka.broker().subscriber(&kafka.subscription(&unique("group"))).await.unwrap();
    let found = receive(&mut subscriber, 2).await;
    assert_eq!(texts(&found), ["hello", "after"]);
    assert_eq!(found[0].arrived.headers, [("ce_id".to_owned(), b"e-1".to_vec())]);
    subscriber.close().await;
}
