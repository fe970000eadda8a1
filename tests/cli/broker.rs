//! What is left on a broker's server when a test is done with it.

use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions};
use rdkafka::client::DefaultClientContext;

use super::kit::block_on;

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
