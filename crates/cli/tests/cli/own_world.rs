//! `demo` and `bench` have a world of their own: what others have in the environment, in a file or
//! in a database is never touched.

use std::collections::BTreeSet;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use serde_json::Value;

use crate::database::Database;
use crate::kit::{ONCEBOX, Place, Program, closed, eventually};
use crate::support::{service, unique};

/// A show and a measurement that are as short as they can be.
const DEMO: &[&str] = &["demo", "--messages", "20", "--kills", "1", "--no-progress"];
const BENCH: &[&str] = &["bench", "relay", "--messages", "100", "--rounds", "1"];
const FAULT: &[&str] = &["bench", "fault", "--messages", "400", "--rounds", "1", "--stuck", "3", "--output", "json"];
/// Those that look at all databases or topics of a server take turns.
static ON_A_SERVER: Mutex<()> = Mutex::new(());

/// A shop that is at work: tables, a committed order that no publisher has sent yet, and all its
/// settings in the environment and in a file.
struct Shop {
    place: Place,
    config: String,
}

impl Shop {
    fn on(database: Option<&str>, broker: Option<&str>) -> Self {
        let place = Place::on(database, broker);
        place.oncebox(&["migrate", "up"]).run().ok();
        place.enqueue_to("orders", "PROD-3", "{}");
        let config = place.config(&format!(
            "database.url = '{}'\nbroker.url = '{}'\n[[consumer]]\nname = 'shop'\ntopics = ['orders']",
            place.database(),
            broker.unwrap_or("embedded://broker.db")
        ));
        Self { place, config }
    }

    /// In its shell, where every setting of the shop is exported.
    fn shell(&self, arguments: &[&str]) -> Program {
        let temporary = self.place.path().join("tmp");
        std::fs::create_dir_all(&temporary).unwrap();
        self.place
            .oncebox(arguments)
            .env("ONCEBOX_CONFIG", &self.config)
            .env("ONCEBOX_PUBLISHER__LEASE", "3s")
            .env("oncebox_email__directory", "shop-emails")
            .env("TMPDIR", &temporary.display().to_string())
    }

    /// The tag of the demo or benchmark that runs in it.
    fn tag(&self) -> Option<String> {
        let name = std::fs::read_dir(self.place.path().join("tmp")).unwrap().next()?.unwrap().file_name();
        name.to_str()?.rsplit('-').next().map(str::to_owned)
    }

    /// Its order waits for its own publisher, nobody came or went, and nothing is left behind.
    fn is_untouched(&self) {
        let status = self.place.json(&["status"]);
        assert_eq!(
            (&status["pending"], &status["held"], &status["dead"]),
            (&1.into(), &0.into(), &0.into()),
            "{status}"
        );
        assert_eq!(status["shards"][0]["epoch"], 0, "no publisher had it: {status}");
        assert_eq!(status["consumers"], serde_json::json!([]), "{status}");
        assert_eq!(std::fs::read_dir(self.place.path().join("tmp")).unwrap().count(), 0, "files are left behind");
        assert!(!self.place.path().join("shop-emails").exists(), "e-mails went to the shop's directory");
    }
}

/// Shown by reading the environment, as every other command does: the demo's publisher relays the
/// shop's order into a broker that is thrown away. And by clearing only after a verdict that could
/// be printed.
#[test]
fn demo_and_bench_in_a_shell_with_production_settings_leave_production_untouched() {
    let shop = Shop::on(None, None);
    let verdict = shop.shell(&[DEMO, &["--output", "json"]].concat()).run().json();
    assert_eq!(verdict["verdict"], "every effect exactly once", "{verdict}");
    for (count, expected) in [("messages", 20), ("ledger_entries", 20), ("emails", 20), ("lost", 0), ("doubled", 0)] {
        assert_eq!(verdict[count], expected, "{count} of {verdict}");
    }
    shop.is_untouched();
    // Nobody reads the verdict.
    assert_eq!(shop.shell(DEMO).stdout(closed()).code(), Some(0));
    shop.is_untouched();
    shop.shell(BENCH).run().ok();
    shop.is_untouched();
    assert!(!shop.place.path().join("broker.db").exists(), "nobody opened the shop's broker");
}

