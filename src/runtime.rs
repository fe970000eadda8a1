//! Who does the work: relay, consumer, retries, e-mail sender.
mod handler;

pub use handler::{HandlerTx, MessageHandler};
