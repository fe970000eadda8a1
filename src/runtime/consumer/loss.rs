//! Says what a consumer did not get, and will not get.

use crate::broker::PartitionId;
use crate::observe;
use crate::policy::position::Break;

/// A partition does not go on where the consumer stood: counted, said, and given back in words.
pub(super) fn tell(consumer: &str, source: &PartitionId, because: Break) -> String {
    let place = format!("{}/{}", source.place, source.partition);
    let said = match because {
        Break::MadeAnew => format!(
            "the topic of {place} was deleted and made anew: it is consumed from its beginning; \
             what stood in the old one and was not consumed is gone"
        ),
        Break::BeyondEnd { stood, end } => format!(
            "{place} ends at offset {end}, before {stood}, where the consumer stood: the broker lost records, \
             or the topic was made anew; it is consumed from its beginning, and what was handled is known"
        ),
        Break::Lost { stood, first } => {
            observe::lost_records(&source.place, u64::try_from(first - stood).unwrap_or_default());
            format!(
                "the broker deleted records of {place} before they were consumed, offsets {stood} to {first}: their effects are \
                 missing; raise the topic's retention, and publish them again"
            )
        }
    };
    tracing::error!(consumer, "{said}");
    said
}