/// The servers of production, and another database on the same server that the command line names.
/// Shown by a child that keeps the environment of its parent: it works for the shop.
#[test]
fn demo_and_bench_on_a_server_have_a_database_of_their_own_there() {
    let test = "demo_and_bench_on_a_server_have_a_database_of_their_own_there";
    for server in ["ONCEBOX_TEST_POSTGRES", "ONCEBOX_TEST_MARIADB"] {
        let Some(server) = service(test, server) else { continue };
        let _turn = ON_A_SERVER.lock().unwrap_or_else(PoisonError::into_inner);
        let (database, other) = (Database::on(&server), Database::on(&server));
        let shop = Shop::on(Some(&database.url), None);
        let databases = || databases_of_shows(&server);
        let before = databases();
        shop.shell(&[DEMO, &["--database", &other.url]].concat()).run().ok();
        shop.is_untouched();
        shop.shell(&[BENCH, &["--database", &other.url]].concat()).run().ok();
        shop.is_untouched();
        let left: Vec<_> = databases().into_iter().filter(|name| !before.contains(name)).collect();
        assert!(left.is_empty(), "{left:?} were left behind");
        // Not even the database that was named got a table.
        let of_other = Place::on(Some(&other.url), None);
        of_other.oncebox(&["status"]).run().fails(3, &["oncebox migrate up"]);
    }
}

/// The databases of demos and benchmarks on a server.
fn databases_of_shows(server: &str) -> Vec<String> {
    let of_ours = if server.starts_with("mysql") {
        "select cast(schema_name as char) from information_schema.schemata where schema_name like 'oncebox\\_%'"
    } else {
        "select datname::text from pg_database where datname like 'oncebox\\_%'"
    };
    let all = crate::database::column(server, of_ours);
    all.into_iter().filter(|name| name.contains("_demo_") || name.contains("_bench_")).collect()
}

/// The topics or queues on a broker's server whose names begin so.
fn topics(test: &str, broker: &str, prefix: &str) -> BTreeSet<String> {
    let all: Vec<String> = if let Some(servers) = broker.strip_prefix("kafka://") {
        let asker: BaseConsumer = ClientConfig::new().set("bootstrap.servers", servers).create().unwrap();
        let metadata = asker.fetch_metadata(None, Duration::from_secs(30)).unwrap();
        metadata.topics().iter().map(|topic| topic.name().to_owned()).collect()
    } else {
        let Some(control) = service(test, "ONCEBOX_TEST_RABBITMQCTL") else {
            return BTreeSet::new();
        };
        let listed = Command::new(control).args(["--quiet", "list_queues", "name"]).output();
        let listed = listed.unwrap();
        assert!(listed.status.success(), "{}", String::from_utf8_lossy(&listed.stderr));
        String::from_utf8(listed.stdout).unwrap().lines().map(str::to_owned).collect()
    };
    all.into_iter().filter(|name| name.starts_with(prefix)).collect()
}

/// The queues of RabbitMQ that are bound under a routing key that begins so.
fn bound(test: &str, prefix: &str) -> Vec<String> {
    let control = service(test, "ONCEBOX_TEST_RABBITMQCTL").unwrap();
    let listed = Command::new(control).args(["--quiet", "list_bindings", "routing_key", "destination_name"]).output();
    let listed = String::from_utf8(listed.unwrap().stdout).unwrap();
    let bindings = listed.lines().filter_map(|line| line.split_once('\t'));
    // Each queue is also bound to the exchange without a name, under its own name.
    let bindings = bindings.filter(|(key, queue)| key.starts_with(prefix) && key != queue);
    bindings.map(|(_, queue)| queue.to_owned()).collect()
}

