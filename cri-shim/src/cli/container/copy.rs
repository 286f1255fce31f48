//! `podvisor cp`: copies files between the host and a running container, with the container's
//! `tar`.
//!
//! Names follow docker's rules: into an existing directory, under the source's name; otherwise
//! under the given name; a source that ends with `/.` is the contents of the directory.

mod guest;
mod source;

use std::borrow::Cow;
use std::fs::File;
use std::future::pending;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use rustix::fs::statvfs;
use tokio::process::{Child, Command};
use tokio::task::spawn_blocking;

use super::merge::{Temporary, check, merge, merge_contents};
use super::tar_rename::Rename;
use super::{Containers, sweep};
use crate::cli::destination::Destination;
use crate::cli::input::Stdin;
use crate::cli::output::Stdout;
use crate::cli::signals::{Signals, exit_code_of};
use crate::cli::{Globals, terminal};
use crate::sandbox::StdioFds;
use guest::Guest;
use source::{Source, split};

/// Means an archive on stdin or stdout.
const STREAM: &str = "-";

/// Bytes per read of an archive on stdin.
const BUFFER: usize = 64 << 10;

#[derive(Debug, Args)]
pub(in crate::cli) struct CopyArgs {
    /// What to copy: PATH or CONTAINER:PATH; with /. at its end, what is in the directory; - is a
    /// tar archive from stdin
    #[arg(value_name = "FROM")]
    from: String,

    /// Where to: PATH or CONTAINER:PATH; a directory that is there, or the name that it gets; - is
    /// a tar archive to stdout
    #[arg(value_name = "TO")]
    to: String,
}

/// Splits `CONTAINER:PATH`; a path on the host that contains a colon needs a slash before it.
pub(in crate::cli) fn in_container(text: &str) -> Option<(&str, &str)> {
    let (container, path) = text.split_once(':')?;
    (!container.is_empty() && !container.contains('/') && !container.starts_with('.'))
        .then_some((container, path))
}

pub(in crate::cli) fn run(globals: &Globals, args: &CopyArgs) -> anyhow::Result<u8> {
    let containers = Containers::open(&globals.root()?)?;
    let runtime = crate::cli::runtime()?;
    let copy = async {
        sweep(&containers).await?;
        match (in_container(&args.from), in_container(&args.to)) {
            (Some((container, path)), None) => {
                let guest = Guest::of(containers.find(container)?).await?;
                match args.to.as_str() {
                    STREAM => to_stdout(&guest, path).await,
                    to => from_container(&guest, path, Path::new(to)).await,
                }
            }
            (None, Some((container, path))) => {
                let guest = Guest::of(containers.find(container)?).await?;
                match args.from.as_str() {
                    STREAM => from_stdin(&guest, path).await,
                    from => to_container(&guest, Path::new(from), &from_root(path)).await,
                }
            }
            _ => bail!(
                "write one of the two as CONTAINER:PATH, and the other as a path of this host"
            ),
        }
    };
    let done = runtime.block_on(async {
        let mut signals = Signals::new()?;
        tokio::select! {
            done = copy => done.map(|()| 0),
            // Dropped before its end, it removes its temporary files.
            signal = signals.ending() => Ok(exit_code_of(signal)),
        }
    });
    // A thread may be blocked in a read of stdin forever.
    runtime.shutdown_background();
    done
}

/// Copies from the container: unpacks in a private directory, then moves the files to their place.
async fn from_container(guest: &Guest, path: &str, to: &Path) -> anyhow::Result<()> {
    let source = Source::of(path)?;
    let place = Place::of(to)?;
    let temporary = Temporary::make_in(&place.parent)?;
    let unpacked = temporary.contents();
    std::fs::create_dir(&unpacked)
        .with_context(|| format!("cannot create {}", unpacked.display()))?;
    let done = unpack(guest, &source, &unpacked).await;
    done.map_err(|error| match is_full(&place.parent) {
        // The container's tar only knows that nobody reads any more.
        true => error.context(format!(
            "no space left in {}; free some, or copy to another disk",
            place.parent.display()
        )),
        false => error,
    })?;
    check(&unpacked)?;
    place.take(&source, unpacked)
}

