//! Templates: snapshots of machines that have booted already, with an agent that answers but
//! without any part of a sandbox. A sandbox starts as a clone of one, which takes a fraction of a
//! boot.
//!
//! A template is a snapshot in the directory `NAME` of the templates' directory, where the name is
//! derived from its ingredients: this program, kernel, initramfs, and the machine's [`Shape`]. When
//! one of these changes, so does the name: a template never goes stale, it just becomes unused, and
//! the least recently used ones are removed. [`make`] is the process `podvisor template`, which a
//! launcher starts if its template is missing.
//!
//! Clones share the random values that a kernel draws when it boots: its location in memory, and
//! the keys of its tables. From the first call of the agent on, before anything of the sandbox
//! runs, they have their own random numbers (32 bytes of the host's are mixed in, and every
//! generator is reseeded), time, names and addresses.

mod clean;
mod maker;
mod rehearsal;
mod shape;
mod unfinished;

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use podvisor_network::tap::{TUN, taps_apart};
use podvisor_vmm::LinkState;
use tracing::{debug, warn};

pub use clean::remove_abandoned_templates;
use clean::{has_room, remove, remove_oldest};
pub use maker::SnapshotMaker;
pub use shape::Shape;
use unfinished::Unfinished;

use super::provisional_nics::{macs, mtu};
use crate::agent::GuestConfig;
use crate::error::SandboxError;
use crate::in_process::{BuiltSandbox, SandboxConfig};
use crate::machine::{
    Boot, GuestFiles, MachineConfig, MachineError, Nic, NicKind, SharedDir, Snapshot, causes,
};

/// Delay before another attempt after a template could not be created.
const RETRY_DELAY: Duration = Duration::from_secs(600);

/// The files of a snapshot.
const STATE: &str = "state";
const MEMORY: &str = "memory";

/// The executable of this process.
pub(super) const THIS_PROGRAM: &str = "/proc/self/exe";

/// The file that is locked while a template is made.
const TURN: &str = "turn";

/// The reason why there is no template.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// A file or directory failed.
    #[error("failed to {action} {}", path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// The path of the kernel or initramfs is not UTF-8.
    #[error("failed to write a template's shape as an argument")]
    Argument(#[source] serde_json::Error),
    /// The host's end of a card or a share was not created.
    #[error("failed to create the host side of a template's devices")]
    Devices(#[source] io::Error),
    /// The machine did not boot.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
}

fn file(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> TemplateError {
    let path = path.into();
    move |source| TemplateError::File {
        action,
        path,
        source,
    }
}

/// A template's open files.
#[derive(Debug)]
pub(super) struct Template {
    pub(super) state: OwnedFd,
    pub(super) memory: OwnedFd,
}

impl Template {
    /// Opens a snapshot's files.
    pub(super) fn of_snapshot(dir: &Path) -> Result<Self, SandboxError> {
        let open = |name| {
            let path = dir.join(name);
            let opened = File::open(&path).map(OwnedFd::from);
            opened.map_err(|source| SandboxError::File {
                action: "open",
                path,
                source,
            })
        };
        Ok(Self {
            state: open(STATE)?,
            memory: open(MEMORY)?,
        })
    }

    /// Reads and checks the snapshot.
    pub(super) fn open(self) -> Result<Snapshot, SandboxError> {
        let snapshot = Snapshot::from_files(self.state.into(), self.memory.into());
        Ok(snapshot.map_err(MachineError::from)?)
    }
}

/// Creates the template of a shape in this process, which must not have another thread yet: it
/// leaves the host's network. Does nothing if there is one, another process is creating it, or as
/// many others as are kept are in use.
///
/// # Errors
/// [`TemplateError`]; there is no template then.
pub async fn make(shape: &Shape, templates: &Path) -> Result<(), TemplateError> {
    create(templates)?;
    let place = shape
        .place(Path::new(THIS_PROGRAM), templates)
        .map_err(file("name the template in", templates))?;
    let lock_path = place.with_extension("lock");
    let lock = File::create(&lock_path).map_err(file("create", &lock_path))?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Ok(()),
        Err(TryLockError::Error(error)) => return Err(file("lock", &lock_path)(error)),
    }
    // One after the other: when a node starts its pods, their processors have other work.
    let turn_path = templates.join(TURN);
    let turn = File::create(&turn_path).map_err(file("create", &turn_path))?;
    turn.lock().map_err(file("lock", &turn_path))?;
    Snapshot::remove_partial(&place, None);
    // After an upgrade, the others cannot be requested any more.
    remove_abandoned_templates(templates);
    let is_whole = [STATE, MEMORY].map(|name| place.join(name).exists()) == [true; 2];
    let made = match is_whole {
        true => Ok(()),
        // Others may have been made since this one was asked for.
        false if !has_room(templates) => Ok(()),
        false => match remove(&place) {
            // What is left of one that was not removed completely would be in the way.
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(file("remove", &place)(error))
            }
            _ => snapshot(shape, &place).await,
        },
    };
    let failed = failure(&place);
    let noted = match made {
        Ok(()) => fs::remove_file(failed),
        Err(_) => fs::write(failed, ""),
    };
    for left in [noted, fs::remove_file(&lock_path)] {
        if let Err(error) = left
            && error.kind() != io::ErrorKind::NotFound
        {
            debug!(%error, "something of a template's making stays");
        }
    }
    remove_oldest(templates, &place);
    made
}

