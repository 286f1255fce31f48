//! `grub.cfg` in the subset of GRUB's language that `grub-mkconfig` and its kind write.
//!
//! | supported | how |
//! | --- | --- |
//! | `set`, `unset`, assignments, `$name`, `${name}`, quotes, functions with arguments | as GRUB does |
//! | `if`, `elif`, `else`, `test`, `[`: strings, numbers, files, `!`, `-a`, `-o` | as GRUB does |
//! | `load_env` | from the environment block; `save_env` is ignored, nothing is written |
//! | `search` by UUID, label and file, with its older spellings | among the disks of the machine, the file's own disk first |
//! | `source`, `configfile`, `normal` | a few deep; a missing file is skipped, as GRUB does |
//! | `menuentry`, `submenu`, `default` by number, id or title, with `>` | only the entry that is chosen is executed |
//! | `linux`, `initrd` and their variants, `chainloader` of a unified kernel image | the result |
//! | `blscfg` | the entries of `loader/entries` |
//! | what sets up a display, a keyboard, modules and time | ignored |
//!
//! Loops, other commands and other loaders are errors that name file and line, when they are
//! executed. `limits` bounds all work.

mod commands;
mod env;
mod menu;
mod run;
mod script;
mod test_command;

use std::collections::BTreeMap;

use thiserror::Error;

use crate::bls::BlsError;
use crate::files::{Files, PathError};
use crate::uki::UkiError;
use crate::volumes::{FileError, VolumeId};
use crate::{BootEntry, limits};

pub use env::{of_volume as environment, parse as parse_environment};

/// Where systems have it, from the root of a file system.
pub const PATHS: &[&str] = &[
    "boot/grub/grub.cfg",
    "boot/grub2/grub.cfg",
    "grub/grub.cfg",
    "grub2/grub.cfg",
];

/// A `grub.cfg` that names nothing to boot.
#[derive(Debug, Error)]
#[error("line {line} of {path}: {kind}")]
pub struct GrubError {
    /// The file, which may be one that the first includes.
    pub path: String,
    /// The line, from 1.
    pub line: usize,
    /// What is wrong there.
    #[source]
    pub kind: GrubErrorKind,
}

/// What is wrong in a line.
#[derive(Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum GrubErrorKind {
    /// The text is no commands.
    #[error("{0}")]
    Syntax(&'static str),
    /// Blocks within blocks.
    #[error("more than {max} blocks within each other", max = limits::NESTING)]
    Nesting,
    /// A loop of the language.
    #[error("`{0}` loops are not supported")]
    Loop(String),
    /// Files that include each other, or too many of them.
    #[error("{path} includes itself, or more than {max} files include each other", max = limits::INCLUDES)]
    Includes {
        /// The file to be included.
        path: String,
    },
    /// Too much work.
    #[error("more than {0} were used: does it loop?")]
    Quota(&'static str),
    /// A command that is not in the subset.
    #[error("the command `{0}` is not supported")]
    Command(String),
    /// A command without what it needs.
    #[error("`{0}` has no operand")]
    Operand(String),
    /// Another operating system's loader.
    #[error("it starts another boot loader ({0}), which needs a firmware")]
    Chainloader(String),
    /// A device that the machine does not have.
    #[error("there is no file system on the device {0:?}")]
    Device(String),
    /// A path that is not followed.
    #[error(transparent)]
    Path(#[from] PathError),
    /// A file that cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// Entries of the Boot Loader Specification.
    #[error(transparent)]
    Bls(#[from] BlsError),
    /// A unified kernel image.
    #[error(transparent)]
    Uki(#[from] UkiError),
    /// The menu is empty.
    #[error("there is no menu entry")]
    NoEntry,
    /// The chosen entry does not start a kernel.
    #[error("the entry {0:?} starts no kernel")]
    NoKernel(String),
}

/// Returns what a `grub.cfg` would boot without a key pressed.
///
/// # Errors
///
/// If it is outside of the subset where it is executed, or starts no kernel; the error names the
/// line.
pub fn load(files: &Files<'_>, volume: VolumeId, path: &str) -> Result<BootEntry, GrubError> {
    menu::load(files, volume, path)
}

/// Replaces `$name` and `${name}` in a line; unknown ones by nothing.
pub(crate) fn expand_line(line: &str, variables: &BTreeMap<String, String>) -> String {
    let mut expanded = String::new();
    let mut rest = line;
    while let Some((before, after)) = rest.split_once('$') {
        expanded.push_str(before);
        let (name, tail) = match after
            .strip_prefix('{')
            .and_then(|after| after.split_once('}'))
        {
            Some((name, tail)) => (name, tail),
            None => {
                let is_name = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
                let end = after.find(|letter| !is_name(letter)).unwrap_or(after.len());
                after.split_at(end)
            }
        };
        match variables.get(name) {
            Some(value) => expanded.push_str(value),
            None if name.is_empty() => expanded.push('$'),
            None => {}
        }
        rest = tail;
        if expanded.len() > limits::VALUE_BYTES {
            break;
        }
    }
    expanded.push_str(rest);
    expanded
}

#[cfg(test)]
mod tests;
