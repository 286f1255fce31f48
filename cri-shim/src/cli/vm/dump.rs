//! `vm dump`: the memory of a VM that runs, as a file for debuggers.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::slice;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail, ensure};
use clap::Args;

use super::run::claimed;
use crate::cli::Globals;
use crate::cli::container::lifecycle::each_name;
use crate::cli::container::state;
use crate::cli::whole_file::WholeFile;
use crate::sandbox::{DumpMachine, DumpState};

#[derive(Debug, Args)]
pub(super) struct DumpArgs {
    /// The VM, which runs or is paused
    #[arg(value_name = "VM")]
    vm: String,

    /// The file, which is replaced if it is there
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

pub(super) fn run(globals: &Globals, args: &DumpArgs) -> anyhow::Result<u8> {
    each_name(
        globals,
        slice::from_ref(&args.vm),
        async |containers, name| {
            let path = &args.file;
            let entry = containers.find(name)?;
            let _claim = claimed(&entry, name).await?;
            let (client, ..) = state::running(&entry).await?;
            let cannot = || format!("cannot write {}", path.display());
            ensure!(!path.is_dir(), "{}: it is a directory", cannot());
            let directory = path.parent().filter(|parent| *parent != Path::new(""));
            let directory = directory.unwrap_or(Path::new("."));
            let whole = WholeFile::create_in(directory).with_context(cannot)?;
            // What is in a guest's memory is its owner's matter.
            let private = whole.file().set_permissions(Permissions::from_mode(0o600));
            private.with_context(cannot)?;
            let id = &entry.record.id;
            // One that was begun by a command that is gone is another one.
            let now = SystemTime::now().duration_since(UNIX_EPOCH);
            let number = now.unwrap_or_default().as_nanos();
            let dump = DumpMachine {
                name: format!("vm dump {number}"),
                file: whole.file().try_clone().with_context(cannot)?,
                limit: DumpMachine::LONGEST,
            };
            client.dump_machine(id, dump).await?;
            match client.dump_ended(id).await? {
                Some(info) if info.state == DumpState::Done => {}
                Some(info) => bail!("the memory of VM {name} is not dumped: {}", info.reason),
                None => bail!("the process of VM {name} knows of no dump"),
            }
            whole.finish(path).with_context(cannot)?;
            Ok(Some(path.display().to_string()))
        },
    )
}
