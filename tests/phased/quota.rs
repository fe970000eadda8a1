//! The quota on stored bytes at a phased operation: no provider is called for what is refused, and
//! what was begun goes on (M120).

use oncebox::operation::{Answered, Code};

use crate::flow::{BUDGET, KEY, ONE, Plan, Service, TWO, code, status};
use crate::scripted::{Scripted, done};
use crate::world::Rows;

// Shown by: refusing nothing (the provider is called twice); storing the refused one.
async fn m120_a_tenant_with_its_bytes_used_up_charges_nothing_new<S: Rows>(store: S) {
    let plan = Plan::new(KEY);
    let provider = Scripted::default().answers(done()).answers(done());
    let service = Service::start(&store, &plan, provider.clone()).await;
    let first = service.ask(ONE, 700, BUDGET).await;
    assert_eq!(status(&first), (201, false));
    let stored = store.stored_of_tenant("t1").await.unwrap();
    let full = Service::start(&store, &Plan { stored_max: Some(stored), ..plan.clone() }, provider.clone()).await;
    let over = full.ask(TWO, 701, BUDGET).await;
    assert!(
        matches!(&over, Answered::Problem(problem) if problem.code == Code::QuotaExceeded && problem.status == 429),
        "{over:?}"
    );
    assert_eq!((store.operation_ids().await.len(), provider.arrived().len()), (1, 1));
    full.ended_once("settled").await;
    let again = full.ask(ONE, 700, BUDGET).await;
    assert_eq!(status(&again), (201, true));
    let other = full.ask(ONE, 701, BUDGET).await;
    assert_eq!(code(&other), Some(Code::KeyReused));
    let roomy = Service::start(&store, &Plan { stored_max: Some(stored + 1), ..plan }, provider).await;
    let second = roomy.ask(TWO, 701, BUDGET).await;
    assert_eq!(status(&second), (201, false));
}

crate::on_all! {
    m120_a_tenant_with_its_bytes_used_up_charges_nothing_new;
}
