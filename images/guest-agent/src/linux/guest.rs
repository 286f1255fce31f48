//! Which command is whose.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::event::PollFd;
use serde_json::{Value, json};

use super::files::Files;
use super::freeze::Freezer;
use super::kernel::Kernel;
use super::programs::Programs;
use super::{cpus, keys, mounts, network, system, tool, users};
use crate::protocol::{Command, Fault, Handler, Password, ShutdownMode};

/// How long another program may take that a command waits for.
const TOOL_LIMIT: Duration = Duration::from_secs(10);

/// How long a refusal of a shutdown is waited for.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(3);

/// Longest password in bytes: what fits into a pipe together with a name.
const MAX_PASSWORD: usize = 4096;

/// The system that the agent is in.
#[derive(Debug)]
pub struct Guest<K> {
    /// Where its files are.
    root: PathBuf,
    kernel: K,
    programs: Programs,
    files: Files,
    freezer: Freezer,
}

impl<K: Kernel> Guest<K> {
    /// Asks the system whose files are below `root`.
    pub fn new(root: &Path, kernel: K) -> Self {
        Self {
            root: root.to_owned(),
            kernel,
            programs: Programs::default(),
            files: Files::default(),
            freezer: Freezer::default(),
        }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// Reads what the system's programs have written, and does what is due by now.
    pub(super) fn turn(&mut self) {
        self.programs.turn();
        if self.freezer.is_overdue(Instant::now()) {
            // Tried again at the next turn if it fails.
            let _ = self.thaw();
        }
    }

    /// When [`turn`](Self::turn) has something to do at the latest.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.freezer.deadline()
    }

    /// What there is to wait for.
    pub(super) fn waits_for(&self) -> impl Iterator<Item = PollFd<'_>> {
        self.programs.waits_for()
    }

    /// Ends what must not outlive the agent.
    pub(super) fn leave(&mut self) {
        if self.freezer.is_frozen() {
            let _ = self.thaw();
        }
    }

    fn thaw(&mut self) -> Result<Value, Fault> {
        // Without them, what this agent has frozen thaws all the same.
        let mounts = mounts::read(&self.path("proc/self/mountinfo")).unwrap_or_default();
        let thawed = self.freezer.thaw(&mounts, &self.root, &self.kernel);
        thawed.map(Value::from)
    }

    fn shut_down(&self, mode: ShutdownMode) -> Result<Value, Fault> {
        let (flag, other) = match mode {
            ShutdownMode::PowerDown => ("-P", "poweroff"),
            ShutdownMode::Halt => ("-H", "halt"),
            ShutdownMode::Reboot => ("-r", "reboot"),
        };
        let (tool, words) = match tool::find(&self.root, "shutdown") {
            Ok(tool) => (tool, vec![flag, "+0"]),
            Err(_) => (tool::find(&self.root, other)?, Vec::new()),
        };
        tool::run(&tool, &words, b"", SHUTDOWN_LIMIT, tool::AtLimit::GoesOn)?;
        Ok(json!({}))
    }

    fn set_password(&self, password: &Password) -> Result<Value, Fault> {
        let Password {
            username,
            password,
            crypted,
        } = password;
        let is_name = !username.is_empty() && !username.contains([':', '\n']);
        if !is_name || password.contains(&b'\n') {
            return Err(Fault::new(
                "a name has no colon, and neither a name nor a password has a line break",
            ));
        }
        if password.len() > MAX_PASSWORD || username.len() > MAX_PASSWORD {
            return Err(Fault::new(format!(
                "a password has at most {MAX_PASSWORD} bytes"
            )));
        }
        let line = [username.as_bytes(), b":", password, b"\n"].concat();
        let words: &[&str] = if *crypted { &["-e"] } else { &[] };
        let tool = tool::find(&self.root, "chpasswd")?;
        tool::run(&tool, words, &line, TOOL_LIMIT, tool::AtLimit::IsKilled)?;
        Ok(json!({}))
    }

    fn set_time(&self, time: Option<i64>) -> Result<Value, Fault> {
        let time = time.ok_or_else(|| {
            Fault::new("there is no clock to read the time from: guest-set-time needs a time")
        })?;
        let time = u64::try_from(time)
            .map_err(|_| Fault::new("a time before 1970 cannot be set".to_owned()))?;
        let set = self.kernel.set_clock(Duration::from_nanos(time));
        set.map_err(|error| Fault::io("set", "the clock", &error))?;
        Ok(json!({}))
    }
}

impl<K: Kernel> Handler for Guest<K> {
    fn is_frozen(&self) -> bool {
        self.freezer.is_frozen()
    }

    fn handle(&mut self, command: Command) -> Result<Value, Fault> {
        match command {
            Command::GetTime => {
                let now = SystemTime::now().duration_since(UNIX_EPOCH);
                let now = now.unwrap_or_default().as_nanos();
                Ok(json!(i64::try_from(now).unwrap_or(i64::MAX)))
            }
            Command::SetTime(time) => self.set_time(time),
            Command::Shutdown(mode) => self.shut_down(mode),
            Command::Exec(exec) => self.programs.start(exec),
            Command::ExecStatus(pid) => self.programs.status(pid),
            Command::FileOpen(open) => self.files.open(&open),
            Command::FileRead(read) => self.files.read(&read),
            Command::FileWrite(write) => self.files.write(&write),
            Command::FileSeek(seek) => self.files.seek(&seek),
            Command::FileFlush(handle) => self.files.flush(handle),
            Command::FileClose(handle) => self.files.close(handle),
            Command::FreezeStatus => Ok(json!(match self.freezer.is_frozen() {
                true => "frozen",
                false => "thawed",
            })),
            Command::Freeze(points) => {
                let mounts = mounts::read(&self.path("proc/self/mountinfo"))?;
                let points = points.as_deref();
                let frozen = self
                    .freezer
                    .freeze(&mounts, points, &self.root, &self.kernel);
                frozen.map(Value::from)
            }
            Command::Thaw => self.thaw(),
            Command::GetUsers => Ok(users::logged_in(&self.root)),
            Command::GetInterfaces => network::interfaces(),
            Command::GetOsInfo => Ok(system::os(&self.root)),
            Command::GetHostName => Ok(system::host_name()),
            Command::GetTimeZone => Ok(system::time_zone()),
            Command::GetFileSystems => {
                let mounts = mounts::read(&self.path("proc/self/mountinfo"))?;
                Ok(system::file_systems(&mounts, &self.root))
            }
            Command::GetVcpus => cpus::list(&self.root),
            Command::SetVcpus(wanted) => cpus::set(&self.root, &wanted),
            Command::GetKeys(user) => keys::get(&self.root, &user),
            Command::AddKeys(wanted) => keys::add(&self.root, &wanted),
            Command::RemoveKeys(wanted) => keys::remove(&self.root, &wanted),
            Command::SetPassword(password) => self.set_password(&password),
        }
    }
}
