//! What to tell users of a failure of libcontainer, whose messages name neither a path nor what to
//! do (`failed to prepare rootfs`): the one place that its texts pass through.
//!
//! The cause is looked for where the failed process would have found it: in the bundle, or in the
//! container. Where nothing is found, libcontainer's text stays, after what was tried.

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use oci_spec::runtime::{Mount, Process, Spec};
use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, fstat, openat, openat2};
use rustix::io::Errno;

use super::NewProcess;

/// The cause of a failed launch.
#[derive(Debug, PartialEq, Eq)]
enum Cause {
    /// The source of a mount is a directory and its destination is not, or the other way round.
    Kinds {
        destination: PathBuf,
        source_is_dir: bool,
    },
    /// The source of a mount does not exist in the guest.
    NoSource { destination: PathBuf },
    /// The working directory does not exist.
    NoDirectory(PathBuf),
    /// The working directory is something else.
    NotDirectory(PathBuf),
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kinds {
                destination,
                source_is_dir: true,
            } => write!(
                f,
                "cannot mount a directory at {}, which is a file in the container: choose another \
                 path, or mount a file",
                destination.display()
            ),
            Self::Kinds { destination, .. } => write!(
                f,
                "cannot mount a file at {}, which is a directory in the container: choose another \
                 path, or mount a directory",
                destination.display()
            ),
            Self::NoSource { destination } => write!(
                f,
                "cannot mount at {}: its source does not exist (any more); check the volume's path",
                destination.display()
            ),
            Self::NoDirectory(path) => write!(
                f,
                "the working directory {} does not exist in the container: create it in the image, \
                 or choose another one",
                path.display()
            ),
            Self::NotDirectory(path) => write!(
                f,
                "the working directory {} is not a directory in the container: choose another one",
                path.display()
            ),
        }
    }
}

/// Returns the message for the failure of a launch.
pub(super) fn explain(kind: &NewProcess, error: &anyhow::Error) -> String {
    let (cause, tried) = match kind {
        NewProcess::Create { bundle } => (of_container(bundle), "create the container"),
        NewProcess::Exec { process, init } => {
            let root = PathBuf::from(format!("/proc/{init}/root"));
            (
                of_exec(process, &root),
                "start the process in the container",
            )
        }
    };
    match cause {
        Ok(Some(cause)) => cause.to_string(),
        // What cannot be looked at explains nothing.
        Ok(None) | Err(_) => format!("cannot {tried}: {error:#}"),
    }
}

fn of_container(bundle: &Path) -> io::Result<Option<Cause>> {
    let spec: Spec = read(&bundle.join("config.json"))?;
    let Some(root) = spec.root() else {
        return Ok(None);
    };
    let root = open_root(&bundle.join(root.path()))?;
    let mounts: Vec<&Mount> = spec.mounts().iter().flatten().collect();
    for mount in &mounts {
        if let Some(cause) = of_mount(&root, mount)? {
            return Ok(Some(cause));
        }
    }
    // libcontainer creates a missing working directory. One below a mount is not seen here.
    let cwd = spec.process().as_ref().map(Process::cwd);
    let is_below_mount = |cwd: &Path| {
        let mut at = mounts.iter().map(|mount| mount.destination());
        at.any(|at| at != Path::new("/") && cwd.starts_with(at))
    };
    Ok(match cwd.filter(|cwd| !is_below_mount(cwd)) {
        Some(cwd) => {
            of_directory(&root, cwd).filter(|cause| matches!(cause, Cause::NotDirectory(_)))
        }
        None => None,
    })
}

fn of_mount(root: &OwnedFd, mount: &Mount) -> io::Result<Option<Cause>> {
    let binds = |option: &String| option == "bind" || option == "rbind";
    let is_bind = mount.options().iter().flatten().any(binds);
    let Some(source) = mount.source().as_ref().filter(|_| is_bind) else {
        return Ok(None);
    };
    let destination = mount.destination().clone();
    let source_is_dir = match fs::metadata(source) {
        Ok(about) => about.is_dir(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Ok(Some(Cause::NoSource { destination }));
        }
        Err(error) => return Err(error),
    };
    Ok(match is_dir(root, &destination) {
        Ok(is_dir) if is_dir != source_is_dir => Some(Cause::Kinds {
            destination,
            source_is_dir,
        }),
        // It is created.
        Ok(_) | Err(_) => None,
    })
}

fn of_exec(process: &Path, root: &Path) -> io::Result<Option<Cause>> {
    let process: Process = read(process)?;
    Ok(of_directory(&open_root(root)?, process.cwd()))
}