/// Every one of these figures is there, each with the same without the fault beside it. How large
/// they are depends on the machine.
fn has_both_sides(printed: &str, names: &[&str]) {
    let figures: Vec<Value> = printed.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let printed: Vec<_> = figures.iter().filter_map(|figure| figure["name"].as_str()).collect();
    assert_eq!(printed, names);
    for figure in figures {
        for side in ["value", "baseline", "ratio"] {
            assert!(figure[side].as_f64().is_some_and(f64::is_finite), "{side} of {figure}");
        }
    }
}

const SILENT: [&str; 3] = ["fault.silent_topic.p50", "fault.silent_topic.p99", "fault.silent_topic.p999"];
const AFTER: [&str; 3] = ["fault.after_failure", "fault.catch_up", "fault.catch_up.rate"];

/// Shown to fail: without the removal of the directory at the end.
#[test]
fn faults_are_measured_beside_the_same_without_them_and_nothing_stays_behind() {
    let shop = Shop::on(None, None);
    has_both_sides(&shop.shell(FAULT).run().ok(), &[SILENT, AFTER].concat());
    shop.is_untouched();
}

/// Growth is measured beside the same with little, and `scripts/plot` draws what was measured.
#[test]
fn growth_is_measured_and_drawn() {
    let shop = Shop::on(None, None);
    let few = ["--messages", "100", "--rounds", "1", "--pending", "0", "--stored", "0", "--output", "json"];
    let figures = shop.shell(&[&["bench", "growth"], &few[..]].concat()).run().ok();
    has_both_sides(&figures, &["growth.relay.keys", "growth.relay.consumers", "growth.consume.consumers"]);
    shop.is_untouched();
    let (from, to) = (shop.place.file("growth.jsonl", &figures), shop.place.path().join("growth.svg"));
    let plot = Command::new(crate::readme::root().join("scripts/plot")).arg(&from).arg(&to).status().unwrap();
    assert!(plot.success());
    let drawn = std::fs::read_to_string(to).unwrap();
    for words in ["relay with a million keys", "consumer beside 1,000 others", "not measured"] {
        assert!(drawn.contains(words), "{words}: {drawn}");
    }
}

/// Shown to fail: by keeping the database of the stuck topics.
#[test]
fn faults_are_measured_on_servers_and_no_database_and_no_topic_stays_behind() {
    let test = "faults_are_measured_on_servers_and_no_database_and_no_topic_stays_behind";
    let stuck = ["fault.stuck_topic.p50", "fault.stuck_topic.p99", "fault.stuck_topic.p999"];
    let names = [&stuck[..], &SILENT, &["fault.frozen_peer"], &AFTER].concat();
    for (server, broker) in
        [("ONCEBOX_TEST_POSTGRES", "ONCEBOX_TEST_KAFKA"), ("ONCEBOX_TEST_MARIADB", "ONCEBOX_TEST_RABBITMQ")]
    {
        let (Some(server), Some(broker)) = (service(test, server), service(test, broker)) else {
            continue;
        };
        let _turn = ON_A_SERVER.lock().unwrap_or_else(PoisonError::into_inner);
        let (databases, made) = (databases_of_shows(&server), topics(test, &broker, "bench-"));
        let other = Database::on(&server);
        let shop = Shop::on(None, None);
        let done = shop.shell(&[FAULT, &["--database", &other.url, "--broker", &broker]].concat());
        has_both_sides(&done.run().ok(), &names);
        shop.is_untouched();
        let mut left = databases_of_shows(&server);
        left.retain(|name| !databases.contains(name));
        left.extend(topics(test, &broker, "bench-").difference(&made).cloned());
        assert!(left.is_empty(), "{left:?} were left behind");
    }
}

