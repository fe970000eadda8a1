//! The flags of the service.

use std::time::Duration;

use clap::{Parser, ValueEnum};
use oncebox::operation::{AfterExpiry, KeyFormat, Mode, Retention, Route};

/// A payments API in which every POST may be sent twice.
#[derive(Debug, Clone, Parser)]
#[command(name = "payments_api")]
pub(crate) struct Args {
    /// postgres://, mysql:// or sqlite://FILE
    #[arg(long, default_value = "sqlite://payments_api.db")]
    pub(crate) database: String,
    /// Where it listens; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:8080")]
    pub(crate) listen: String,
    /// Carries messages to this broker, in this process
    #[arg(long)]
    pub(crate) broker: Option<String>,
    /// The outside provider of /charges
    #[arg(long)]
    pub(crate) provider: Option<String>,
    /// Whether this process recovers unfinished operations by itself; `only`: that and carrying
    /// messages, and it serves nothing
    #[arg(long, value_enum, default_value = "on")]
    pub(crate) recovery: Switch,
    /// How long a claim is owned without a heartbeat, in seconds
    #[arg(long, default_value_t = 30.0)]
    pub(crate) lease: f64,
    /// How long an answer is replayed, in seconds
    #[arg(long, default_value_t = 86_400.0)]
    pub(crate) key_ttl: f64,
    /// How long a charge may take before 202, in seconds
    #[arg(long, default_value_t = 2.0)]
    pub(crate) charge_budget: f64,
    /// The region of this service: keys of a tenant named `REGION.anything` are kept in that
    /// region, others everywhere
    #[arg(long)]
    pub(crate) region: Option<String>,
    /// The id of this deployment: where the database has another one, nothing is sent to the
    /// provider. Without it a database with operations is refused unless this machine knows it
    /// from before its first one, so that a clone does not charge. `database` takes the one that
    /// the database has, so that a clone charges too: for trying things out
    #[arg(long, value_name = "ID|database", value_parser = deployment)]
    pub(crate) deployment: Option<Deployment>,
    /// Stops at a point and says so on stderr, for tests that kill it there
    #[arg(long, hide = true)]
    pub(crate) pause_at: Option<String>,
}

/// Whose deployment it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Deployment {
    Id(uuid::Uuid),
    Database,
}

fn deployment(text: &str) -> Result<Deployment, &'static str> {
    match text.parse() {
        Ok(id) => Ok(Deployment::Id(id)),
        Err(_) if text == "database" => Ok(Deployment::Database),
        Err(_) => Err("give a UUID, or `database`"),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    On,
    Off,
    Only,
}

impl Args {
    /// The route of an operation: the engine's defaults with the times of the command line.
    pub(crate) fn route(&self, mode: Mode) -> Route {
        let lease = Duration::from_secs_f64(self.lease.max(0.1));
        let ttl = Duration::from_secs_f64(self.key_ttl.max(0.001));
        let mut route = Route::new(mode);
        route.lease = lease;
        route.timeout = lease.mul_f64(0.6);
        route.completion_budget = lease.mul_f64(0.2);
        route.retention = Retention { ttl, body: ttl, metadata: ttl.max(Retention::default().metadata) };
        if mode == Mode::Phased {
            route.operation_path = Some("/operations/".to_owned());
            // Keys of any form, which are free again after their time; the default asks for UUID v7
            // and refuses late ones.
            route.key_format = KeyFormat::Opaque;
            route.after_expiry = AfterExpiry::ExecuteAsNew;
        }
        route
    }

    /// How long a call of the provider may take: it must fit into the lease.
    pub(crate) fn provider_timeout(&self) -> Duration {
        Duration::from_secs_f64((self.lease.max(0.1) * 0.4).min(10.0))
    }
}
