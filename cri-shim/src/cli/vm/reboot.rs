//! `vm reboot`.

use clap::Args;

use crate::cli::Globals;
use crate::cli::container::lifecycle::each_name;
use crate::cli::container::state;

#[derive(Debug, Args)]
pub(super) struct RebootArgs {
    /// Reset the machine, without asking the guest
    #[arg(short, long)]
    force: bool,

    /// Names or ids
    #[arg(value_name = "VM", required = true)]
    vms: Vec<String>,
}

pub(super) fn run(globals: &Globals, args: &RebootArgs) -> anyhow::Result<u8> {
    each_name(globals, &args.vms, async |containers, name| {
        let entry = containers.find(name)?;
        let (client, ..) = state::running(&entry).await?;
        let id = &entry.record.id;
        match args.force {
            true => client.reset_machine(id).await?,
            false => client.reboot_guest(id).await?,
        }
        Ok(Some(name.to_owned()))
    })
}
