//! A second name for a server, which stands in no certificate.

use tokio::net::{TcpListener, TcpStream};
use url::Url;

/// The URL of the same server under an address that its certificate does not have.
pub(crate) async fn under_another_name(url: &str) -> String {
    let mut url = Url::parse(url).unwrap();
    let port = url.port().expect("a server of these tests has a port of its own");
    let listener = TcpListener::bind("127.0.0.2:0").await.unwrap();
    url.set_host(Some("127.0.0.2")).unwrap();
    url.set_port(Some(listener.local_addr().unwrap().port())).unwrap();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut server = TcpStream::connect(("127.0.0.1", port)).await?;
                tokio::io::copy_bidirectional(&mut client, &mut server).await
            });
        }
    });
    url.into()
}
