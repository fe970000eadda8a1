//! `publisher` and `consumer` as processes: they end by themselves where they are told to, on the
//! first signal with 0, on the second at once, and show on their listener how they are.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::database::Locked;
use crate::kit::{ONCEBOX, PUBLISHER, Place, Program, Running, block_on, eventually, payment};
use crate::logs::objects;
use crate::postgres::Server;
use crate::standstill::Standstill;

/// Shown by taking the gauge of pending messages out of the code: its name is missing.
#[test]
fn the_listener_serves_livez_readyz_and_every_metric_of_the_interface() {
    let place = Place::migrated();
    let config = place.ledger();
    place.enqueue("acc-7", &payment("p1"));
    let mut publisher = place.publisher(&["--listen", "127.0.0.1:0"]).start();
    let mut consumer = place.consumer(&["--listen", "127.0.0.1:0", "--config", &config]).start();
    publisher.until_ready_says(200, &["relay 0: ready"]);
    consumer.until_ready_says(200, &["consumer ledger: ready"]);
    assert_eq!(publisher.get("/livez"), (200, "ok\n".to_owned()));
    assert_eq!(consumer.get("/livez"), (200, "ok\n".to_owned()));
    eventually("the payment is in the ledger", || (place.entries() == ["p1"]).then_some(()));
    let of_publisher = [
        "oncebox_published_total{broker=\"embedded\"} 1",
        "oncebox_publish_failures_total{broker=\"embedded\",class=\"message\"} 0",
        "oncebox_oldest_pending_age_seconds 0",
        "oncebox_pending_messages 0",
        "oncebox_held_messages 0",
        "oncebox_dead_messages{place=\"outbox\"} 0",
        "oncebox_leases_lost_total 0",
        "oncebox_build_info{version=\"",
    ];
    let outcomes = ["processed\"} 1", "duplicate\"} 0", "retried\"} 0", "dead\"} 0", "mismatch\"} 0", "unhandled\"} 0"];
    let of_consumer =
        outcomes.map(|outcome| format!("oncebox_deliveries_total{{consumer=\"ledger\",outcome=\"{outcome}"));
    for (program, names) in [
        (&mut publisher, of_publisher.map(str::to_owned).to_vec()),
        (
            &mut consumer,
            [of_consumer.to_vec(), vec!["oncebox_leases_lost_total".into(), "oncebox_build_info{".into()]].concat(),
        ),
    ] {
        let mut text = String::new();
        let missing = |text: &str| names.iter().find(|name| !text.contains(*name)).cloned();
        eventually("every metric is there", || {
            text = program.get("/metrics").1;
            missing(&text).is_none().then_some(())
        });
        for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let name = line.split(['{', ' ']).next().unwrap();
            assert!(
                text.contains(&format!("# TYPE {name} "))
                    || name.ends_with("_sum")
                    || name.contains("_bucket")
                    || name.ends_with("_count"),
                "{line}"
            );
        }
        assert_eq!(program.get("/nowhere").0, 404);
    }
    assert_eq!(publisher.stop().ok(), "");
    assert_eq!(consumer.stop().ok(), "");
}

/// The alerts look at these gauges, and the process is there: no other alert would fire. Shown by:
/// reading the tables only once the broker has answered.
#[test]
fn a_publisher_whose_broker_was_never_there_shows_what_is_pending() {
    let place = Place::migrated();
    place.enqueue("acc-7", &payment("p1"));
    let mut publisher = place.publisher(&["--listen", "127.0.0.1:0", "--broker", "amqp://127.0.0.1:1"]).start();
    publisher.until_ready_says(503, &["broker: waiting"]);
    eventually("the message is counted", || {
        publisher.get("/metrics").1.contains("oncebox_pending_messages 1").then_some(())
    });
    publisher.until_ready_says(503, &["broker: waiting"]);
    publisher.stop().ok();
}

#[test]
fn an_address_in_use_is_an_error_that_names_it() {
    let place = Place::migrated();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let config = place.ledger();
    for program in [
        place.publisher(&["--listen", &address]),
        place.consumer(&["--listen", &address, "--config", &config]),
        place.oncebox(&["sender", "--listen", &address]),
        place.publisher(&[]).env("ONCEBOX_HTTP__LISTEN", &address),
    ] {
        program.run().fails(1, &[&address, "Address already in use", "choose another address"]);
    }
}

