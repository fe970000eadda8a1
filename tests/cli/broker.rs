//! What others do on a broker's server: a message of theirs, and the end of a test's own topic, exchange and queue.

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

/// Deletes topic, exchange and queue of this name.
pub(crate) fn forget(server: &str, name: &str) {
    block_on(async {
        if let Some(servers) = server.strip_prefix("kafka://") {
            let admin: AdminClient<DefaultClientContext> =
                ClientConfig::new().set("bootstrap.servers", servers).create().unwrap();
            admin.delete_topics(&[name], &AdminOptions::new()).await.unwrap();
            let _ = admin.delete_groups(&[name], &AdminOptions::new()).await;
        } else {
            let connection = lapin::Connection::connect(server, lapin::ConnectionProperties::default()).await.unwrap();
            let channel = connection.create_channel().await.unwrap();
            channel.queue_delete(format!("{name}.{name}").into(), Default::default()).await.unwrap();
            channel.exchange_delete(name.into(), Default::default()).await.unwrap();
            connection.close(200, "done".into()).await.unwrap();
        }
    });
}