/// Shown to fail: with the second database, that of the stuck topics, left out; by listening for
/// SIGINT alone.
#[test]
fn a_benchmark_that_is_stopped_by_a_signal_removes_both_of_its_databases() {
    let test = "a_benchmark_that_is_stopped_by_a_signal_removes_both_of_its_databases";
    let (server, broker) = ("ONCEBOX_TEST_POSTGRES", "ONCEBOX_TEST_KAFKA");
    let (Some(server), Some(broker)) = (service(test, server), service(test, broker)) else { return };
    let _turn = ON_A_SERVER.lock().unwrap_or_else(PoisonError::into_inner);
    let before = databases_of_shows(&server);
    let other = Database::on(&server);
    let shop = Shop::on(None, None);
    let long = ["bench", "fault", "--messages", "20000", "--stuck", "3", "--database", &other.url, "--broker", &broker];
    let new = || databases_of_shows(&server).into_iter().filter(|name| !before.contains(name)).collect::<Vec<_>>();
    for signal in ["-INT", "-TERM"] {
        let mut running = shop.shell(&long).start();
        eventually("a second database", || {
            assert!(!running.has_ended(), "it has no second database: {:?}", new());
            new().iter().any(|name| name.ends_with("_b")).then_some(())
        });
        running.signal(signal);
        running.ends().fails(1, &["stopped"]);
        assert_eq!(new(), Vec::<String>::new(), "left behind after {signal}");
        shop.is_untouched();
    }
}

/// Shown to fail: with relay and consumer in tasks that nobody ends: the benchmark waited until the
/// session of its own consumer was over.
#[test]
fn a_benchmark_of_latency_that_is_stopped_by_a_signal_leaves_no_group_behind() {
    let test = "a_benchmark_of_latency_that_is_stopped_by_a_signal_leaves_no_group_behind";
    let Some(broker) = service(test, "ONCEBOX_TEST_KAFKA") else { return };
    let _turn = ON_A_SERVER.lock().unwrap_or_else(PoisonError::into_inner);
    let shop = Shop::on(None, None);
    let mut running = shop.shell(&["bench", "latency", "--messages", "20000", "--broker", &broker]).start();
    let group = eventually("a group with a member", || {
        assert!(!running.has_ended(), "it has ended");
        let topic = topics(test, &broker, &format!("bench-{}-", shop.tag()?)).pop_first()?;
        groups(&broker).into_iter().find(|(group, members)| group.starts_with(&topic) && *members > 0)
    });
    running.signal("-INT");
    running.ends_within(Duration::from_secs(30)).fails(1, &["stopped"]);
    assert!(groups(&broker).iter().all(|(name, _)| *name != group.0), "{group:?} was left behind");
    shop.is_untouched();
}

/// The groups of a Kafka with the number of members of each.
fn groups(broker: &str) -> Vec<(String, usize)> {
    let servers = broker.strip_prefix("kafka://").unwrap();
    let asker: BaseConsumer = ClientConfig::new().set("bootstrap.servers", servers).create().unwrap();
    // A broker that just began to coordinate groups refuses at first.
    let list = eventually("the groups", || asker.fetch_group_list(None, Duration::from_secs(30)).ok());
    list.groups().iter().map(|group| (group.name().to_owned(), group.members().len())).collect()
}

/// Shown to fail: by removing the topic at the successful end only; and by removing it with a
/// broker that does not know the tap.
#[test]
fn a_demo_that_is_stopped_by_a_signal_removes_its_database_and_its_topic() {
    let test = "a_demo_that_is_stopped_by_a_signal_removes_its_database_and_its_topic";
    let (server, broker) = ("ONCEBOX_TEST_MARIADB", "ONCEBOX_TEST_RABBITMQ");
    let (Some(server), Some(broker)) = (service(test, server), service(test, broker)) else { return };
    let _turn = ON_A_SERVER.lock().unwrap_or_else(PoisonError::into_inner);
    let before = databases_of_shows(&server);
    let other = Database::on(&server);
    let shop = Shop::on(None, None);
    let long = ["demo", "--messages", "20000", "--no-progress", "--database", &other.url, "--broker", &broker];
    let mut running = shop.shell(&long).start();
    let mine = || databases_of_shows(&server).into_iter().find(|name| !before.contains(name));
    let prefix = eventually("a database, the queues of both consumers, and a tap", || {
        assert!(!running.has_ended(), "it made no queues");
        let prefix = format!("demo-{}-", mine()?.strip_prefix("oncebox_demo_")?);
        let queues = topics(test, &broker, &prefix);
        // Both queues, and the tap beside them.
        (bound(test, &prefix).len() >= 3 && queues.len() >= 2).then_some(prefix)
    });
    running.signal("-INT");
    running.ends().fails(1, &["interrupted"]);
    assert_eq!(mine(), None);
    let mut left = topics(test, &broker, &prefix);
    left.extend(bound(test, &prefix));
    assert!(left.is_empty(), "{left:?} were left behind");
    shop.is_untouched();
}