/// What is held or dead is reported, not waited for; a second run finds nothing to do and doubles
/// nothing.
#[test]
fn until_empty_and_until_idle_end_by_themselves_with_everything_done_once() {
    let place = Place::migrated();
    let config = place.ledger();
    for number in 0..50 {
        place.enqueue(&format!("acc-{}", number % 7), &payment(&format!("p{number:02}")));
    }
    place.publish();
    assert_eq!(place.consumer(&["--until-idle", "2s", "--config", &config]).run().ok(), "");
    let all: Vec<String> = (0..50).map(|number| format!("p{number:02}")).collect();
    assert_eq!(place.entries(), all);
    place.publish();
    place.consume(&config).ok();
    assert_eq!(place.entries(), all);
    let status = place.json(&["status"]);
    assert_eq!((&status["pending"], &status["consumers"][0]["inbox_rows"]), (&0.into(), &50.into()), "{status}");
    let table = place.oncebox(&["status"]).run().ok();
    assert!(table.contains("outbox: 0 pending") && table.contains("ledger"), "{table}");

    assert_eq!(place.oncebox(&["sender", "--until-empty"]).run().ok(), "", "there is no e-mail to send");

    place.enqueue("acc-9", "{}");
    place.publish();
    place.consume(&config).ok_saying(&["idle, but messages wait or are dead", "oncebox dead list"]);

    // Another consumer says nothing of what is dead at this one.
    let other = place.config(
        "[[consumer]]\nname = 'books'\ntopics = ['payments']\n\
         [[consumer.on]]\nkind = 'none'\nhandler = 'sql'\nsql = ['select 1']\n",
    );
    let done = place.consume(&other);
    assert!(!done.stderr.contains("messages wait or are dead"), "{done:?}");
    done.ok();
}

/// Shown by leaving the standby alone: from cron such programs pile up.
#[test]
fn until_empty_beside_another_publisher_ends_when_nothing_is_pending() {
    let place = Place::migrated();
    let mut publisher = place.publisher(&["--listen", "127.0.0.1:0"]).start();
    publisher.until_ready_says(200, &["relay 0: ready"]);
    place.publisher(&["--until-empty"]).run().ok_saying(&["standing by", "nothing is pending"]);
    publisher.stop().ok();
    let test = "until_empty_beside_another_publisher_ends_when_nothing_is_pending";
    let of_server = Place::on_server(test, "ONCEBOX_TEST_POSTGRES").map(|place| {
        let lease = "owner = 'other', lease_until = now() + interval '1 hour', lease_seconds = 3600";
        // What the other one proved stays in the table.
        (place, format!("oncebox.shard set {lease}"), "update oncebox.shard set scanned_to = 1000")
    });
    let lease = "owner = 'other', lease_until = (unixepoch() + 3600) * 1000, lease_length = 3600000";
    let of_file = (
        place,
        format!("oncebox_shard set {lease}"),
        "update oncebox_shard set scanned_to = 1000; delete from oncebox_outbox",
    );
    for (place, lease, proven) in of_server.into_iter().chain([of_file]) {
        place.enqueue("acc-1", &payment("p1"));
        place.sql(&format!("update {lease}"));
        let mut beside = place.publisher(&["--until-empty"]).start();
        beside.says(&["standing by", "other has the lease"]);
        std::thread::sleep(Duration::from_secs(3));
        assert!(!beside.has_ended(), "the message is pending");
        place.sql(proven);
        beside.ends().ok_saying(&["nothing is pending"]);
    }
}

/// A consumer keeps the rule by which it told messages apart: another one would take known messages
/// for new. Shown to fail without the flag: the refusal named one that did not exist.
#[test]
fn another_id_rule_is_refused_until_a_start_accepts_it() {
    let place = Place::migrated();
    let config = place.ledger();
    place.enqueue("acc-1", &payment("p1"));
    place.publish();
    place.consume(&config).ok();
    let file = std::fs::read_to_string(&config).unwrap();
    let changed = place.config(&file.replace("topics =", "id = \"payload:/paymentId\"\ntopics ="));
    let start =
        |more: &[&str]| place.consumer(&[&["--until-idle", "300ms", "--config", &changed], more].concat()).run();
    start(&[]).fails(3, &["ledger", "`envelope`", "`payload:/paymentId`", "`consumer --accept`"]);
    start(&["--accept"]).ok();
    start(&[]).ok();
    assert_eq!(place.entries(), ["p1"]);
}

