//! Boot Loader Specification, type 1: one file per entry in `loader/entries`, as systemd-boot and
//! Fedora's GRUB read them (UAPI.1).

use std::cmp::Ordering;
use std::collections::BTreeMap;

use thiserror::Error;

use crate::files::{Files, PathError, normalize};
use crate::grub_env::{self, expand_line};
use crate::uki::{self, UkiError};
use crate::volumes::{FileError, VolumeId};
use crate::{BootEntry, FileRef, Format, limits, version};

/// Where entries are, from the root of a file system.
pub const DIRECTORIES: &[&str] = &["loader/entries", "boot/loader/entries"];

/// Entries that name nothing to boot.
#[derive(Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum BlsError {
    /// A file cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// An entry's path is not followed.
    #[error("{file}: {source}")]
    Path {
        /// The entry's file.
        file: String,
        /// What is wrong with the path.
        source: PathError,
    },
    /// An entry is a unified kernel image that cannot be read.
    #[error(transparent)]
    Uki(#[from] UkiError),
    /// An entry starts no kernel.
    #[error("{file} has neither `linux` nor the `efi` of a unified kernel image")]
    NoKernel {
        /// The entry's file.
        file: String,
    },
    /// An entry has too many initial file systems.
    #[error("{file} has more than {max} `initrd`", max = limits::INITRDS)]
    Initrds {
        /// The entry's file.
        file: String,
    },
    /// No entry is for this machine.
    #[error("no entry in {directory} is for x86-64 and starts a kernel")]
    NoEntry {
        /// The directory.
        directory: String,
    },
}

/// An entry's file as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// Its file's name without `.conf` and without the count of its attempts.
    pub id: String,
    /// The path of its file.
    pub file: String,
    /// What a menu shows.
    pub title: Option<String>,
    /// The kernel's version.
    pub version: Option<String>,
    sort_key: Option<String>,
    machine_id: Option<String>,
    linux: Option<String>,
    efi: Option<String>,
    initrds: Vec<String>,
    options: Vec<String>,
    architecture: Option<String>,
    /// All its attempts to boot failed.
    is_bad: bool,
}

impl Entry {
    /// Parses the text of an entry's file.
    #[must_use]
    pub fn parse(file: &str, text: &str) -> Self {
        let name = file.rsplit_once('/').map_or(file, |(_, name)| name);
        let name = name.strip_suffix(".conf").unwrap_or(name);
        let (id, is_bad) = without_counter(name);
        let mut entry = Self {
            id: id.to_owned(),
            file: file.to_owned(),
            is_bad,
            ..Self::default()
        };
        for line in text.lines() {
            let line = line.trim();
            let Some((key, value)) = line.split_once(char::is_whitespace) else {
                continue;
            };
            let value = value.trim().to_owned();
            match key {
                "title" => entry.title = Some(value),
                "version" => entry.version = Some(value),
                "sort-key" => entry.sort_key = Some(value),
                "machine-id" => entry.machine_id = Some(value),
                "linux" => entry.linux = Some(value),
                "efi" | "uki" => entry.efi = Some(value),
                "initrd" => entry.initrds.push(value),
                "options" => entry.options.push(value),
                "architecture" => entry.architecture = Some(value),
                // Comments, and what Fedora's menu adds.
                _ => {}
            }
        }
        entry
    }

    fn is_for_this_machine(&self) -> bool {
        let architecture = self.architecture.as_deref();
        architecture.is_none_or(|name| name.eq_ignore_ascii_case("x64"))
            && (self.linux.is_some() || self.efi.is_some())
    }

    /// Returns what the entry boots. GRUB's variables in it are replaced by these.
    ///
    /// # Errors
    ///
    /// If a path is refused, or the entry starts no kernel.
    pub fn resolve(
        &self,
        files: &Files<'_>,
        volume: VolumeId,
        variables: &BTreeMap<String, String>,
    ) -> Result<BootEntry, BlsError> {
        let expand = |line: &str| expand_line(line, variables);
        let path = |path: &str| {
            normalize(path).map_err(|source| BlsError::Path {
                file: self.file.clone(),
                source,
            })
        };
        let options: Vec<String> = self.options.iter().map(|line| expand(line)).collect();
        let cmdline = options.join(" ").trim().to_owned();
        let title = self.title.clone().unwrap_or_else(|| self.id.clone());
        let config = FileRef::whole(volume, self.file.clone());
        if let Some(linux) = &self.linux {
            let mut initrds = Vec::new();
            // More than one may stand in a line where GRUB reads it.
            for line in &self.initrds {
                for initrd in expand(line).split_whitespace() {
                    initrds.push(FileRef::whole(volume, path(initrd)?));
                }
            }
            if initrds.len() > limits::INITRDS {
                let file = self.file.clone();
                return Err(BlsError::Initrds { file });
            }
            return Ok(BootEntry {
                title,
                format: Format::Bls,
                config,
                kernel: FileRef::whole(volume, path(&expand(linux))?),
                initrds,
                cmdline,
            });
        }
        let Some(efi) = &self.efi else {
            let file = self.file.clone();
            return Err(BlsError::NoKernel { file });
        };
        let image = uki::load(files, volume, &path(efi)?)?;
        Ok(BootEntry {
            title,
            config,
            format: Format::Bls,
            cmdline: if cmdline.is_empty() {
                image.cmdline
            } else {
                cmdline
            },
            ..image
        })
    }
}

/// Splits `NAME+LEFT-DONE` of boot counting; whether none is left.
fn without_counter(name: &str) -> (&str, bool) {
    let Some((id, counter)) = name.rsplit_once('+') else {
        return (name, false);
    };
    let left = counter.split('-').next().unwrap_or(counter);
    let is_counter = counter.split('-').count() <= 2
        && counter
            .split('-')
            .all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()));
    if !is_counter {
        return (name, false);
    }
    (id, left.bytes().all(|byte| byte == b'0'))
}