/// Whether there is no room for any file in a directory.
fn is_full(directory: &Path) -> bool {
    statvfs(directory).is_ok_and(|found| found.f_bavail == 0)
}

/// The destination of a copy on the host.
#[derive(Debug)]
struct Place<'a> {
    /// As the user named it.
    to: &'a Path,
    /// The file that is created or replaced; `None` to copy into the directory `to`.
    file: Option<PathBuf>,
    /// Directory for unpacking, on the same file system.
    parent: PathBuf,
}

impl<'a> Place<'a> {
    fn of(to: &'a Path) -> anyhow::Result<Self> {
        let destination = Destination::of(to);
        let destination = destination.with_context(|| format!("cannot write {}", to.display()))?;
        let (file, parent) = match destination {
            Destination::Directory => (None, to.to_owned()),
            Destination::File(path) => {
                let parent = split(&path)?.0;
                (Some(path), parent)
            }
            Destination::Special => bail!(
                "{} is a device, a pipe or a socket, and not replaced; `podvisor cp CONTAINER:PATH \
                 -` writes an archive to stdout",
                to.display()
            ),
        };
        ensure!(
            parent.is_dir(),
            "{} is no directory to copy into",
            parent.display()
        );
        Ok(Self { to, file, parent })
    }

    /// Moves the unpacked files there.
    fn take(&self, source: &Source, unpacked: PathBuf) -> anyhow::Result<()> {
        let to = self.to.display();
        let Some(file) = &self.file else {
            return match source.is_contents() {
                true => merge_contents(&unpacked, self.to),
                false => merge(&unpacked, &source.name, self.to),
            };
        };
        let made = match source.is_contents() {
            true => unpacked,
            false => unpacked.join(&source.name),
        };
        let is_directory = made.is_dir() && !made.is_symlink();
        let wants_directory = self.to.as_os_str().as_bytes().ends_with(b"/");
        ensure!(
            is_directory || !wants_directory,
            "{to} is no directory to copy into"
        );
        ensure!(
            !is_directory || !file.exists(),
            "{to} is a file, and what is copied a directory"
        );
        // A power loss leaves the old file or the new one.
        let synced = match !is_directory && file.exists() && !made.is_symlink() {
            true => sync(&made),
            false => Ok(()),
        };
        let moved = synced.and_then(|()| std::fs::rename(&made, file));
        moved.with_context(|| format!("cannot create {to}"))
    }
}

/// Syncs a file to the disk, unless this user may not read it.
fn sync(path: &Path) -> io::Result<()> {
    match File::open(path) {
        Ok(file) => file.sync_all(),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        Err(error) => Err(error),
    }
}

