//! The container of a copy: what it answers by its own `test`, `readlink` and `tar`.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use anyhow::{Context as _, bail, ensure};
use oci_spec::runtime::Process;
use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe;

use super::source::{Source, split};
use crate::cli::container::Entry;
use crate::cli::container::state::running;
use crate::sandbox::{
    Exec, SandboxClient, StdioFds, SupplementalGroups, further_process, random_id,
};

/// Maximum length of a program's output that is kept, in bytes.
const MAX_HEARD: u64 = 4 << 10;

/// Maximum length of a path in Linux, with the byte that ends it.
const PATH_MAX: usize = 4096;

/// Maximum number of links of one path, as in Linux.
const MAX_LINKS: usize = 40;

/// A running container.
pub(super) struct Guest {
    entry: Entry,
    client: SandboxClient,
}

impl Guest {
    pub(super) async fn of(entry: Entry) -> anyhow::Result<Self> {
        let (client, _, is_paused) = running(&entry).await?;
        ensure!(
            !is_paused,
            "container {} is paused; `podvisor unpause` it first",
            entry.record.name
        );
        Ok(Self { entry, client })
    }

    /// Returns the directory in which to unpack the source, and the name that it gets there, if
    /// that is not its own. The container's `tar` would replace a file by a directory, an empty
    /// directory by a file, and a link instead of its target.
    pub(super) async fn place(
        &self,
        path: &str,
        source: &Source,
        is_directory: bool,
    ) -> anyhow::Result<(String, Option<String>)> {
        if self.has_directory(path).await? {
            if !source.is_contents() {
                let made = format!("{}/{}", path.trim_end_matches('/'), source.name);
                self.check_kind(&made, is_directory).await?;
            }
            return Ok((path.to_owned(), None));
        }
        let target = self.followed(path).await?;
        ensure!(
            is_directory || !target.ends_with('/'),
            "{path} is no directory of the container to copy into"
        );
        self.check_kind(&target, is_directory).await?;
        ensure!(
            !self.is(&["-e", &target, "-a", "!", "-f", &target]).await,
            "{path} is a device, a pipe or a socket of the container, and not replaced"
        );
        let (dir, name) = split(Path::new(&target))?;
        Ok((dir.to_string_lossy().into_owned(), Some(name)))
    }

    /// Returns an error if a directory would be replaced by a file, or the other way round.
    async fn check_kind(&self, path: &str, is_directory: bool) -> anyhow::Result<()> {
        let file = ["-e", path, "-a", "!", "-d", path, "-o", "-L", path];
        let directory = ["-d", path, "-a", "!", "-L", path];
        match is_directory {
            true => ensure!(
                !self.is(&file).await,
                "{path} is a file of the container, and what is copied a directory"
            ),
            false => ensure!(
                !self.is(&directory).await,
                "{path} is a directory of the container, and what is copied is none"
            ),
        }
        Ok(())
    }

    /// Follows the links that a path ends with, also if the last one leads nowhere.
    async fn followed(&self, path: &str) -> anyhow::Result<String> {
        let mut target = path.to_owned();
        for _ in 0..MAX_LINKS {
            if !self.is(&["-L", &target]).await {
                return Ok(target);
            }
            let told = self.read_link(&target).await?;
            target = link_target(&target, &told)
                .with_context(|| format!("cannot follow the link {path} of the container"))?;
        }
        bail!("{path} of the container leads through more than {MAX_LINKS} links")
    }

    /// Returns what the container's `readlink` writes, or the beginning of it.
    async fn read_link(&self, path: &str) -> anyhow::Result<Vec<u8>> {
        let (told, stdout) = io::pipe()?;
        let stdio = StdioFds {
            stdout: Some(stdout.into()),
            ..StdioFds::default()
        };
        let told = heard(pipe::Receiver::from_owned_fd(told.into())?);
        let command = ["readlink", "-n", path];
        let (told, ran) = tokio::join!(told, self.run(&command, stdio));
        let (code, said) = ran.with_context(|| {
            format!("{path} is a link, and the container has no readlink to follow it")
        })?;
        ensure!(
            code == 0,
            "the container's readlink failed with exit code {code}: {}",
            said.trim()
        );
        Ok(told)
    }

    /// Returns whether a path is a directory; if the container has no `test`, it is taken for one.
    pub(super) async fn has_directory(&self, path: &str) -> anyhow::Result<bool> {
        Ok(self.test(&["-d", path]).await.unwrap_or(true))
    }

    /// Returns whether the container's `test` says so.
    async fn is(&self, condition: &[&str]) -> bool {
        self.test(condition).await.unwrap_or(false)
    }

