//! Whether a host of a URL is this machine: then nothing lies between us and the server, and it is
//! not asked for TLS.

use std::net::IpAddr;

/// Whether a host is this machine, as far as its name tells.
pub(crate) fn is_loopback(host: &str) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shown by: comparing only the beginning of the host. A password then goes to a foreign host
    /// without TLS.
    #[test]
    fn a_host_is_this_machine_only_by_its_whole_name_or_address() {
        for here in ["localhost", "LocalHost", "127.0.0.1", "127.8.9.1", "::1", "[::1]"] {
            assert!(is_loopback(here), "{here}");
        }
        for away in ["", "broker", "localhost.example", "127.0.0.1.example", "10.0.0.1", "0.0.0.0", "::", "[::2]"] {
            assert!(!is_loopback(away), "{away}");
        }
    }
}