/// Unpacks the source into an empty directory of the host.
async fn unpack(guest: &Guest, source: &Source, to: &Path) -> anyhow::Result<()> {
    // The guest may send other files than requested, which are not moved from there: not every tar
    // takes a name of what to unpack for more than a pattern.
    let mut unpack = tar()
        .args(["-x", "--no-same-owner", "--no-same-permissions", "-f", "-"])
        .arg("-C")
        .arg(to)
        .stdin(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .context("cannot run tar")?;
    let stdin = unpack.stdin.take().context("tar has no stdin")?;
    let stdin = stdin.into_owned_fd().context("cannot pass on a pipe")?;
    let packed = guest.pack(source, stdin).await;
    // Its input ends with the guest's output, or with the error.
    let has_unpacked = ended(unpack).await?;
    packed?;
    ensure!(has_unpacked, "tar could not unpack what the container sent");
    ensure!(
        source.is_contents() || to.join(&source.name).symlink_metadata().is_ok(),
        "the container's tar sent no `{}`",
        source.name
    );
    Ok(())
}

/// Copies to stdout, as an archive from the container's `tar`.
async fn to_stdout(guest: &Guest, path: &str) -> anyhow::Result<()> {
    let source = Source::of(path)?;
    ensure!(
        !terminal::is_terminal(io::stdout()),
        "an archive is nothing for a terminal: redirect it to a file or a pipe"
    );
    let (mut archive, stdout) = io::pipe()?;
    // If the reader closes stdout, this end of the pipe is closed, too, and the container's tar
    // fails.
    let shown = spawn_blocking(move || io::copy(&mut archive, &mut Stdout).map(|_| ()));
    let (shown, packed) = tokio::join!(shown, guest.pack(&source, stdout.into()));
    shown?.context("cannot write to stdout")?;
    packed
}

/// Copies an archive from stdin, which the container's `tar` unpacks.
async fn from_stdin(guest: &Guest, path: &str) -> anyhow::Result<()> {
    ensure!(
        guest.has_directory(path).await?,
        "{path} is no directory of the container to copy into"
    );
    let (stdin, mut archive) = io::pipe()?;
    let stdio = StdioFds {
        stdin: Some(stdin.into()),
        ..StdioFds::default()
    };
    let mut own = io::BufReader::with_capacity(BUFFER, Stdin);
    let fed = spawn_blocking(move || io::copy(&mut own, &mut archive).map(|_| ()));
    let feed = async {
        match fed.await {
            // It is not an error if the container's tar does not read all of its input.
            Ok(Err(error)) if error.kind() != io::ErrorKind::BrokenPipe => error,
            _ => pending().await,
        }
    };
    let command = ["tar", "-x", "-f", "-", "-C", path];
    tokio::select! {
        unpacked = guest.tar(&command, stdio) => unpacked,
        error = feed => Err(error).context("cannot read stdin"),
    }
}

/// Returns a path in a container that begins at its root.
fn from_root(path: &str) -> Cow<'_, str> {
    match path.is_empty() || path.starts_with('/') {
        true => path.into(),
        false => format!("/{path}").into(),
    }
}

async fn to_container(guest: &Guest, from: &Path, path: &str) -> anyhow::Result<()> {
    let name = from.to_str().context("a name that is no UTF-8")?;
    // Before the container's tar is started, which would complain of an empty archive. The slash
    // at its end is left out: with it, a file is said not to be a directory, without advice.
    let bare = match name.trim_end_matches('/') {
        "" => from,
        bare => Path::new(bare),
    };
    bare.symlink_metadata()
        .with_context(|| format!("cannot copy {name}"))?;
    ensure!(
        !name.ends_with('/') || from.is_dir(),
        "{name} is no directory; leave out the slash at its end to copy a file"
    );
    let source = Source::of(name)?;
    let is_directory = source.is_contents() || from.is_dir() && !from.is_symlink();
    let (dir, renamed) = guest.place(path, &source, is_directory).await?;
    // bsdtar takes `@name` for an archive whose members it adds.
    let member = match source.name.starts_with('@') {
        true => format!("./{}", source.name),
        false => source.name.clone(),
    };
    let mut pack = tar()
        .args(["-c", "-f", "-", "-C"])
        .arg(&source.dir)
        .args(["--", &member])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .context("cannot run tar")?;
    let stdout = pack.stdout.take().context("tar has no stdout")?;
    let mut archive = stdout.into_owned_fd().context("cannot pass on a pipe")?;
    let mut renames = None;
    if let Some(name) = renamed {
        let (renamed, writer) = io::pipe().context("cannot create a pipe for what is packed")?;
        let packed = File::from(std::mem::replace(&mut archive, renamed.into()));
        let rename = Rename::new(&source.name, &name);
        renames = Some(spawn_blocking(move || rename.pass(packed, writer)));
    }
    let stdio = StdioFds {
        stdin: Some(archive),
        ..StdioFds::default()
    };
    let unpacked = guest
        .tar(&["tar", "-x", "-f", "-", "-C", &dir], stdio)
        .await;
    let has_packed = ended(pack).await?;
    let renamed = match renames {
        Some(renames) => renames.await.context("cannot rename what is packed")?,
        None => Ok(()),
    };
    let renamed = match renamed {
        // The container's tar need not read what is behind the archive's end.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        renamed => renamed,
    };
    let is_invalid = |error: &io::Error| error.kind() == io::ErrorKind::InvalidData;
    if !renamed.as_ref().is_err_and(is_invalid) {
        unpacked?;
        ensure!(has_packed, "tar could not pack {}", from.display());
    }
    renamed.with_context(|| format!("cannot rename what tar packed of {}", from.display()))
}

