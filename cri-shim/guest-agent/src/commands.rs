//! Each command of the agent that is used here.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};

use crate::bounded::{List, MAX_LIST, Text};
use crate::client::GuestAgent;
use crate::error::GuestAgentError;
use crate::program::{Program, ProgramExit};
use crate::types::{
    GuestInfo, RawCpu, RawFileSystem, RawHostName, RawInfo, RawInterface, RawOs, RawTimeZone,
    RawUser,
};

/// How long a refusal of a shutdown is waited for.
const REFUSAL: Duration = Duration::from_millis(500);

/// Most bytes of a request's texts.
const MAX_TEXT: usize = 64 << 10;

/// How a guest is shut down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShutdownMode {
    /// And powered off.
    PowerDown,
    /// And started again.
    Reboot,
}

impl<S: AsyncRead + AsyncWrite + Unpin> GuestAgent<S> {
    /// Returns when the agent answers.
    ///
    /// # Errors
    /// [`GuestAgentError`].
    pub async fn ping(&self, limit: Duration) -> Result<(), GuestAgentError> {
        self.done("guest-ping", Value::Null, limit).await
    }

    /// Asks for all that the agent says of its guest. What it does not support, or its
    /// configuration blocks, or it does not say while file systems are frozen, is empty.
    ///
    /// # Errors
    /// [`GuestAgentError`], if it answers nothing at all.
    pub async fn info(&self, limit: Duration) -> Result<GuestInfo, GuestAgentError> {
        let info: RawInfo = self.call("guest-info", Value::Null, limit).await?;
        let enabled = info.supported_commands.0.into_iter();
        let enabled = enabled.filter(|command| command.enabled);
        let mut system = GuestInfo {
            agent_version: info.version.0,
            commands: enabled.map(|command| command.name.0).collect(),
            ..GuestInfo::default()
        };
        let Some(status) = self.maybe::<Text>("guest-fsfreeze-status", limit).await? else {
            return self.rest_of(system, limit).await;
        };
        system.is_frozen = status.0 == "frozen";
        match system.is_frozen {
            // It refuses the others then.
            true => Ok(system),
            false => self.rest_of(system, limit).await,
        }
    }

    async fn rest_of(
        &self,
        mut system: GuestInfo,
        limit: Duration,
    ) -> Result<GuestInfo, GuestAgentError> {
        let os = self.maybe::<RawOs>("guest-get-osinfo", limit).await?;
        system.os = os.map(Into::into).unwrap_or_default();
        let name = self.maybe::<RawHostName>("guest-get-host-name", limit);
        system.host_name = name.await?.map(|raw| raw.host_name.0).unwrap_or_default();
        let zone = self.maybe::<RawTimeZone>("guest-get-timezone", limit);
        if let Some(zone) = zone.await? {
            (system.time_zone, system.time_offset) = (zone.zone.0, zone.offset);
        }
        let users = self.list::<RawUser>("guest-get-users", limit).await?;
        system.users = users.into_iter().map(Into::into).collect();
        let interfaces = self.list::<RawInterface>("guest-network-get-interfaces", limit);
        system.interfaces = interfaces.await?.into_iter().map(Into::into).collect();
        let mounted = self
            .list::<RawFileSystem>("guest-get-fsinfo", limit)
            .await?;
        system.file_systems = mounted.into_iter().map(Into::into).collect();
        Ok(system)
    }

    /// The answer to a question, unless the agent refuses it or says something else.
    async fn maybe<T: DeserializeOwned>(
        &self,
        command: &'static str,
        limit: Duration,
    ) -> Result<Option<T>, GuestAgentError> {
        match self.call(command, Value::Null, limit).await {
            Ok(answer) => Ok(Some(answer)),
            Err(error) if error.is_no_agent() => Err(error),
            Err(_) => Ok(None),
        }
    }

    async fn list<T: DeserializeOwned>(
        &self,
        command: &'static str,
        limit: Duration,
    ) -> Result<Vec<T>, GuestAgentError> {
        let list = self.maybe::<List<T>>(command, limit).await?;
        Ok(list.unwrap_or_default().0)
    }

    async fn done(
        &self,
        command: &'static str,
        arguments: Value,
        limit: Duration,
    ) -> Result<(), GuestAgentError> {
        let done = self.call::<IgnoredAny>(command, arguments, limit).await;
        done.map(drop)
    }

    /// Brings all CPUs online that the guest has found, or the first 128. Returns whether it says
    /// that there are `wanted` then, or as many of them.
    ///
    /// # Errors
    /// [`GuestAgentError`].
    pub async fn use_cpus(&self, wanted: usize, limit: Duration) -> Result<bool, GuestAgentError> {
        Ok(self.bring_online(limit).await? >= wanted.min(MAX_LIST))
    }

