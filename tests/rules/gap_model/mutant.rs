//! Ways to break the rules. Each is a reasonable version that loses or reorders a message in some
//! history.
//!
//! They live on the side of the test: in the reference cursor, in the simulated relay, or in the
//! simulated server.

use super::checks::Kind;
use super::world::Settings;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mutant {
    /// R1: the position is drawn before the transaction has an id.
    PositionBeforeId,
    /// R2.1: the persisted gaps close at the first read of a session.
    StartWithoutFence,
    /// R2.3: missing positions before the first row of a read are not gaps.
    NothingBeforeTheFirst,
    /// R2.4: a gap closes although the LIMIT was reached below it.
    LimitIgnored,
    /// R2.5: a checkpoint fences what a read found after it began.
    FenceBeforeRead,
    /// R2.5: a checkpoint fences nothing.
    NoFence,
    /// R2.7: the mark persists the gaps that memory has now, without the gap rows of the window.
    PersistMemoryAtMark,
    /// R2.5: the checkpoint persists the gaps that memory has now.
    PersistMemoryAtCheckpoint,
    /// R2.7: any proven batch may be marked, not only the oldest.
    MarkAnyProven,
    /// R3: the xmax of the snapshot is the fence.
    XmaxIsTheFence,
    /// R4: gaps are read again only by every third read.
    RecheckSeldom,
    /// R4: gaps are read again by a statement of their own, before the tail.
    RecheckApart,
    /// R5: a batch is sent before its checkpoint returned.
    SendBeforeCheckpoint,
    /// R5: the checkpoint that lets a batch go had begun before it was read.
    CheckpointBeforeRead,
    /// R6: lock holders are remembered by backend, which PREPARE changes.
    HoldersByBackend,
    /// R6: the holders listed speak also for gaps found after the list was asked for.
    HoldersForLaterGaps,
    /// R6: holders that ended while a read was under way close gaps at that read.
    HoldersGoneDuringRead,
    /// The cursor of every first version: `position > last`.
    HighestSeen,
    /// R15: a refused row is dead at once, and the session goes on with its key.
    SkipAndGoOn,
    /// R17: keys are diverted by what stands in the table, not by what is diverted in the window.
    DivertByTableOnly,
    /// R18: shards are merged with the gaps that both have.
    JoinByIntersection,
}

impl Mutant {
    /// What must be seen of it.
    pub(crate) fn breaks(self) -> Kind {
        match self {
            Self::RecheckSeldom | Self::RecheckApart | Self::SkipAndGoOn | Self::DivertByTableOnly => Kind::OutOfOrder,
            Self::SendBeforeCheckpoint | Self::CheckpointBeforeRead => Kind::Phantom,
            Self::NoFence => Kind::Stuck,
            _ => Kind::Lost,
        }
    }

    /// Narrows what is random to where the rule matters, so that fewer histories are needed.
    pub(crate) fn focus(self, settings: &mut Settings) {
        match self {
            Self::SendBeforeCheckpoint | Self::CheckpointBeforeRead => {
                settings.asynchronous = true;
                settings.server_crashes = 20;
                settings.processes = 1;
            }
            Self::HoldersByBackend => {
                settings.lock_watch = true;
                settings.prepared = true;
            }
            Self::HoldersForLaterGaps | Self::HoldersGoneDuringRead => {
                settings.lock_watch = true;
                settings.writers_max = 3;
                settings.without_failures();
            }
            Self::FenceBeforeRead | Self::XmaxIsTheFence => {
                settings.long_writers = false;
                settings.writers_max = 3;
                settings.without_failures();
            }
            Self::RecheckSeldom | Self::RecheckApart => {
                (settings.topics, settings.keys) = (1, 1);
                settings.without_failures();
            }
            Self::SkipAndGoOn | Self::DivertByTableOnly => settings.poison = true,
            Self::JoinByIntersection => settings.splits = true,
            _ => {}
        }
    }
}

impl Settings {
    /// Some rules need no failure to be missed.
    fn without_failures(&mut self) {
        self.processes = 1;
        self.rows = 20;
        self.ranges_max = 1_000;
        (self.server_crashes, self.session_ends) = (0, 0);
        (self.poison, self.blocked, self.splits) = (false, false, false);
    }
}
