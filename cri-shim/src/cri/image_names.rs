//! Short names of disk images: a directory of files, as Virtlet has them, that say which URL a name
//! after the prefix `virtlet.cloud/` stands for. They are read anew for each name.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use regex::{Regex, RegexBuilder};
use serde::Deserialize;
use tracing::warn;

use crate::machine::causes;

/// Most files of a directory, bytes of a file, and names of a file.
const MAX_FILES: usize = 64;
const MAX_BYTES: u64 = 1 << 20;
const MAX_NAMES: usize = 4096;

/// Most bytes that a compiled expression may take.
const MAX_EXPRESSION: usize = 1 << 20;

/// Why the files cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ImageNamesError {
    /// The directory or a file cannot be read.
    #[error("failed to read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// A file is not what it should be.
    #[error("{}: {reason}", path.display())]
    Invalid { path: PathBuf, reason: String },
}

/// Names that follow their directory. Clones share what was read last.
#[derive(Debug, Clone, Default)]
pub(crate) struct ImageNames(Option<Followed>);

#[derive(Debug, Clone)]
struct Followed {
    directory: PathBuf,
    last: Arc<Mutex<Arc<Table>>>,
}

impl ImageNames {
    /// Names of the files in `directory`; without one there are none.
    ///
    /// # Errors
    /// It cannot be read, or a file of it is wrong.
    pub(crate) fn of(directory: Option<PathBuf>) -> Result<Self, ImageNamesError> {
        let followed = directory.map(|directory| {
            let last = Arc::new(Mutex::new(Arc::new(Table::read(&directory)?)));
            Ok::<_, ImageNamesError>(Followed { directory, last })
        });
        Ok(Self(followed.transpose()?))
    }

    /// The URL that a name stands for, if a file of the directory says so; where the directory
    /// cannot be used, what it said last. Reads files.
    pub(super) fn url(&self, name: &str) -> Option<String> {
        let followed = self.0.as_ref()?;
        let read = Table::read(&followed.directory);
        let mut last = followed.last.lock().unwrap_or_else(PoisonError::into_inner);
        match read {
            Ok(table) => *last = Arc::new(table),
            Err(error) => {
                let error = causes(&error);
                warn!(
                    error,
                    "failed to read names of images; the last ones are used"
                );
            }
        }
        let table = Arc::clone(&last);
        drop(last);
        table.url(name)
    }
}

/// A file. As the resource VirtletImageMapping it has the rest in `spec`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Document {
    #[serde(rename = "apiVersion")]
    _api_version: String,
    kind: Option<String>,
    #[serde(rename = "metadata")]
    _metadata: serde_json::Value,
    spec: Option<Mapping>,
    prefix: String,
    translations: Vec<Translation>,
    transports: BTreeMap<String, serde_json::Value>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Mapping {
    prefix: String,
    translations: Vec<Translation>,
    transports: BTreeMap<String, serde_json::Value>,
}