/// Shown by leaving out the look at the outbox.
#[test]
fn demo_and_bench_refuse_a_database_whose_outbox_holds_messages_of_others() {
    let test = "demo_and_bench_refuse_a_database_whose_outbox_holds_messages_of_others";
    let servers = ["ONCEBOX_TEST_POSTGRES", "ONCEBOX_TEST_MARIADB"].map(|name| service(test, name));
    let databases: Vec<Database> = servers.iter().flatten().map(|server| Database::on(server)).collect();
    for url in databases.iter().map(|database| Some(database.url.as_str())).chain([None]) {
        let shop = Shop::on(url, None);
        for command in [DEMO, BENCH] {
            let done = shop.shell(&[command, &["--database", shop.place.database()]].concat()).run();
            done.fails(4, &["messages of others", "1 pending", "name a database that nobody works with"]);
        }
        shop.is_untouched();
    }
}

/// Shown to fail: by making the directory before all else; a benchmark left it, with its database,
/// where its broker could not be reached.
#[test]
fn demo_and_bench_that_cannot_begin_say_why_and_leave_no_directory_behind() {
    let place = Place::new();
    let config = place.config(&format!("database.url = 'sqlite://{}.db'", unique("shop")));
    let temporary = place.path().join("tmp");
    std::fs::create_dir(&temporary).unwrap();
    let fails = |command: &[&str], arguments: [&str; 2], code: i32, words: &[&str]| {
        let program = Program::new(ONCEBOX, &[command, &arguments].concat()).within(place.path());
        program.env("TMPDIR", &temporary.display().to_string()).run().fails(code, words);
        assert_eq!(std::fs::read_dir(&temporary).unwrap().count(), 0, "{command:?} {arguments:?} left files behind");
    };
    for command in [DEMO, BENCH] {
        fails(command, ["--config", &config], 2, &["reads no configuration file", "--database"]);
        fails(command, ["--database", "nonsense"], 2, &["no scheme that is known"]);
    }
    fails(BENCH, ["--broker", "amqp://127.0.0.1:1"], 1, &["refused"]);
}

/// Shown to fail: by leaving the database where a file beside it cannot be made.
#[test]
fn a_demo_whose_files_cannot_be_made_leaves_no_database_behind() {
    let test = "a_demo_whose_files_cannot_be_made_leaves_no_database_behind";
    for server in ["ONCEBOX_TEST_POSTGRES", "ONCEBOX_TEST_MARIADB"] {
        let Some(server) = service(test, server) else { continue };
        let _turn = ON_A_SERVER.lock().unwrap_or_else(PoisonError::into_inner);
        let (before, other) = (databases_of_shows(&server), Database::on(&server));
        let place = Place::new();
        // A file where the directory of the logs is to be.
        place.file("logs", "");
        let dir = place.path().display().to_string();
        let demo = Program::new(ONCEBOX, &[DEMO, &["--dir", &dir, "--database", &other.url]].concat());
        demo.run().fails(1, &["logs cannot be made"]);
        let left: Vec<_> = databases_of_shows(&server).into_iter().filter(|name| !before.contains(name)).collect();
        assert!(left.is_empty(), "{left:?} were left behind");
    }
}
