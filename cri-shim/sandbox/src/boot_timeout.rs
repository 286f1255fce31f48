//! How long a guest may take to boot.

use std::time::Duration;

/// How long a guest may take until its agent answers.
const BOOT_TIMEOUT: Duration = Duration::from_secs(60);

/// The environment variable that sets another boot timeout, in seconds, where guests boot slowly.
pub const BOOT_TIMEOUT_VARIABLE: &str = "PODVISOR_BOOT_TIMEOUT";

/// Returns the boot timeout of this process.
pub(crate) fn boot_timeout() -> Duration {
    let seconds = std::env::var(BOOT_TIMEOUT_VARIABLE).ok();
    let seconds = seconds.and_then(|text| text.parse().ok());
    seconds.map_or(BOOT_TIMEOUT, Duration::from_secs)
}