/// Boots a machine, and snapshots it to a new directory when its agent answers. A clone rehearses
/// the first steps of sandboxes, so that later clones get the pages up front that they will write.
///
/// # Errors
/// [`TemplateError`]; there is no snapshot then.
pub async fn snapshot(shape: &Shape, place: &Path) -> Result<(), TemplateError> {
    let ends = HostEnds::new(shape, place)?;
    let unfinished = Unfinished::beside(place)?;
    let made = unfinished.snapshot();
    boot_and_snapshot(shape, &ends, &made).await?;
    SnapshotMaker::current().note(&made)?;
    // If that fails, no sandbox could begin with it on this host.
    let clone = rehearsal::clone(shape, &ends, &made)?;
    if let Err(error) = rehearsal::rehearse(clone, shape, &made).await {
        // Clones work without it, but slower.
        warn!(
            error = causes(&error),
            "failed to record the clones' working set"
        );
    }
    unfinished.finish()
}

async fn boot_and_snapshot(
    shape: &Shape,
    ends: &HostEnds,
    place: &Path,
) -> Result<(), TemplateError> {
    let open = |path: &Path| File::open(path).map_err(file("open", path));
    let files = GuestFiles::from_files(open(&shape.kernel)?, open(&shape.initramfs)?);
    let boot = Boot::Cold(files.map_err(SandboxError::from)?);
    let config = SandboxConfig {
        guest: GuestConfig::default(),
        machine: ends.machine(shape, boot)?,
    };
    let sandbox = BuiltSandbox::new(config)?.answering().await?;
    let answered = sandbox.agent().ping().await;
    answered.map_err(SandboxError::from)?;
    if shape.image_slots > 0 {
        rehearsal::warm_up(&sandbox).await?;
    }
    let machine = sandbox.machine();
    machine.pause().await.map_err(SandboxError::from)?;
    machine
        .snapshot(place.to_owned())
        .await
        .map_err(SandboxError::from)?;
    machine.kill();
    Ok(())
}

/// The host's ends of the devices of a template's machine: unused sockets, and an empty directory.
#[derive(Debug)]
struct HostEnds {
    nics: Vec<OwnedFd>,
    _peers: Vec<UnixStream>,
    share: Option<OwnedFd>,
}

impl HostEnds {
    fn new(shape: &Shape, place: &Path) -> Result<Self, TemplateError> {
        let (nics, _peers) = match shape.nic_kind {
            NicKind::Tap => {
                let taps = taps_apart(shape.nics);
                let taps = taps.map_err(file("make taps by", Path::new(TUN)))?;
                (taps, Vec::new())
            }
            NicKind::Stream => {
                let pair = |_| UnixStream::pair().map(|(ours, peer)| (ours.into(), peer));
                let pairs: io::Result<Vec<_>> = (0..shape.nics).map(pair).collect();
                let pairs = pairs.map_err(TemplateError::Devices)?;
                pairs.into_iter().unzip()
            }
        };
        let shared = place.with_extension("share");
        let share = match shape.shares {
            false => None,
            true => {
                create(&shared)?;
                let opened = File::open(&shared).map_err(file("open", &shared))?;
                fs::remove_dir(&shared).map_err(file("remove", &shared))?;
                Some(opened.into())
            }
        };
        Ok(Self {
            nics,
            _peers,
            share,
        })
    }

