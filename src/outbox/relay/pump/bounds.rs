//! The bounds on dead and held rows: at one of them nothing new is read, visibly (G11).
//!
//! Not here: which rows are held (`rules::diversion`), and the counting (the store's).

use super::Pump;
use crate::outbox::relay::ending::Doubt;

impl Pump<'_> {
    /// Why no more rows may be dead or held, so that nothing new is read.
    pub(super) fn full(&self) -> Option<String> {
        let held = self.diverted.len();
        if self.not_loaded || held >= self.relay.options.held_rows_max {
            return Some(format!(
                "{held} dead and held messages, `held_rows_max` reached: nothing more is read; see `oncebox dead list`"
            ));
        }
        self.too_many_dead.then(|| self.too_many_dead())
    }

    fn too_many_dead(&self) -> String {
        let dead = self.relay.options.dead_rows_max;
        format!("{dead} dead messages, `dead_rows_max` reached: nothing more is read; see `oncebox dead list`")
    }

    /// Counts dead messages up to their bound. Those under policy `skip` are not in memory, because
    /// they hold nothing.
    pub(super) async fn look_at_dead(&mut self) -> Result<(), Doubt> {
        let too_many = self.session.has_dead(self.relay.options.dead_rows_max).await?;
        if too_many && !self.too_many_dead {
            tracing::error!(shard = self.relay.options.shard, "{}", self.too_many_dead());
        }
        self.too_many_dead = too_many;
        Ok(())
    }
}
