//! Which parts of the answers of one operation are kept, and which cannot be.

use super::headers;
use crate::error::Invalid;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::operation) struct Keeping {
    pub(in crate::operation) headers: Vec<String>,
    pub(in crate::operation) redact: Vec<String>,
}

impl Keeping {
    pub(in crate::operation) fn validate(&self) -> Result<(), Invalid> {
        if let Some(name) = self.headers.iter().find(|name| headers::is_never(name)) {
            let why = "is never stored: it belongs to one answer, one connection or one caller";
            return Err(Invalid::new(format!("the header `{name}` {why}")));
        }
        match self.redact.iter().find(|pointer| !pointer.starts_with('/')) {
            Some(pointer) => Err(Invalid::new(format!("`{pointer}` is no JSON pointer: it begins with `/`"))),
            None => Ok(()),
        }
    }
}
