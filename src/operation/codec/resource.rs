//! The resource of an answer, which is kept beside the body and outlives it (M34, M63, M99).

use super::Sealer;
use crate::operation::reply::{Keep, Reply};
use crate::operation::rules::record::Resource;

/// A longer kind, id or location is not kept, because it would be in the row of the claim.
const PART_MAX: usize = 2_048;

/// The resource to keep: the one that the handler names, else the `Location` of a success.
///
/// A resource is stored in plain. So where bodies and headers are encrypted, only what the handler
/// names is kept: a `Location` may be a signed URL.
pub(super) fn kept(reply: &Reply, sealer: &Sealer) -> Option<Resource> {
    match &reply.resource {
        _ if reply.keep == Keep::Nothing => None,
        Some(named) if fits(named) => Some(named.clone()),
        Some(named) => {
            tracing::warn!(kind = %named.kind.escape_debug(), "a resource is not kept: its kind, id or location is longer than {PART_MAX} bytes, or has control characters");
            None
        }
        None if sealer.encrypts() => None,
        None => located(reply).filter(fits),
    }
}

/// The resource at the `Location` of a success. Its URL is all that is known of it.
fn located(reply: &Reply) -> Option<Resource> {
    let (_, location) = reply.headers.iter().find(|(name, _)| name.eq_ignore_ascii_case("location"))?;
    let location = std::str::from_utf8(location).ok().filter(|_| (200..300).contains(&reply.status))?.to_owned();
    Some(Resource { kind: "location".to_owned(), id: location.clone(), location: Some(location) })
}

fn fits(resource: &Resource) -> bool {
    let parts = [Some(&resource.kind), Some(&resource.id), resource.location.as_ref()];
    parts.into_iter().flatten().all(|part| part.len() <= PART_MAX && !part.contains(char::is_control))
}
