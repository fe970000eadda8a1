//! Pure: no I/O, no clock.
//! Splits a URL with several hosts into one URL for each host, in their order. Promise: all other
//! parts of the URL stay as they are. Not here: connecting (`store`, `broker`).
//!
//! `postgres://app:secret@a:5432,b:5432/shop?sslmode=verify-full` means two servers with the same
//! user, password, path and query. The adapter decides whether and how it uses more than one host.

/// Returns a URL for each host before the path; the URL as it is if it has one host.
///
/// # Errors
/// A host between commas is empty. The error has no part of the URL, which may hold a password.
pub(crate) fn each(url: &str) -> Result<Vec<String>, &'static str> {
    let Some((scheme, rest)) = url.split_once("://") else { return Ok(vec![url.to_owned()]) };
    let (authority, tail) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    let (user_info, hosts) = match authority.rfind('@') {
        Some(at) => authority.split_at(at + 1),
        None => ("", authority),
    };
    if !hosts.contains(',') {
        return Ok(vec![url.to_owned()]);
    }
    let one = |host: &str| match host {
        "" => Err("a host between commas is empty"),
        host => Ok(format!("{scheme}://{user_info}{host}{tail}")),
    };
    hosts.split(',').map(one).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn each_host_has_a_url_with_all_the_rest() {
        assert_eq!(
            each("postgres://app:a,b@h1:1,[::1]:2,h3/shop?x=1,2").unwrap(),
            [
                "postgres://app:a,b@h1:1/shop?x=1,2",
                "postgres://app:a,b@[::1]:2/shop?x=1,2",
                "postgres://app:a,b@h3/shop?x=1,2"
            ]
        );
        for one in ["amqp://h", "amqp://h/a,b", "mysql://u:p@h:1/d?x=a,b", "sqlite:a,b.db", "nonsense,x"] {
            assert_eq!(each(one).unwrap(), [one]);
        }
        for empty in ["amqp://h,", "amqp://,h", "amqp://u:p@h,,g/v"] {
            assert!(each(empty).is_err(), "{empty}");
        }
    }
}
