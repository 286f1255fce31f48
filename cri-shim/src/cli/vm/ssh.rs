//! `vm ssh`: runs the host's ssh with the VM's address and podvisor's own key.

use std::os::unix::process::CommandExt as _;
use std::process::Command;

use anyhow::{Context as _, bail};
use clap::Args;

use super::keys;
use crate::cli::Globals;
use crate::cli::container::{Entry, network, state, sweep};

/// The user that cloud-init makes in the guest.
pub(super) const USER: &str = "podvisor";

#[derive(Debug, Args)]
pub(super) struct SshArgs {
    /// Name or id, and the user in the guest [default: podvisor]
    #[arg(value_name = "[USER@]VM")]
    vm: String,

    /// Command to run in the guest, and flags of ssh before it
    #[arg(
        value_name = "COMMAND",
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    command: Vec<String>,
}

pub(super) fn run(globals: &Globals, args: &SshArgs) -> anyhow::Result<u8> {
    let containers = globals.containers()?;
    let (user, name) = args.vm.split_once('@').unwrap_or((USER, &args.vm));
    let entry = crate::cli::runtime()?.block_on(async {
        sweep(&containers).await?;
        let entry = containers.find(name)?;
        state::running(&entry).await?;
        anyhow::Ok(entry)
    })?;
    let (address, port) = address(&entry)?;
    let error = Command::new("ssh")
        .arg("-i")
        .arg(keys::own_path(&globals.root()?))
        .args(["-o", "StrictHostKeyChecking=accept-new", "-o"])
        .arg(format!(
            "UserKnownHostsFile={}",
            entry.dir.join("known_hosts").display()
        ))
        .args(["-l", user, "-p", &port.to_string(), &address])
        .args(&args.command)
        .exec();
    match error.kind() {
        std::io::ErrorKind::NotFound => {
            bail!("`vm ssh` runs the host's ssh, which is not installed; install openssh-client")
        }
        _ => Err(error).context("cannot run ssh"),
    }
}

/// Returns where the VM's SSH server is reached from this host.
fn address(entry: &Entry) -> anyhow::Result<(String, u16)> {
    let record = &entry.record;
    if let Some(port) = record.vm.as_ref().and_then(|vm| vm.ssh_port) {
        return Ok(("127.0.0.1".to_owned(), port));
    }
    let endpoint = network::endpoint(entry);
    let address = endpoint.and_then(|endpoint| endpoint.addresses.first().copied());
    let address = address.with_context(|| {
        format!(
            "VM {} has no address that this host reaches; `podvisor vm console {}` connects to it",
            record.name, record.name
        )
    })?;
    Ok((address.address().to_string(), 22))
}
