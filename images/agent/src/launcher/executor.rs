//! The last steps before a container's command runs, in its namespaces and as its user.

use std::collections::HashMap;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use libcontainer::workload::{
    Executor, ExecutorError, ExecutorSetEnvsError, ExecutorValidationError,
};
use oci_spec::runtime::{Process, Spec};
use rustix::fs::{Access, AtFlags, CWD, accessat};
use rustix::io::Errno;

use super::confinement::LoadedConfinement;
use super::{Failure, LaunchReport};
use crate::seccomp::Filter;

/// Where commands are looked up if the process has no PATH; the directories that execvp(3) would
/// use.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Finds the command, reports at creation if it cannot be run, and executes it at the start.
#[derive(Debug, Clone)]
pub(super) struct Command {
    report: Arc<File>,
    confinement: Option<LoadedConfinement>,
    /// The path that is executed.
    path: OnceLock<CString>,
}

/// Why a command cannot be run.
#[derive(Debug, PartialEq, Eq)]
enum Unusable {
    NotFound,
    NotExecutable(&'static str),
}

impl Command {
    pub(super) fn new(report: Arc<File>, confinement: Option<LoadedConfinement>) -> Self {
        Self {
            report,
            confinement,
            path: OnceLock::new(),
        }
    }

    /// Reports a failure before libcontainer replaces its message.
    fn refuse(&self, failure: Failure, message: String) -> ExecutorValidationError {
        LaunchReport::failed(failure, message.clone()).send(&self.report);
        ExecutorValidationError::ArgValidationError(message)
    }
}

impl Executor for Command {
    fn validate(&self, spec: &Spec) -> Result<(), ExecutorValidationError> {
        let (process, name) = command_of(spec)
            .ok_or_else(|| ExecutorValidationError::ArgValidationError("no command".to_owned()))?;
        let confined = |step: fn(&LoadedConfinement) -> anyhow::Result<()>| {
            let confinement = self.confinement.as_ref();
            let done = confinement.map_or(Ok(()), step);
            done.map_err(|error| self.refuse(Failure::Other, format!("{error:#}")))
        };
        confined(LoadedConfinement::enter)?;
        // Before any filter is installed, which may forbid the lookup.
        let found = find(name, path_of(process));
        confined(LoadedConfinement::submit)?;
        let unusable = match found {
            Ok(path) => {
                // A path in the specification contains no NUL.
                if let Ok(path) = CString::new(path.into_os_string().into_vec()) {
                    let _ = self.path.set(path);
                }
                return Ok(());
            }
            Err(unusable) => unusable,
        };
        let (failure, message) = match unusable {
            Unusable::NotFound if name.contains('/') => (
                Failure::CommandNotFound,
                format!("command {name:?} not found in the container"),
            ),
            Unusable::NotFound => (
                Failure::CommandNotFound,
                format!("command {name:?} not found in the container's PATH"),
            ),
            Unusable::NotExecutable(why) => (
                Failure::CommandNotExecutable,
                format!("command {name:?} cannot be executed: {why}"),
            ),
        };
        Err(self.refuse(failure, message))
    }

    /// Does nothing: the command gets its environment from execve(2).
    fn setup_envs(&self, _: HashMap<String, String>) -> Result<(), ExecutorSetEnvsError> {
        Ok(())
    }

