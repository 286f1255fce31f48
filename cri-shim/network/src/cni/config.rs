//! Configuration lists: `*.conflist`, `*.conf` and `*.json` of a directory. The first valid list by
//! file name is the node's; it is read again when the directory or a file in it changes.

use std::fs;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tracing::warn;

use super::error::CniError;

/// Longest file that is read, in bytes: network add-ons do not write longer ones.
const FILE_BYTES: u64 = 1 << 20;

/// Most plugins of a list.
const MAX_PLUGINS: usize = 32;

/// Supported versions of the specification, oldest first.
pub(super) const VERSIONS: &[&str] = &["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];

/// A network: plugins that are run one after the other.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct List {
    /// The network's name.
    pub name: String,
    /// The version of the specification that is used with its plugins.
    pub(super) version: String,
    /// Whether CHECK is disabled for its plugins.
    pub(super) disable_check: bool,
    /// The plugins in the order of ADD.
    pub(super) plugins: Vec<Plugin>,
}

impl List {
    /// Whether its plugins support STATUS, which came with version 1.1.
    pub(super) fn has_status(&self) -> bool {
        // Among the supported versions.
        !self.version.starts_with("0.") && self.version != "1.0.0"
    }

    /// Whether a plugin wants the runtime's value of `capability`.
    pub fn takes(&self, capability: &str) -> bool {
        self.plugins.iter().any(|plugin| plugin.wants(capability))
    }
}

/// A plugin of a list.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Plugin {
    /// Its type: the name of its program.
    pub(super) kind: String,
    /// Its configuration as it was read.
    pub(super) config: Map<String, Value>,
}

impl Plugin {
    /// Whether it wants the runtime's value of `capability`.
    pub(super) fn wants(&self, capability: &str) -> bool {
        let capabilities = self.config.get("capabilities");
        capabilities.and_then(|all| all.get(capability)) == Some(&Value::Bool(true))
    }
}

/// The directory's lists.
#[derive(Debug)]
pub(super) struct Configurations {
    dir: PathBuf,
    current: Mutex<Option<(Vec<Stamp>, Arc<List>)>>,
}

/// The attributes that show whether a file has changed.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Stamp {
    path: PathBuf,
    inode: u64,
    size: u64,
    changed: (i64, i64),
}

impl Configurations {
    pub(super) fn new(dir: PathBuf) -> Self {
        Self {
            dir,
            current: Mutex::new(None),
        }
    }

    /// Returns the node's list, as the directory has it now.
    pub(super) fn current(&self) -> Result<Arc<List>, CniError> {
        let stamps = self.stamps()?;
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((known, list)) = &*current
            && *known == stamps
        {
            return Ok(Arc::clone(list));
        }
        *current = None;
        let mut first_fault = None;
        for stamp in &stamps {
            match read(&stamp.path) {
                Ok(list) => {
                    let list = Arc::new(list);
                    *current = Some((stamps, Arc::clone(&list)));
                    return Ok(list);
                }
                Err(reason) => {
                    let reason = format!("{}: {reason}", stamp.path.display());
                    warn!(%reason, "invalid CNI configuration");
                    first_fault.get_or_insert(reason);
                }
            }
        }
        let dir = self.dir.clone();
        Err(match first_fault {
            Some(reason) => CniError::InvalidConfiguration { dir, reason },
            None => CniError::NoConfiguration { dir },
        })
    }

    /// Returns the first valid list of this name.
    pub(super) fn named(&self, name: &str) -> Result<List, CniError> {
        let mut others = Vec::new();
        for stamp in self.stamps()? {
            match read(&stamp.path) {
                Ok(list) if list.name == name => return Ok(list),
                Ok(list) => others.push(list.name),
                Err(reason) => {
                    warn!(path = %stamp.path.display(), reason, "invalid CNI configuration");
                }
            }
        }
        Err(CniError::UnknownNetwork {
            name: name.to_owned(),
            dir: self.dir.clone(),
            others,
        })
    }

