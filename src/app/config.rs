//! Settings in layers (a flag overrides the environment, the environment the file, the file the
//! default), each value with its origin. Unknown keys are refused.

mod load;
mod settings;
mod template;
mod values;

pub use load::{Layers, Loaded, load};
pub use settings::*;
pub use template::TEMPLATE;
pub use values::{ByteSize, Secret, Span, SpanOrNever};
