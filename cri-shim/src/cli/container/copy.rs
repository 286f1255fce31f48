//! `podvisor cp`: files between the host and a running container, by its `tar`.

use std::ffi::OsString;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail, ensure};
use clap::Args;

use super::state::running;
use super::{Containers, Entry, exec, sweep};
use crate::cli::Globals;
use crate::sandbox::{Exec, StdioFds, SupplementalGroups, random_id};

/// What a failed `tar` says that is shown, in bytes.
const SAID: u64 = 4 << 10;

#[derive(Debug, Args)]
pub(in crate::cli) struct CopyArgs {
    /// What to copy: PATH or CONTAINER:PATH
    #[arg(value_name = "FROM")]
    from: String,

    /// Where to: PATH or CONTAINER:PATH
    #[arg(value_name = "TO")]
    to: String,
}

/// `CONTAINER:PATH`; a path with a colon is written with a slash before it.
fn in_container(text: &str) -> Option<(&str, &str)> {
    let (container, path) = text.split_once(':')?;
    (!container.is_empty() && !container.contains('/') && !container.starts_with('.'))
        .then_some((container, path))
}

pub(in crate::cli) fn run(globals: &Globals, args: &CopyArgs) -> anyhow::Result<u8> {
    let containers = Containers::open(&globals.root()?)?;
    let runtime = crate::cli::runtime()?;
    let done = runtime.block_on(async {
        sweep(&containers).await?;
        match (in_container(&args.from), in_container(&args.to)) {
            (Some((container, path)), None) => {
                from_container(&containers.find(container)?, path, Path::new(&args.to)).await
            }
            (None, Some((container, path))) => {
                to_container(&containers.find(container)?, Path::new(&args.from), path).await
            }
            _ => bail!(
                "write one of the two as CONTAINER:PATH, and the other as a path of this host"
            ),
        }
    });
    runtime.shutdown_background();
    done.map(|()| 0)
}

/// The directory and the name of what is copied.
fn split(path: &Path) -> anyhow::Result<(PathBuf, OsString)> {
    let name = path
        .file_name()
        .with_context(|| format!("`{}` names no file", path.display()))?;
    let dir = match path.parent() {
        Some(dir) if dir.as_os_str().is_empty() => PathBuf::from("."),
        Some(dir) => dir.to_owned(),
        None => PathBuf::from("/"),
    };
    Ok((dir, name.to_owned()))
}

async fn from_container(entry: &Entry, path: &str, to: &Path) -> anyhow::Result<()> {
    let (dir, name) = split(Path::new(path))?;
    ensure!(to.is_dir(), "{} is no directory to copy into", to.display());
    let mut unpack = Command::new("tar")
        .args([
            "-x",
            "--no-same-owner",
            "--no-same-permissions",
            "-f",
            "-",
            "-C",
        ])
        .arg(to)
        // The guest may send what nobody asked for.
        .arg("--")
        .arg(&name)
        .stdin(Stdio::piped())
        .spawn()
        .context("cannot run tar")?;
    let stdin = unpack.stdin.take().context("tar has no stdin")?;
    let command = [
        "tar",
        "-c",
        "-f",
        "-",
        "-C",
        &dir.to_string_lossy(),
        &name.to_string_lossy(),
    ];
    let stdio = StdioFds {
        stdout: Some(stdin.into()),
        ..StdioFds::default()
    };
    let packed = tar(entry, &command, stdio).await;
    // Its input has ended with the guest's output, or with the error.
    let status = unpack.wait().context("cannot wait for tar")?;
    packed?;
    ensure!(
        status.success(),
        "tar could not unpack into {}",
        to.display()
    );
    Ok(())
}

async fn to_container(entry: &Entry, from: &Path, path: &str) -> anyhow::Result<()> {
    let (dir, name) = split(from)?;
    let mut pack = Command::new("tar")
        .args(["-c", "-f", "-", "-C"])
        .arg(dir)
        .arg(name)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot run tar")?;
    let stdout = pack.stdout.take().context("tar has no stdout")?;
    let stdio = StdioFds {
        stdin: Some(stdout.into()),
        ..StdioFds::default()
    };
    let unpacked = tar(entry, &["tar", "-x", "-f", "-", "-C", path], stdio).await;
    let status = pack.wait().context("cannot wait for tar")?;
    unpacked?;
    ensure!(status.success(), "tar could not pack {}", from.display());
    Ok(())
}

/// Runs the container's `tar`.
async fn tar(entry: &Entry, command: &[&str], mut stdio: StdioFds) -> anyhow::Result<()> {
    let (client, _, _) = running(entry).await?;
    let (said, stderr) = io::pipe()?;
    stdio.stderr = Some(stderr.into());
    let exec_id: String = random_id()?.chars().take(16).collect();
    let command = command.iter().map(|part| (*part).to_owned()).collect();
    let exec = Exec {
        exec_id: exec_id.clone(),
        process: exec::process(&entry.record, command, false),
        user: "0".to_owned(),
        supplemental_groups: SupplementalGroups::Default,
        tty: None,
        stdio,
    };
    client.exec(&entry.record.id, exec).await?;
    let exit = client.wait(&entry.record.id, Some(&exec_id)).await?;
    if exit.code != 0 {
        let mut text = String::new();
        let _ = said.take(SAID).read_to_string(&mut text);
        bail!(
            "the container's tar failed with exit code {}: {}",
            exit.code,
            text.trim()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_colon_tells_a_containers_path() {
        assert_eq!(in_container("web:/etc/hosts"), Some(("web", "/etc/hosts")));
        for path in ["/etc/hosts", "./a:b", "/a:b", ":b", "file"] {
            assert_eq!(in_container(path), None, "{path}");
        }
    }
}