    /// Returns an error only for what `validate` has accepted; by then it can be reported only to
    /// the container's own standard error.
    fn exec(&self, spec: &Spec) -> Result<(), ExecutorError> {
        let (process, name) = command_of(spec).ok_or(ExecutorError::InvalidArg)?;
        let strings = |list: &Option<Vec<String>>| -> Result<Vec<CString>, ExecutorError> {
            list.iter()
                .flatten()
                .map(|text| CString::new(text.as_str()).map_err(|_| ExecutorError::InvalidArg))
                .collect()
        };
        let (args, env) = (strings(process.args())?, strings(process.env())?);
        let path = self.path.get().ok_or(ExecutorError::InvalidArg)?;
        let confinement = self.confinement.as_ref();
        let filter = confinement.and_then(LoadedConfinement::late_filter);
        let confine = || filter.map_or(Ok(()), Filter::install);
        let error = crate::sys::execve(path, &args, &env, confine);
        // The same codes as in a shell.
        eprintln!("podvisor: cannot execute {name}: {}", explain(&error));
        std::process::exit(if error.raw_os_error() == Some(libc::ENOENT) {
            127
        } else {
            126
        });
    }
}

fn explain(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::ENOENT) => "its interpreter or loader is not in the image".to_owned(),
        Some(libc::ENOEXEC) => {
            "it is neither a program of this architecture nor a script with #!".to_owned()
        }
        _ => error.to_string(),
    }
}

fn command_of(spec: &Spec) -> Option<(&Process, &str)> {
    let process = spec.process().as_ref()?;
    Some((process, process.args().as_ref()?.first()?))
}

fn path_of(process: &Process) -> &str {
    let mut env = process.env().iter().flatten();
    env.find_map(|variable| variable.strip_prefix("PATH="))
        .unwrap_or(DEFAULT_PATH)
}

/// Looks up a command as execvp(3) does: a name with a slash is a path, any other is searched for
/// in each directory of `path`, where an empty one means the working directory.
fn find(name: &str, path: &str) -> Result<PathBuf, Unusable> {
    if name.contains('/') {
        return usable(Path::new(name)).map(|()| PathBuf::from(name));
    }
    let mut worst = Unusable::NotFound;
    for directory in path.split(':') {
        let candidate = Path::new(if directory.is_empty() { "." } else { directory }).join(name);
        match usable(&candidate) {
            Ok(()) => return Ok(candidate),
            Err(Unusable::NotFound) => {}
            Err(reason) => worst = reason,
        }
    }
    Err(worst)
}

