//! Kernels that were read from images' disks once, for machines that boot them from then on.
//!
//! What a fresh disk boots is a function of its image: the loader finds it in a machine of its own
//! ([`ReadKernel`]), which has the image alone, and the files are kept with the image in the store.
//! They are the image's word, as its disk is, and are parsed as hostile: the frame here, the kernel
//! by whoever starts it.
//!
//! A machine whose disk its guest may have written boots by the loader, which sees updates.

use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use podvisor_images::Disk;
use podvisor_kept_kernel::{BLOCK, DISK_BYTES, Frame, FrameError};
use tempfile::TempDir;
use tracing::debug;

use crate::blocking::apart;
use crate::machine::causes;
use crate::sandbox::{KeptKernel, ReadKernel, RefusalKind, SandboxClient, SandboxError};

/// Names of the files of a kernel.
const FRAME: &str = "frame";
const KERNEL: &str = "kernel";
const INITRAMFS: &str = "initramfs";

/// What the names of directories begin with.
const DIRECTORY: &str = "kernel-";

/// What the name of the file begins with which says that an image has no kernel to keep.
const NOTHING: &str = "nothing-";

/// Longest reason for that which is remembered, in bytes.
const MAX_REASON: usize = 1024;

/// The command line of the loader's kernel that reads an image.
const CMDLINE: &str = "console=ttyS0 quiet panic=-1 reboot=k -- --no-self-tests";

