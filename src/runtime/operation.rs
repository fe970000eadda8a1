//! The operation engine: one decision, three doors (O1 to O29).
//!
//! | module | for |
//! |---|---|
//! | `engine` | [`Engine`]: what a process shares, and its limits |
//! | `endpoint` | [`Endpoint`]: an operation as its author declares it |
//! | `front` | [`Front`]: what every door asks before it executes |
//! | `door_a` | [`Engine::execute_tx`]: claim, effects, messages and answer in one commit |
//! | [`phased`] | door B: phases, and calls of providers between them |
//! | `door_c` | [`Engine::execute_edge`]: a claim around any handler |
//! | `codec` | what is kept of answers, and replayed |
//! | `reconcile` | how an edge run ended whose end was not seen |
//! | `standing` | what must come to stand behind the answer |
//! | `running`, `memory` | what runs here; how much memory bodies may take |
//! | `reach`, `admission` | whether the store is there; how many operations its connections carry |
//!
//! Not here: the decisions ([`policy::operation`](crate::policy::operation)), the statements
//! ([`store`](crate::store)), and HTTP or gRPC, which only translate what comes in and out.

mod admission;
mod codec;
mod door_a;
mod door_c;
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

pub use codec::{Kept, SealError, Sealer};
pub use door_a::EffectTx;
pub use door_c::{EdgeAnswer, Ended, Guard, GuardError, Progress};
pub use endpoint::{Endpoint, EndpointError, Reconciled, Reconciling, Registered};
pub use engine::{Core, Engine, EngineBuilder};
pub use front::{Asking, Begin, Front, KeyGiven, Turn};
pub use memory::BodyPermit;
pub use reply::{Answered, Keep, Problem, Reply};
