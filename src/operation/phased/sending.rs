//! An operation with one effect that is sent to others: its intent is committed, the effect is
//! sent, and its result is the answer.

use async_trait::async_trait;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::effect::{Effect, Settlement, Settlements};
use super::ends::{First, Settled};
use super::flow::Flow;
use super::phase::{FirstPhase, Phase, SettledPhase};
use super::provider::Prepare;
use crate::error::{HandlerError, Invalid};
use crate::operation::Reply;
use crate::operation::rules::IdempotentCommand;
use crate::operation::rules::delivery::Delivery;
use crate::operation::rules::provider::{Answer, Matches, Strategy};
use crate::store::base::Base;

/// The flow with this one effect; `refused` is the code of the answer to a refused effect.
pub(super) fn flow<S, C, P>(
    name: &'static str,
    provider: P,
    strategy: Strategy,
    refused: &'static str,
) -> Result<Flow<S>, Invalid>
where
    S: Base,
    C: IdempotentCommand + Serialize + DeserializeOwned + Send + Sync + 'static,
    P: Prepare<C>,
{
    let effect = Effect::new(name, provider, strategy);
    let begin = Begin { effect: effect.clone(), refused };
    Flow::begin::<C>(C::OPERATION, 1, begin).effect(&effect, End { name, refused }).build()
}

struct Begin<P> {
    effect: Effect<P>,
    refused: &'static str,
}

#[async_trait]
impl<S: Base, C: Send + Sync + 'static, P: Prepare<C>> FirstPhase<S, C> for Begin<P> {
    async fn run(&self, phase: &mut Phase<'_, S>, command: &C) -> Result<First, HandlerError> {
        match self.effect.intend(phase.context(), command) {
            Ok(intent) => Ok(First::Intent(intent)),
            Err(error) if error.terminal => {
                let word = Delivery::Refused.word();
                let body = serde_json::json!({"code": self.refused, "state": word, "detail": error.message});
                Ok(First::Rejected {
                    reply: Reply::json(422, &body)?,
                    code: Some(self.refused.to_owned()),
                    binding: true,
                })
            }
            Err(error) => Err(error),
        }
    }
}

struct End {
    name: &'static str,
    refused: &'static str,
}

#[async_trait]
impl<S: Base, C: Send + Sync + 'static> SettledPhase<S, C> for End {
    async fn run(&self, _: &mut Phase<'_, S>, _: &C, settled: &Settlements) -> Result<Settled, HandlerError> {
        match settled.of(self.name) {
            Some(Settlement::Failed(proof)) => {
                let body = serde_json::json!({"code": self.refused, "state": Delivery::Refused.word()});
                let code = Some(self.refused.to_owned());
                Ok(Settled::Failure { proof: proof.clone(), reply: Reply::json(422, &body)?, code })
            }
            Some(Settlement::Succeeded) => {
                Ok(Settled::Response(Reply::json(200, &serde_json::json!({"state": Delivery::Sent.word()}))?))
            }
            _ => Err(HandlerError::terminal(format!("the effect `{}` is not settled", self.name))),
        }
    }
}

/// The same answer of a receiver that says no more than its status: there is nothing to compare.
pub(super) fn uncompared(mut answer: Answer) -> Answer {
    if let Answer::Status { matches, .. } = &mut answer {
        *matches = Matches::ALL;
    }
    answer
}

/// Builds the stored bytes: one line with the destination, then the body.
pub(super) fn packed(whereto: &impl Serialize, body: &[u8]) -> Result<Vec<u8>, HandlerError> {
    Ok([serde_json::to_vec(whereto)?.as_slice(), b"\n", body].concat())
}

pub(super) fn opened<T: DeserializeOwned>(bytes: &[u8]) -> Result<(T, &[u8]), HandlerError> {
    let end = bytes.iter().position(|&byte| byte == b'\n');
    let end = end.ok_or_else(|| HandlerError::terminal("the stored bytes have no first line"))?;
    Ok((serde_json::from_slice(&bytes[..end])?, &bytes[end + 1..]))
}
