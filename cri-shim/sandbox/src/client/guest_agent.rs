//! The requests to QEMU's guest agent, in a guest with an operating system of its own.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use podvisor_guest_agent::{GuestInfo, Program, ProgramEnd};

use super::super::error::SandboxError;
use super::super::types::{GuestAgentAnswer, GuestAgentCall, Password};
use super::super::wire::{Answer, Call};
use super::{REQUEST_TIMEOUT, SandboxClient};

/// How long the agent has for a request that takes a moment.
const MOMENT: Duration = Duration::from_secs(30);

/// How long it has to freeze file systems.
const FREEZE: Duration = Duration::from_secs(120);

impl SandboxClient {
    /// Returns whether the guest's agent answers.
    ///
    /// # Errors
    /// The kind [`NoAgent`](super::super::RefusalKind::NoAgent) without one; [`SandboxError`]
    /// otherwise.
    pub async fn ping_guest_agent(&self, id: &str) -> Result<(), SandboxError> {
        self.asks(id, GuestAgentCall::Ping, MOMENT).await
    }

    /// Returns what the guest says of itself: its system, users, addresses, file systems.
    ///
    /// # Errors
    /// As [`Self::ping_guest_agent`].
    pub async fn guest_info(&self, id: &str) -> Result<GuestInfo, SandboxError> {
        match self.agent(id, GuestAgentCall::Info, MOMENT).await? {
            GuestAgentAnswer::Info(info) => Ok(*info),
            _ => Err(self.unfit()),
        }
    }

    /// Runs a program in the guest to its end, or until `limit`, when it is not waited for any
    /// more; zero waits for as long as it takes. Of each output there is at most
    /// [`GuestAgentCall::MAX_OUTPUT`]. [`Self::exec`] does the same with streams.
    ///
    /// # Errors
    /// As [`Self::ping_guest_agent`].
    pub async fn run_in_guest(
        &self,
        id: &str,
        program: Program,
        limit: Duration,
    ) -> Result<ProgramEnd, SandboxError> {
        match self.agent(id, GuestAgentCall::Run(program), limit).await? {
            GuestAgentAnswer::Ended(end) => Ok(end),
            _ => Err(self.unfit()),
        }
    }

    /// Makes the guest's file systems consistent on their disks and keeps programs from writing,
    /// until [`Self::thaw_guest`], but for `longest` at most and never for more than
    /// [`GuestAgentCall::LONGEST_FREEZE`]. Returns how many there are.
    ///
    /// # Errors
    /// As [`Self::ping_guest_agent`].
    pub async fn freeze_guest(&self, id: &str, longest: Duration) -> Result<u64, SandboxError> {
        self.file_systems(id, GuestAgentCall::Freeze(longest), FREEZE)
            .await
    }

    /// Ends [`Self::freeze_guest`]. Returns how many file systems were frozen.
    ///
    /// # Errors
    /// As [`Self::ping_guest_agent`].
    pub async fn thaw_guest(&self, id: &str) -> Result<u64, SandboxError> {
        self.file_systems(id, GuestAgentCall::Thaw, MOMENT).await
    }

    /// Sets the guest's clock to the host's time.
    ///
    /// # Errors
    /// As [`Self::ping_guest_agent`].
    pub async fn set_guest_time(&self, id: &str) -> Result<(), SandboxError> {
        self.asks(id, GuestAgentCall::SetTime, MOMENT).await
    }

    /// Lets who has one of these keys, each a line of OpenSSH's `authorized_keys`, log in as a user
    /// of the guest.
    ///
    /// # Errors
    /// As [`Self::ping_guest_agent`].
    pub async fn add_guest_keys(
        &self,
        id: &str,
        user: &str,
        keys: Vec<String>,
    ) -> Result<(), SandboxError> {
        let user = user.to_owned();
        self.asks(id, GuestAgentCall::AddKeys { user, keys }, MOMENT)
            .await
    }

