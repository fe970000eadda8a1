//! Text that PostgreSQL cannot store: a name in a foreign message may contain a NUL, and no text
//! column accepts one.
//!
//! Guarantee: [`restored`] gives back exactly what [`stored`] was given, for every string. Ordinary
//! text is stored unchanged.

/// Begins an escape: a private-use character, which is escaped itself where it occurs.
const ESCAPE: char = '\u{e000}';

/// The text in the form that a column accepts.
pub(super) fn stored(text: &str) -> String {
    let mut stored = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '\0' => stored.extend([ESCAPE, '0']),
            ESCAPE => stored.extend([ESCAPE, '1']),
            other => stored.push(other),
        }
    }
    stored
}

/// The text as it was before [`stored`].
pub(super) fn restored(text: String) -> String {
    if !text.contains(ESCAPE) {
        return text;
    }
    let mut original = String::with_capacity(text.len());
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        original.push(match character {
            ESCAPE if characters.next() == Some('0') => '\0',
            other => other,
        });
    }
    original
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_text_comes_back_as_it_was_and_no_nul_is_stored() {
        for text in ["", "payment.created", "a\0b", "\0", "\u{e000}", "\u{e000}0\0\u{e000}1", "é\0"] {
            assert!(!stored(text).contains('\0'), "{text:?}");
            assert_eq!(restored(stored(text)), text, "{text:?}");
        }
    }
}
