//! How many operations begin at once where connections are few (O29).

use std::sync::Arc;

use oncebox::operation::{Answered, Code};
use oncebox::store::postgres::PostgresStore;
use oncebox::store::{Base, StoreOptions};
use tokio::sync::Barrier;

use crate::flow::{BUDGET, Clash, KEY, ONE, Plan, Service, TWO};
use crate::scripted::{Scripted, done};
use crate::support::eventually;
use crate::world::{SOON, prepared};

// Shown by: a place that the request's own future holds. Clients that give up and come again then
// begin more than the connections carry.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o29_a_first_phase_holds_its_place_after_its_request_was_dropped() {
    let test = "o29_a_first_phase_holds_its_place_after_its_request_was_dropped";
    crate::postgres::with_database(test, |database| async move {
        prepared(database.store).await;
        // Two of the three carry operations.
        let options = StoreOptions { connections_max: 3, ..StoreOptions::new(database.url.clone()) };
        let store = PostgresStore::connect(&options).await.unwrap();
        // Both first phases wait until the test comes too.
        let clash = Arc::new(Clash { meet: Barrier::new(3), ..Clash::new(true) });
        let mut plan = Plan::new(KEY).long_lease();
        plan.trouble.clash = Some(Arc::clone(&clash));
        let told = Scripted::default().answers(done()).answers(done());
        let service = Arc::new(Service::start(&store, &plan, told).await);
        let asks = [(ONE, 700), (TWO, 701)].map(|(key, amount)| {
            let service = Arc::clone(&service);
            tokio::spawn(async move { service.ask(key, amount, BUDGET).await })
        });
        eventually("both are in their first phase", SOON, || async { (clash.runs() == 2).then_some(()) }).await;
        for asked in asks {
            asked.abort();
            assert!(asked.await.unwrap_err().is_cancelled());
        }
        let refused = tokio::time::timeout(SOON, service.ask_once("key-0000000000000003", 7, BUDGET)).await.unwrap();
        let Answered::Problem(problem) = &refused else { panic!("{refused:?}") };
        assert_eq!(problem.code, Code::StoreUnavailable);
        let detail = problem.detail.as_deref().unwrap_or_default();
        assert!(detail.contains("every place for this operation is taken"), "{problem:?}");
        clash.meet.wait().await;
        assert!(service.engine.drain(SOON).await);
        assert_eq!(service.payments("settled").await, 2);
    })
    .await;
}
