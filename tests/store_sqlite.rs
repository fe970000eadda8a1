//! The SQLite store.
#![allow(clippy::unwrap_used)]
#![cfg(all(feature = "sqlite", feature = "testing"))]

use std::time::Duration;

use oncebox::message::{MessageId, NewMessage};
use oncebox::store::sqlite::SqliteStore;
use oncebox::store::*;

#[tokio::test]
async fn smoke() {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("sqlite://{}", dir.path().join("t.db").display());
    let store = SqliteStore::connect(&StoreOptions::new(&url)).await.unwrap();
    assert_eq!(store.schema().await.unwrap(), SchemaState::Missing);
    assert!(!dir.path().join("t.db").exists());
    let store = SqliteStore::connect(&StoreOptions { create: true, ..StoreOptions::new(&url) }).await.unwrap();
    assert_eq!(store.migrate().await.unwrap(), vec![1, 2, 3]);
    assert!(store.migrate().await.unwrap().is_empty());
    for finding in store.check().await.unwrap() {
        println!("{finding:?}");
        assert_eq!(finding.severity, Severity::Ok);
    }
    let mut tx = store.pool().begin_with("BEGIN IMMEDIATE").await.unwrap();
    let one = enqueue(&mut *tx, NewMessage::text("t", "k", "{}").with_key("a").with_header("h", "v")).await.unwrap();
    let many: Vec<_> =
        (0..1000).map(|i| NewMessage::bytes("t", "k", vec![0u8; i % 3]).with_key(format!("k{i}"))).collect();
    let ids = enqueue_all(&mut *tx, many).await.unwrap();
    commit(tx).await.unwrap();
    let request = LeaseRequest { shard: 0, owner: "me".into(), length: Duration::from_secs(10) };
    let LeaseAnswer::Taken(mut session) = store.open(&request).await.unwrap() else { panic!() };
    let batch = session.read(600).await.unwrap();
    assert_eq!(batch.rows.len(), 600);
    assert!(batch.more);
    assert_eq!(batch.rows[0].message.id, one);
    assert!(batch.rows[1..].iter().zip(&ids).all(|(r, id)| r.message.id == *id));
    session.claim(Mark::default()).await.unwrap();
    let batch2 = session.read(600).await.unwrap();
    assert_eq!(batch2.rows.len(), 401);
    let dead = batch2.rows[3].position;
    session
        .claim(Mark {
            through: Some(batch2.batch),
            diverted: vec![(dead, Diversion::Dead { reason: "no".into(), holds: true })],
            ..Mark::default()
        })
        .await
        .unwrap();
    let held = session.held(&[dead]).await.unwrap();
    assert_eq!(held[0].message, batch2.rows[3].message);
    println!("{:?}", store.status().await.unwrap());
    session.release().await.unwrap();

    let consumer =
        store.register(&ConsumerSpec { name: "c".into(), id_rule: "envelope".into(), accept: false }).await.unwrap();
    let entry = InboxEntry { id: MessageId::new(), hash: [1; 16] };
    let mut tx = store.begin(consumer).await.unwrap();
    assert_eq!(tx.admit(&[entry]).await.unwrap().known, vec![None]);
    assert_eq!(tx.prove().await.unwrap(), Proof::Same);
    tx.commit().await.unwrap();
    let mut tx = store.begin(consumer).await.unwrap();
    assert_eq!(tx.admit(&[entry]).await.unwrap().known, vec![Some(Known { hash: [1; 16] })]);
    sqlx::raw_sql("commit").execute(tx.connection()).await.unwrap_err();
    assert_eq!(tx.prove().await.unwrap(), Proof::Aborted);
    drop(tx);
    let mut tx = store.begin(consumer).await.unwrap();
    assert_eq!(tx.admit(&[entry]).await.unwrap().known, vec![Some(Known { hash: [1; 16] })]);
    tx.commit().await.unwrap();
    println!("{:?}", store.dead(&DeadFilter::default()).await.unwrap());
}