impl Document {
    fn mapping(self) -> Result<Mapping, String> {
        match (self.kind.as_deref(), self.spec) {
            (None, None) => Ok(Mapping {
                prefix: self.prefix,
                translations: self.translations,
                transports: self.transports,
            }),
            (Some("VirtletImageMapping"), Some(spec)) => Ok(spec),
            (None, Some(_)) => Err("it has a spec, but no kind".to_owned()),
            (Some(kind), _) => Err(format!("a {kind:?} is no VirtletImageMapping with a spec")),
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Translation {
    name: Option<String>,
    regexp: Option<String>,
    url: String,
    transport: String,
}

/// What the files say.
#[derive(Debug, Default)]
struct Table {
    fixed: BTreeMap<String, String>,
    expressions: Vec<Expression>,
}

#[derive(Debug)]
struct Expression {
    prefix: String,
    pattern: Regex,
    url: String,
}

impl Table {
    /// Reads the files whose names end in `.yaml`, `.yml` or `.json`, in the order of their names;
    /// of a name that stands twice the later one counts.
    fn read(directory: &Path) -> Result<Self, ImageNamesError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            |source| ImageNamesError::Read { path, source }
        };
        let mut paths = Vec::new();
        for entry in fs::read_dir(directory).map_err(failed(directory))? {
            let path = entry.map_err(failed(directory))?.path();
            let ending = path.extension().and_then(|ending| ending.to_str());
            if matches!(ending, Some("yaml" | "yml" | "json")) {
                paths.push(path);
            }
        }
        paths.sort();
        let mut table = Self::default();
        for (number, path) in paths.into_iter().enumerate() {
            let invalid = |reason: String| ImageNamesError::Invalid {
                path: path.clone(),
                reason,
            };
            if number == MAX_FILES {
                return Err(invalid(format!("more than {MAX_FILES} files of names")));
            }
            let text = read_file(&path).map_err(failed(&path))?;
            let document = serde_saphyr::from_str::<Document>(&text);
            let document = document.map_err(|error| invalid(error.to_string()))?;
            table.add(document).map_err(invalid)?;
        }
        Ok(table)
    }

    fn add(&mut self, document: Document) -> Result<(), String> {
        let mapping = document.mapping()?;
        let elsewhere = "settings of servers are in hosts.toml, below the directory of --hosts-dir";
        if !mapping.transports.is_empty() {
            return Err(format!("transports are not supported: {elsewhere}"));
        }
        if mapping.translations.len() > MAX_NAMES {
            return Err(format!("more than {MAX_NAMES} translations"));
        }
        for (number, translation) in mapping.translations.into_iter().enumerate() {
            let Translation {
                name,
                regexp,
                url,
                transport,
            } = translation;
            let field = |what: &str| format!("translations[{number}]: {what}");
            if !transport.is_empty() {
                let reason = format!("transport is not supported: {elsewhere}");
                return Err(field(&reason));
            }
            if url.is_empty() {
                return Err(field("it has no url"));
            }
            match (name, regexp) {
                (Some(name), None) => {
                    self.fixed.insert(joined(&mapping.prefix, &name), url);
                }
                (None, Some(regexp)) => {
                    // The whole name must match, not a part of it.
                    let pattern = RegexBuilder::new(&format!("^(?:{regexp})$"))
                        .size_limit(MAX_EXPRESSION)
                        .build();
                    self.expressions.push(Expression {
                        prefix: mapping.prefix.clone(),
                        pattern: pattern.map_err(|error| field(&error.to_string()))?,
                        url,
                    });
                }
                _ => return Err(field("it needs either a name or a regexp")),
            }
        }
        Ok(())
    }

    /// Names as they are go before expressions.
    fn url(&self, name: &str) -> Option<String> {
        if let Some(url) = self.fixed.get(name) {
            return Some(url.clone());
        }
        self.expressions.iter().find_map(|expression| {
            let rest = match expression.prefix.as_str() {
                "" => name,
                prefix => name.strip_prefix(prefix)?.strip_prefix('/')?,
            };
            let found = expression.pattern.captures(rest)?;
            let mut url = String::new();
            found.expand(&expression.url, &mut url);
            Some(url)
        })
    }
}

/// A name after the prefix of its file.
fn joined(prefix: &str, name: &str) -> String {
    match (prefix, name) {
        ("", name) => name.to_owned(),
        (prefix, "") => prefix.to_owned(),
        (prefix, name) => format!("{prefix}/{name}"),
    }
}

fn read_file(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?
        .take(MAX_BYTES + 1)
        .read_to_string(&mut text)?;
    match text.len() as u64 > MAX_BYTES {
        true => Err(io::Error::other(format!("more than {MAX_BYTES} bytes"))),
        false => Ok(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(files: &[(&str, &str)]) -> (tempfile::TempDir, Result<ImageNames, ImageNamesError>) {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(dir.path().join(name), text).unwrap();
        }
        let names = ImageNames::of(Some(dir.path().to_owned()));
        (dir, names)
    }

    const FIRST: &str = r#"
translations:
- name: cirros
  url: https://images.example/cirros.img
- regexp: 'debian/(\d+)'
  url: 'https://images.example/debian-$1.qcow2'
- regexp: '.*irro.*'
  url: https://images.example/never
"#;

    const SECOND: &str = r#"{"apiVersion": "virtlet.k8s/v1", "kind": "VirtletImageMapping", "spec":
        {"prefix": "ours", "translations": [
            {"name": "small", "url": "http://cache.example/small"},
            {"name": "", "url": "http://cache.example/default"},
            {"regexp": "v(.+)", "url": "http://cache.example/$1"}]}}"#;

    #[test]
    fn a_name_is_what_the_files_say_of_it() {
        let (_dir, names) = names(&[("1.yaml", FIRST), ("2.json", SECOND), ("notes.txt", "{")]);
        let names = names.unwrap();
        for (name, url) in [
            ("cirros", Some("https://images.example/cirros.img")),
            ("debian/12", Some("https://images.example/debian-12.qcow2")),
            ("debian/12/x", None),
            ("ours/small", Some("http://cache.example/small")),
            ("ours", Some("http://cache.example/default")),
            ("ours/v7", Some("http://cache.example/7")),
            // One that merely begins like the prefix.
            ("oursv7", None),
            ("small", None),
            ("v7", None),
            ("host.example/a.img", None),
        ] {
            assert_eq!(names.url(name).as_deref(), url, "{name}");
        }
        assert_eq!(ImageNames::default().url("cirros"), None);
    }

    #[test]
    fn a_change_is_seen_and_a_broken_file_changes_nothing() {
        let (dir, names) = names(&[("1.yaml", FIRST)]);
        let names = names.unwrap();
        let later = "translations: [{name: cirros, url: https://images.example/new}]";
        fs::write(dir.path().join("2.yaml"), later).unwrap();
        let new = Some("https://images.example/new".to_owned());
        assert_eq!(names.url("cirros"), new);
        fs::write(dir.path().join("3.yaml"), "translations: [").unwrap();
        assert_eq!(names.url("cirros"), new);
        fs::remove_dir_all(dir.path()).unwrap();
        assert_eq!(names.url("cirros"), new);
    }

    #[test]
    fn what_is_wrong_with_a_file_is_told_with_its_path() {
        for (text, reason) in [
            ("translations: 3", "1.yaml"),
            ("translation: []", "translation"),
            (
                "translations: [{name: a}]",
                "translations[0]: it has no url",
            ),
            ("translations: [{url: b}]", "either a name or a regexp"),
            ("translations: [{regexp: '(', url: b}]", "translations[0]"),
            (
                "translations: [{regexp: '(a{9999}){9999}', url: b}]",
                "limit",
            ),
            ("transports: {x: {timeout: 1}}", "hosts.toml"),
            (
                "translations: [{name: a, url: b, transport: x}]",
                "hosts.toml",
            ),
            ("{apiVersion: v1, kind: Pod, spec: {}}", "Pod"),
        ] {
            let (_dir, names) = names(&[("1.yaml", text)]);
            let said = names.unwrap_err().to_string();
            assert!(
                said.contains("1.yaml") && said.contains(reason),
                "{text}: {said}"
            );
        }
        let missing = ImageNames::of(Some("/no/such/directory".into())).unwrap_err();
        assert!(
            missing.to_string().contains("/no/such/directory"),
            "{missing}"
        );
    }
}