#[test]
fn the_first_signal_ends_a_program_with_0_and_what_came_meanwhile_is_not_lost() {
    let place = Place::migrated();
    let config = place.ledger();
    for signal in ["-TERM", "-INT"] {
        let mut publisher = place.publisher(&["--listen", "127.0.0.1:0"]).start();
        let mut consumer = place.consumer(&["--listen", "127.0.0.1:0", "--config", &config]).start();
        publisher.until_ready_says(200, &["relay 0: ready"]);
        consumer.until_ready_says(200, &["consumer ledger: ready"]);
        place.enqueue("acc-7", &payment(&format!("p{signal}")));
        publisher.signal(signal);
        consumer.signal(signal);
        publisher.ends().ok_saying(&["stopping"]);
        consumer.ends().ok_saying(&["stopping"]);
    }
    place.publish();
    place.consume(&config).ok();
    assert_eq!(place.entries(), ["p-INT", "p-TERM"]);
}

/// With a dead message on both sides, and one that the broker, which is away, cannot take.
///
/// Shown by reporting at the end whatever it was: "the outbox is empty", and "idle".
#[test]
fn a_program_that_is_stopped_before_its_end_says_of_nothing_that_it_is_empty_or_idle() {
    let place = Place::migrated();
    let config = place.ledger();
    place.enqueue("acc-9", "{}");
    place.publish();
    place.consume(&config).ok();
    place.sql(
        "insert into oncebox_outbox_dead (position, bucket, message_id, topic, key, kind, headers, payload, content_type, \
         created_at, state, holds, reason, diverted_at) values (1, 0, '0199aaaa-0000-7000-8000-000000000001', \
         'payments', 'k', 'made', '[]', 'x', 'text/plain', unixepoch() * 1000, 'dead', 1, 'too large', unixepoch() * 1000)",
    );
    place.enqueue("acc-7", &payment("p1"));
    let listen = ["--listen", "127.0.0.1:0"];
    let away = [&listen[..], &["--until-empty", "--broker", "kafka://127.0.0.1:1"]].concat();
    let mut publisher = place.publisher(&away).env("ONCEBOX_SHUTDOWN_GRACE", "1s").start();
    publisher.until_ready_says(503, &["relay 0: waiting"]);
    let long = [&listen[..], &["--until-idle", "1h", "--config", &config]].concat();
    let mut consumer = place.consumer(&long).start();
    consumer.until_ready_says(200, &["consumer ledger: ready"]);
    let (publisher, consumer) = (publisher.stop(), consumer.stop());
    assert!(!publisher.stderr.contains("the outbox is empty"), "{publisher:?}");
    assert!(!consumer.stderr.contains("idle, but"), "{consumer:?}");
    publisher.ok();
    consumer.ok();
    assert_eq!(place.json(&["status"])["pending"], 1);
}

/// As `timeout` of GNU does it: to the process, and to its group. Shown by counting every signal.
#[test]
fn a_signal_that_is_sent_twice_at_once_is_one_signal() {
    let place = Place::migrated();
    for _ in 0..5 {
        let mut publisher = place.publisher(&["--listen", "127.0.0.1:0"]).start();
        publisher.until_ready_says(200, &["relay 0: ready"]);
        publisher.signal_twice("-TERM");
        let done = publisher.ends();
        assert!(!done.stderr.contains("a second signal"), "{done:?}");
        done.ok();
    }
}

/// The handler cannot commit while the test holds the write lock, so the first signal has to wait
/// for it.
///
/// Shown by letting the second signal cancel the token once more instead of ending the process: the
/// first grace runs out.
#[test]
fn the_second_signal_ends_a_program_at_once_and_the_work_is_done_by_the_next_one() {
    let place = Place::migrated();
    let config = place.ledger();
    // The consumer and its topic are known before the lock is taken.
    place.consume(&config).ok();
    let grace = ("ONCEBOX_SHUTDOWN_GRACE", "10m");
    let mut consumer = place.consumer(&["--listen", "127.0.0.1:0", "--config", &config]).env(grace.0, grace.1).start();
    // Taking a partition is a write too.
    for partition in 0..4 {
        consumer.says(&["assigned", &format!("partition={partition}")]);
    }
    // Nothing of the partition waits for the lock once a message of it was handled.
    place.append(Some("acc-7"), &[("ce_id", "0"), ("ce_type", "payment.created")], &payment("p0"));
    eventually("the first payment is in the ledger", || (place.entries() == ["p0"]).then_some(()));
    let lock = Locked::on(place.database());
    place.append(Some("acc-7"), &[("ce_id", "1"), ("ce_type", "payment.created")], &payment("p1"));
    eventually("the handler is on its way", || {
        consumer.get("/metrics").1.contains("oncebox_consumer_in_flight{consumer=\"ledger\"} 1").then_some(())
    });
    consumer.signal("-TERM");
    consumer.says(&["stopping"]);
    // What comes within a moment of the first counts as the first.
    eventually("a later signal is the second", || {
        consumer.signal("-TERM");
        consumer.has_ended().then_some(())
    });
    let done = consumer.ends();
    assert_eq!((done.code(), done.stderr.contains("a second signal: ending at once")), (Some(1), true), "{done:?}");
    drop(lock);
    assert_eq!(place.entries(), ["p0"]);
    // The group waits until the one who did not say goodbye is out of time.
    let mut consumer = place.consumer(&["--config", &config]).start();
    eventually("both payments are in the ledger", || (place.entries() == ["p0", "p1"]).then_some(()));
    consumer.says(&["assigned", "suspicious=true"]);
    consumer.stop().ok();
}