fn usable(path: &Path) -> Result<(), Unusable> {
    let metadata = std::fs::metadata(path).map_err(|error| match error.raw_os_error() {
        Some(libc::EACCES) => Unusable::NotExecutable("permission denied on the way to it"),
        Some(libc::ELOOP) => Unusable::NotExecutable("too many symbolic links"),
        _ => Unusable::NotFound,
    })?;
    if metadata.is_dir() {
        return Err(Unusable::NotExecutable("it is a directory"));
    }
    if !metadata.is_file() {
        return Err(Unusable::NotExecutable("it is no regular file"));
    }
    // Only a definite refusal counts.
    if metadata.permissions().mode() & 0o111 == 0
        || accessat(CWD, path, Access::EXEC_OK, AtFlags::EACCESS) == Err(Errno::ACCESS)
    {
        return Err(Unusable::NotExecutable("permission denied"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launcher::Confinement;
    use crate::seccomp::compile;
    use serde_json::{Value, json};
    use std::fs;

    fn directory() -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for (name, mode) in [("tool", 0o755), ("data", 0o644)] {
            fs::write(directory.path().join(name), "").unwrap();
            fs::set_permissions(
                directory.path().join(name),
                fs::Permissions::from_mode(mode),
            )
            .unwrap();
        }
        fs::create_dir(directory.path().join("dir")).unwrap();
        directory
    }

    /// Returns the output of a process created from `process`, as a container's own, under a
    /// filter.
    fn run(process: &Value, filter: Option<&Value>) -> std::process::Output {
        let filter = filter.map(|profile| {
            let file = tempfile::NamedTempFile::new().unwrap();
            let profile = serde_json::from_value(profile.clone()).unwrap();
            compile(&profile).unwrap().store(file.path()).unwrap();
            file
        });
        let mut process: Process = serde_json::from_value(process.clone()).unwrap();
        let path = filter.as_ref().map(|file| file.path().to_owned());
        let confinement = Confinement::take_own(&mut process, path, None);
        assert_eq!(process.cwd(), Path::new("/"));
        let no_new_privileges = process.no_new_privileges() == Some(true);
        let mut spec = Spec::default();
        spec.set_process(Some(process));
        let report = Arc::new(tempfile::tempfile().unwrap());
        let command = Command::new(report, Some(confinement.load().unwrap()));
        crate::sys::output_of(move || {
            if no_new_privileges {
                rustix::thread::set_no_new_privs(true)?;
            }
            command.validate(&spec).map_err(io::Error::other)?;
            command.exec(&spec).map_err(io::Error::other)
        })
    }

    #[test]
    fn a_filter_may_forbid_all_that_its_command_does_not_do_itself() {
        let strict = json!({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{
            "names": ["statx", "faccessat2", "sendmsg", "rt_sigaction", "capset", "setfsuid"],
            "action": "SCMP_ACT_KILL_PROCESS",
        }]});
        let output = run(
            &json!({"user": {"uid": 0, "gid": 0}, "cwd": "/", "noNewPrivileges": true,
                "args": ["cat", "/proc/self/status"], "env": ["PATH=/nonexistent:/bin"]}),
            Some(&strict),
        );
        let status = String::from_utf8(output.stdout).unwrap();
        assert!(
            status.contains("Seccomp:\t2"),
            "{:?}: {status}",
            output.status
        );
    }

    #[test]
    fn a_filter_that_cannot_wait_does_not_hide_the_command() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let blind = json!({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [
            {"names": ["statx", "faccessat2"], "action": "SCMP_ACT_KILL_PROCESS"}]});
        let rights = ["CAP_CHOWN", "CAP_SETPCAP"];
        let output = run(
            &json!({"user": {"uid": 0, "gid": 0}, "cwd": "/", "args": ["cat", "/proc/self/status"],
                "env": ["PATH=/bin"], "capabilities": {"bounding": rights, "effective": rights,
                "permitted": rights, "inheritable": [], "ambient": []}}),
            Some(&blind),
        );
        let status = String::from_utf8(output.stdout).unwrap();
        for line in ["Seccomp:\t2", "CapEff:\t0000000000000101"] {
            assert!(status.contains(line), "{:?}: {status}", output.status);
        }
    }

    #[test]
    fn a_working_directory_that_is_missing_is_made() {
        let directory = tempfile::tempdir().unwrap();
        let wanted = directory.path().canonicalize().unwrap().join("a/b");
        let output = run(
            &json!({"user": {"uid": 0, "gid": 0}, "cwd": wanted, "args": ["/bin/sh", "-c", "pwd"]}),
            None,
        );
        assert_eq!(
            output.stdout,
            format!("{}\n", wanted.display()).into_bytes()
        );
        let mode = fs::metadata(&wanted).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o755);
    }

    #[test]
    fn a_command_is_found_in_the_path() {
        let directory = directory();
        let path = format!("/nonexistent:{}", directory.path().display());
        assert_eq!(find("tool", &path), Ok(directory.path().join("tool")));
        assert_eq!(find("nothing", &path), Err(Unusable::NotFound));
    }

    #[test]
    fn a_file_that_cannot_be_executed_is_told_from_one_that_is_missing() {
        let directory = directory();
        let at = |name: &str| {
            directory
                .path()
                .join(name)
                .into_os_string()
                .into_string()
                .unwrap()
        };
        let path = directory.path().to_str().unwrap();
        assert_eq!(
            find("data", path),
            Err(Unusable::NotExecutable("permission denied"))
        );
        assert_eq!(
            find(&at("dir"), ""),
            Err(Unusable::NotExecutable("it is a directory"))
        );
        assert_eq!(find(&at("none"), path), Err(Unusable::NotFound));
        assert_eq!(find(&at("data/below"), path), Err(Unusable::NotFound));
    }

    #[test]
    fn a_command_that_works_later_in_the_path_wins_over_one_that_does_not() {
        let (first, second) = (directory(), directory());
        fs::set_permissions(first.path().join("tool"), fs::Permissions::from_mode(0o600)).unwrap();
        let path = format!("{}:{}", first.path().display(), second.path().display());
        assert_eq!(find("tool", &path), Ok(second.path().join("tool")));
    }
}