fn of_directory(root: &OwnedFd, cwd: &Path) -> Option<Cause> {
    match is_dir(root, cwd) {
        Ok(true) => None,
        Ok(false) | Err(Errno::NOTDIR) => Some(Cause::NotDirectory(cwd.to_owned())),
        Err(Errno::NOENT) => Some(Cause::NoDirectory(cwd.to_owned())),
        Err(_) => None,
    }
}

/// Returns whether a path in the container is that of a directory. Links stay in the container.
fn is_dir(root: &OwnedFd, path: &Path) -> Result<bool, Errno> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let opened = openat2(root, path, flags, Mode::empty(), resolve)?;
    Ok(FileType::from_raw_mode(fstat(opened)?.st_mode) == FileType::Directory)
}

fn open_root(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(openat(CWD, path, flags, Mode::empty())?)
}

fn read<T: serde::de::DeserializeOwned>(path: &Path) -> io::Result<T> {
    Ok(serde_json::from_reader(io::BufReader::new(File::open(
        path,
    )?))?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use oci_spec::runtime::{MountBuilder, ProcessBuilder, RootBuilder, SpecBuilder};

    use super::*;

    /// A bundle whose root has the file `/etc/passwd`.
    fn bundle() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("rootfs/etc")).unwrap();
        fs::write(dir.path().join("rootfs/etc/passwd"), "").unwrap();
        symlink("/etc", dir.path().join("rootfs/link")).unwrap();
        dir
    }

    fn process(cwd: &str) -> Process {
        ProcessBuilder::default().cwd(cwd).build().unwrap()
    }

    fn told(kind: &NewProcess) -> String {
        explain(kind, &anyhow::anyhow!("failed to prepare rootfs"))
    }

    fn of_create(source: &Path, destination: &str, cwd: &str) -> String {
        let dir = bundle();
        let mount = MountBuilder::default()
            .destination(destination)
            .typ("bind")
            .source(source)
            .options(["rbind".to_owned()])
            .build()
            .unwrap();
        let spec = SpecBuilder::default()
            .root(RootBuilder::default().path("rootfs").build().unwrap())
            .mounts([mount])
            .process(process(cwd))
            .build()
            .unwrap();
        fs::write(
            dir.path().join("config.json"),
            serde_json::to_vec(&spec).unwrap(),
        )
        .unwrap();
        told(&NewProcess::Create {
            bundle: dir.path().to_owned(),
        })
    }

    #[test]
    fn a_mount_of_another_kind_than_what_is_there_is_named() {
        let source = tempfile::tempdir().unwrap();
        let file = source.path().join("file");
        fs::write(&file, "").unwrap();
        let message = of_create(&file, "/etc", "/");
        assert!(
            message.starts_with("cannot mount a file at /etc, which is a directory"),
            "{message}"
        );
        let message = of_create(source.path(), "/etc/passwd", "/");
        assert!(
            message.starts_with("cannot mount a directory at /etc/passwd, which is a file"),
            "{message}"
        );
        let message = of_create(&source.path().join("none"), "/new", "/");
        assert!(
            message.starts_with("cannot mount at /new: its source does not exist"),
            "{message}"
        );
    }

    #[test]
    fn a_working_directory_that_is_none_is_named() {
        let source = tempfile::tempdir().unwrap();
        let message = of_create(source.path(), "/new", "/etc/passwd");
        assert!(
            message.starts_with("the working directory /etc/passwd is not a directory"),
            "{message}"
        );
        let dir = bundle();
        let path = dir.path().join("process.json");
        let root = dir.path().join("rootfs");
        let cause = |cwd: &str| {
            fs::write(&path, serde_json::to_vec(&process(cwd)).unwrap()).unwrap();
            of_exec(&path, &root).unwrap()
        };
        assert_eq!(cause("/nodir"), Some(Cause::NoDirectory("/nodir".into())));
        // A link leads nowhere outside.
        assert_eq!(
            cause("/link/none"),
            Some(Cause::NoDirectory("/link/none".into()))
        );
        assert_eq!(
            cause("/etc/passwd/x"),
            Some(Cause::NotDirectory("/etc/passwd/x".into()))
        );
        assert_eq!(cause("/link"), None);
    }

    #[test]
    fn what_is_not_explained_says_what_was_tried() {
        let source = tempfile::tempdir().unwrap();
        for message in [
            of_create(source.path(), "/etc", "/"),
            told(&NewProcess::Create {
                bundle: source.path().join("none"),
            }),
        ] {
            assert_eq!(
                message,
                "cannot create the container: failed to prepare rootfs"
            );
        }
        let kind = NewProcess::Exec {
            process: source.path().join("none"),
            init: 1,
        };
        let message = told(&kind);
        assert!(
            message.starts_with("cannot start the process in the container: "),
            "{message}"
        );
    }
}