/// The value of a metric, by its whole name with labels.
fn metric(program: &mut Running, name: &str) -> Option<f64> {
    let text = program.get("/metrics").1;
    let value = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok();
    text.lines().find_map(value)
}

/// Shown by: not remembering who was shown (the gauges of the forgotten consumer keep their last
/// values for as long as the process lives).
#[test]
fn the_ages_of_what_is_held_and_what_waits_are_in_metrics_and_end_with_a_consumer_that_was_forgotten() {
    let place = Place::migrated();
    let config = place.ledger();
    // The first is dead, and the second held behind it.
    place.enqueue("acc-9", "{}");
    place.enqueue("acc-9", &payment("p1"));
    place.publish();
    place.consume(&config).ok();
    // The same in the outbox, as a publisher leaves it.
    for (position, state, reason) in [(1_000_001, "dead", "'too large'"), (1_000_002, "held-behind", "null")] {
        place.sql(&format!(
            "insert into oncebox_outbox_dead (position, bucket, message_id, topic, key, kind, headers, payload, content_type, \
             created_at, state, holds, reason, diverted_at) values ({position}, 0, '0199aaaa-0000-7000-8000-00000{position}', \
             'payments', 'k', 'made', '[]', 'x', 'text/plain', unixepoch() * 1000 - 60000, '{state}', {}, {reason}, \
             unixepoch() * 1000)",
            u8::from(state == "dead")
        ));
    }
    let mut publisher = place.publisher(&["--listen", "127.0.0.1:0"]).start();
    let of_consumer = [
        "oncebox_oldest_waiting_age_seconds{consumer=\"ledger\"}",
        "oncebox_consumer_held_messages{consumer=\"ledger\"}",
        "oncebox_dead_messages{place=\"ledger\"}",
    ];
    for name in of_consumer {
        eventually(name, || metric(&mut publisher, name).filter(|value| *value > 0.0));
    }
    eventually("the age of what is held", || {
        metric(&mut publisher, "oncebox_oldest_held_age_seconds").filter(|age| (60.0..600.0).contains(age))
    });
    assert!(metric(&mut publisher, "oncebox_status_age_seconds").is_some_and(|age| age < 60.0));
    place.sql("update oncebox_consumer set seen_at = seen_at - 3600000");
    place.oncebox(&["consumers", "forget", "ledger", "--yes", "--why", "replaced"]).run().ok();
    for name in of_consumer {
        eventually(name, || metric(&mut publisher, name).filter(|value| *value == 0.0));
    }
    publisher.stop().ok();
}

/// Shown by: closing the connections without a bound (that waits for the database after the grace).
#[test]
fn a_publisher_whose_database_stands_still_says_so_and_a_stop_ends_with_its_grace() {
    let test = "a_publisher_whose_database_stands_still_says_so_and_a_stop_ends_with_its_grace";
    let Some(server) = block_on(Server::start(test, "")) else { return };
    let place = Place::on(Some(&server.url()), None);
    place.oncebox(&["migrate", "up"]).run().ok();
    let mut publisher = place.publisher(&["--listen", "127.0.0.1:0"]).env("ONCEBOX_SHUTDOWN_GRACE", "2s").start();
    publisher.until_ready_says(200, &["relay 0: ready"]);
    eventually("the gauges", || metric(&mut publisher, "oncebox_status_age_seconds"));
    let (standstill, began) = (Standstill::watch(), Instant::now());
    server.freeze();
    publisher.until_ready_says(503, &["does not answer"]);
    let late = began.elapsed();
    assert!(late < standstill.allows(Duration::from_secs(2)), "{late:?}");
    eventually("the gauges grow old", || metric(&mut publisher, "oncebox_status_age_seconds").filter(|age| *age > 4.0));
    let (standstill, began) = (Standstill::watch(), Instant::now());
    let done = publisher.stop();
    let late = began.elapsed();
    assert!(late < standstill.allows(Duration::from_secs(3)), "{late:?}: {}", done.stderr);
    done.ok();
}

