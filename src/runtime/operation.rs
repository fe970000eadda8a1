//! The operation engine: one decision table, and three kinds of operations (O1 to O29).
//!
//! | module | for |
//! |---|---|
//! | `engine` | [`Engine`]: what a process shares, and its limits |
//! | `endpoint` | [`Endpoint`]: an operation as its author declares it |
//! | `front` | [`Front`]: what every operation does with a request before it executes |
//! | `transactional` | [`Engine::execute_transactional`]: claim, effects, messages and answer in one commit |
//! | [`phased`] | phased operations: phases, and calls of providers between them |
//! | `edge` | [`Engine::execute_edge`]: a claim around any handler |
//! | `codec` | what is kept of answers, and replayed |
//! | `reconcile` | finds out the outcome of an edge run whose end was not recorded |
//! | `standing` | marks a run as unknown in the background, after its request was answered |
//! | `running`, `memory` | the runs of this process; how much memory request bodies may take |
//! | `reach`, `admission` | whether the store answers; how many operations its connections carry |
//!
//! Not here: the decisions ([`policy::operation`](crate::policy::operation)), the statements
//! ([`store`](crate::store)), and HTTP or gRPC, which only translate requests and answers.

mod admission;
mod codec;
mod edge;
mod endpoint;
mod engine;
mod front;
mod live;
mod memory;
pub mod phased;
mod quota;
mod reach;
mod reconcile;
mod reply;
mod running;
mod standing;
mod transactional;

pub use codec::{Kept, SealError, Sealer};
pub use edge::{EdgeAnswer, Ended, Guard, GuardError, Progress};
pub use endpoint::{Endpoint, EndpointError, Reconciled, Reconciling, Registered};
pub use engine::{Core, Engine, EngineBuilder};
pub use front::{Asking, Begin, Front, KeyGiven, Turn};
pub use memory::BodyPermit;
pub use reply::{Answered, Keep, Problem, Reply};
pub use transactional::EffectTx;
