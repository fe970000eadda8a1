//! Signatures of webhooks by the Standard Webhooks specification: HMAC-SHA256 over id, timestamp
//! and body.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::error::Invalid;

const PREFIX: &str = "whsec_";
const NO_SECRET: &str = "a webhook's secret is `whsec_` and 24 to 64 bytes in base64";

/// A secret that is shared with a receiver. It is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct WebhookSecret(Vec<u8>);

impl std::str::FromStr for WebhookSecret {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        // The error does not repeat the text.
        let bytes = STANDARD.decode(text.strip_prefix(PREFIX).unwrap_or(text)).unwrap_or_default();
        if (24..=64).contains(&bytes.len()) { Ok(Self(bytes)) } else { Err(Invalid::new(NO_SECRET)) }
    }
}

impl std::fmt::Debug for WebhookSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WebhookSecret")
    }
}

/// The value of the signature header: one signature for each secret, separated by spaces.
pub(super) fn signatures(secrets: &[WebhookSecret], id: &str, timestamp: &str, body: &[u8]) -> String {
    let one = |secret: &WebhookSecret| {
        // This accepts a key of any length.
        let mut mac = Hmac::<Sha256>::new_from_slice(&secret.0).ok()?;
        mac.update(format!("{id}.{timestamp}.").as_bytes());
        mac.update(body);
        Some(format!("v1,{}", STANDARD.encode(mac.finalize().into_bytes())))
    };
    secrets.iter().filter_map(one).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    // The vector of the Standard Webhooks libraries. Shown by: leaving the timestamp out.
    #[test]
    fn o28_a_signature_is_that_of_the_standard() {
        let secret: WebhookSecret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw".parse().unwrap();
        let signed = signatures(
            std::slice::from_ref(&secret),
            "msg_p5jXN8AQM9LWM0D4loKWxJek",
            "1614265330",
            br#"{"test": 2432232314}"#,
        );
        assert_eq!(signed, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
        let other: WebhookSecret = "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSx".parse().unwrap();
        assert_eq!(signatures(&[secret, other], "i", "1", b"").split(' ').count(), 2);
        for bad in ["", "whsec_", "whsec_AAAA", "not base64!"] {
            assert_eq!(bad.parse::<WebhookSecret>(), Err(Invalid::new(NO_SECRET)), "{bad}");
        }
    }
}