/// Processes that name this directory in their arguments.
fn processes_of(directory: &str) -> usize {
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    let arguments = all.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
    arguments.filter(|arguments| String::from_utf8_lossy(arguments).contains(directory)).count()
}

/// A show on files, once its four processes run: the program, its directory, and the beginning of
/// the names of its settings, which its processes have as an argument.
fn demo_on_stage(place: &Place) -> (Running, PathBuf, String) {
    let temporary = place.path().join("tmp");
    std::fs::create_dir_all(&temporary).unwrap();
    // More than it can do before it is stopped.
    let demo = Program::new(ONCEBOX, &["demo", "--no-progress", "--messages", "200000"]).within(place.path());
    let demo = demo.env("TMPDIR", &temporary.display().to_string()).start();
    let settings = format!("{}/oncebox-demo-", temporary.display());
    eventually("the cast is on the stage", || (processes_of(&settings) >= 4).then_some(()));
    (demo, temporary, settings)
}

/// Shown by children whose stdin is empty: they run on, each with its connections.
#[test]
fn a_demo_that_is_killed_takes_its_processes_with_it_and_has_said_what_stays() {
    let place = Place::new();
    let (mut demo, temporary, settings) = demo_on_stage(&place);
    let directory = std::fs::read_dir(&temporary).unwrap().next().unwrap().unwrap().path();
    demo.says(&[&directory.display().to_string(), "database: sqlite://", "topic: demo-", "consumers: demo-"]);
    demo.signal("-KILL");
    eventually("nobody is left", || (processes_of(&settings) == 0).then_some(()));
    drop(demo);
}

/// A closed terminal sends SIGHUP. Shown by leaving it to the system: the directory stays. And by
/// listening for it where it is ignored: `nohup` has no effect.
#[test]
fn a_hangup_stops_a_program_as_sigterm_does_unless_it_is_to_be_ignored() {
    let place = Place::migrated();
    let (demo, temporary, settings) = demo_on_stage(&place);
    demo.signal("-HUP");
    demo.ends().fails(1, &["interrupted"]);
    assert_eq!((processes_of(&settings), std::fs::read_dir(temporary).unwrap().count()), (0, 0));
    let mut publisher = place.publisher(&["--listen", "127.0.0.1:0"]).start();
    publisher.until_ready_says(200, &["relay 0: ready"]);
    publisher.signal("-HUP");
    publisher.ends().ok();
    let mut publisher = place.program("nohup", &[PUBLISHER, "--listen", "127.0.0.1:0"]).start();
    publisher.until_ready_says(200, &["relay 0: ready"]);
    publisher.signal("-HUP");
    std::thread::sleep(Duration::from_secs(1));
    publisher.until_ready_says(200, &["relay 0: ready"]);
    publisher.stop().ok();
}

/// Shown by leaving the signals to the system: publisher, consumers and sender run on; by saying
/// where the files are with `eprintln!`, which is no JSON; by writing its settings over a file
/// `oncebox.toml` of the directory that was named.
#[test]
fn an_interrupted_demo_leaves_no_process_behind() {
    let place = Place::new();
    let directory = place.path().join("demo").display().to_string();
    let config = format!("{directory}/oncebox-");
    std::fs::create_dir(&directory).unwrap();
    let mine = format!("{directory}/oncebox.toml");
    std::fs::write(&mine, "[log]").unwrap();
    let arguments = ["demo", "--no-progress", "--keep", "--dir", &directory, "--log-format", "json"];
    let demo = Program::new(ONCEBOX, &arguments).within(place.path()).start();
    eventually("the cast is on the stage", || (processes_of(&config) >= 4).then_some(()));
    demo.signal("-TERM");
    let done = demo.ends();
    done.fails(1, &["interrupted", "logs and files: "]);
    objects(&done);
    eventually("nobody is left", || (processes_of(&config) == 0).then_some(()));
    assert_eq!(std::fs::read_to_string(&mine).unwrap(), "[log]");
}
