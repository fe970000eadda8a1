//! Later phases of which the server still has a run, whose connection was lost while a statement
//! went on (O1, O9, R28): what that comes to is not known, so they wait for it, and cost nobody
//! else anything.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use oncebox::operation::Stage;
use oncebox::store::{StoreOptions, StoredOperation};

use crate::cut::behind_a_network;
use crate::flow::{BUDGET, KEY, ONE, Plan, Service, TWO, code};
use crate::proxy::{Failure, Proxy};
use crate::scripted::{Scripted, done};
use crate::support::eventually;
use crate::world::{Rows, SOON};

/// A pool that two operations can use up.
async fn behind<S: Rows>(url: &str, clear: &str) -> (S, Proxy) {
    let proxy = Proxy::before(url, clear);
    let options = StoreOptions { connections_max: 2, ..StoreOptions::new(proxy.url.clone()) };
    (S::connect(&options).await.unwrap(), proxy)
}

/// What only one can do at a time and others wait for as long as it takes, and how many wait for it
/// at the server.
struct Gate {
    takes: &'static str,
    waiting: &'static str,
}

const POSTGRES: Gate = Gate {
    // Without the last setting the server ends the statement 5 s after its client is gone.
    takes: "set local lock_timeout = 0; set local idle_in_transaction_session_timeout = 0; \
            set local client_connection_check_interval = 0; update place set n = n + 1 where name = 'x'",
    waiting: "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock' \
              and query like '%update place%'",
};
const MARIADB: Gate = Gate {
    takes: "set session innodb_lock_wait_timeout = 600, wait_timeout = 600; update place set n = n + 1 where name = 'x'",
    waiting: "select count(*) from information_schema.processlist where db = database() and command in ('Query', 'Execute') \
              and state like 'updating%' and info like '%update place%'",
};

async fn operations<S: Rows>(direct: &S) -> Vec<StoredOperation> {
    let mut operations = Vec::new();
    for id in direct.operation_ids().await {
        operations.push(direct.operation(id).await.unwrap().unwrap());
    }
    operations.retain(|operation| operation.outcome_at.is_none());
    operations
}

/// Both are taken up again and again, and nothing comes of it but that.
async fn are_looked_at<S: Rows>(direct: &S, times: i64) {
    eventually("a worker looks at both", SOON, || async {
        let operations = operations(direct).await;
        assert_eq!(operations.len(), 2, "they have no outcome");
        for one in &operations {
            assert_eq!((one.stage, one.parked.as_deref()), (Stage::Local, None));
            // Where the cut met the give-back of the request too, its lease ran out, which counts
            // as the death of its process would; looking counts nothing.
            assert!(one.attempts <= 1, "{}", one.attempts);
        }
        operations.iter().all(|one| one.epoch > times).then_some(())
    })
    .await;
}

async fn costs_nobody_anything<S: Rows>(direct: S, (through, proxy): (S, Proxy), gate: Gate) {
    direct.write("insert into place (name, n) values ('x', 0)").await;
    let mut plan = Plan { local: true, ..Plan::new(KEY) };
    plan.trouble.commits_by = Some(gate.takes);
    plan.trouble.local_commits.store(2, Ordering::SeqCst);
    let told = Scripted::default().answers(done()).answers(done());
    let service = Service::start(&through, &plan, told.clone()).await;
    let mut holder = direct.transaction().await;
    S::run(&mut holder, gate.takes.to_owned()).await.unwrap();
    let held_up = || async { direct.number(gate.waiting).await };
    let cut = async {
        eventually("both are held up", SOON, || async { (held_up().await == 2).then_some(()) }).await;
        proxy.fails(Failure::Cut);
        proxy.works();
    };
    tokio::join!(service.ask(ONE, 700, BUDGET), service.ask(TWO, 700, BUDGET), cut);

    let worker = service.recover();
    are_looked_at(&direct, 1).await;
    let (mut asked, soon) = (0, AtomicU32::new(0));
    eventually("other keys are answered within a second", SOON, || {
        asked += 1;
        let (service, soon, key) = (&service, &soon, format!("key-{asked:016}-other"));
        async move {
            let began = Instant::now();
            let answered = service.ask(&key, 7, BUDGET).await;
            let is_soon = code(&answered).is_none() && began.elapsed() < Duration::from_secs(1);
            // The first ones may come before a worker has come to the phases; then all are soon.
            if !is_soon {
                soon.store(0, Ordering::SeqCst);
            }
            (is_soon && soon.fetch_add(1, Ordering::SeqCst) == 20).then_some(())
        }
    })
    .await;
    are_looked_at(&direct, 4).await;
    assert_eq!(held_up().await, 2, "they were held up all the time");
    assert_eq!(told.arrived().len(), 0);

    holder.rollback().await.unwrap();
    for key in [ONE, TWO] {
        assert_eq!(service.ask_until_known(key, 700).await.0.status, 201);
    }
    worker.stop().await;
    assert_eq!((told.arrived().len(), service.payments("settled").await), (2, 2));
    let steps = "select count(*) from step";
    let places = "select count(*) from place where n = 0";
    assert_eq!((direct.number(steps).await, direct.number(places).await), (2, 1), "what was held up was rolled back");
}

/// A phase has the lock wait that a session outside of it has: `asks` stores the phase's own.
async fn waits_as_usual<S: Rows>(direct: S, (through, _proxy): (S, Proxy), usual: &str, asks: &'static str) {
    let mut plan = Plan { local: true, ..Plan::new(KEY) };
    plan.trouble.commits_by = Some(asks);
    plan.trouble.local_commits.store(1, Ordering::SeqCst);
    let told = Scripted::default().answers(done());
    let service = Service::start(&through, &plan, told).await;
    assert_eq!(service.ask_until_known(ONE, 700).await.0.status, 201);
    let outside = through.texts(usual).await;
    let inside = direct.texts("select name from step where name <> 'intend'").await;
    assert_eq!(inside, outside);
    assert_eq!(direct.texts(usual).await, outside);
}

// Shown by: the usual wait for the mark (nobody else was answered).
behind_a_network! { on_postgres:
    o9_a_run_that_does_not_end_at_the_server_costs_nobody_else_anything:
        |direct, behind| costs_nobody_anything(direct, behind, POSTGRES);
    // Shown by: not putting the usual wait back.
    o9_a_phase_waits_for_locks_as_long_as_usual: |direct, behind| waits_as_usual(direct, behind,
        "select current_setting('lock_timeout')", "insert into step select current_setting('lock_timeout')");
}
behind_a_network! { on_mariadb:
    o9_a_run_that_does_not_end_at_the_server_costs_nobody_else_anything:
        |direct, behind| costs_nobody_anything(direct, behind, MARIADB);
    o9_a_phase_waits_for_locks_as_long_as_usual: |direct, behind| waits_as_usual(direct, behind,
        "select cast(@@session.innodb_lock_wait_timeout as char)",
        "insert into step select @@session.innodb_lock_wait_timeout");
}
