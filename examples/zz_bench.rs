use oncebox::broker::embedded::*;
use oncebox::broker::*;
use oncebox::message::OutgoingMessage;
use std::time::Instant;
#[tokio::main]
async fn main() {
    let dir = tempfile::tempdir_in(std::env::args().nth(1).unwrap_or("/tmp".into())).unwrap();
    let broker = EmbeddedBroker::open(EmbeddedConfig::new(dir.path().join("b.db"))).await.unwrap();
    let n = 200_000usize;
    for batch in [1usize, 10, 100, 1000, 5000] {
        let total = (batch * 2000).min(n);
        let mut p = broker.publisher().await.unwrap();
        let rows: Vec<_> = (0..total)
            .map(|i| {
                (
                    i as u64,
                    OutgoingMessage {
                        id: uuid::Uuid::now_v7(),
                        topic: format!("t{batch}"),
                        key: Some(format!("k{}", i % 1000)),
                        kind: "payment.created".into(),
                        headers: vec![("tenant".into(), "t1".into())],
                        payload: vec![b'x'; 200],
                        content_type: "application/json".into(),
                        trace: None,
                        created_at: chrono::Utc::now(),
                    },
                )
            })
            .collect();
        let b = Instant::now();
        let mut settled = vec![];
        let mut it = rows.into_iter();
        let mut sent = 0;
        loop {
            let part: Vec<_> = it.by_ref().take(batch).collect();
            if part.is_empty() {
                break;
            }
            sent += part.len();
            p.send(part).await.unwrap();
            let w = if batch < 1000 { 0 } else { 3 * batch };
            while sent - settled.len() > w {
                p.settle(&mut settled).await.unwrap();
            }
        }
        while settled.len() < sent {
            p.settle(&mut settled).await.unwrap();
        }
        println!("publish batch {batch}: {:.0}/s", total as f64 / b.elapsed().as_secs_f64());
        p.close().await;
        let b = Instant::now();
        let mut s = broker.subscriber(&Subscription::new("c", vec![format!("t{batch}")])).await.unwrap();
        let mut got = 0;
        while got < total {
            if let Event::Deliveries(d) = s.next().await.unwrap() {
                got += d.len();
                let mut m = std::collections::BTreeMap::new();
                for x in &d {
                    m.insert(x.source.clone(), x.sequence);
                }
                for (k, v) in m {
                    s.acknowledge(&k, v).await.unwrap();
                }
            }
        }
        println!("consume: {:.0}/s", total as f64 / b.elapsed().as_secs_f64());
        s.close().await;
    }
    // latency
    let mut p = broker.publisher().await.unwrap();
    let other = EmbeddedBroker::open(EmbeddedConfig::new(dir.path().join("b.db"))).await.unwrap();
    let mut s = other.subscriber(&Subscription::new("c", vec!["lat".into()])).await.unwrap();
    let mut lat = vec![];
    s.next().await.unwrap();
    for i in 0..300u64 {
        tokio::time::sleep(std::time::Duration::from_millis(i % 37)).await;
        let b = Instant::now();
        let mut v = vec![];
        p.send(vec![(
            i,
            OutgoingMessage {
                id: uuid::Uuid::now_v7(),
                topic: "lat".into(),
                key: None,
                kind: "k".into(),
                headers: vec![],
                payload: vec![],
                content_type: "t".into(),
                trace: None,
                created_at: chrono::Utc::now(),
            },
        )])
        .await
        .unwrap();
        p.settle(&mut v).await.unwrap();
        loop {
            if let Event::Deliveries(d) = s.next().await.unwrap() {
                s.acknowledge(&d[0].source, d[0].sequence).await.unwrap();
                break;
            }
        }
        lat.push(b.elapsed());
    }
    lat.sort();
    println!("latency p50 {:?} p99 {:?} max {:?}", lat[150], lat[297], lat[299]);
}
