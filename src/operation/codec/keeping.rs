//! Which parts of the answers of one operation are kept, and which cannot be.

use super::headers;
use crate::operation::endpoint::EndpointError;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::operation) struct Keeping {
    pub(in crate::operation) headers: Vec<String>,
    pub(in crate::operation) redact: Vec<String>,
}

impl Keeping {
    pub(in crate::operation) fn validate(&self) -> Result<(), EndpointError> {
        if let Some(name) = self.headers.iter().find(|name| headers::is_never(name)) {
            return Err(EndpointError::Header(name.clone()));
        }
        match self.redact.iter().find(|pointer| !pointer.starts_with('/')) {
            Some(pointer) => Err(EndpointError::Pointer(pointer.clone())),
            None => Ok(()),
        }
    }
}