/// The host's `tar`, of any make, by what they have in common.
fn tar() -> Command {
    let mut command = Command::new("tar");
    // Of GNU's: it may allow what is refused by default, and choose other formats.
    command.env_remove("TAR_OPTIONS");
    command
}

/// Waits for a program; returns true if it succeeded.
async fn ended(mut child: Child) -> anyhow::Result<bool> {
    let status = child.wait().await;
    Ok(status.context("cannot wait for tar")?.success())
}

#[cfg(test)]
mod tests {

    use super::*;
    use crate::small_disk::SmallDisk;

    #[test]
    fn a_colon_tells_a_containers_path() {
        assert_eq!(in_container("web:/etc/hosts"), Some(("web", "/etc/hosts")));
        for path in ["/etc/hosts", "./a:b", "/a:b", ":b", "file"] {
            assert_eq!(in_container(path), None, "{path}");
        }
    }

    #[test]
    fn a_dot_at_the_end_stands_for_what_is_in_the_directory() {
        let source = |path| {
            let Source { dir, name } = Source::of(path).unwrap();
            (dir.to_str().unwrap().to_owned(), name)
        };
        let expected = |dir: &str, name: &str| (dir.to_owned(), name.to_owned());
        assert_eq!(source("/etc/hosts"), expected("/etc", "hosts"));
        assert_eq!(source("file"), expected(".", "file"));
        assert_eq!(source("/srv/"), expected("/", "srv"));
        assert_eq!(source("/srv/."), expected("/srv/.", "."));
        assert_eq!(source("."), expected(".", "."));
        assert_eq!(source("/"), expected("/", "."));
        assert!(Source::of("a/..").is_err());
    }

    #[test]
    fn what_a_link_points_to_is_replaced_and_what_is_no_file_is_not() {
        use std::fs;
        use std::os::unix::fs::{FileTypeExt as _, symlink};

        use rustix::fs::FileType;

        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for name in ["unpacked", "elsewhere"] {
            fs::create_dir(at(name)).unwrap();
        }
        fs::write(at("elsewhere/file"), "old").unwrap();
        symlink("elsewhere/file", at("link")).unwrap();
        fs::write(at("unpacked/copied"), "new").unwrap();
        let link = at("link");
        let place = Place::of(&link).unwrap();
        // On the target's file system, to allow a rename.
        assert_eq!(place.parent, fs::canonicalize(at("elsewhere")).unwrap());
        let source = Source::of("/copied").unwrap();
        place.take(&source, at("unpacked")).unwrap();
        assert!(link.is_symlink());
        assert_eq!(fs::read_to_string(at("elsewhere/file")).unwrap(), "new");

        let pipe = at("pipe");
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, FileType::Fifo, mode, 0).unwrap();
        symlink("pipe", at("to-pipe")).unwrap();
        for name in ["pipe", "to-pipe"] {
            let error = Place::of(&at(name)).unwrap_err().to_string();
            assert!(error.contains("is a device, a pipe or a socket"), "{error}");
        }
        assert!(fs::metadata(&pipe).unwrap().file_type().is_fifo());
    }

    #[test]
    fn a_disk_is_full_when_it_has_no_room_for_any_file() {
        let disk = SmallDisk::new();
        assert!(!is_full(disk.path()));
        disk.fill();
        assert!(is_full(disk.path()));
        disk.clear();
        assert!(!is_full(disk.path()) && !is_full(Path::new("/no/such")));
    }
}