    /// Returns the answer of the container's `test`, if it has one.
    async fn test(&self, condition: &[&str]) -> Option<bool> {
        let command = [&["test"], condition].concat();
        match self.run(&command, StdioFds::default()).await {
            Ok((0, _)) => Some(true),
            Ok((1, _)) => Some(false),
            _ => None,
        }
    }

    /// Runs the container's `tar` to pack the source.
    pub(super) async fn pack(&self, source: &Source, to: OwnedFd) -> anyhow::Result<()> {
        let dir = source.dir.to_string_lossy();
        let stdio = StdioFds {
            stdout: Some(to),
            ..StdioFds::default()
        };
        let command = ["tar", "-c", "-f", "-", "-C", &dir, "--", &source.name];
        self.tar(&command, stdio).await
    }

    /// Runs the container's `tar`.
    pub(super) async fn tar(&self, command: &[&str], stdio: StdioFds) -> anyhow::Result<()> {
        let (code, said) = self.run(command, stdio).await?;
        ensure!(
            code == 0,
            "the container's tar failed with exit code {code}: {}",
            said.trim()
        );
        Ok(())
    }

    /// Runs a program in the container as root; returns its exit code, and the beginning of its
    /// error output.
    async fn run(&self, command: &[&str], mut stdio: StdioFds) -> anyhow::Result<(i32, String)> {
        let (said, stderr) = io::pipe()?;
        stdio.stderr = Some(stderr.into());
        let exec_id: String = random_id()?.chars().take(16).collect();
        let record = &self.entry.record;
        let exec = Exec {
            exec_id: exec_id.clone(),
            process: process(&record.process, command),
            user: "0".to_owned(),
            supplemental_groups: SupplementalGroups::Default,
            tty: None,
            stdio,
        };
        self.client.exec(&record.id, exec).await?;
        let heard = heard(pipe::Receiver::from_owned_fd(said.into())?);
        let exit = self.client.wait(&record.id, Some(&exec_id));
        let (said, exit) = tokio::join!(heard, exit);
        Ok((exit?.code, String::from_utf8_lossy(&said).into_owned()))
    }
}

/// Returns the process for a program that resolves relative names at the container's root, as in
/// docker and podman.
fn process(own: &Process, command: &[&str]) -> Process {
    let command = command.iter().map(|part| (*part).to_owned()).collect();
    let mut process = further_process(own, command, false);
    process.set_cwd("/".into());
    process
}

/// Returns the beginning of the output, but reads all of it, so that the writer does not block.
async fn heard(mut from: pipe::Receiver) -> Vec<u8> {
    let mut text = Vec::new();
    let beginning = (&mut from).take(MAX_HEARD).read_to_end(&mut text).await;
    // A read error after that does not affect the copy.
    if beginning.is_ok() {
        let _ = tokio::io::copy(&mut from, &mut tokio::io::sink()).await;
    }
    text
}

/// Returns the path that a link at `path` leads to, from what the container says of it. It is only
/// used in the container, and shown.
fn link_target(path: &str, told: &[u8]) -> anyhow::Result<String> {
    let target = std::str::from_utf8(told).context("its target is no UTF-8")?;
    ensure!(
        (1..PATH_MAX).contains(&target.len()) && !target.chars().any(char::is_control),
        "its target is no path"
    );
    if target.starts_with('/') {
        return Ok(target.to_owned());
    }
    let dir = path.rsplit_once('/').map_or("", |(dir, _)| dir);
    let target = format!("{dir}/{target}");
    ensure!(target.len() < PATH_MAX, "its target is too long");
    Ok(target)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn the_target_of_a_link_is_a_path_of_the_container() {
        let target = |told: &[u8]| link_target("/a/link", told).map_err(|error| error.to_string());
        assert_eq!(target(b"/b").as_deref(), Ok("/b"));
        assert_eq!(target(b"../b").as_deref(), Ok("/a/../b"));
        assert_eq!(link_target("/link", b"-C").unwrap(), "/-C");
        let (long, longer) = ([b'x'; PATH_MAX - 1], [b'x'; PATH_MAX]);
        for bad in [
            b"".as_slice(),
            b"b\n",
            b"b\0",
            b"\x1b[2J",
            b"\xff",
            &long,
            &longer,
        ] {
            assert!(target(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn names_in_a_container_are_relative_to_its_root() {
        let mut own = Process::default();
        own.set_cwd("/srv".into());
        assert_eq!(process(&own, &["tar"]).cwd(), Path::new("/"));
    }

    #[tokio::test]
    async fn more_than_is_shown_is_read_all_the_same() {
        let (said, mut writer) = io::pipe().unwrap();
        let write = std::thread::spawn(move || writer.write_all(&[b'x'; 1 << 20]));
        let said = heard(pipe::Receiver::from_owned_fd(said.into()).unwrap()).await;
        write.join().unwrap().unwrap();
        assert_eq!(said.len(), 4 << 10);
    }
}
