//! Credentials from Docker's configuration file, and from the helpers that it names. Podman's file
//! has the same form, with keys that may name a part of a registry.

use std::collections::{BTreeMap, HashMap};
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
    auths: BTreeMap<String, Auth>,
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

/// Looks up a repository of a registry. A missing file, or one without the registry, means nobody.
/// May run a helper program and wait for it.
pub(super) fn lookup(
    file: &Path,
    registry: &str,
    repository: &str,
) -> Result<Credentials, RegistryError> {
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
    // As for Docker, the empty name is that of no helper.
    let helper = helper.or(config.creds_store.as_ref());
    if let Some(helper) = helper.filter(|name| !name.is_empty())
        && let Some(credentials) = ask_helper(helper, server).map_err(fault)?
    {
        return Ok(credentials);
    }
    let (mut part, mut whole): (Option<(usize, &Auth)>, _) = (None, None);
    for (key, auth) in &config.auths {
        match scope_of(key, registry, repository) {
            Some(0) => whole = whole.or(Some(auth)),
            // The longest one wins.
            Some(length) if part.is_none_or(|(longest, _)| length > longest) => {
                part = Some((length, auth));
            }
            _ => {}
        }
    }
    let auth = part
        .map(|(_, auth)| auth)
        .or_else(|| config.auths.get(server))
        .or(whole);
    auth.map_or(Ok(Credentials::Anonymous), |auth| {
        decode(auth).map_err(fault)
    })
}

/// How much of a repository a key names, as `HOST/PATH`; 0 for the registry as a whole, `None` for
/// something else. With a scheme, or the version of the interface as path, it is a registry
/// (docker's `ConvertToHostname`).
fn scope_of(key: &str, registry: &str, repository: &str) -> Option<usize> {
    let (has_scheme, rest) = match key.split_once("://") {
        Some((_, rest)) => (true, rest),
        None => (false, key),
    };
    let rest = rest.trim_end_matches('/');
    let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
    if host != registry && !(registry == "docker.io" && host == "index.docker.io") {
        return None;
    }
    if has_scheme || matches!(path, "" | "v1" | "v2") {
        return Some(0);
    }
    let below = repository.strip_prefix(path)?;
    (below.is_empty() || below.starts_with('/')).then_some(path.len())
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
        let password = password.trim_end_matches('\0');
        return Ok(basic(user.to_owned(), password.to_owned()));
    }
    Ok(match (&auth.username, &auth.password) {
        (Some(user), Some(password)) => basic(user.clone(), password.clone()),
        _ => Credentials::Anonymous,
    })
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
    Ok(Some(helper_answer(&out.stdout)?))
}

fn helper_answer(json: &[u8]) -> serde_json::Result<Credentials> {
    let HelperAnswer { username, secret } = serde_json::from_slice(json)?;
    Ok(match username.as_str() {
        "<token>" => Credentials::IdentityToken(secret),
        _ => basic(username, secret),
    })
}

/// Neither user nor password is how some helpers and tools say that there are no credentials.
fn basic(user: String, password: String) -> Credentials {
    match user.is_empty() && password.is_empty() {
        true => Credentials::Anonymous,
        false => Credentials::Basic { user, password },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(json: &str, registry: &str) -> Result<Credentials, RegistryError> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.json");
        std::fs::write(&file, json).unwrap();
        lookup(&file, registry, "team/app")
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
            lookup(Path::new("/nonexistent/config.json"), "x", "y").unwrap(),
            Credentials::Anonymous
        );
    }

    #[test]
    fn keys_with_a_scheme_or_version_are_the_hosts_and_others_a_part_of_it() {
        let found = |key: &str, registry: &str| {
            let json = format!(r#"{{"auths":{{"{key}":{{"identitytoken":"t"}}}}}}"#);
            look(&json, registry).unwrap() == Credentials::IdentityToken("t".into())
        };
        for key in [
            "r.example/",
            "r.example/v1/",
            "https://r.example/v2/",
            "https://r.example/else",
            "r.example/team",
            "r.example/team/app",
        ] {
            assert!(found(key, "r.example"), "{key}");
            assert!(!found(key, "other.example"), "{key}");
        }
        for key in ["r.example/tea", "r.example/team/app/x", "r.example.org"] {
            assert!(!found(key, "r.example"), "{key}");
        }
        for key in [
            "index.docker.io",
            "https://index.docker.io/v2/",
            "docker.io",
        ] {
            assert!(found(key, "docker.io"), "{key}");
        }
        let json = r#"{"auths":{"r.example/team/app":{"identitytoken":"app"},
            "r.example/team":{"identitytoken":"team"},"r.example":{"identitytoken":"all"}}}"#;
        let app = Credentials::IdentityToken("app".into());
        assert_eq!(look(json, "r.example").unwrap(), app);
    }

    #[test]
    fn a_helper_without_a_name_is_none() {
        let auths = r#""auths":{"r.example":{"identitytoken":"t"}}"#;
        for helpers in [
            r#""credsStore":"""#,
            r#""credHelpers":{"r.example":""}"#,
            // That registry has none, whatever the others have.
            r#""credHelpers":{"r.example":""},"credsStore":"not/a/name""#,
        ] {
            let found = look(&format!("{{{helpers},{auths}}}"), "r.example");
            let token = Credentials::IdentityToken("t".into());
            assert_eq!(found.unwrap(), token, "{helpers}");
        }
    }

    #[test]
    fn neither_user_nor_password_is_nobody() {
        for auth in [
            r#"{"auth":"Og=="}"#,
            r#"{"username":"","password":""}"#,
            r#"{"auth":"","username":"","password":""}"#,
        ] {
            let found = look(
                &format!(r#"{{"auths":{{"r.example":{auth}}}}}"#),
                "r.example",
            );
            assert_eq!(found.unwrap(), Credentials::Anonymous, "{auth}");
        }
        let answer = |user: &str, secret: &str| {
            let json = serde_json::json!({"ServerURL": "x", "Username": user, "Secret": secret});
            helper_answer(json.to_string().as_bytes()).unwrap()
        };
        assert_eq!(answer("", ""), Credentials::Anonymous);
        assert_eq!(answer("u", ""), basic("u".into(), String::new()));
        assert_eq!(answer("", "p"), basic(String::new(), "p".into()));
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
