//! Settings in layers (a flag overrides the environment, the environment the file, the file the
//! default), each value with its origin. Unknown keys are refused.

mod load;
mod settings;
mod template;
mod values;

pub(crate) use self::load::load;
pub use self::{
    load::Loaded,
    settings::*,
    template::TEMPLATE,
    values::{Secret, parse_address, parse_duration},
};