    async fn bring_online(&self, limit: Duration) -> Result<usize, GuestAgentError> {
        const GET: &str = "guest-get-vcpus";
        let known: List<RawCpu> = self.call(GET, Value::Null, limit).await?;
        let count = known.0.len();
        let offline = known.0.into_iter().filter(|cpu| !cpu.online);
        let wanted: Vec<Value> = offline
            .map(|cpu| json!({ "logical-id": cpu.logical_id, "online": true }))
            .collect();
        if wanted.is_empty() {
            return Ok(count);
        }
        // It says how many of them it has changed, up to the first one that failed.
        let asked = wanted.len();
        let set = json!({ "vcpus": wanted });
        let changed: usize = self.call("guest-set-vcpus", set, limit).await?;
        Ok(count - asked + changed.min(asked))
    }

    /// Makes all file systems consistent on their disks, and keeps programs from writing until
    /// [`thaw`](Self::thaw). Returns how many were frozen.
    ///
    /// # Errors
    /// [`GuestAgentError`]; they may be frozen nevertheless, so thaw them.
    pub async fn freeze(&self, limit: Duration) -> Result<u64, GuestAgentError> {
        self.call("guest-fsfreeze-freeze", Value::Null, limit).await
    }

    /// Ends [`freeze`](Self::freeze). Returns how many file systems were frozen.
    ///
    /// # Errors
    /// [`GuestAgentError`].
    pub async fn thaw(&self, limit: Duration) -> Result<u64, GuestAgentError> {
        self.call("guest-fsfreeze-thaw", Value::Null, limit).await
    }

    /// Shuts the guest down. Returns when the agent has the command and does not refuse it within a
    /// moment: it does not answer.
    ///
    /// # Errors
    /// [`GuestAgentError`].
    pub async fn shutdown(
        &self,
        mode: ShutdownMode,
        limit: Duration,
    ) -> Result<(), GuestAgentError> {
        let mode = match mode {
            ShutdownMode::PowerDown => "powerdown",
            ShutdownMode::Reboot => "reboot",
        };
        let arguments = json!({ "mode": mode });
        self.send("guest-shutdown", arguments, limit, REFUSAL).await
    }

    /// Sets the guest's clock: by the agent's own command, or by the guest's `date` where the agent
    /// refuses because the guest has no `hwclock`.
    ///
    /// # Errors
    /// [`GuestAgentError`].
    pub async fn set_time(&self, time: SystemTime, limit: Duration) -> Result<(), GuestAgentError> {
        let asked = Instant::now();
        let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        let nanoseconds = i64::try_from(since.as_nanos()).unwrap_or(i64::MAX);
        let arguments = json!({ "time": nanoseconds });
        match self.done("guest-set-time", arguments, limit).await {
            // The clock is set by then; the machine has none that would keep the time when it is
            // off.
            Err(GuestAgentError::Refused { reason, .. }) if reason.contains("hwclock") => Ok(()),
            Err(refused @ GuestAgentError::Refused { .. }) => {
                // The first answer took a while.
                let since = since.saturating_add(asked.elapsed());
                let date = Program {
                    path: "date".to_owned(),
                    arguments: vec!["-s".to_owned(), format!("@{}", since.as_secs())],
                    ..Program::default()
                };
                let number = self.start_program(&date, limit).await?;
                match self.program_end(number, limit).await?.exit {
                    ProgramExit::Code(0) => Ok(()),
                    _ => Err(refused),
                }
            }
            done => done,
        }
    }

    /// Adds keys, each a line of OpenSSH's `authorized_keys`, to those by which a user of the guest
    /// may log in.
    ///
    /// # Errors
    /// [`GuestAgentError`].
    pub async fn add_authorized_keys(
        &self,
        user: &str,
        keys: &[String],
        limit: Duration,
    ) -> Result<(), GuestAgentError> {
        let size = keys.iter().map(String::len).sum::<usize>();
        check("keys", size.saturating_add(user.len()))?;
        let arguments = json!({ "username": user, "keys": keys, "reset": false });
        self.done("guest-ssh-add-authorized-keys", arguments, limit)
            .await
    }

    /// Sets the password of a user of the guest.
    ///
    /// # Errors
    /// [`GuestAgentError`].
    pub async fn set_password(
        &self,
        user: &str,
        password: &str,
        limit: Duration,
    ) -> Result<(), GuestAgentError> {
        check("a password", password.len().saturating_add(user.len()))?;
        let arguments = json!({
            "username": user,
            "password": BASE64.encode(password),
            "crypted": false,
        });
        self.done("guest-set-user-password", arguments, limit).await
    }
}

fn check(what: &'static str, size: usize) -> Result<(), GuestAgentError> {
    match size > MAX_TEXT {
        true => Err(GuestAgentError::Request {
            what,
            size,
            most: MAX_TEXT,
        }),
        false => Ok(()),
    }
}
