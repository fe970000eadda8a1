//! What others do on a broker's server: a message of theirs, and the end of a test's own topic,
//! exchange and queue.

use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions};
use rdkafka::client::DefaultClientContext;
use rdkafka::producer::{FutureProducer, FutureRecord};

use super::kit::block_on;

/// A message that no program of ours wrote: a key and a payload, no id, no kind.
pub(crate) fn foreign(server: &str, name: &str, payload: &str) {
    block_on(async {
        if let Some(servers) = server.strip_prefix("kafka://") {
            let producer: FutureProducer = ClientConfig::new().set("bootstrap.servers", servers).create().unwrap();
            let record = FutureRecord::to(name).key("acc-7").payload(payload);
            producer.send(record, std::time::Duration::from_secs(30)).await.unwrap();
        } else {
            let connection = lapin::Connection::connect(server, lapin::ConnectionProperties::default()).await.unwrap();
            let channel = connection.create_channel().await.unwrap();
            channel.confirm_select(Default::default()).await.unwrap();
            let properties = lapin::BasicProperties::default().with_delivery_mode(2);
            let sent =
                channel.basic_publish(name.into(), name.into(), Default::default(), payload.as_bytes(), properties);
            assert!(sent.await.unwrap().await.unwrap().is_ack());
            connection.close(200, "done".into()).await.unwrap();
        }
    });
}

/// A topic, a group, an exchange and a queue of one name, deleted when the test is done with them,
/// also when it fails.
#[derive(Debug)]
pub(crate) struct Own {
    server: String,
    name: String,
}

impl Own {
    pub(crate) fn new(server: &str, name: &str) -> Self {
        Self { server: server.to_owned(), name: name.to_owned() }
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        let (server, name) = (self.server.clone(), self.name.clone());
        // A panic there must not meet one of the test.
        let forgotten = std::thread::spawn(move || block_on(forget(&server, &name))).join();
        if forgotten.is_err() {
            eprintln!("{} was not deleted", self.name);
        }
    }
}

async fn forget(server: &str, name: &str) {
    if let Some(servers) = server.strip_prefix("kafka://") {
        let admin: AdminClient<DefaultClientContext> =
            ClientConfig::new().set("bootstrap.servers", servers).create().unwrap();
        admin.delete_topics(&[name], &AdminOptions::new()).await.unwrap();
        // A group that still has members goes by itself, later.
        let _ = admin.delete_groups(&[name], &AdminOptions::new()).await;
    } else {
        let connection = lapin::Connection::connect(server, lapin::ConnectionProperties::default()).await.unwrap();
        let channel = connection.create_channel().await.unwrap();
        channel.queue_delete(format!("{name}.{name}").into(), Default::default()).await.unwrap();
        channel.exchange_delete(name.into(), Default::default()).await.unwrap();
        connection.close(200, "done".into()).await.unwrap();
    }
}