    /// Configures a machine of the shape with these ends; only one at a time.
    fn machine(&self, shape: &Shape, boot: Boot) -> Result<MachineConfig, TemplateError> {
        let nic = |(fd, mac): (&OwnedFd, [u8; 6])| -> io::Result<Nic> {
            Ok(Nic {
                kind: shape.nic_kind,
                fd: fd.try_clone()?,
                mac,
                mtu: mtu(shape.nic_kind),
                link: LinkState::Up,
            })
        };
        let nics: io::Result<_> = self.nics.iter().zip(macs()).map(nic).collect();
        let share = self.share.as_ref().map(OwnedFd::try_clone).transpose();
        Ok(MachineConfig {
            boot,
            cpus: shape.vcpus,
            max_cpus: shape.max_vcpus,
            memory: shape.memory,
            growth: shape.growth,
            disks: Vec::new(),
            spare_disks: shape.image_slots,
            nics: nics.map_err(TemplateError::Devices)?,
            share: share
                .map_err(TemplateError::Devices)?
                .map(|dir| SharedDir { dir, users: None }),
            transport: shape.transport,
            psi: shape.psi,
            console: None,
            early: None,
        })
    }
}

/// Creates a directory for this user only, unless it exists.
fn create(dir: &Path) -> Result<(), TemplateError> {
    let mut builder = fs::DirBuilder::new();
    let made = builder.recursive(true).mode(0o700).create(dir);
    made.map_err(file("create the directory", dir))
}

/// The file whose time is that of the last failure to create this template.
fn failure(place: &Path) -> PathBuf {
    place.with_extension("failed")
}

fn has_just_failed(place: &Path) -> bool {
    let failed = fs::metadata(failure(place)).and_then(|meta| meta.modified());
    failed.is_ok_and(|at| at.elapsed().is_ok_and(|since| since < RETRY_DELAY))
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::shape::sample as shape;
    use super::*;

    #[tokio::test]
    async fn what_could_not_be_made_is_not_tried_again_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let shape = Shape {
            nics: 0,
            ..shape(dir.path())
        };
        let place = shape.place(Path::new(THIS_PROGRAM), dir.path()).unwrap();
        let of_another = dir.path().join(".0123.1.0.partial");
        fs::create_dir(&of_another).unwrap();
        assert!(!has_just_failed(&place));
        // The kernel file is invalid.
        make(&shape, dir.path()).await.unwrap_err();
        assert!(has_just_failed(&place));
        let long_ago = SystemTime::now() - 2 * RETRY_DELAY;
        let file = File::options().write(true).open(failure(&place)).unwrap();
        file.set_modified(long_ago).unwrap();
        assert!(!has_just_failed(&place));
        for left in ["lock", "share"] {
            assert!(!place.with_extension(left).exists(), "{left}");
        }
        assert!(!of_another.exists());
    }

    #[tokio::test]
    async fn none_is_made_that_would_take_the_place_of_one_in_use() {
        let dir = tempfile::tempdir().unwrap();
        let shape = Shape {
            nics: 0,
            ..shape(dir.path())
        };
        let mut others = 0..u64::MAX;
        while has_room(dir.path()) {
            let memory = shape.memory + others.next().unwrap() + 1;
            let other = Shape {
                memory,
                ..shape.clone()
            };
            other.pretend(Path::new(THIS_PROGRAM), dir.path());
        }
        let place = shape.place(Path::new(THIS_PROGRAM), dir.path()).unwrap();
        // Its kernel's file is invalid, and so an attempt would fail.
        make(&shape, dir.path()).await.unwrap();
        for left in ["lock", "failed"] {
            assert!(!place.with_extension(left).exists(), "{left}");
        }
        let one = fs::read_dir(dir.path()).unwrap().flatten();
        let one = one.map(|entry| entry.path()).find(|path| path.is_dir());
        let long_ago = SystemTime::now() - Duration::from_secs(86400);
        let one = File::open(one.unwrap()).unwrap();
        one.set_modified(long_ago).unwrap();
        make(&shape, dir.path()).await.unwrap_err();
    }
}
