//! What all commands share: their global flags, exit codes and runtime.

use std::env;
use std::ffi::OsString;
use std::io;
use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;
use podvisor_images::Store;

use super::kept::Kept;
use super::log::{LogFormat, LogLevel};
use super::message::message;

/// Exit code of a command that failed.
pub(super) const FAILURE: u8 = 1;

/// Exit code for an invalid command line.
pub(super) const USAGE: u8 = 2;

/// Exit code of `run` and `exec` if podvisor failed and not the program, as in docker.
pub(super) const RUN_FAILURE: u8 = 125;

#[derive(Debug, Args)]
#[command(next_help_heading = "Global options")]
pub(super) struct Globals {
    /// Directory of images and state [default: /var/lib/podvisor for root,
    /// $XDG_DATA_HOME/podvisor for others]
    #[arg(
        long,
        value_name = "DIR",
        env = "PODVISOR_ROOT",
        hide_env_values = true
    )]
    #[arg(global = true)]
    pub(super) root: Option<PathBuf>,

    /// Log level on stderr [default: warn; info for `serve`]
    #[arg(long, value_name = "LEVEL", value_enum)]
    #[arg(global = true)]
    pub(super) log_level: Option<LogLevel>,

    /// Format of log lines
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = LogFormat::Text)]
    #[arg(global = true)]
    pub(super) log_format: LogFormat,

    /// What commands about containers are about.
    #[arg(skip)]
    pub(super) kept: Kept,
}

/// Creates a single-threaded runtime: slow work runs in other processes and machines.
pub(super) fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the asynchronous runtime")
}

impl Globals {
    /// Opens the store of images.
    pub(super) fn store(&self) -> anyhow::Result<Store> {
        Store::open(self.root()?.join("images")).map_err(|error| unwritable(error.into()))
    }

    pub(super) fn root(&self) -> anyhow::Result<PathBuf> {
        if let Some(root) = &self.root {
            return Ok(root.clone());
        }
        let is_root = rustix::process::geteuid().is_root();
        default_root(is_root, env::var_os("XDG_DATA_HOME"), env::var_os("HOME"))
            .context("no directory for images: set PODVISOR_ROOT or HOME, or give --root")
    }
}

/// Adds advice to an error if something below the root cannot be written.
pub(super) fn unwritable(error: anyhow::Error) -> anyhow::Error {
    let is_refused = error.chain().any(|cause| {
        let kind = cause.downcast_ref().map(io::Error::kind);
        matches!(
            kind,
            Some(io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem)
        )
    });
    match is_refused {
        // The whole chain first: a context would be printed before it.
        true => anyhow::Error::msg(format!(
            "{}; choose a directory of your own by --root or PODVISOR_ROOT",
            message(&error)
        )),
        false => error,
    }
}

fn default_root(is_root: bool, data: Option<OsString>, home: Option<OsString>) -> Option<PathBuf> {
    if is_root {
        return Some(PathBuf::from("/var/lib/podvisor"));
    }
    // The XDG base directory specification requires ignoring relative directories.
    let absolute = |value: Option<OsString>| value.map(PathBuf::from).filter(|p| p.is_absolute());
    absolute(data)
        .or_else(|| absolute(home).map(|home| home.join(".local/share")))
        .map(|data| data.join("podvisor"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_follows_the_user() {
        let dir = |s: &str| Some(OsString::from(s));
        let is = |root: Option<PathBuf>, path: &str| assert_eq!(root, Some(PathBuf::from(path)));
        is(
            default_root(true, dir("/d"), dir("/h")),
            "/var/lib/podvisor",
        );
        is(default_root(false, dir("/d"), dir("/h")), "/d/podvisor");
        is(
            default_root(false, dir("d"), dir("/h")),
            "/h/.local/share/podvisor",
        );
        is(
            default_root(false, None, dir("/h")),
            "/h/.local/share/podvisor",
        );
        assert_eq!(default_root(false, None, None), None);
    }
}
