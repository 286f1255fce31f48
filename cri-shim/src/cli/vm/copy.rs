//! `vm cp`: copies a file to or from a VM by the guest's agent.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use clap::Args;

use crate::cli::Globals;
use crate::cli::container::{Containers, Entry, copy::in_container, state, sweep};
use crate::cli::signals::{Signals, exit_code_of};
use crate::sandbox::SandboxClient;
use crate::sandbox::guest::{Program, ProgramExit};

#[derive(Debug, Args)]
pub(super) struct CopyArgs {
    /// The file to copy: PATH or VM:PATH
    #[arg(value_name = "FROM")]
    from: String,

    /// Where to: PATH or VM:PATH; a directory that is there, or the name that it gets
    #[arg(value_name = "TO")]
    to: String,
}

pub(super) fn run(globals: &Globals, args: &CopyArgs) -> anyhow::Result<u8> {
    let containers = globals.containers()?;
    crate::cli::runtime()?.block_on(async {
        let mut signals = Signals::new()?;
        let copy = async {
            sweep(&containers).await?;
            match (in_container(&args.from), in_container(&args.to)) {
                (Some((vm, path)), None) => {
                    let (client, entry) = vm_of(&containers, vm).await?;
                    from_guest(&client, &entry, path, Path::new(&args.to)).await
                }
                (None, Some((vm, path))) => {
                    let (client, entry) = vm_of(&containers, vm).await?;
                    to_guest(&client, &entry, Path::new(&args.from), path).await
                }
                _ => bail!("write one of the two as VM:PATH, and the other as a path of this host"),
            }
        };
        tokio::select! {
            done = copy => done.map(|()| 0),
            signal = signals.ending() => Ok(exit_code_of(signal)),
        }
    })
}

async fn vm_of(containers: &Containers, name: &str) -> anyhow::Result<(SandboxClient, Entry)> {
    let entry = containers.find(name)?;
    let (client, ..) = state::running(&entry).await?;
    Ok((client, entry))
}

/// Returns the name of a file, which it has in a directory, too.
fn name_of(path: &Path) -> anyhow::Result<String> {
    let name = path.file_name().and_then(|name| name.to_str());
    let name = name.with_context(|| format!("{} names no file", path.display()))?;
    Ok(name.to_owned())
}

async fn from_guest(
    client: &SandboxClient,
    entry: &Entry,
    path: &str,
    to: &Path,
) -> anyhow::Result<()> {
    check(path)?;
    let to = match to.is_dir() {
        true => to.join(name_of(Path::new(path))?),
        false => to.to_owned(),
    };
    let directory = match to.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    // It gets its name when it is whole.
    let mut file = tempfile::Builder::new()
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(directory)
        .with_context(|| format!("cannot write to {}", directory.display()))?;
    let (mut ours, theirs) = UnixStream::pair().context("no more descriptors are available")?;
    let taken = tokio::task::spawn_blocking(move || io::copy(&mut ours, &mut file).map(|_| file));
    let copied = client.copy_from_guest(&entry.record.id, path, theirs).await;
    let file = taken.await.context("the copy was cancelled")?;
    copied.with_context(|| format!("{path} in VM {}", entry.record.name))?;
    let file = file.with_context(|| format!("cannot write {}", to.display()))?;
    file.persist(&to)
        .map(drop)
        .with_context(|| format!("cannot write {}", to.display()))
}

async fn to_guest(
    client: &SandboxClient,
    entry: &Entry,
    from: &Path,
    path: &str,
) -> anyhow::Result<()> {
    check(path)?;
    let open = || -> io::Result<(File, fs::Metadata)> {
        let file = File::open(from)?;
        let metadata = file.metadata()?;
        Ok((file, metadata))
    };
    let (mut file, metadata) = open().with_context(|| format!("cannot open {}", from.display()))?;
    ensure!(
        metadata.is_file(),
        "{} is not a regular file; `vm cp` copies files alone, so pack a directory by tar",
        from.display()
    );
    let id = &entry.record.id;
    let test = Program {
        path: "test".to_owned(),
        arguments: vec!["-d".to_owned(), path.to_owned()],
        ..Program::default()
    };
    let is_directory = path.ends_with('/')
        || client.run_in_guest(id, test, TEST).await?.exit == ProgramExit::Code(0);
    let path = match is_directory {
        true => PathBuf::from(path)
            .join(name_of(from)?)
            .display()
            .to_string(),
        false => path.to_owned(),
    };
    let (mut ours, theirs) = UnixStream::pair().context("no more descriptors are available")?;
    // Closed at its end: the guest's file is complete then.
    let given = tokio::task::spawn_blocking(move || io::copy(&mut file, &mut ours).map(drop));
    let mode = metadata.permissions().mode();
    let copied = client.copy_to_guest(id, &path, mode, theirs).await;
    let given = given.await.context("the copy was cancelled")?;
    let copied = copied.with_context(|| format!("{path} in VM {}", entry.record.name))?;
    given.with_context(|| format!("cannot read {}", from.display()))?;
    ensure!(
        copied == metadata.len(),
        "{} changed while it was copied: {copied} bytes are in the guest",
        from.display()
    );
    Ok(())
}

/// How long the guest may take to look at a path.
const TEST: std::time::Duration = std::time::Duration::from_secs(30);

fn check(path: &str) -> anyhow::Result<()> {
    ensure!(
        path.starts_with('/'),
        "{path}: write the whole path in the VM, from / on"
    );
    Ok(())
}
