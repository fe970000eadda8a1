//! Settings in layers (a flag overrides the environment, the environment the file, the file the
//! default), each value with its origin. Unknown keys are refused.

mod load;
mod settings;
mod template;
mod values;

pub use self::{
    load::{Layers, Loaded, load},
    settings::*,
    template::TEMPLATE,
    values::{ByteSize, Secret, Span, SpanOrNever},
};
