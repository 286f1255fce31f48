//! The duties of PID 1 towards its kernel and its host.
//!
//! [`main`] runs once, when the kernel starts `/init`: it mounts ([`mounts`]), brings the loopback
//! interface up, reaps ([`reaper`]), serves, and ends in [`power`]-off whatever happens. It must
//! not know about containers.

pub mod mounts;

use std::convert::Infallible;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context as _;
use rustix::process::{Resource, Rlimit, setrlimit};

use crate::guest::{clock, sysctl};
use crate::network;
use crate::power;
use crate::reaper;
use crate::server::{self, Listeners};
use crate::service::Service;
use crate::stdio::StreamRegistry;

/// Runs PID 1. Does not return while the machine runs: any failure here is written to the kernel's
/// log and the guest is powered off, so that the host sees an exit and not a hang.
pub fn main() -> ExitCode {
    std::panic::set_hook(Box::new(|info| {
        crate::log::emergency(&format!("{info}"));
        power::off();
    }));
    let Err(error) = run();
    crate::log::emergency(&format!("cannot go on: {error:#}"));
    power::off()
}

fn run() -> anyhow::Result<Infallible> {
    mounts::set_up().context("setting up the guest's filesystems")?;
    crate::log::init();
    raise_limits();
    if let Err(error) = network::loopback_up() {
        // Running containers without loopback is better than running none.
        tracing::warn!(%error, "loopback interface is down");
    }
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("starting the event loop")?
        .block_on(serve())
}

/// Limit of open descriptors of PID 1: the streams of many processes add up. A launcher lowers it
/// again, so that containers do not inherit it.
const OPEN_FILES: u64 = 65_536;

/// Raises the limits of PID 1. Containers inherit those other than that of open files: the kernel
/// derives them from the memory at boot, not from what the guest grows to, and containers are
/// limited by control groups.
fn raise_limits() {
    let both = |limit| Rlimit {
        current: limit,
        maximum: limit,
    };
    for (resource, limit) in [
        (Resource::Nofile, Some(OPEN_FILES)),
        (Resource::Nproc, None),
        (Resource::Sigpending, None),
    ] {
        if let Err(error) = setrlimit(resource, both(limit)) {
            tracing::warn!(?resource, %error, "cannot raise a resource limit");
        }
    }
}

async fn serve() -> anyhow::Result<Infallible> {
    let (reaper, reaping) = reaper::start().context("watching for ended processes")?;
    let listeners = Listeners::vsock().context("listening on vsock")?;
    let hub = StreamRegistry::new();
    let service = Service::new(reaper, hub.clone());
    let serving = server::serve(listeners, Arc::new(service), hub);
    server::announce()
        .await
        .context("telling the host that the guest is ready")?;
    sysctl::set_defaults();
    tokio::spawn(clock::follow_host());
    tokio::select! {
        error = serving => Err(error).context("serving the host"),
        error = reaping => Err(error).context("reaping processes"),
    }
}
