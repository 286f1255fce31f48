//! Credentials from Docker's configuration file, and from the helpers that it names.

use std::collections::HashMap;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use super::{Credentials, RegistryError};

/// The name of Docker Hub in these files.
const HUB: &str = "https://index.docker.io/v1/";

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct ConfigFile {
    auths: HashMap<String, Auth>,
    creds_store: Option<String>,
    cred_helpers: HashMap<String, String>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "lowercase")]
struct Auth {
    auth: Option<String>,
    username: Option<String>,
    password: Option<String>,
    identitytoken: Option<String>,
    registrytoken: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct HelperAnswer {
    username: String,
    secret: String,
}

/// Looks up a registry. A missing file, or one without the registry, means no credentials. May run
/// a helper program and wait for it.
pub(super) fn lookup(file: &Path, registry: &str) -> Result<Credentials, RegistryError> {
    let fault = |source: Box<dyn std::error::Error + Send + Sync>| RegistryError::DockerConfig {
        path: file.to_owned(),
        source,
    };
    let text = match std::fs::read(file) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Ok(Credentials::Anonymous);
        }
        Err(error) => return Err(fault(error.into())),
    };
    let config: ConfigFile = serde_json::from_slice(&text).map_err(|error| fault(error.into()))?;
    let server = if registry == "docker.io" {
        HUB
    } else {
        registry
    };
    let helper = config
        .cred_helpers
        .get(server)
        .or(config.cred_helpers.get(registry));
    if let Some(helper) = helper.or(config.creds_store.as_ref())
        && let Some(credentials) = ask_helper(helper, server).map_err(fault)?
    {
        return Ok(credentials);
    }
    let spellings = [
        server.to_owned(),
        registry.to_owned(),
        format!("https://{registry}"),
        format!("http://{registry}"),
    ];
    let auth = spellings.iter().find_map(|name| config.auths.get(name));
    auth.map_or(Ok(Credentials::Anonymous), |auth| {
        decode(auth).map_err(fault)
    })
}

fn decode(auth: &Auth) -> Result<Credentials, Box<dyn std::error::Error + Send + Sync>> {
    if let Some(token) = auth.registrytoken.clone().filter(|token| !token.is_empty()) {
        return Ok(Credentials::RegistryToken(token));
    }
    if let Some(token) = auth.identitytoken.clone().filter(|token| !token.is_empty()) {
        return Ok(Credentials::IdentityToken(token));
    }
    if let Some(encoded) = auth.auth.as_deref().filter(|encoded| !encoded.is_empty()) {
        let decoded = String::from_utf8(STANDARD.decode(encoded.trim())?)?;
        let (user, password) = decoded.split_once(':').ok_or("its \"auth\" has no colon")?;
        return Ok(Credentials::Basic {
            user: user.into(),
            password: password.trim_end_matches('\0').into(),
        });
    }
    match (&auth.username, &auth.password) {
        (Some(user), Some(password)) => Ok(Credentials::Basic {
            user: user.clone(),
            password: password.clone(),
        }),
        _ => Ok(Credentials::Anonymous),
    }
}

/// Runs `docker-credential-NAME get`; `None` if it does not know the server.
fn ask_helper(
    name: &str,
    server: &str,
) -> Result<Option<Credentials>, Box<dyn std::error::Error + Send + Sync>> {
    if !name
        .bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
    {
        return Err(format!("{name:?} is not a credential helper's name").into());
    }
    let program = format!("docker-credential-{name}");
    let mut child = Command::new(&program)
        .arg("get")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| format!("cannot run {program}: {error}"))?;
    if let Some(mut input) = child.stdin.take() {
        // A helper that does not read its input may still answer.
        let _ = input.write_all(server.as_bytes());
    }
    let out = child.wait_with_output()?;
    if !out.status.success() {
        return Ok(None);
    }
    let HelperAnswer { username, secret } = serde_json::from_slice(&out.stdout)?;
    Ok(Some(match username.as_str() {
        "<token>" => Credentials::IdentityToken(secret),
        _ => Credentials::Basic {
            user: username,
            password: secret,
        },
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(json: &str, registry: &str) -> Result<Credentials, RegistryError> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.json");
        std::fs::write(&file, json).unwrap();
        lookup(&file, registry)
    }

    #[test]
    fn credentials_are_found_under_every_spelling() {
        let json = r#"{"auths":{"https://index.docker.io/v1/":{"auth":"dTpwOnc="},
            "https://r.example":{"identitytoken":"t"},"localhost:5000":{"auth":""}}}"#;
        let hub = Credentials::Basic {
            user: "u".into(),
            password: "p:w".into(),
        };
        assert_eq!(look(json, "docker.io").unwrap(), hub);
        assert_eq!(
            look(json, "r.example").unwrap(),
            Credentials::IdentityToken("t".into())
        );
        assert_eq!(
            look(json, "localhost:5000").unwrap(),
            Credentials::Anonymous
        );
        assert_eq!(look(json, "other.example").unwrap(), Credentials::Anonymous);
        assert_eq!(
            lookup(Path::new("/nonexistent/config.json"), "x").unwrap(),
            Credentials::Anonymous
        );
    }

    #[test]
    fn broken_files_are_errors_and_not_nobody() {
        for json in [
            "{",
            r#"{"auths":{"x":{"auth":"!"}}}"#,
            r#"{"credsStore":"../../bin/sh"}"#,
        ] {
            assert!(
                matches!(look(json, "x"), Err(RegistryError::DockerConfig { .. })),
                "{json}"
            );
        }
    }

    #[test]
    fn secrets_are_not_printed() {
        let credentials = Credentials::Basic {
            user: "u".into(),
            password: "hunter2".into(),
        };
        assert!(!format!("{credentials:?}").contains("hunter2"));
    }
}
