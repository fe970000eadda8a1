//! A connection that is lost during COMMIT (G12): the network fails before the server sees it, or
//! after it did.

use oncebox::store::{OperatorAct, StoreOptions};
use oncebox_testkit::memory::Fault;

use super::kit::{Act, Behind, Does, SOON, Sql, behind_a_proxy, consumer_options, relay_options};
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
    relay.end().await.unwrap();
    through.store.close().await;
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
