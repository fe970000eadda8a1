//! Which endpoints may be called: those at public addresses, and hosts that are allowed.
//!
//! Guarantees, for all but the allowed hosts: an address is checked if it stands in the URL, when a
//! name is resolved, and again by the resolver of the connection itself, so a name that changes in
//! between reaches no private address. One private address among public ones refuses the name.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use reqwest::Url;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use url::Host;

#[derive(Debug)]
pub(super) struct Addresses {
    pub(super) allowed_hosts: BTreeSet<String>,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum Barred {
    #[error("the endpoint is not `https`")]
    Scheme,
    /// The URL holds a user or a password, which would end up in logs.
    #[error("the endpoint's URL holds a user or a password")]
    Credentials,
    #[error("the endpoint's URL has no host")]
    NoHost,
    #[error("the endpoint is at {0}, which is no public address")]
    Private(IpAddr),
    /// The name was not resolved; it may be later.
    #[error("the endpoint's name is not resolved: {0}")]
    Unresolved(std::io::Error),
}

impl Addresses {
    pub(super) fn permits(&self, url: &Url) -> Result<(), Barred> {
        let host = url.host_str().ok_or(Barred::NoHost)?;
        let allowed = self.allowed_hosts.contains(host);
        if url.scheme() != "https" && !(allowed && url.scheme() == "http") {
            return Err(Barred::Scheme);
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err(Barred::Credentials);
        }
        if allowed {
            return Ok(());
        }
        match url.host() {
            Some(Host::Ipv4(ip)) => public(ip.into()),
            Some(Host::Ipv6(ip)) => public(ip.into()),
            _ => Ok(()),
        }
    }

    /// Checks the addresses to which the URL's name resolves now.
    pub(super) async fn resolves(&self, url: &Url) -> Result<(), Barred> {
        match url.host() {
            Some(Host::Domain(name)) => self.resolve(name).await.map(drop),
            _ => Ok(()),
        }
    }

    async fn resolve(&self, name: &str) -> Result<Vec<SocketAddr>, Barred> {
        let found: Vec<SocketAddr> = tokio::net::lookup_host((name, 0)).await.map_err(Barred::Unresolved)?.collect();
        if !self.allowed_hosts.contains(name) {
            found.iter().try_for_each(|address| public(address.ip()))?;
        }
        Ok(found)
    }
}

/// The resolver of connections. It returns no address that is barred.
#[derive(Debug, Clone)]
pub(super) struct Public(pub(super) Arc<Addresses>);

impl Resolve for Public {
    fn resolve(&self, name: Name) -> Resolving {
        let addresses = Arc::clone(&self.0);
        Box::pin(async move {
            let found = addresses.resolve(name.as_str()).await?;
            Ok(Box::new(found.into_iter()) as Addrs)
        })
    }
}

fn public(ip: IpAddr) -> Result<(), Barred> {
    let is_public = match ip {
        IpAddr::V4(ip) => is_public_v4(ip),
        IpAddr::V6(ip) => is_public_v6(ip),
    };
    if is_public { Ok(()) } else { Err(Barred::Private(ip)) }
}

/// Refuses every range that IANA's registry of special addresses does not call globally reachable.
fn is_public_v4(ip: Ipv4Addr) -> bool {
    let [a, b, c, _] = ip.octets();
    !(a == 0
        || ip.is_private()
        || ip.is_loopback()
        || ip.is_link_local()
        || ip.is_documentation()
        || ip.is_multicast()
        || (a == 100 && (64..128).contains(&b))
        || (a == 192 && b == 0 && c == 0)
        || (a == 192 && b == 88 && c == 99)
        || (a == 198 && (b == 18 || b == 19))
        || a >= 240)
}

/// Accepts global unicast only. Mapped, translated and 6to4 addresses are judged by the IPv4
/// address inside them.
fn is_public_v6(ip: Ipv6Addr) -> bool {
    let inside = |high: u16, low: u16| {
        let [a, b] = high.to_be_bytes();
        let [c, d] = low.to_be_bytes();
        is_public_v4(Ipv4Addr::new(a, b, c, d))
    };
    match ip.segments() {
        [0, 0, 0, 0, 0, 0xffff, high, low] | [0x64, 0xff9b, 0, 0, 0, 0, high, low] | [0x2002, high, low, ..] => {
            inside(high, low)
        }
        // Teredo, benchmarking and ORCHID; documentation.
        [0x2001, 0..=0x1ff, ..] | [0x2001, 0xdb8, ..] | [0x3fff, 0..=0xfff, ..] => false,
        [first, ..] => (0x2000..=0x3fff).contains(&first),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn addresses(hosts: &[&str]) -> Addresses {
        Addresses { allowed_hosts: hosts.iter().map(|&host| host.to_owned()).collect() }
    }

    // Shown by: removing any line of the two lists.
    #[test]
    fn o28_private_and_disguised_addresses_are_refused() {
        let private = "127.0.0.1 0.0.0.0 0.1.2.3 10.0.0.1 172.16.0.1 172.31.255.255 192.168.1.1 169.254.169.254
            100.64.0.1 192.0.0.1 192.0.2.1 192.88.99.1 198.18.0.1 198.51.100.1 203.0.113.1 224.0.0.1
            240.0.0.1 255.255.255.255 [::] [::1] [::ffff:10.0.0.1] [64:ff9b::a00:1] [2002:a00:1::] [2001::1]
            [2001:db8::1] [3fff::1] [fc00::1] [fd12::1] [fe80::1] [fec0::1] [ff02::1] 2130706433 0x7f.1
            017700000001";
        for private in private.split_whitespace() {
            let url = Url::parse(&format!("https://{private}/hook")).unwrap();
            assert!(matches!(addresses(&[]).permits(&url), Err(Barred::Private(_))), "{private}");
        }
        let public = "1.1.1.1 100.63.255.255 100.128.0.1 172.15.0.1 172.32.0.1 198.20.0.1 [2606:4700::1111]
            [::ffff:1.1.1.1] [64:ff9b::101:101] example.com";
        for public in public.split_whitespace() {
            let url = Url::parse(&format!("https://{public}/hook")).unwrap();
            assert!(addresses(&[]).permits(&url).is_ok(), "{public}");
        }
    }

    #[test]
    fn o28_only_an_allowed_host_is_spoken_to_in_plain_or_at_home() {
        let url = |text: &str| Url::parse(text).unwrap();
        let allows = addresses(&["127.0.0.1", "hooks.internal"]);
        assert!(allows.permits(&url("http://127.0.0.1:8080/hook")).is_ok());
        assert!(allows.permits(&url("http://hooks.internal/hook")).is_ok());
        assert!(matches!(allows.permits(&url("http://example.com/hook")), Err(Barred::Scheme)));
        assert!(matches!(allows.permits(&url("ftp://127.0.0.1/hook")), Err(Barred::Scheme)));
        assert!(matches!(allows.permits(&url("https://u:p@example.com/")), Err(Barred::Credentials)));
        assert!(matches!(allows.permits(&url("https://127.0.0.2/")), Err(Barred::Private(_))));
    }

    // Shown by: resolving without the check of addresses.
    #[tokio::test]
    async fn o28_a_name_that_resolves_to_a_private_address_is_not_spoken_to() {
        let url = Url::parse("https://localhost/hook").unwrap();
        assert!(matches!(addresses(&[]).resolves(&url).await, Err(Barred::Private(_))));
        assert!(addresses(&["localhost"]).resolves(&url).await.is_ok());
        let resolver = Public(Arc::new(addresses(&[])));
        assert!(resolver.resolve("localhost".parse().unwrap()).await.is_err());
    }
}
