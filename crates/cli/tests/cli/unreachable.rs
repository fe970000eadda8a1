//! Servers that are away, or do not let us in. What a person runs fails at once and names host and
//! port; `publisher`, `consumer` and `oncebox sender` wait, say for what, and go on by themselves.

use std::net::{SocketAddr, TcpListener, TcpStream};

use tokio::net::TcpSocket;

use crate::broker::Own;
use crate::kit::{Done, Place, Program, SECRET, eventually, payment};
use crate::support::{service, unique};

/// An address where nobody listens, until somebody is let through to a server there. The socket is
/// bound, so that the port is nobody else's meanwhile.
struct Door(SocketAddr, #[allow(dead_code)] TcpSocket);

impl Door {
    fn closed() -> Self {
        // Of loopback, but not where other tests get their ports.
        let reserved = TcpSocket::new_v4().unwrap();
        reserved.set_reuseaddr(true).unwrap();
        reserved.bind("127.0.99.1:0".parse().unwrap()).unwrap();
        Self(reserved.local_addr().unwrap(), reserved)
    }

    /// The URL of a server as it is reached through this door.
    fn url(&self, server: &str) -> String {
        let mut url = url::Url::parse(server).unwrap();
        url.set_ip_host(self.0.ip()).unwrap();
        url.set_port(Some(self.0.port())).unwrap();
        url.into()
    }

    /// From now on connections reach the server.
    fn open(&self, server: &str) {
        let url = url::Url::parse(server).unwrap();
        let server = format!("{}:{}", url.host_str().unwrap(), url.port().unwrap());
        let listener = TcpListener::bind(self.0).unwrap();
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let server = TcpStream::connect(&server).unwrap();
                for (mut from, mut to) in [(client.try_clone().unwrap(), server.try_clone().unwrap()), (server, client)]
                {
                    std::thread::spawn(move || {
                        let _ = std::io::copy(&mut from, &mut to);
                        let _ = to.shutdown(std::net::Shutdown::Write);
                    });
                }
            }
        });
    }
}

/// At debug level too, no password is said: the kit looks for it.
fn loud(program: Program) -> Done {
    program.env("RUST_LOG", "debug").run()
}

/// Shown by leaving away the first connection of the PostgreSQL store: the pool says only that time
/// is up, after 30 s.
#[test]
fn a_command_fails_with_1_at_once_and_names_the_database_server() {
    let door = Door::closed();
    for scheme in ["postgres", "mysql"] {
        let url = format!("{scheme}://app:{SECRET}@{}/app", door.0);
        let place = Place::on(Some(&url), None);
        let shown = format!("{scheme}://app:***@{}/app", door.0);
        for arguments in [&["status"][..], &["migrate", "up"], &["migrate", "status"], &["dead", "list"]] {
            loud(place.oncebox(arguments)).fails(1, &[&shown, "not available", "Connection refused"]);
        }
        let doctor = place.oncebox(&["doctor"]).run();
        doctor.ends_with(3, &["broken"]);
        assert!(doctor.stdout.contains(&shown) && doctor.stdout.contains("Connection refused"), "{}", doctor.stdout);
    }
}

#[test]
fn doctor_names_a_broker_that_is_away_and_goes_on_with_the_database() {
    let door = Door::closed();
    let place = Place::migrated();
    let mut brokers = vec![format!("amqp://app:{SECRET}@{}/%2f", door.0), format!("kafka://{}", door.0)];
    if cfg!(feature = "kafka-tls") {
        brokers.push(format!("kafkas://app:{SECRET}@{}", door.0));
    }
    for url in brokers {
        let doctor = loud(place.oncebox(&["doctor", "--broker", &url]));
        doctor.ends_with(3, &["broken"]);
        for text in [&door.0.to_string(), "Connection refused", "start it, or mend [broker] url", "durability"] {
            assert!(doctor.stdout.contains(text), "{text} in {}", doctor.stdout);
        }
    }
}

