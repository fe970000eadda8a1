//! The words of a panic, for logs and for the error of the work that panicked.

/// The message of a panic; `no message` if what it carries is no text.
pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
