//! `vm commit`: an image of a VM's disk, which other VMs begin with.
//!
//! The image is what KubeVirt calls a containerDisk: its only file is `/disk/disk.qcow2`, so that
//! the image may be saved, pushed and pulled like any.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, fchown};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use clap::Args;
use podvisor_images::{Error, Image, ImportSource, PullOptions, Store, parse_reference};

use super::run::{claimed, is_off};
use super::snapshot::VmSnapshot;
use super::{arrival, disk};
use crate::cli::container::sweep;
use crate::cli::interrupt::{Interruptible, Interrupts};
use crate::cli::progress::Progress;
use crate::cli::signals::exit_code_of;
use crate::cli::{Globals, notice};

/// The directory of an image's tree while it is made, in the VM's.
const TREE: &str = "commit";

/// Where the disk is in the image.
const DIRECTORY: &str = "disk";
const FILE: &str = "disk.qcow2";

/// The user and group that KubeVirt's launchers read disks as.
const OWNER: u32 = 107;

#[derive(Debug, Args)]
pub(super) struct CommitArgs {
    /// The VM, which is off, or one of its snapshots
    #[arg(value_name = "VM[:SNAPSHOT]")]
    from: String,

    /// Name of the image
    #[arg(value_name = "IMAGE")]
    image: String,

    /// Show no progress
    #[arg(short, long)]
    quiet: bool,
}

pub(super) fn run(globals: &Globals, args: &CommitArgs) -> anyhow::Result<u8> {
    // Before much is written.
    parse_reference(&args.image)?;
    let containers = globals.containers()?;
    let store = globals.store()?;
    let interrupts = Interrupts::catch()?;
    let (vm, snapshot) = match args.from.split_once(':') {
        Some((vm, snapshot)) => (vm, Some(snapshot)),
        None => (&*args.from, None),
    };
    let found = crate::cli::runtime()?.block_on(async {
        sweep(&containers).await?;
        let mut entry = containers.find(vm)?;
        let claim = claimed(&entry, vm).await?;
        let disk = match snapshot {
            Some(name) => VmSnapshot::find(&entry, name)?.dir,
            None => {
                ensure!(
                    is_off(&entry).await?,
                    "VM {vm} runs, and writes its disk: stop it first, or commit a snapshot of \
                     it: `podvisor vm snapshot {vm} NAME`, then `podvisor vm commit {vm}:NAME {}`",
                    args.image
                );
                arrival::must_have_come(&mut entry)?;
                entry.dir.clone()
            }
        };
        anyhow::Ok((entry, claim, disk))
    });
    let (entry, _claim, disk) = found?;
    if !args.quiet {
        notice(&format!("reading the disk of VM {vm}"));
    }
    let name = args.image.clone();
    let progress = Progress::for_steps(args.quiet);
    let ended = interrupts.during(progress, move |options| {
        Ok(commit(&store, &entry.dir, &disk, &name, options))
    });
    match ended? {
        Interruptible::Done(image) => {
            crate::cli::print(&format!("{}\n", image?.id()))?;
            Ok(0)
        }
        Interruptible::Interrupted(signal) => Ok(exit_code_of(signal)),
    }
}

/// Makes an image of the disk in `disk`, whose own image is in the directory of the VM.
fn commit(
    store: &Store,
    vm: &Path,
    disk: &Path,
    name: &str,
    options: &PullOptions,
) -> anyhow::Result<Image> {
    let tree = Tree::new(vm.join(TREE))?;
    let file = tree.file()?;
    let go_on = || !options.cancel.is_cancelled();
    if !disk::flatten(vm, disk, &file, go_on)? {
        return Err(Error::Cancelled.into());
    }
    drop(file);
    let source = ImportSource::Directory(tree.0.clone());
    Ok(store.import(source, Some(name), options)?)
}

/// The files of an image that is made, which are removed with this.
#[derive(Debug)]
struct Tree(PathBuf);

impl Tree {
    /// Makes it, in place of one that was left by a process that was killed. Who makes one has the
    /// VM's claim.
    fn new(path: PathBuf) -> anyhow::Result<Self> {
        match fs::remove_dir_all(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot remove {}", path.display()));
            }
            _ => {}
        }
        let tree = Self(path);
        let inner = tree.0.join(DIRECTORY);
        let made = DirBuilder::new().recursive(true).mode(0o755).create(&inner);
        made.with_context(|| format!("cannot make the directory {}", inner.display()))?;
        Ok(tree)
    }

    fn file(&self) -> anyhow::Result<File> {
        let path = self.0.join(DIRECTORY).join(FILE);
        let mut options = File::options();
        options.read(true).write(true).create_new(true).mode(0o440);
        let file = options.open(&path);
        let file = file.with_context(|| format!("cannot create {}", path.display()))?;
        // Not for a user without root, whose image has the user's number.
        let _ = fchown(&file, Some(OWNER), Some(OWNER));
        Ok(file)
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            let path = self.0.display();
            crate::cli::report(&anyhow::Error::new(error).context(format!("cannot remove {path}")));
        }
    }
}

#[cfg(test)]
mod tests {
    use podvisor_images::Cancel;

    use super::*;

    /// A VM with a disk of 1 MiB over an image of half of that, and the store.
    fn vm(root: &Path) -> (Store, PathBuf) {
        let store = Store::open(root.join("images")).unwrap();
        let file = root.join("disk.img");
        fs::write(&file, [b'x'; 1 << 19]).unwrap();
        let image = store.import_disk(&file).unwrap();
        let dir = root.join("vm");
        fs::create_dir(&dir).unwrap();
        disk::create(&dir, &image, Some(1 << 20)).unwrap();
        (store, dir)
    }

    #[test]
    fn a_committed_disk_is_the_disk_of_an_image_that_has_its_name() {
        let root = tempfile::tempdir().unwrap();
        let (store, dir) = vm(root.path());
        // What a process that was killed has left is in nobody's way.
        fs::create_dir_all(dir.join(TREE).join("left")).unwrap();
        let options = PullOptions::default();
        let image = commit(&store, &dir, &dir, "mine:1", &options).unwrap();
        assert!(!dir.join(TREE).exists());
        assert_eq!(store.resolve("mine:1").unwrap().id(), image.id());
        let disk = store.container_disk("mine:1").unwrap();
        let bytes = fs::read(disk.path()).unwrap();
        assert_eq!(bytes.len(), 1 << 20);
        let (written, rest) = bytes.split_at(1 << 19);
        assert!(written.iter().all(|byte| *byte == b'x'));
        assert!(rest.iter().all(|byte| *byte == 0));
    }

    #[test]
    fn a_commit_that_is_cancelled_leaves_nothing() {
        let root = tempfile::tempdir().unwrap();
        let (store, dir) = vm(root.path());
        let before = fs::read_dir(&dir).unwrap().count();
        let cancel = Cancel::default();
        cancel.cancel();
        let options = PullOptions::default().cancel(cancel);
        let said = commit(&store, &dir, &dir, "mine:1", &options).unwrap_err();
        assert!(
            matches!(said.downcast_ref(), Some(Error::Cancelled)),
            "{said}"
        );
        assert_eq!(fs::read_dir(&dir).unwrap().count(), before);
        assert!(store.resolve("mine:1").is_err());
    }
}
