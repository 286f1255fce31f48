//! The guest as a whole: what the host configures once for all containers.
//!
//! A request is checked as a whole before anything is changed; then host name, [`clock`], entropy,
//! network ([`crate::network`]), [`shares`] and [`sysctl`] are brought into the requested state, in
//! this order. What already is in that state is left unchanged. Knows nothing about containers.

pub mod clock;
pub mod cpu;
pub mod memory;
pub mod pci;
pub mod shares;
pub mod sysctl;

use std::io;

use podvisor_agent_protocol::{AgentError, ErrorKind, api, limits};

use crate::causes::with_causes;
use crate::network::plan::{Plan, PlanError};
use crate::network::{self, NetworkError};
use clock::ClockError;
use cpu::CpuError;
use pci::ScanError;
use shares::{Share, ShareError, Shares};
use sysctl::{Sysctl, SysctlError};

/// The guest cannot be configured as requested.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GuestError {
    /// The host name is invalid.
    #[error("a host name is 1 to 64 letters, digits, '-', '.' or '_'")]
    HostName,
    /// The seed is too long.
    #[error("a seed is at most {} bytes", limits::ENTROPY_BYTES)]
    Seed,
    /// The clock cannot be set.
    #[error(transparent)]
    Clock(#[from] ClockError),
    /// The description of the network is invalid.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The network cannot be configured.
    #[error(transparent)]
    Network(#[from] NetworkError),
    /// A virtio-fs device cannot be mounted.
    #[error(transparent)]
    Share(#[from] ShareError),
    /// PCI devices cannot be scanned or removed.
    #[error(transparent)]
    Scan(#[from] ScanError),
    /// The number of processors cannot be changed.
    #[error(transparent)]
    Cpu(#[from] CpuError),
    /// A kernel parameter cannot be set.
    #[error(transparent)]
    Sysctl(#[from] SysctlError),
    /// Any other failure.
    #[error("cannot {action}")]
    Io {
        /// The action that failed.
        action: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

impl GuestError {
    /// Returns the kind of the error, for the host.
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

/// The state of the configuration.
#[derive(Debug, Default)]
pub struct Guest {
    shares: Shares,
}

impl Guest {
    /// Brings the guest into the state that a request describes.
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
