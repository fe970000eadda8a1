//! Reports records that a consumer will not get, and partitions that it must not consume.

use crate::broker::{Begun, PartitionId};
use crate::inbox::rules::position::Break;
use crate::message::IdRule;
use crate::observe;

/// Logs why a partition does not continue at the consumer's position, and counts the records that
/// are lost; returns the text.
pub(super) fn tell(consumer: &str, source: &PartitionId, because: Break) -> String {
    let place = format!("{}/{}", source.place, source.partition);
    let said = match because {
        Break::MadeAnew { first } => {
            observe::lost_records(&source.place, u64::try_from(first).unwrap_or_default());
            let gone = if first > 0 {
                format!(
                    "; the broker deleted its records up to offset {first} before they were consumed: their effects are missing"
                )
            } else {
                String::new()
            };
            format!(
                "the topic of {place} was deleted and made anew: it is consumed from its beginning; \
                 what stood in the old one and was not consumed is gone{gone}"
            )
        }
        Break::BeyondEnd { stood, end } => format!(
            "{place} ends at offset {end}, before {stood}, where the consumer stood: the broker lost records, \
             or the topic was made anew; it is consumed from its beginning, and the inbox knows what was handled, unless `id_epoch` \
             is new"
        ),
        Break::Lost { stood, first } => {
            observe::lost_records(&source.place, u64::try_from(first - stood).unwrap_or_default());
            format!(
                "the broker deleted records of {place} before they were consumed, offsets {stood} to {first}: their effects are \
                 missing; raise the topic's retention, and publish them again"
            )
        }
    };
    tracing::error!(consumer, source = %place, what = %said, "a partition is not what it was");
    said
}

/// Why a partition must not be consumed from its beginning: its offsets belonged to other records,
/// and coordinates are the ids. `None` if it may be consumed.
pub(super) fn takes_records_for_others(rule: &IdRule, has_new_ids: bool, begins: &Begun) -> Option<String> {
    let again = matches!(begins.start.because, Some(Break::MadeAnew { .. } | Break::BeyondEnd { .. }));
    if !again || has_new_ids || !matches!(rule, IdRule::Coordinates) {
        return None;
    }
    let (topic, partition) = (&begins.source.place, begins.source.partition);
    Some(format!(
        "{topic}/{partition} is not consumed: the topic was made anew, or the broker lost records, so its offsets are given again, \
         and with id = \"coordinates\" its new records would be taken for the old ones; give id_epoch a new value, and start once with `consumer --accept`"
    ))
}
