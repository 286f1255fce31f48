//! The launcher: the agent executed again, single-threaded, to call libcontainer.
//!
//! libcontainer forks and does much between fork and exec, which is only safe in a process with a
//! single thread. So PID 1 executes itself with [`SUBCOMMAND`] and a [`LaunchRequest`], with the
//! process's standard streams already in place (or a console socket to send the terminal through),
//! and a pipe on which exactly one [`LaunchReport`] line counts: the first. Processes are created
//! as siblings of the launcher, so they are children of PID 1 from the start.
//!
//! This module runs in the launcher; `container::process::launch` is PID 1's side.

mod confinement;
mod entry;
mod executor;
mod explain;

use std::fs::File;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context as _;
use libcontainer::container::builder::ContainerBuilder;
use libcontainer::error::LibcontainerError;
use libcontainer::syscall::syscall::SyscallType;
use podvisor_agent_protocol::limits;
use rustix::process::{Pid, Resource, Rlimit, setrlimit};
use serde::{Deserialize, Serialize};

use crate::cgroup::Cgroup;
pub use confinement::Confinement;
pub use entry::UserEntry;
use executor::Command;

/// First argument of a launcher's command line; the second is a [`LaunchRequest`] as JSON.
pub const SUBCOMMAND: &str = "launch";

/// Longest line of a report, in bytes.
pub const REPORT_BYTES: usize = limits::ERROR_BYTES + 1024;

/// A request of PID 1.
#[derive(Debug, Serialize, Deserialize)]
pub struct LaunchRequest {
    /// libcontainer's name of the container, short and unique within the guest.
    pub name: String,
    /// Directory of libcontainer's states; an exec has a separate one.
    pub state: PathBuf,
    /// Socket to which the terminal's master is sent, for a process with a terminal.
    pub console: Option<PathBuf>,
    /// The inherited descriptor of the report pipe.
    pub report_fd: i32,
    /// The restrictions that are not passed to libcontainer, for a process with a seccomp filter or
    /// a user namespace.
    pub confinement: Option<Confinement>,
    /// The process to create.
    pub kind: NewProcess,
}

/// The process to create.
#[derive(Debug, Serialize, Deserialize)]
pub enum NewProcess {
    /// A container's own, from the bundle in this directory; it waits to be started.
    Create {
        /// Contains config.json.
        bundle: PathBuf,
    },
    /// An additional one in a running container; it starts immediately.
    Exec {
        /// File with the process object.
        process: PathBuf,
        /// The container's own process, in the guest's pid namespace.
        init: u32,
    },
}

/// The result of a launch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum LaunchReport {
    /// The process exists.
    Made {
        /// Its id in the guest's pid namespace.
        pid: i32,
    },
    /// The process could not be created.
    Failed {
        /// The kind of failure.
        failure: Failure,
        /// The message for users.
        message: String,
    },
}

/// Kinds of failure that callers distinguish.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Failure {
    /// There is no such command in the container.
    CommandNotFound,
    /// The command cannot be executed.
    CommandNotExecutable,
    /// Any other failure.
    Other,
}

impl LaunchReport {
    /// Writes the report as one line; if there are several, the reader takes the first.
    fn send(&self, mut pipe: &File) {
        if let Ok(mut line) = serde_json::to_vec(self) {
            line.push(b'\n');
            // The reader is gone only if PID 1 is.
            let _ = pipe.write_all(&line);
        }
    }

    fn failed(failure: Failure, mut message: String) -> Self {
        message.truncate(message.floor_char_boundary(limits::ERROR_BYTES));
        Self::Failed { failure, message }
    }
}

/// Runs the launcher with the request on its command line.
pub fn main(request: Option<String>) -> ExitCode {
    crate::log::init();
    let prepared = request.context("no request was given").and_then(|json| {
        let request: LaunchRequest =
            serde_json::from_str(&json).context("the request is malformed")?;
        // Reopened instead of taken over: only its number is known.
        let pipe = File::options()
            .write(true)
            .open(format!("/proc/self/fd/{}", request.report_fd))
            .context("cannot open the report pipe")?;
        Ok((request, Arc::new(pipe)))
    });
    let (request, pipe) = match prepared {
        Ok(prepared) => prepared,
        Err(error) => {
            crate::log::emergency(&format!("launcher: {error:#}"));
            return ExitCode::FAILURE;
        }
    };
    match make(&request, &pipe) {
        Ok(pid) => {
            LaunchReport::Made { pid }.send(&pipe);
            ExitCode::SUCCESS
        }
        Err(error) => {
            let message = explain::explain(&request.kind, &error);
            LaunchReport::failed(Failure::Other, message).send(&pipe);
            ExitCode::FAILURE
        }
    }
}

/// Limits of open files of a process whose specification sets none: the initial limit, and the one
/// up to which it may raise it.
const OPEN_FILES: Rlimit = Rlimit {
    current: Some(1024),
    maximum: Some(524_288),
};

fn make(request: &LaunchRequest, pipe: &Arc<File>) -> anyhow::Result<i32> {
    setrlimit(Resource::Nofile, OPEN_FILES).context("cannot limit open files")?;
    let confinement = request.confinement.clone();
    let confinement = confinement.map(Confinement::load).transpose()?;
    let builder = ContainerBuilder::new(request.name.clone(), SyscallType::default())
        .with_executor(Command::new(pipe.clone(), confinement))
        .with_console_socket(request.console.clone())
        .with_root_path(&request.state)?;
    let made = match &request.kind {
        NewProcess::Create { bundle } => builder
            .as_init(bundle)
            .with_systemd(false)
            .with_detach(true)
            .as_sibling(true)
            .build()
            .and_then(|container| {
                container.pid().ok_or_else(|| {
                    LibcontainerError::Other("the new container has no process".to_owned())
                })
            }),
        NewProcess::Exec { process, init } => builder
            .as_tenant()
            .with_process(Some(process))
            .with_sub_cgroup(nested_group(&request.name, *init))
            .with_detach(true)
            .as_sibling(true)
            .build(),
    };
    Ok(made?.as_raw())
}

/// Returns the control group that a container's process has created below its own and moved to: if
/// such groups have controllers, the container's own accepts no more processes.
fn nested_group(name: &str, init: u32) -> Option<String> {
    let init = Pid::from_raw(i32::try_from(init).ok()?)?;
    Cgroup::new(name).nested(init)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_report_fits_its_line() {
        let report = LaunchReport::failed(Failure::CommandNotExecutable, "x".repeat(100_000));
        assert!(serde_json::to_vec(&report).unwrap().len() < REPORT_BYTES);
    }
}
