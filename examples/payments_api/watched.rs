//! The adapter of the card provider with points to be killed at: before a call, while it is out,
//! and with its answer in hand.

use std::sync::Arc;
use std::time::Duration;

use oncebox::operation::phased::{Asked, Call, Prepare, Provider, Sent};
use oncebox::{HandlerError, async_trait};

use crate::cards::{CardCharge, Cards};
use crate::points::{pauses_at, reach};

/// The adapter, watched.
#[derive(Debug)]
pub(crate) struct Watched(Arc<Cards>);

impl Watched {
    pub(crate) fn new(cards: Cards) -> Self {
        Self(Arc::new(cards))
    }
}

#[async_trait]
impl Provider for Watched {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn version(&self) -> u32 {
        self.0.version()
    }

    fn timeout(&self) -> Duration {
        // At a point it waits to be killed, not to be timed out.
        self.0.timeout()
    }

    async fn send(&self, call: &Call<'_>) -> Sent {
        reach("charge.intended").await;
        if pauses_at("charge.sending") {
            let (cards, key) = (Arc::clone(&self.0), call.key.to_owned());
            let (bytes, version, send) = (call.bytes.to_vec(), call.version, call.send);
            tokio::spawn(async move { cards.send(&Call { key: &key, bytes: &bytes, version, send }).await });
            reach("charge.sending").await;
        }
        let sent = self.0.send(call).await;
        reach("charge.answered").await;
        sent
    }

    async fn query(&self, call: &Call<'_>) -> Asked {
        self.0.query(call).await
    }
}

impl Prepare<CardCharge> for Watched {
    fn prepare(&self, request: &CardCharge, key: &str) -> Result<Vec<u8>, HandlerError> {
        self.0.prepare(request, key)
    }
}
