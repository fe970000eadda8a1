//! Settings: flag over environment over file over default, each with its origin; unknown keys are
//! refused.

mod load;
mod settings;
pub mod template;
mod values;

pub use load::{Layers, Loaded, load};
pub use settings::*;
pub use values::{ByteSize, Secret, Span, SpanOrNever};