/// Why a kernel is not kept, or was not found.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KeptKernelError {
    /// A file failed.
    #[error("failed to {0} {1}")]
    Io(&'static str, PathBuf, #[source] io::Error),
    /// The loader's frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The loader's machine.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    /// The image.
    #[error(transparent)]
    Image(#[from] Box<podvisor_images::Error>),
    /// The loader has found before that there is none.
    #[error("the image was looked at before: {0}")]
    Nothing(String),
    /// The host has no more threads.
    #[error("failed to start a thread")]
    Thread(#[source] io::Error),
    /// A file that was kept is damaged.
    #[error("{0} has not the size that it was kept with")]
    Size(PathBuf),
}

impl KeptKernelError {
    /// Whether the image is the reason, and not this host at this time.
    fn is_of_image(&self) -> bool {
        match self {
            Self::Frame(_) => true,
            Self::Sandbox(error) => error.kind() == Some(RefusalKind::Image),
            _ => false,
        }
    }
}

type Result<T> = std::result::Result<T, KeptKernelError>;

/// Returns what a machine with a fresh disk of this image starts: the kernel that is kept, or one
/// that the loader reads now in the sandbox, which has `memory` bytes for it and no machine yet.
/// That takes a while, of which `reads` tells; it is to be kept once the machine runs.
///
/// # Errors
/// There is none: the machine boots by the loader, which says why if it cannot either.
pub(crate) async fn of_image(
    client: &SandboxClient,
    disk: &Disk,
    loader: [&Path; 2],
    memory: u64,
    reads: impl FnOnce(),
) -> Result<(KeptKernel, Option<Unkept>)> {
    let (disk, files) = (disk.clone(), loader.map(Path::to_owned));
    let begun = apart("kept-kernel", move || {
        let [kernel, initramfs] = &files;
        let kept = KeptKernels::of(&disk, [kernel, initramfs])?;
        if let Some(found) = kept.find()? {
            return Ok::<_, KeptKernelError>((kept, Begun::Kept(found)));
        }
        kept.check_nothing(memory)?;
        let open = |path: &PathBuf| File::open(path).map_err(failed("open", path));
        // Open, the image stays, and so does the directory.
        let image = disk.open().map_err(Box::new)?;
        let frame = kept.create_frame()?;
        let again = image.try_clone().map_err(failed("open", disk.path()))?;
        let loader = [open(kernel)?, open(initramfs)?];
        let read = reader(again, &frame, loader, memory);
        let read = read.map_err(failed("open", &kept.directory))?;
        Ok((kept, Begun::Read(image, frame, Box::new(read))))
    });
    let (kept, begun) = begun.await.map_err(KeptKernelError::Thread)??;
    let (image, frame, read) = match begun {
        Begun::Kept(found) => return Ok((found, None)),
        Begun::Read(image, frame, read) => (image, frame, read),
    };
    reads();
    let read = client.read_kernel(*read).await;
    let taken = apart("kept-kernel", move || {
        let taken = match read {
            Ok(()) => kept.take(&frame),
            Err(error) => Err(error.into()),
        };
        if let Err(error) = &taken
            && error.is_of_image()
        {
            kept.keep_nothing(memory, error);
        }
        drop(image);
        taken
    });
    let (kernel, unkept) = taken.await.map_err(KeptKernelError::Thread)??;
    Ok((kernel, Some(unkept)))
}

/// How the kernel of an image is known.
enum Begun {
    /// It is kept.
    Kept(KeptKernel),
    /// A machine reads it: the image, which stays open, the file that the machine writes, and the
    /// machine.
    Read(File, File, Box<ReadKernel>),
}

/// Where the kernel of one image is kept, as one version of the loader reads it.
#[derive(Debug)]
struct KeptKernels {
    /// Of the image; it may not be there.
    directory: PathBuf,
    /// Of the kernel, in it.
    name: String,
}

impl KeptKernels {
    /// Returns where the kernel of an image is kept, for a loader with these files.
    fn of(disk: &Disk, loader: [&Path; 2]) -> Result<Self> {
        Self::new(disk.derived_directory(), loader)
    }

    fn new(directory: PathBuf, loader: [&Path; 2]) -> Result<Self> {
        let mut name = format!("{DIRECTORY}{}", env!("CARGO_PKG_VERSION"));
        // Another loader may find something else.
        for file in loader {
            let meta = fs::metadata(file).map_err(failed("look at", file))?;
            name += &format!("-{:x}-{:x}", meta.len(), meta.mtime());
        }
        Ok(Self { directory, name })
    }

    fn path(&self) -> PathBuf {
        self.directory.join(&self.name)
    }

    /// Opens the kernel; `None` if none is kept.
    fn find(&self) -> Result<Option<KeptKernel>> {
        match open(&self.path()) {
            Err(KeptKernelError::Io(_, _, error)) if error.kind() == io::ErrorKind::NotFound => {
                Ok(None)
            }
            found => found.map(Some),
        }
    }

    /// Where it is kept that this loader finds no kernel in the image.
    fn nothing(&self) -> PathBuf {
        self.directory.join(format!("{NOTHING}{}", self.name))
    }

    /// Fails if this loader has found no kernel before, with as much memory or more.
    fn check_nothing(&self, memory: u64) -> Result<()> {
        let path = self.nothing();
        let mut text = Vec::new();
        match File::open(&path).map(|file| file.take(2 * MAX_REASON as u64)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            file => file.and_then(|mut file| file.read_to_end(&mut text)),
        }
        .map_err(failed("read", &path))?;
        let text = String::from_utf8_lossy(&text);
        match text.split_once('\n') {
            Some((had, why)) if had.parse().is_ok_and(|had: u64| memory <= had) => {
                Err(KeptKernelError::Nothing(why.to_owned()))
            }
            _ => Ok(()),
        }
    }

    /// Keeps that this loader has found no kernel, in place of what older ones have found. If that
    /// fails, the image is read again.
    fn keep_nothing(&self, memory: u64, error: &KeptKernelError) {
        let why = causes(error);
        let end = why.floor_char_boundary(MAX_REASON);
        let text = format!("{memory}\n{}", &why[..end]);
        let kept = remove_nothing(&self.directory)
            .and_then(|()| tempfile::NamedTempFile::new_in(&self.directory))
            .and_then(|mut file| file.write_all(text.as_bytes()).map(|()| file))
            .and_then(|file| file.persist(self.nothing()).map_err(|error| error.error));
        if let Err(error) = kept {
            debug!(%error, "it is not kept that an image has no kernel");
        }
    }

    /// Creates the file that a loader writes a kernel to; it has no name.
    fn create_frame(&self) -> Result<File> {
        let directory = &self.directory;
        fs::create_dir_all(directory).map_err(failed("create", directory))?;
        let frame = tempfile::tempfile_in(directory);
        let frame = frame.and_then(|file| file.set_len(DISK_BYTES).map(|()| file));
        frame.map_err(failed("create a file in", directory))
    }

    /// Takes the kernel out of the file that a loader has written. It may be started before it is
    /// kept ([`Unkept::keep`]).
    fn take(&self, frame: &File) -> Result<(KeptKernel, Unkept)> {
        let directory = &self.directory;
        let mut block = [0; BLOCK];
        let read = frame.read_exact_at(&mut block, 0);
        read.map_err(failed("read the kernel of", directory))?;
        let parsed = Frame::parse(&block)?;
        let new = tempfile::Builder::new()
            .prefix("new-")
            .tempdir_in(directory);
        let new = new.map_err(failed("create a directory in", directory))?;
        let write = |name: &str, part: Range<u64>| {
            let path = new.path().join(name);
            copy(frame, part, &path).map_err(failed("write", &path))
        };
        write(FRAME, 0..BLOCK as u64)?;
        write(KERNEL, parsed.kernel())?;
        if let Some(initramfs) = parsed.initramfs() {
            write(INITRAMFS, initramfs)?;
        }
        let kernel = open(new.path())?;
        let unkept = Unkept {
            directory: new,
            target: self.path(),
        };
        Ok((kernel, unkept))
    }
}

/// Files of a kernel that are not kept yet.
#[derive(Debug)]
#[must_use]
pub(crate) struct Unkept {
    directory: TempDir,
    target: PathBuf,
}

impl Unkept {
    /// Keeps the kernel for the next machines, in place of those that older loaders have read.
    pub(crate) fn keep(self) -> Result<()> {
        let Self { directory, target } = self;
        let parent = target.parent().unwrap_or(Path::new("/"));
        for name in [FRAME, KERNEL, INITRAMFS] {
            let path = directory.path().join(name);
            match File::open(&path).and_then(|file| file.sync_all()) {
                Err(error) if name == INITRAMFS && error.kind() == io::ErrorKind::NotFound => {}
                synced => synced.map_err(failed("sync", &path))?,
            }
        }
        // With more memory, the loader has found one.
        remove_nothing(parent).map_err(failed("list", parent))?;
        let others = fs::read_dir(parent).map_err(failed("list", parent))?;
        for other in others.flatten() {
            let is_kernel = other.file_name().to_string_lossy().starts_with(DIRECTORY);
            if is_kernel && other.path() != target {
                // It is of use to nobody, and in nobody's way.
                let _ = fs::remove_dir_all(other.path());
            }
        }
        match fs::rename(directory.path(), &target) {
            // Another process was faster; what it has kept is the same.
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
            renamed => {
                renamed.map_err(failed("create", &target))?;
                // There is nothing to remove any more.
                let _ = directory.keep();
                Ok(())
            }
        }
    }
}

/// Removes what is kept of loaders that found no kernel.
fn remove_nothing(directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory)?.flatten() {
        if entry.file_name().to_string_lossy().starts_with(NOTHING) {
            // It is in nobody's way.
            let _ = fs::remove_file(entry.path());
        }
    }
    Ok(())
}

/// Returns the machine that reads the kernel of an image, with so many bytes of memory.
fn reader(image: File, frame: &File, loader: [File; 2], memory: u64) -> io::Result<ReadKernel> {
    let [kernel, initramfs] = loader;
    Ok(ReadKernel {
        kernel,
        initramfs,
        cmdline: format!(
            "{CMDLINE} --root {} --hand-over {}",
            ReadKernel::IMAGE,
            ReadKernel::FRAME
        ),
        memory,
        image,
        frame: frame.try_clone()?,
    })
}

/// Opens the kernel in a directory.
fn open(directory: &Path) -> Result<KeptKernel> {
    let file = |name: &str, bytes: u64| {
        let path = directory.join(name);
        let file = File::open(&path).map_err(failed("open", &path))?;
        let meta = file.metadata().map_err(failed("look at", &path))?;
        match meta.len() == bytes {
            true => Ok(file),
            false => Err(KeptKernelError::Size(path)),
        }
    };
    let mut block = [0; BLOCK];
    let read = file(FRAME, BLOCK as u64)?.read_exact(&mut block);
    read.map_err(failed("read", directory))?;
    let frame = Frame::parse(&block)?;
    let bytes = |part: Range<u64>| part.end - part.start;
    let initramfs = frame.initramfs();
    Ok(KeptKernel {
        kernel: file(KERNEL, bytes(frame.kernel()))?,
        initramfs: initramfs
            .map(|part| file(INITRAMFS, bytes(part)))
            .transpose()?,
        cmdline: frame.cmdline().to_owned(),
        title: frame.title().to_owned(),
    })
}

/// Copies a part of a file to a new one.
fn copy(from: &File, part: Range<u64>, path: &Path) -> io::Result<()> {
    let mut from = from;
    from.seek(SeekFrom::Start(part.start))?;
    let bytes = part.end - part.start;
    let mut to = File::create_new(path)?;
    let copied = io::copy(&mut from.take(bytes), &mut to)?;
    to.flush()?;
    match copied == bytes {
        true => Ok(()),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> KeptKernelError {
    let path = path.to_owned();
    move |error| KeptKernelError::Io(what, path, error)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(mut file: File) -> String {
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        text
    }

    /// A store's directory, and a loader's two files.
    fn kept(root: &Path) -> KeptKernels {
        let loader = [root.join("vmlinux-loader"), root.join("loader.cpio")];
        for file in &loader {
            fs::write(file, "loader").unwrap();
        }
        let [kernel, program] = &loader;
        KeptKernels::new(root.join("derived"), [kernel, program]).unwrap()
    }

    fn written(kept: &KeptKernels, kernel: &str, initramfs: &str) -> File {
        let file = kept.create_frame().unwrap();
        let lengths = (kernel.len() as u64, initramfs.len() as u64);
        let frame = Frame::new(lengths.0, lengths.1, "ro quiet", "Debian").unwrap();
        file.write_all_at(&frame.to_block(), 0).unwrap();
        file.write_all_at(kernel.as_bytes(), frame.kernel().start)
            .unwrap();
        if let Some(part) = frame.initramfs() {
            file.write_all_at(initramfs.as_bytes(), part.start).unwrap();
        }
        file
    }

    #[test]
    fn what_a_loader_has_written_is_found_by_the_same_loader_alone() {
        let root = tempfile::tempdir().unwrap();
        let kept = kept(root.path());
        assert!(kept.find().unwrap().is_none());
        let frame = written(&kept, "vmlinuz", "initrd");
        let (first, unkept) = kept.take(&frame).unwrap();
        assert_eq!(text(first.kernel), "vmlinuz");
        assert!(kept.find().unwrap().is_none(), "it is not kept yet");
        unkept.keep().unwrap();
        let found = kept.find().unwrap().unwrap();
        assert_eq!(text(found.kernel), "vmlinuz");
        assert_eq!(text(found.initramfs.unwrap()), "initrd");
        assert_eq!(
            (found.cmdline.as_str(), found.title.as_str()),
            ("ro quiet", "Debian")
        );
        // A second one that was read meanwhile.
        kept.take(&frame).unwrap().1.keep().unwrap();

        let loader = root.path().join("loader.cpio");
        fs::write(&loader, "another loader").unwrap();
        let other = [root.path().join("vmlinux-loader"), loader];
        let [kernel, program] = &other;
        let other = KeptKernels::new(root.path().join("derived"), [kernel, program]).unwrap();
        assert!(other.find().unwrap().is_none());
        let frame = written(&other, "newer", "");
        other.take(&frame).unwrap().1.keep().unwrap();
        assert!(other.find().unwrap().unwrap().initramfs.is_none());
        assert!(kept.find().unwrap().is_none(), "the older one is removed");
        assert_eq!(
            fs::read_dir(root.path().join("derived")).unwrap().count(),
            1
        );
    }

    #[test]
    fn a_frame_that_was_not_finished_keeps_nothing() {
        let root = tempfile::tempdir().unwrap();
        let kept = kept(root.path());
        let error = kept.take(&kept.create_frame().unwrap()).unwrap_err();
        assert!(matches!(error, KeptKernelError::Frame(FrameError::Missing)));
        // Less was written than it says.
        let frame = written(&kept, "vmlinuz", "");
        frame.set_len(BLOCK as u64 + 3).unwrap();
        assert!(kept.take(&frame).is_err());
        assert_eq!(
            fs::read_dir(root.path().join("derived")).unwrap().count(),
            0
        );
    }

    #[test]
    fn a_kept_file_of_another_size_is_damaged() {
        let root = tempfile::tempdir().unwrap();
        let kept = kept(root.path());
        let frame = written(&kept, "vmlinuz", "");
        kept.take(&frame).unwrap().1.keep().unwrap();
        fs::write(kept.path().join(KERNEL), "vml").unwrap();
        assert!(matches!(kept.find(), Err(KeptKernelError::Size(_))));
    }

    #[test]
    fn an_image_without_a_kernel_is_looked_at_again_by_another_loader_or_with_more_memory_alone() {
        let root = tempfile::tempdir().unwrap();
        let kept = kept(root.path());
        fs::create_dir(&kept.directory).unwrap();
        kept.check_nothing(64 << 20).unwrap();
        let why = "no boot entry".repeat(MAX_REASON);
        let found = SandboxError::Refused {
            kind: RefusalKind::Image,
            message: why.clone(),
        };
        let error = KeptKernelError::from(found);
        assert!(error.is_of_image());
        kept.keep_nothing(64 << 20, &error);
        for memory in [32 << 20, 64 << 20] {
            let error = kept.check_nothing(memory).unwrap_err();
            let KeptKernelError::Nothing(said) = error else {
                panic!("{error}")
            };
            assert!(said.len() == MAX_REASON && why.starts_with(&said[..13]));
        }
        kept.check_nothing(128 << 20).unwrap();
        let mut other = self::kept(root.path());
        other.name += "-2";
        other.check_nothing(64 << 20).unwrap();
        // One file an image, whoever has looked.
        other.keep_nothing(64 << 20, &error);
        let entries = || fs::read_dir(&kept.directory).unwrap().count();
        assert_eq!(entries(), 1);
        kept.check_nothing(64 << 20).unwrap();
        // A host that was busy says nothing of the image.
        let slow = SandboxError::Refused {
            kind: RefusalKind::Internal,
            message: "it did not end within 60 s".to_owned(),
        };
        assert!(!KeptKernelError::from(slow).is_of_image());
        // What is found after all takes its place.
        let frame = written(&kept, "vmlinuz", "");
        kept.take(&frame).unwrap().1.keep().unwrap();
        assert_eq!(entries(), 1);
    }
}
