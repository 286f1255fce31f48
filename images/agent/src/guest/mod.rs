//! The guest as a whole: what the host configures once for all containers.
//!
//! A request is checked as a whole before anything is changed; then host name, [`clock`], entropy,
//! network ([`crate::network`]), [`shares`] and [`sysctl`] are brought into the state that it asks
//! for, in this order. What is so already stays as it is. Knows no containers.

pub mod clock;
pub mod cpu;
pub mod memory;
pub mod pci;
pub mod shares;
pub mod sysctl;

use std::error::Error;
use std::io;

use podvisor_agent_protocol::{AgentError, ErrorKind, api, limits};

use crate::network::plan::{Plan, PlanError};
use crate::network::{self, NetworkError};
use clock::ClockError;
use cpu::CpuError;
use pci::ScanError;
use shares::{Share, ShareError, Shares};
use sysctl::{Sysctl, SysctlError};

/// The guest cannot be configured as asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GuestError {
    /// No host name.
    #[error("a host name is 1 to 64 letters, digits, '-', '.' or '_'")]
    HostName,
    /// Too much of it.
    #[error("a seed is at most {} bytes", limits::ENTROPY_BYTES)]
    Seed,
    /// The clock.
    #[error(transparent)]
    Clock(#[from] ClockError),
    /// The network's description.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The network.
    #[error(transparent)]
    Network(#[from] NetworkError),
    /// virtio-fs.
    #[error(transparent)]
    Share(#[from] ShareError),
    /// Devices on PCI.
    #[error(transparent)]
    Scan(#[from] ScanError),
    /// Processors.
    #[error(transparent)]
    Cpu(#[from] CpuError),
    /// Kernel parameters.
    #[error(transparent)]
    Sysctl(#[from] SysctlError),
    /// Anything else.
    #[error("cannot {action}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
}

impl GuestError {
    /// What the host decides by.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::HostName
            | Self::Seed
            | Self::Plan(_)
            | Self::Clock(ClockError::OutOfRange)
            | Self::Share(ShareError::Tag(_) | ShareError::Path(_) | ShareError::Other { .. })
            | Self::Scan(ScanError::Address(_))
            | Self::Sysctl(SysctlError::Name(_) | SysctlError::Value(_)) => {
                ErrorKind::InvalidArgument
            }
            Self::Share(ShareError::TooMany) | Self::Sysctl(SysctlError::TooMany) => {
                ErrorKind::ResourceExhausted
            }
            Self::Network(NetworkError::Missing { .. }) | Self::Scan(ScanError::NoBus) => {
                ErrorKind::NotFound
            }
            _ => ErrorKind::Internal,
        }
    }
}

impl From<GuestError> for AgentError {
    fn from(error: GuestError) -> Self {
        Self::new(error.kind(), with_causes(&error))
    }
}

/// An error and what it comes from, in one line.
pub(crate) fn with_causes(error: &dyn Error) -> String {
    let mut message = error.to_string();
    let mut cause = error.source();
    while let Some(source) = cause {
        message.push_str(": ");
        message.push_str(&source.to_string());
        cause = source.source();
    }
    message
}

/// What has been configured.
#[derive(Debug, Default)]
pub struct Guest {
    shares: Shares,
}

impl Guest {
    /// Brings the guest into the state that a request asks for.
    ///
    /// # Errors
    ///
    /// [`GuestError`]; nothing has changed if its kind is `InvalidArgument`.
    pub async fn configure(&self, request: &api::ConfigureRequest) -> Result<(), GuestError> {
        let name = request.hostname.as_bytes();
        let name_fits = name.len() <= limits::HOSTNAME_BYTES
            && name
                .iter()
                .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_'));
        if !name_fits {
            return Err(GuestError::HostName);
        }
        if request.entropy.len() > limits::ENTROPY_BYTES {
            return Err(GuestError::Seed);
        }
        let time = (request.unix_time_ns > 0)
            .then(|| clock::time(request.unix_time_ns))
            .transpose()?;
        let plan = Plan::new(request)?;
        let shares = Share::all(&request.shares)?;
        let sysctls = Sysctl::all(&request.sysctls)?;

        if !name.is_empty() {
            rustix::system::sethostname(name).map_err(|error| GuestError::Io {
                action: "set the host name",
                source: error.into(),
            })?;
        }
        if let Some(time) = time {
            clock::correct(time)?;
        }
        if !request.entropy.is_empty() {
            crate::sys::add_entropy(&request.entropy).map_err(|source| GuestError::Io {
                action: "add entropy",
                source,
            })?;
        }
        network::apply(&plan).await?;
        for share in &shares {
            self.shares.mount(share)?;
        }
        for sysctl in &sysctls {
            sysctl.set()?;
        }
        Ok(())
    }
}
