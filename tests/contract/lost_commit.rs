//! A connection that is lost during COMMIT (G12): the network fails before the server sees it, or
//! after it did.

use oncebox::store::{OperatorAct, StoreOptions};
use oncebox_testkit::memory::Fault;

use super::kit::{
    Act, Behind, Does, SOON, Sql, behind_a_proxy, consumer_options, fails, on_mariadb, on_postgres, relay_options,
};
use super::observed::{Heard, hear};
use super::proxy::{Failure, When};
use super::support::eventually;

/// So many COMMITs of the effect fail, one after the other.
async fn effect_is_once<S: Sql>(behind: Behind<S>, when: When, failure: Failure, times: u32) {
    let Behind { direct, through, proxy } = behind;
    proxy.fail_times_at(times, "insert into effect", "COMMIT", when, failure);
    direct.deliver_all(&["a1", "b1"]);
    let consumer = through.consumer(consumer_options(), Does(|_: &str, _: &oncebox::Message| Act::Done));
    eventually("acknowledged", SOON, || async { (direct.broker.committed("ledger", "t", 0) == 2).then_some(()) }).await;
    assert!(proxy.has_failed(), "it was cut as often as that");
    assert_eq!(direct.effects().await, ["a1", "b1"]);
    assert!(direct.dead().await.is_empty());
    consumer.end().await;
    through.store.close().await;
}

/// The COMMIT that stores a message as dead takes effect, and its answer is lost. Shown by: keeping
/// what was concluded of the message (redriven, it was dead again without having been sent).
async fn a_redrive_sends_it<S: Sql>(behind: Behind<S>) {
    let Behind { direct, through, proxy } = behind;
    direct.broker.faults().on_publish(Fault::RefuseMessage("too large".into()), |_| true);
    direct.enqueue("t", &["a1"]).await;
    // It is held first, so that it is sent alone. Only the statement that makes it dead has this
    // text.
    proxy.fail_times_at(1, ".requested = 'discard'", "COMMIT", When::BeforeAnswer, Failure::Cut);
    let relay = through.relay(relay_options());
    direct.until_status("it is dead", |status| status.dead == 1).await;
    eventually("the answer is lost", SOON, || async { proxy.has_failed().then_some(()) }).await;
    direct.broker.faults().clear_on_publish();
    direct.act(OperatorAct::Redrive).await;
    direct.until_published("t", &["a1"]).await;
    direct.until_status("nothing is dead", |status| status.dead + status.held + status.pending == 0).await;
    relay.end().await;
    through.store.close().await;
}

/// A retrier stores a message as dead after its last try, and the answer to its COMMIT is lost. Its
/// next look finds nothing of it to do. Shown by: telling of it only after an answer.
async fn a_death_is_told_once<S: Sql>(behind: Behind<S>, heard: Heard) {
    let Behind { direct, through, proxy } = behind;
    // Only the transaction of a retrier that makes its message dead has this text.
    let (pg, my) = ("waiting where sequence = $1 and lease = $2", "waiting where sequence = ? and lease = ?");
    let of_retrier = if S::NAME == "postgres" { pg } else { my };
    proxy.fail_times_at(1, of_retrier, "COMMIT", When::BeforeAnswer, Failure::Cut);
    direct.deliver_all(&["a1"]);
    let consumer = through.consumer(consumer_options(), Does(|_: &str, _: &oncebox::Message| fails()));
    direct.until_consumer("it is dead", |ledger| ledger.dead == 1).await;
    let told = || {
        let said = heard.said();
        let of_it = said.iter().filter(|said| said.level == tracing::Level::ERROR);
        of_it.filter(|said| said.fields.get("message").is_some_and(|text| text.contains("a message is dead"))).count()
    };
    eventually("it is told", SOON, || async { (proxy.has_failed() && told() > 0).then_some(()) }).await;
    consumer.end().await;
    let counted = heard.metric("oncebox_deliveries_total", &[("consumer", "ledger"), ("outcome", "dead")]);
    assert_eq!((told(), counted as u64), (1, 1));
    through.store.close().await;
}

#[tokio::test]
async fn g10_a_message_whose_last_retry_ended_in_a_commit_without_a_reply_is_told_as_dead_on_postgres() {
    let (heard, _hearing) = hear();
    on_postgres("g10_told_as_dead", |world| async move {
        a_death_is_told_once(Behind::new(world, "sslmode=disable", StoreOptions::new("")).await, heard).await;
    })
    .await;
}

#[tokio::test]
async fn g10_a_message_whose_last_retry_ended_in_a_commit_without_a_reply_is_told_as_dead_on_mariadb() {
    let (heard, _hearing) = hear();
    on_mariadb("g10_told_as_dead", |world| async move {
        a_death_is_told_once(Behind::new(world, "ssl-mode=DISABLED", StoreOptions::new("")).await, heard).await;
    })
    .await;
}

fn patient() -> StoreOptions {
    StoreOptions { answer_timeout: Some(std::time::Duration::from_secs(2)), ..StoreOptions::new("") }
}

behind_a_proxy! {
    g12_a_commit_whose_reply_was_lost_is_found_out_and_the_effect_is_there_once:
        |behind| effect_is_once(behind, When::BeforeAnswer, Failure::Cut, 1), StoreOptions::new("");
    g12_a_commit_that_never_arrived_is_found_out_and_the_effect_is_there_once:
        |behind| effect_is_once(behind, When::BeforeRequest, Failure::Cut, 2), StoreOptions::new("");
    g12_a_commit_whose_reply_never_comes_is_found_out_and_the_effect_is_there_once:
        |behind| effect_is_once(behind, When::BeforeAnswer, Failure::Silence, 1), patient();
    g12_a_commit_that_got_stuck_is_found_out_and_the_effect_is_there_once:
        |behind| effect_is_once(behind, When::BeforeRequest, Failure::Silence, 1), patient();
    g12_a_message_whose_death_was_stored_by_a_commit_without_a_reply_is_sent_once_it_is_redriven:
        a_redrive_sends_it, StoreOptions::new("");
}
