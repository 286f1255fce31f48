//! Configurations of Ignition, which images such as Fedora CoreOS read in place of cloud-init.

use serde_json::Value;

/// Most bytes of a configuration: what a ConfigMap or Secret may have.
pub const MAX_IGNITION: usize = 1 << 20;

/// Why a text is not a configuration of Ignition.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IgnitionError {
    /// It is too large.
    #[error(
        "the Ignition configuration has {0} bytes, but at most {MAX_IGNITION}: let it fetch the \
         rest by `ignition.config.merge`"
    )]
    TooLarge(usize),
    /// It is not JSON.
    #[error(
        "the Ignition configuration is not JSON: write that of Ignition itself, which `butane` \
         makes of YAML"
    )]
    Json(#[source] serde_json::Error),
    /// It says nothing of its version.
    #[error(
        "the Ignition configuration has no `ignition.version`, such as \
         {{\"ignition\": {{\"version\": \"3.4.0\"}}}}"
    )]
    NoVersion,
}

/// Checks that a text is a configuration of Ignition, of any version. What else is in it is the
/// guest's matter, which may know a version that nobody here does.
///
/// # Errors
/// It is too large, not JSON, or has no version.
pub fn check_ignition(text: &[u8]) -> Result<(), IgnitionError> {
    if text.len() > MAX_IGNITION {
        return Err(IgnitionError::TooLarge(text.len()));
    }
    let config: Value = serde_json::from_slice(text).map_err(IgnitionError::Json)?;
    let version = config.pointer("/ignition/version").and_then(Value::as_str);
    match version {
        Some(version) if !version.is_empty() => Ok(()),
        _ => Err(IgnitionError::NoVersion),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_json_with_a_version_is_a_configuration() {
        check_ignition(br#"{"ignition": {"version": "3.4.0"}, "unheard": {}}"#).unwrap();
        for (text, named) in [
            ("", "butane"),
            ("variant: fcos\nversion: 1.5.0\n", "butane"),
            ("#cloud-config\n", "butane"),
            ("[]", "version"),
            ("{\"ignition\": \"3.4.0\"}", "version"),
            ("{\"ignition\": {\"version\": 3}}", "version"),
            ("{\"ignition\": {\"version\": \"\"}}", "version"),
        ] {
            let said = check_ignition(text.as_bytes()).unwrap_err().to_string();
            assert!(said.contains(named), "{text}: {said}");
        }
        let deep = "[".repeat(100_000);
        check_ignition(deep.as_bytes()).unwrap_err();
        let long = vec![b' '; MAX_IGNITION + 1];
        let said = check_ignition(&long).unwrap_err().to_string();
        assert!(said.contains("1048577"), "{said}");
    }
}