/// The order of the specification: what failed comes last, then by sort key, machine and newest
/// version, then by newest name.
fn order(a: &Entry, b: &Entry) -> Ordering {
    let newest = |a: &Option<String>, b: &Option<String>| {
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        version::compare(&text(b), &text(a))
    };
    let by_key = match (&a.sort_key, &b.sort_key) {
        (Some(x), Some(y)) => x
            .cmp(y)
            .then_with(|| a.machine_id.cmp(&b.machine_id))
            .then_with(|| newest(&a.version, &b.version)),
        // One with a key comes before one without.
        (x, y) => y.is_some().cmp(&x.is_some()),
    };
    a.is_bad
        .cmp(&b.is_bad)
        .then(by_key)
        .then_with(|| version::compare(&b.id, &a.id))
        .then_with(|| a.file.cmp(&b.file))
}

/// Returns the entries of a directory that are for this machine, the first one to boot first.
///
/// # Errors
///
/// If the directory or an entry cannot be read.
pub fn entries(
    files: &Files<'_>,
    volume: VolumeId,
    directory: &str,
) -> Result<Vec<Entry>, BlsError> {
    let mut entries = Vec::new();
    for name in files.list(volume, directory)? {
        if !name.ends_with(".conf") {
            continue;
        }
        let file = format!("{directory}/{name}");
        if let Some(text) = files.read(volume, &file)? {
            entries.push(Entry::parse(&file, &text));
        }
    }
    entries.retain(Entry::is_for_this_machine);
    entries.sort_by(order);
    Ok(entries)
}

/// Returns what a directory of entries boots: what `loader.conf` or GRUB's environment block says,
/// else the newest. `None` if the directory has no entry's file at all.
///
/// # Errors
///
/// If files cannot be read, or no entry starts a kernel.
pub fn load(
    files: &Files<'_>,
    volume: VolumeId,
    directory: &str,
) -> Result<Option<BootEntry>, BlsError> {
    let names = files.list(volume, directory)?;
    if !names.iter().any(|name| name.ends_with(".conf")) {
        return Ok(None);
    }
    let entries = entries(files, volume, directory)?;
    let variables = grub_env::of_volume(files, volume);
    let loader = directory.strip_suffix("/entries").unwrap_or(directory);
    let conf = files.read(volume, &format!("{loader}/loader.conf"))?;
    let patterns = ["next_entry", "saved_entry"]
        .iter()
        .filter_map(|name| variables.get(*name).cloned())
        .chain(conf.as_deref().and_then(default_of));
    let chosen = patterns
        .filter(|pattern| !pattern.is_empty())
        .find_map(|pattern| {
            let pattern = pattern.strip_suffix(".conf").unwrap_or(&pattern).to_owned();
            entries.iter().find(|entry| matches(&pattern, &entry.id))
        });
    let Some(entry) = chosen.or_else(|| entries.first()) else {
        let directory = directory.to_owned();
        return Err(BlsError::NoEntry { directory });
    };
    entry.resolve(files, volume, &variables).map(Some)
}

/// The pattern of `default` in `loader.conf`.
fn default_of(conf: &str) -> Option<String> {
    conf.lines()
        .filter_map(|line| line.trim().split_once(char::is_whitespace))
        .filter(|(key, _)| *key == "default")
        .map(|(_, pattern)| pattern.trim().to_owned())
        .next_back()
}

/// Whether a name matches a pattern of `*` and `?`.
fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name) = (pattern.as_bytes(), name.as_bytes());
    let (mut p, mut n) = (0, 0);
    // Where the last `*` was, and the part of the name that it began at.
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(byte) if *byte == b'?' || Some(byte) == name.get(n) => {
                p += 1;
                n += 1;
            }
            _ => match star {
                Some((at, begun)) => {
                    p = at + 1;
                    n = begun + 1;
                    star = Some((at, n));
                }
                None => return false,
            },
        }
    }
    pattern
        .get(p..)
        .is_some_and(|rest| rest.iter().all(|byte| *byte == b'*'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_as_globs() {
        for (pattern, name, is_match) in [
            ("debian-*", "debian-6.1", true),
            ("debian-*", "arch", false),
            ("*-6.1*-x", "a-6.1-6.1b-x", true),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("", "", true),
            ("*", "", true),
        ] {
            assert_eq!(matches(pattern, name), is_match, "{pattern} {name}");
        }
    }

    #[test]
    fn a_name_may_count_its_attempts() {
        assert_eq!(without_counter("a-1+3"), ("a-1", false));
        assert_eq!(without_counter("a-1+0-3"), ("a-1", true));
        assert_eq!(without_counter("6.1+deb"), ("6.1+deb", false));
    }

    #[test]
    fn the_order_is_sort_key_then_version_then_name() {
        let entry =
            |name: &str, text: &str| Entry::parse(&format!("loader/entries/{name}.conf"), text);
        let mut entries = [
            entry("z-9", "linux /a"),
            entry("a-10", "linux /a"),
            entry("old", "linux /a\nsort-key debian\nversion 6.1.0-9"),
            entry("new", "linux /a\nsort-key debian\nversion 6.1.0-50"),
            entry("bad+0-3", "linux /a\nsort-key arch\nversion 7"),
        ];
        entries.sort_by(order);
        let ids: Vec<_> = entries.iter().map(|entry| entry.id.as_str()).collect();
        assert_eq!(ids, ["new", "old", "z-9", "a-10", "bad"]);
    }
}
