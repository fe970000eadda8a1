//! What every test against a real service needs: its address or a visible skip, and names of its own.
#![allow(dead_code)] // each test binary uses its part

use std::time::{Duration, Instant};

/// The value of an environment variable that names a service. Where it is missing the test is skipped, visibly, unless
/// `ONCEBOX_TEST_STRICT=1` makes that a failure.
pub(crate) fn service(test: &str, variable: &str) -> Option<String> {
    match std::env::var(variable) {
        Ok(value) if !value.is_empty() => Some(value),
        _ => {
            assert!(std::env::var("ONCEBOX_TEST_STRICT").as_deref() != Ok("1"), "{test} needs {variable}");
            eprintln!("SKIPPED: {test} (no {variable})");
            None
        }
    }
}

/// A name that no other test, and no earlier run, has used.
pub(crate) fn unique(prefix: &str) -> String {
    format!("{prefix}-{}", &uuid::Uuid::now_v7().simple().to_string()[16..])
}

/// Asks again and again until the answer is there; fails with `what` after the deadline.
pub(crate) async fn eventually<T, F>(what: &str, deadline: Duration, mut ask: impl FnMut() -> F) -> T
where
    F: Future<Output = Option<T>>,
{
    let start = Instant::now();
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(start.elapsed() < deadline, "{what}: not within {deadline:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