/// Waits visibly, and goes on when the door is opened; nothing of what waited is lost.
fn waits_for_the_database(test: &str, variable: &str) {
    let Some(place) = Place::on_server(test, variable) else { return };
    let config = place.ledger();
    place.enqueue("acc-7", &payment("p1"));

    let door = Door::closed();
    let url = door.url(place.database());
    let waiting = ["database: waiting", &door.0.to_string(), "Connection refused"];
    let listen = ["--listen", "127.0.0.1:0", "--database", &url];
    let mut publisher = place.publisher(&listen).env("RUST_LOG", "debug").start();
    let mut consumer = place.consumer(&[&listen[..], &["--config", &config]].concat()).env("RUST_LOG", "debug").start();
    for program in [&mut publisher, &mut consumer] {
        program.until_ready_says(503, &waiting);
        assert_eq!(program.get("/livez").0, 200, "waiting is no reason to be restarted");
        program.says(&["WARN", "waiting", "database", &door.0.to_string()]);
    }
    // Told to stop while it waits, a program has done nothing wrong.
    let mut other = place.publisher(&listen).start();
    other.until_ready_says(503, &waiting);
    other.stop().ok_saying(&["stopped while waiting for the database"]);

    door.open(place.database());
    let ready = publisher.until_ready_says(200, &["relay 0: ready"]);
    assert!(!ready.contains("database"), "what was waited for is there: {ready}");
    consumer.until_ready_says(200, &["consumer ledger: ready"]);
    eventually("the payment is in the ledger", || (place.entries() == ["p1"]).then_some(()));
    publisher.stop().ok();
    consumer.stop().ok();
}

/// Shown by giving the connection a health of its own: `/readyz` says nothing of what is waited
/// for.
#[test]
fn programs_wait_visibly_for_postgres_and_go_on_when_it_appears() {
    let test = "programs_wait_visibly_for_postgres_and_go_on_when_it_appears";
    waits_for_the_database(test, "ONCEBOX_TEST_POSTGRES");
}

#[test]
fn programs_wait_visibly_for_mariadb_and_go_on_when_it_appears() {
    let test = "programs_wait_visibly_for_mariadb_and_go_on_when_it_appears";
    waits_for_the_database(test, "ONCEBOX_TEST_MARIADB");
}

/// Between a failover and the promotion. The server is told to say that it is a standby by a
/// function of that name.
#[test]
fn programs_wait_visibly_for_a_standby_to_be_promoted() {
    let test = "programs_wait_visibly_for_a_standby_to_be_promoted";
    let Some(place) = Place::on_server(test, "ONCEBOX_TEST_POSTGRES") else { return };
    place.sql(
        "create schema standby;
         create function standby.pg_is_in_recovery() returns boolean language sql as 'select true';
         do $$ begin execute format('alter database %I set search_path = standby, pg_catalog, public', current_database()); end $$",
    );
    let config = place.ledger();
    place.enqueue("acc-7", &payment("p1"));
    let arguments = ["--listen", "127.0.0.1:0", "--config", &config];
    let mut publisher = place.publisher(&arguments).start();
    let mut consumer = place.consumer(&arguments).start();
    let mut sender = place.oncebox(&["sender", "--listen", "127.0.0.1:0"]).start();
    publisher.until_ready_says(503, &["database", "waiting", "standby"]);
    sender.until_ready_says(503, &["database", "waiting", "standby"]);
    consumer.until_ready_says(503, &["database", "waiting", "standby"]);
    place.oncebox(&["doctor"]).run().ends_with(3, &["not there yet"]);
    place.sql("drop function standby.pg_is_in_recovery()");
    publisher.until_ready_says(200, &["relay 0: ready"]);
    consumer.until_ready_says(200, &["consumer ledger: ready"]);
    sender.until_ready_says(200, &["e-mail sender: ready"]);
    eventually("the payment is in the ledger", || (place.entries() == ["p1"]).then_some(()));
    publisher.stop().ok();
    consumer.stop().ok();
    sender.stop().ok();
}

