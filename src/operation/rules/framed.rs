//! Pure: no I/O, no clock.
//! Several parts as the bytes of one hash, or as the associated data of a cipher. Promise: other
//! parts, or the same bytes cut elsewhere, give other bytes. These bytes must never change: what is
//! stored already was hashed and sealed with them.

/// Joins the parts. Each stands after its length in bytes, as eight bytes in big-endian order.
pub(crate) fn framed<'a>(parts: impl IntoIterator<Item = &'a [u8], IntoIter: Clone>) -> Vec<u8> {
    let parts = parts.into_iter();
    let mut out = Vec::with_capacity(parts.clone().map(|part| part.len() + 8).sum());
    for part in parts {
        out.extend_from_slice(&(part.len() as u64).to_be_bytes());
        out.extend_from_slice(part);
    }
    out
}
