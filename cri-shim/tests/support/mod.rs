//! Helpers of the command line's tests: a registry in this process with one image of busybox, and
//! podvisor itself with its own root.
#![allow(dead_code)] // Each test program uses a part of it.

pub(crate) mod containerd;
pub(crate) mod cri;
pub(crate) mod foreign;
pub(crate) mod guest_files;
pub(crate) mod host;
pub(crate) mod image;
pub(crate) mod own_os;
pub(crate) mod pod;
pub(crate) mod registry;
pub(crate) mod stand_in;
pub(crate) mod terminal;
pub(crate) mod tree;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// Timeout for everything, including guests on a loaded emulated host.
pub(crate) const PATIENCE: Duration = Duration::from_secs(300);

/// Shell commands that mount an overlay, which has no mounts with mapped users, on `/run`. They are
/// for a mount namespace of its own, in a directory of the test's.
pub(crate) const OVERLAY_ON_RUN: &str = "mkdir upper work && mount -t overlay \
     -o lowerdir=/run,upperdir=upper,workdir=work overlay /run";

/// Polls a condition that has no notification.
#[track_caller]
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    loop {
        let asked = Instant::now();
        if holds() {
            return;
        }
        assert!(begin.elapsed() < PATIENCE, "{what} does not come");
        // A command takes the emulated CPU that the guest needs, which is waited for.
        let pause = asked.elapsed() * 2;
        std::thread::sleep(pause.clamp(Duration::from_millis(20), Duration::from_secs(2)));
    }
}

/// A directory for podvisor's state, removed when this is dropped.
pub(crate) struct Root {
    dir: TempDir,
}

impl Default for Root {
    fn default() -> Self {
        Self {
            dir: tempfile::tempdir().unwrap(),
        }
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.tell();
            self.clear();
        }
    }
}

impl Root {
    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Returns `podvisor` with this root, without this process's settings.
    pub(crate) fn podvisor(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_podvisor"));
        command.args(arguments).stdin(Stdio::null());
        for name in [
            "PODVISOR_HOSTS_DIR",
            "PODVISOR_ROOT",
            "XDG_DATA_HOME",
            "http_proxy",
            "HTTP_PROXY",
            "all_proxy",
        ] {
            command.env_remove(name);
        }
        command.env("PODVISOR_ROOT", self.path());
        // Guests boot slowly in an emulated host; the test runner ends hanging ones.
        command.env("PODVISOR_BOOT_TIMEOUT", "900");
        // Creating a template requires an additional boot.
        command.env("PODVISOR_BOOT", "cold");
        // Plugins are only used in tests that are about them.
        command.env("PODVISOR_NETWORK", "none");
        command
    }

    pub(crate) fn output(&self, arguments: &[&str]) -> Ran {
        Ran::new(self.podvisor(arguments).output().unwrap())
    }

    /// Prints information about a failed test: its containers, and their sandboxes' logs.
    fn tell(&self) {
        let listed = self.podvisor(&["ps", "-a"]).output();
        if let Ok(listed) = listed {
            eprintln!("{}", String::from_utf8_lossy(&listed.stdout));
        }
        let sandboxes = std::fs::read_dir(self.path().join("c"));
        for sandbox in sandboxes.into_iter().flatten().flatten() {
            let log = sandbox.path().join("sandbox.log");
            if let Ok(text) = std::fs::read_to_string(&log) {
                eprintln!("{}:\n{text}", log.display());
            }
        }
    }

    /// Removes the containers of a failed test: the next one would find them on the same host.
    fn clear(&self) {
        for (list, remove) in [
            (&["pod", "ls", "-q"][..], &["pod", "rm", "-f"][..]),
            (&["ps", "-aq"], &["rm", "-f"]),
            (&["vm", "ps", "-q"], &["vm", "rm", "-f"]),
        ] {
            let Ok(listed) = self.podvisor(list).output() else {
                continue;
            };
            let names = String::from_utf8_lossy(&listed.stdout);
            let _ = self
                .podvisor(remove)
                .args(names.split_whitespace())
                .output();
        }
    }

    /// Returns the files below the root whose names have this suffix.
    pub(crate) fn files_ending_in(&self, ending: &str) -> Vec<PathBuf> {
        let mut found = Vec::new();
        let mut directories = vec![self.path().to_owned()];
        while let Some(directory) = directories.pop() {
            for entry in std::fs::read_dir(directory).unwrap() {
                let entry = entry.unwrap();
                if entry.file_type().unwrap().is_dir() {
                    directories.push(entry.path());
                } else if entry.file_name().to_string_lossy().ends_with(ending) {
                    found.push(entry.path());
                }
            }
        }
        found
    }
}

/// A command's output and exit code.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ran {
    pub(crate) fn new(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    pub(crate) fn of(child: Child) -> Self {
        Self::new(child.wait_with_output().unwrap())
    }

    /// Asserts that it exited with `code` and that podvisor's own message is at most two lines that
    /// contain all of `words`.
    #[track_caller]
    pub(crate) fn refused(&self, code: i32, words: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:?}");
        for word in words {
            assert!(self.stderr.contains(word), "no {word:?} in {self:?}");
        }
        let says = |line: &&str| line.starts_with("podvisor: ");
        assert_eq!(self.stderr.lines().filter(says).count(), 1, "{self:?}");
        for bad in ["panicked", "backtrace", "Caused by", "RUST_BACKTRACE"] {
            assert!(!self.stderr.contains(bad), "{self:?}");
        }
    }

    #[track_caller]
    pub(crate) fn printed(&self, stdout: &str) {
        assert_eq!(self.code, Some(0), "{self:?}");
        assert_eq!(self.stdout, stdout, "{self:?}");
    }
}
