//! Another region: two services, each with a database of its own, and a home region for each scope
//! (M106, M117).

use oncebox::operation::Code;

use super::kit::*;
use super::service::{Service, count, messages, payment};

/// The regions and their databases.
struct Regions {
    databases: [String; 2],
    services: [Service; 2],
}

impl Regions {
    async fn on(databases: [String; 2]) -> Self {
        let begun = [("eu", &databases[0]), ("us", &databases[1])]
            .map(|(region, database)| Service::begin(database, &["--region", region]));
        let [eu, us] = begun.map(Service::ready);
        Self { services: [eu.await, us.await], databases }
    }

    async fn pay(&self, region: usize, who: &str, key: &str, body: &str) -> Http {
        send(self.services[region].ask_as(who, "/payments", key, body)).await
    }

    /// Payments and messages of each database.
    async fn effects(&self) -> [(i64, i64); 2] {
        let mut effects = [(0, 0); 2];
        for (database, effects) in self.databases.iter().zip(&mut effects) {
            let payments = count(database, "select count(*) from payment").await;
            *effects = (payments, messages(database, "payment.created").await);
        }
        effects
    }

    /// Records of keys.
    async fn records(&self) -> [i64; 2] {
        let mut records = [0; 2];
        for (database, records) in self.databases.iter().zip(&mut records) {
            *records = super::service::records(database).await;
        }
        records
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m117_a_retry_from_another_region_pays_once_on_sqlite() {
    let directory = tempfile::tempdir().unwrap();
    let url = |region: &str| format!("sqlite://{}", directory.path().join(region).display());
    pays_once(["eu.db", "us.db"].map(url)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m117_a_retry_from_another_region_pays_once_on_mariadb() {
    let test = "m117_a_retry_from_another_region_pays_once_on_mariadb";
    let Some(eu) = crate::mysql::Db::empty(test).await else { return };
    let Some(us) = crate::mysql::Db::empty(test).await else { return };
    pays_once([&eu, &us].map(|database| database.url.clone())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m117_a_retry_from_another_region_pays_once_on_postgres() {
    let test = "m117_a_retry_from_another_region_pays_once_on_postgres";
    crate::postgres::with_database(test, |eu| async move {
        crate::postgres::with_database(test, |us| pays_once([eu.url.clone(), us.url])).await;
    })
    .await;
}

// Shown by: a service that does not ask where a scope is at home.
/// A client whose traffic moves between regions in the middle of its retries.
async fn pays_once(databases: [String; 2]) {
    let regions = Regions::on(databases).await;
    let body = payment(1_000, "order-1");
    for (home, tenant) in [(0, "eu.t1"), (1, "us.t1")] {
        let (away, name, who) = (1 - home, ["eu", "us"][home], format!("{tenant}:p1"));
        let lost = regions.pay(away, &who, K1, &body).await;
        lost.is(Code::WrongRegion);
        assert_eq!(lost.header("idempotency-home-region"), Some(name), "where to go, and no redirect");
        assert_eq!((lost.header("location"), lost.json()["key_state"].as_str()), (None, Some("not_said")));
        let first = regions.pay(home, &who, K1, &body).await;
        assert_eq!((first.status, first.is_replayed()), (201, false), "{first:?}");
        // The answer was lost, and traffic moved.
        for _ in 0..2 {
            regions.pay(away, &who, K1, &body).await.is(Code::WrongRegion);
            regions.pay(away, &who, K1, &payment(2_000, "order-1")).await.is(Code::WrongRegion);
            let again = regions.pay(home, &who, K1, &body).await;
            assert_eq!((again.status, again.is_replayed(), &again.body), (201, true, &first.body));
        }
        // A new key for the same order finds its home too.
        regions.pay(away, &who, K2, &body).await.is(Code::WrongRegion);
        let same = regions.pay(home, &who, K2, &body).await;
        assert_eq!((same.status, &same.json()["duplicate_of"]), (200, &first.json()["id"]));
    }
    assert_eq!(regions.effects().await, [(1, 1), (1, 1)], "one payment of each tenant, at its home");
    assert_eq!(regions.records().await, [2, 2], "what is another region's leaves no record");
    for service in &regions.services {
        assert_eq!(service.metric("oncebox_idempotency_replay_count").await, 2.0);
    }
    // No region claims this one: it is at home everywhere, which is what a service without a rule
    // for regions is.
    for region in [0, 1] {
        assert_eq!(regions.pay(region, "t1:p1", K1, &body).await.status, 201);
    }
    assert_eq!(regions.effects().await, [(2, 2), (2, 2)]);
}