    /// Returns the directory's configuration files, sorted by name.
    fn stamps(&self) -> Result<Vec<Stamp>, CniError> {
        let failed = || CniError::io("read the directory", &self.dir);
        let entries = match fs::read_dir(&self.dir) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(failed()(error)),
        };
        let mut stamps = Vec::new();
        for entry in entries {
            let path = entry.map_err(failed())?.path();
            let extension = path.extension().and_then(|extension| extension.to_str());
            if !matches!(extension, Some("conflist" | "conf" | "json")) {
                continue;
            }
            // A file that is removed meanwhile, or a dangling link, is skipped.
            let Ok(meta) = fs::metadata(&path) else {
                continue;
            };
            if meta.is_file() {
                stamps.push(Stamp {
                    path,
                    inode: meta.ino(),
                    size: meta.size(),
                    changed: (meta.ctime(), meta.ctime_nsec()),
                });
            }
        }
        stamps.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(stamps)
    }
}

fn read(path: &Path) -> Result<List, String> {
    let mut text = Vec::new();
    let file = fs::File::open(path).map_err(|error| error.to_string())?;
    file.take(FILE_BYTES + 1)
        .read_to_end(&mut text)
        .map_err(|error| error.to_string())?;
    if text.len() as u64 > FILE_BYTES {
        return Err(format!("it is longer than {FILE_BYTES} bytes"));
    }
    parse(&text, path.extension().is_some_and(|e| e == "conflist"))
}

/// Parses a list, or a single plugin's configuration as a list of one.
pub(super) fn parse(text: &[u8], is_list: bool) -> Result<List, String> {
    let mut config: Map<String, Value> =
        serde_json::from_slice(text).map_err(|error| format!("not a JSON object: {error}"))?;
    let name = string(&config, "name")?.ok_or("it has no \"name\"")?;
    if !is_network_name(&name) {
        return Err(format!("{name:?} is not a network name"));
    }
    let version = version(&config)?;
    let disable_check = match config.get("disableCheck") {
        None | Some(Value::Bool(false)) => false,
        Some(Value::Bool(true)) => true,
        Some(Value::String(text)) if text == "true" || text == "false" => text == "true",
        Some(_) => return Err("\"disableCheck\" is not a boolean".to_owned()),
    };
    let plugins = if is_list || config.contains_key("plugins") {
        match config.remove("plugins") {
            Some(Value::Array(plugins)) => plugins,
            _ => return Err("it has no list of \"plugins\"".to_owned()),
        }
    } else {
        vec![Value::Object(config)]
    };
    if plugins.is_empty() || plugins.len() > MAX_PLUGINS {
        return Err(format!("it has not 1 to {MAX_PLUGINS} plugins"));
    }
    let plugins = plugins.into_iter().map(plugin).collect::<Result<_, _>>()?;
    Ok(List {
        name,
        version,
        disable_check,
        plugins,
    })
}

fn plugin(config: Value) -> Result<Plugin, String> {
    let Value::Object(config) = config else {
        return Err("a plugin's configuration is not a JSON object".to_owned());
    };
    let kind = string(&config, "type")?.ok_or("a plugin has no \"type\"")?;
    // It becomes the name of a program in the plugins' directory.
    if kind.is_empty() || kind.len() > 255 || kind.starts_with('.') || kind.contains(['/', '\0']) {
        return Err(format!("{kind:?} is not a plugin's type"));
    }
    Ok(Plugin { kind, config })
}

/// The newest version that both sides support.
fn version(config: &Map<String, Value>) -> Result<String, String> {
    let mut offered: Vec<String> = string(config, "cniVersion")?.into_iter().collect();
    if let Some(Value::Array(more)) = config.get("cniVersions") {
        offered.extend(more.iter().filter_map(|v| v.as_str().map(str::to_owned)));
    }
    let known = VERSIONS.iter().rev();
    let best = known.copied().find(|v| offered.iter().any(|o| o == v));
    best.map(str::to_owned).ok_or_else(|| {
        let offered = match offered.as_slice() {
            [] => "none".to_owned(),
            offered => offered.join(", "),
        };
        format!(
            "its \"cniVersion\" ({offered}) is not one of {}",
            VERSIONS.join(", ")
        )
    })
}

fn string(config: &Map<String, Value>, key: &str) -> Result<Option<String>, String> {
    match config.get(key) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(_) => Err(format!("{key:?} is not a string")),
    }
}