/// The same for a broker; names there are the test's own.
fn waits_for_the_broker(server: &str, settings: &str, part: &str) {
    let place = Place::migrated();
    let name = unique("cli");
    let _own = Own::new(server, &name);
    let config = place.ledger();
    let own = std::fs::read_to_string(&config)
        .unwrap()
        .replace("\"payments\"", &format!("\"{name}\""))
        .replace("\"ledger\"", &format!("\"{name}\""));
    let config = place.config(&format!("{}{own}", settings.replace("NAME", &name)));
    let door = Door::closed();
    let url = door.url(server);
    let arguments = ["--listen", "127.0.0.1:0", "--broker", &url, "--config", &config];
    let mut publisher = place.publisher(&arguments).env("RUST_LOG", "debug").start();
    let mut consumer = place.consumer(&arguments).env("RUST_LOG", "debug").start();
    publisher.until_ready_says(503, &[part, "waiting", &door.0.to_string()]);
    consumer.until_ready_says(503, &["consumer", "waiting", &door.0.to_string()]);
    place.enqueue_to(&name, "acc-7", &payment("p1"));
    let status = place.json(&["status"]);
    assert_eq!((&status["pending"], &status["dead"], &status["held"]), (&1.into(), &0.into(), &0.into()));

    door.open(server);
    consumer.until_ready_says(200, &["ready"]);
    publisher.until_ready_says(200, &["relay 0: ready"]);
    eventually("the payment is in the ledger", || (place.entries() == ["p1"]).then_some(()));
    publisher.stop().ok();
    consumer.stop().ok();
}

#[test]
fn programs_wait_visibly_for_rabbitmq_and_go_on_when_it_appears() {
    let test = "programs_wait_visibly_for_rabbitmq_and_go_on_when_it_appears";
    let Some(server) = service(test, "ONCEBOX_TEST_RABBITMQ") else { return };
    waits_for_the_broker(&server, "broker.rabbitmq.exchange = 'NAME'\n", "broker");
}

#[test]
fn programs_wait_visibly_for_kafka_and_go_on_when_it_appears() {
    let test = "programs_wait_visibly_for_kafka_and_go_on_when_it_appears";
    let Some(server) = service(test, "ONCEBOX_TEST_KAFKA") else { return };
    waits_for_the_broker(&server, "broker.kafka = { create_topics = true, partitions = 1 }\n", "");
}

fn with_password(server: &str, user: &str) -> String {
    let mut url = url::Url::parse(server).unwrap();
    url.set_username(user).unwrap();
    url.set_password(Some(SECRET)).unwrap();
    url.into()
}

/// A password may be put right on the server, but for a database a program that is let in nowhere
/// has nothing to do.
#[test]
fn a_wrong_password_for_the_database_ends_a_program_with_3_and_names_the_server() {
    let test = "a_wrong_password_for_the_database_ends_a_program_with_3_and_names_the_server";
    let postgres = service(test, "ONCEBOX_TEST_POSTGRES_TLS").map(|url| (url, "password authentication failed"));
    let mariadb = service(test, "ONCEBOX_TEST_MARIADB").map(|url| (url, "Access denied"));
    for (server, words) in [postgres, mariadb].into_iter().flatten() {
        let place = Place::on(Some(&with_password(&server, "oncebox")), None);
        let host = url::Url::parse(&server).unwrap();
        let host = format!("oncebox:***@{}:{}", host.host_str().unwrap(), host.port().unwrap());
        let config =
            place.config("[[consumer]]\nname = 'c'\ntopics = ['t']\non = [{ handler = 'sql', sql = ['select 1'] }]");
        for program in [
            place.oncebox(&["status"]),
            place.oncebox(&["migrate", "up"]),
            place.publisher(&[]),
            place.consumer(&["--config", &config]),
        ] {
            loud(program).ends_with(3, &[&host, words, "correct the user or the password"]);
        }
    }
}

#[test]
fn a_database_that_is_not_there_ends_commands_and_publisher_with_3_and_what_to_do() {
    let test = "a_database_that_is_not_there_ends_commands_and_publisher_with_3_and_what_to_do";
    for variable in ["ONCEBOX_TEST_POSTGRES", "ONCEBOX_TEST_MARIADB"] {
        let Some(server) = service(test, variable) else { continue };
        let mut url = url::Url::parse(&server).unwrap();
        url.set_path("/no_such_database");
        let place = Place::on(Some(url.as_str()), None);
        for program in [place.oncebox(&["status"]), place.oncebox(&["migrate", "up"]), place.publisher(&[])] {
            loud(program).ends_with(3, &["no_such_database", "create this database first"]);
        }
    }
}

/// It accepts connections and says nothing. Shown by: waiting for the connection, 30 s, before the
/// stop is looked at; there was no line of `/readyz` meanwhile.
#[test]
fn a_program_whose_database_is_silent_says_that_it_starts_and_stops_at_once() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("postgres://app:{SECRET}@{}/app", silent.local_addr().unwrap());
    let place = Place::on(Some(&url), None);
    let mut publisher = place.publisher(&["--listen", "127.0.0.1:0"]).start();
    publisher.until_ready_says(503, &["database: starting"]);
    let (accepted, _) = silent.accept().unwrap();
    let stopped = std::time::Instant::now();
    publisher.stop().ok_saying(&["stopped while waiting for the database"]);
    assert!(stopped.elapsed() < std::time::Duration::from_secs(20), "{:?}", stopped.elapsed());
    drop(accepted);
}

