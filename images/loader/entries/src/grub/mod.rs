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
mod error;
mod menu;
mod run;
mod script;
mod test_command;

use crate::BootEntry;
use crate::files::Files;
use crate::volumes::VolumeId;

pub use crate::grub_env::{of_volume as environment, parse as parse_environment};
pub use error::{GrubError, GrubErrorKind};

/// Where systems have it, from the root of a file system.
pub const PATHS: &[&str] = &[
    "boot/grub/grub.cfg",
    "boot/grub2/grub.cfg",
    "grub/grub.cfg",
    "grub2/grub.cfg",
];

/// Returns what a `grub.cfg` would boot without a key pressed.
///
/// # Errors
///
/// If it is outside of the subset where it is executed, or starts no kernel; the error names the
/// line.
pub fn load(files: &Files<'_>, volume: VolumeId, path: &str) -> Result<BootEntry, GrubError> {
    menu::load(files, volume, path)
}

#[cfg(test)]
mod tests;