/// Whether a name is valid for a network (CNI specification 1.1, "Configuration format").
fn is_network_name(name: &str) -> bool {
    let first = name.bytes().next();
    name.len() <= 255
        && first.is_some_and(|byte| byte.is_ascii_alphanumeric())
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"{"cniVersion": "1.0.0", "name": "a", "plugins": [{"type": "x"}]}"#;

    fn dir() -> (tempfile::TempDir, Configurations) {
        let dir = tempfile::tempdir().unwrap();
        let configurations = Configurations::new(dir.path().to_owned());
        (dir, configurations)
    }

    #[test]
    fn the_first_valid_file_by_name_is_the_nodes() {
        let (dir, configurations) = dir();
        fs::write(dir.path().join("00-broken.conflist"), "{").unwrap();
        fs::write(dir.path().join("05-ignored.txt"), GOOD).unwrap();
        fs::write(
            dir.path().join("20-late.conf"),
            GOOD.replace("\"a\"", "\"b\""),
        )
        .unwrap();
        fs::write(dir.path().join("10-good.conflist"), GOOD).unwrap();
        assert_eq!(configurations.current().unwrap().name, "a");
    }

    #[test]
    fn a_change_is_seen_and_so_is_the_last_files_end() {
        let (dir, configurations) = dir();
        let error = configurations.current().unwrap_err().to_string();
        assert!(error.contains("no CNI configuration"), "{error}");
        let file = dir.path().join("a.conflist");
        fs::write(&file, GOOD).unwrap();
        assert_eq!(configurations.current().unwrap().name, "a");
        fs::write(&file, GOOD.replace("\"a\"", "\"longer\"")).unwrap();
        assert_eq!(configurations.current().unwrap().name, "longer");
        fs::remove_file(&file).unwrap();
        assert!(configurations.current().is_err());
    }

    #[test]
    fn a_missing_directory_has_no_configuration() {
        let configurations = Configurations::new("/no/such/dir".into());
        let error = configurations.current().unwrap_err();
        assert!(matches!(error, CniError::NoConfiguration { .. }), "{error}");
    }

    #[test]
    fn a_network_is_found_by_its_name_and_not_by_its_files() {
        let (dir, configurations) = dir();
        fs::write(dir.path().join("00-broken.conflist"), "{").unwrap();
        fs::write(dir.path().join("10-x.conflist"), GOOD).unwrap();
        let other = GOOD.replace("\"a\"", "\"other\"");
        fs::write(dir.path().join("20-y.conflist"), other).unwrap();
        assert_eq!(configurations.named("other").unwrap().name, "other");
        let error = configurations.named("x").unwrap_err().to_string();
        assert!(error.contains("a, other"), "{error}");
    }

    #[test]
    fn a_single_configuration_is_a_list_of_one() {
        let list = parse(
            br#"{"cniVersion":"0.4.0","name":"n","type":"bridge"}"#,
            false,
        )
        .unwrap();
        assert_eq!(list.plugins.len(), 1);
        assert_eq!(list.plugins[0].kind, "bridge");
        assert_eq!(list.version, "0.4.0");
    }

    #[test]
    fn the_newest_common_version_is_spoken() {
        let text = br#"{"cniVersion":"0.4.0","cniVersions":["0.4.0","1.1.0","2.0.0"],
            "name":"n","plugins":[{"type":"x"}]}"#;
        assert_eq!(parse(text, true).unwrap().version, "1.1.0");
    }

    #[test]
    fn what_no_network_can_be_made_of_is_refused_with_its_reason() {
        for (text, reason) in [
            ("[]", "JSON object"),
            (r#"{"cniVersion":"1.0.0","plugins":[{"type":"x"}]}"#, "name"),
            (
                r#"{"cniVersion":"1.0.0","name":"../x","plugins":[{"type":"x"}]}"#,
                "network name",
            ),
            (
                r#"{"cniVersion":"0.1.0","name":"n","plugins":[{"type":"x"}]}"#,
                "cniVersion",
            ),
            (r#"{"name":"n","plugins":[{"type":"x"}]}"#, "cniVersion"),
            (
                r#"{"cniVersion":"1.0.0","name":"n","plugins":[]}"#,
                "plugins",
            ),
            (r#"{"cniVersion":"1.0.0","name":"n"}"#, "plugins"),
            (
                r#"{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"../sh"}]}"#,
                "type",
            ),
            (
                r#"{"cniVersion":"1.0.0","name":"n","plugins":[{"type":7}]}"#,
                "type",
            ),
            (
                r#"{"cniVersion":"1.0.0","name":"n","plugins":[7]}"#,
                "JSON object",
            ),
        ] {
            let error = parse(text.as_bytes(), true).unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