/// No waiting mends it. Shown to fail: with a refused certificate taken for a server that is away,
/// the start waits for ever.
#[test]
fn a_server_whose_certificate_is_not_trusted_ends_a_start_with_3_and_its_reason() {
    let test = "a_server_whose_certificate_is_not_trusted_ends_a_start_with_3_and_its_reason";
    let Some(other) = service(test, "ONCEBOX_TEST_OTHER_CA") else { return };
    let consumer = "[[consumer]]\nname = 'c'\ntopics = ['t']\non = [{ handler = 'sql', sql = ['select 1'] }]";
    for (part, variable) in [
        ("database", "ONCEBOX_TEST_POSTGRES_TLS"),
        ("database", "ONCEBOX_TEST_MARIADB_TLS"),
        ("broker", "ONCEBOX_TEST_RABBITMQ_TLS"),
        ("broker", "ONCEBOX_TEST_KAFKA_TLS"),
    ] {
        let Some(server) = service(test, variable) else { continue };
        let server = server.split('?').next().unwrap();
        let (place, url) = match part {
            "database" => (Place::on(Some(server), None), server.to_owned()),
            _ if !cfg!(feature = "kafka-tls") && server.starts_with("kafkas") => continue,
            _ => {
                let place = Place::on(None, Some(server));
                place.oncebox(&["migrate", "up"]).run().ok();
                (place, server.to_owned())
            }
        };
        let address = url.rsplit(['@', '/']).find(|part| part.contains(':')).unwrap().to_owned();
        let config = place.config(&format!("{part}.ca_file = '{other}'\n{consumer}"));
        let said = ["certificate", address.as_str()];
        for program in [place.publisher(&["--config", &config]), place.consumer(&["--config", &config])] {
            loud(program).ends_with(3, &said);
        }
        let doctor = loud(place.oncebox(&["doctor", "--config", &config]));
        doctor.ends_with(3, &["broken"]);
        assert!(doctor.stdout.contains("certificate"), "{}", doctor.stdout);
    }
}

/// Brokers are asked again, since a password may be put right there; until then it is said loudly
/// and nothing is lost.
#[test]
fn a_wrong_password_for_the_broker_is_waited_with_loudly_and_doctor_says_3() {
    let test = "a_wrong_password_for_the_broker_is_waited_with_loudly_and_doctor_says_3";
    let rabbitmq = service(test, "ONCEBOX_TEST_RABBITMQ").map(|url| (with_password(&url, "guest"), String::new()));
    let kafka = service(test, "ONCEBOX_TEST_KAFKA_TLS").zip(service(test, "ONCEBOX_TEST_CA")).map(|(url, ca)| {
        // A URL with more servers than one is none to a parser, so it is put together by hand.
        (url.replace("kafkas://", &format!("kafkas://oncebox:{SECRET}@")), format!("broker.ca_file = '{ca}'\n"))
    });
    for (url, settings) in [rabbitmq, kafka].into_iter().flatten() {
        let place = Place::migrated();
        let config = place.config(&settings);
        place.enqueue("acc-7", &payment("p1"));
        let doctor = loud(place.oncebox(&["doctor", "--broker", &url, "--config", &config]));
        doctor.ends_with(3, &["broken"]);
        let address = url.rsplit_once('@').unwrap().1.split('/').next().unwrap();
        assert!(doctor.stdout.contains("not authorised") && doctor.stdout.contains(address), "{}", doctor.stdout);
        let arguments = ["--listen", "127.0.0.1:0", "--broker", &url, "--config", &config];
        let mut publisher = place.publisher(&arguments).env("RUST_LOG", "debug").start();
        publisher.until_ready_says(503, &["waiting", "not authorised", address]);
        publisher.says(&["not authorised"]);
        publisher.stop().ok();
        let status = place.json(&["status"]);
        assert_eq!((&status["pending"], &status["dead"], &status["held"]), (&1.into(), &0.into(), &0.into()));
    }
}
