//! The quota on stored bytes at a phased operation: no provider is called for what is refused, and
//! what was begun goes on (M120).

use std::time::Duration;

use oncebox::operation::{Answered, Code};

use crate::flow::{KEY, Plan, Service};
use crate::scripted::{Scripted, done};
use crate::world::Rows;

const ONE: &str = "key-0000000000000001";
const TWO: &str = "key-0000000000000002";
const BUDGET: Duration = Duration::from_secs(20);

// Shown by: refusing nothing (the provider is called twice); storing the refused one.
async fn m120_a_tenant_with_its_bytes_used_up_charges_nothing_new<S: Rows>(store: S) {
    let plan = Plan::new(KEY);
    let provider = Scripted::default().answers(done()).answers(done());
    let service = Service::start(&store, &plan, provider.clone()).await;
    let first = service.ask(ONE, 700, BUDGET).await;
    assert!(matches!(&first, Answered::Reply { reply, replayed: false } if reply.status == 201), "{first:?}");
    let stored = store.stored_of_tenant("t1").await.unwrap();
    let full = Service::start(&store, &Plan { stored_max: Some(stored), ..plan.clone() }, provider.clone()).await;
    let over = full.ask(TWO, 701, BUDGET).await;
    assert!(
        matches!(&over, Answered::Problem(problem) if problem.code == Code::QuotaExceeded && problem.status == 429),
        "{over:?}"
    );
    assert_eq!(store.operation_ids().await.len(), 1);
    full.ended_once("settled").await;
    let again = full.ask(ONE, 700, BUDGET).await;
    assert!(matches!(&again, Answered::Reply { reply, replayed: true } if reply.status == 201), "{again:?}");
    let other = full.ask(ONE, 701, BUDGET).await;
    assert!(matches!(&other, Answered::Problem(problem) if problem.code == Code::KeyReused), "{other:?}");
    let roomy = Service::start(&store, &Plan { stored_max: Some(stored + 1), ..plan }, provider).await;
    let second = roomy.ask(TWO, 701, BUDGET).await;
    assert!(matches!(&second, Answered::Reply { reply, replayed: false } if reply.status == 201), "{second:?}");
}

crate::on_all! {
    m120_a_tenant_with_its_bytes_used_up_charges_nothing_new;
}