    /// Sets the password of a user of the guest.
    ///
    /// # Errors
    /// As [`Self::ping_guest_agent`].
    pub async fn set_guest_password(
        &self,
        id: &str,
        user: &str,
        password: Password,
    ) -> Result<(), SandboxError> {
        let user = user.to_owned();
        self.asks(id, GuestAgentCall::SetPassword { user, password }, MOMENT)
            .await
    }

    /// Copies a file of the guest to a connected stream of the host; returns its size.
    ///
    /// # Errors
    /// The kind [`NotFound`](super::super::RefusalKind::NotFound) if the guest cannot open it; else
    /// as [`Self::ping_guest_agent`].
    pub async fn copy_from_guest(
        &self,
        id: &str,
        path: &str,
        to: UnixStream,
    ) -> Result<u64, SandboxError> {
        self.copies(id, path, None, to).await
    }

    /// Copies what comes from a connected stream to a file of the guest, until the stream ends; the
    /// file has this mode then.
    ///
    /// # Errors
    /// As [`Self::copy_from_guest`].
    pub async fn copy_to_guest(
        &self,
        id: &str,
        path: &str,
        mode: u32,
        from: UnixStream,
    ) -> Result<u64, SandboxError> {
        self.copies(id, path, Some(mode), from).await
    }

    async fn copies(
        &self,
        id: &str,
        path: &str,
        write: Option<u32>,
        stream: UnixStream,
    ) -> Result<u64, SandboxError> {
        let call = Call::CopyFile {
            id: id.to_owned(),
            path: path.to_owned(),
            write,
        };
        match self.wait_for(call, vec![stream.into()]).await? {
            (Answer::Copied(count), _) => Ok(count),
            _ => Err(self.unfit()),
        }
    }

    /// Asks the guest to reboot: its agent, or without one by the power button, after which its
    /// machine is built anew if it powers itself off within two minutes.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] if it does not run.
    pub async fn reboot_guest(&self, id: &str) -> Result<(), SandboxError> {
        self.reboots(id, false).await
    }

    /// Replaces the machine of a guest with an operating system of its own by a new one, as a reset
    /// button does. The guest is not asked, and the container stays.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] if it does not run, or reboots just now.
    pub async fn reset_machine(&self, id: &str) -> Result<(), SandboxError> {
        self.reboots(id, true).await
    }

    async fn reboots(&self, id: &str, is_reset: bool) -> Result<(), SandboxError> {
        let id = id.to_owned();
        self.done(Call::Reboot { id, is_reset }, Vec::new()).await
    }

    async fn asks(
        &self,
        id: &str,
        ask: GuestAgentCall,
        limit: Duration,
    ) -> Result<(), SandboxError> {
        match self.agent(id, ask, limit).await? {
            GuestAgentAnswer::Done => Ok(()),
            _ => Err(self.unfit()),
        }
    }

    async fn file_systems(
        &self,
        id: &str,
        ask: GuestAgentCall,
        limit: Duration,
    ) -> Result<u64, SandboxError> {
        match self.agent(id, ask, limit).await? {
            GuestAgentAnswer::FileSystems(count) => Ok(count),
            _ => Err(self.unfit()),
        }
    }

    async fn agent(
        &self,
        id: &str,
        ask: GuestAgentCall,
        limit: Duration,
    ) -> Result<GuestAgentAnswer, SandboxError> {
        let call = Call::GuestAgent {
            id: id.to_owned(),
            ask: Box::new(ask),
            limit_ms: u64::try_from(limit.as_millis()).unwrap_or(0),
        };
        let answer = match limit.is_zero() {
            true => self.wait_for(call, Vec::new()).await?,
            false => {
                let limit = limit.saturating_add(REQUEST_TIMEOUT);
                self.call_within(limit, call, Vec::new()).await?
            }
        };
        match answer {
            (Answer::GuestAgent(answer), _) => Ok(answer),
            _ => Err(self.unfit()),
        }
    }
}
