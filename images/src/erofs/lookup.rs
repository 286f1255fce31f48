//! Reads single files from an image that [`Writer`](super::Writer) wrote. A damaged image gives
//! errors or wrong data, never a panic.

use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;

use super::BLOCK;
use super::layout::MAGIC;

/// Maximum bytes of a directory that is read; some 100,000 names.
const MAX_DIRECTORY_SIZE: u64 = 4 << 20;

/// An image's file system.
#[derive(Debug)]
pub(crate) struct FileSystem {
    file: File,
    /// Where the inodes start.
    inodes: u64,
    root: u64,
}

/// The inode of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Inode {
    mode: u16,
    size: u64,
    /// Where all but the tail is, and its length.
    start: u64,
    whole: u64,
    /// Where the tail is.
    tail: u64,
}

impl Inode {
    pub(crate) fn is_file(&self) -> bool {
        self.mode >> 12 == 8
    }

    /// Length in bytes.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    fn is_dir(&self) -> bool {
        self.mode >> 12 == 4
    }
}

fn damaged() -> io::Error {
    io::ErrorKind::InvalidData.into()
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    let field = bytes.get(at..).and_then(<[u8]>::first_chunk);
    u16::from_le_bytes(field.copied().unwrap_or_default())
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let field = bytes.get(at..).and_then(<[u8]>::first_chunk);
    u32::from_le_bytes(field.copied().unwrap_or_default())
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let field = bytes.get(at..).and_then(<[u8]>::first_chunk);
    u64::from_le_bytes(field.copied().unwrap_or_default())
}

/// Returns a file's metadata if it is as long as the file system that it starts with says.
pub(crate) fn whole(file: &File) -> io::Result<Option<Metadata>> {
    let mut superblock = [0; 128];
    match file.read_exact_at(&mut superblock, 1024) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    }
    let length = u64::from(u32_at(&superblock, 36)) * BLOCK as u64;
    let metadata = file.metadata()?;
    let is_whole = u32_at(&superblock, 0) == MAGIC && length == metadata.len();
    Ok(is_whole.then_some(metadata))
}

impl FileSystem {
    pub(crate) fn new(file: File) -> io::Result<Self> {
        let mut superblock = [0; 128];
        file.read_exact_at(&mut superblock, 1024)?;
        if u32_at(&superblock, 0) != MAGIC || superblock[12] != 12 {
            return Err(damaged());
        }
        Ok(Self {
            file,
            inodes: u64::from(u32_at(&superblock, 40)) * BLOCK as u64,
            root: u16_at(&superblock, 14).into(),
        })
    }

    /// Lists the names in the root directory, or in a directory in it; empty if there is no such
    /// directory.
    pub(crate) fn list(&self, directory: Option<&[u8]>) -> io::Result<Vec<(Vec<u8>, Inode)>> {
        let root = self.entries(self.inode(self.root)?)?;
        let Some(wanted) = directory else {
            return Ok(root);
        };
        match root.into_iter().find(|(name, _)| name == wanted) {
            Some((_, inode)) if inode.is_dir() => self.entries(inode),
            _ => Ok(Vec::new()),
        }
    }

    /// Finds a path from the root. Links are not followed.
    pub(crate) fn find(&self, path: &str) -> io::Result<Option<Inode>> {
        let mut found = self.inode(self.root)?;
        for part in path.split('/').filter(|part| !part.is_empty()) {
            if !found.is_dir() {
                return Ok(None);
            }
            let mut entries = self.entries(found)?.into_iter();
            match entries.find(|(name, _)| name == part.as_bytes()) {
                Some((_, inode)) => found = inode,
                None => return Ok(None),
            }
        }
        Ok(Some(found))
    }

    /// Opens a file's content.
    pub(crate) fn open(&self, inode: &Inode) -> io::Result<Content> {
        Ok(Content {
            file: self.file.try_clone()?,
            inode: *inode,
            at: 0,
        })
    }

    fn inode(&self, nid: u64) -> io::Result<Inode> {
        let at = nid
            .checked_mul(32)
            .and_then(|offset| offset.checked_add(self.inodes))
            .ok_or_else(damaged)?;
        let mut bytes = [0; 64];
        // A compact inode may be the last thing in the file.
        self.file.read_exact_at(&mut bytes[..32], at)?;
        let format = u16_at(&bytes, 0);
        let extended = format & 1 == 1;
        if extended {
            self.file.read_exact_at(&mut bytes, at)?;
        }
        let size = match extended {
            true => u64_at(&bytes, 8),
            false => u32_at(&bytes, 8).into(),
        };
        let xattrs = match u64::from(u16_at(&bytes, 2)) {
            0 => 0,
            count => 12 + 4 * (count - 1),
        };
        let block = BLOCK as u64;
        // Layout 2 stores the rest of the last block next to the inode.
        let whole = match format >> 1 & 7 {
            0 => size,
            2 => size - size % block,
            _ => return Err(damaged()),
        };
        Ok(Inode {
            mode: u16_at(&bytes, 4),
            size,
            start: u64::from(u32_at(&bytes, 16)) * block,
            whole,
            tail: at + if extended { 64 } else { 32 } + xattrs,
        })
    }

    fn entries(&self, directory: Inode) -> io::Result<Vec<(Vec<u8>, Inode)>> {
        let mut data = Vec::new();
        self.open(&directory)?
            .take(MAX_DIRECTORY_SIZE)
            .read_to_end(&mut data)?;
        if directory.size > MAX_DIRECTORY_SIZE {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let mut found = Vec::new();
        for block in data.chunks(BLOCK) {
            let names = usize::from(u16_at(block, 8));
            let count = names / 12;
            for index in 0..count {
                let entry = block.get(index * 12..).ok_or_else(damaged)?;
                let start = usize::from(u16_at(entry, 8));
                let end = match index + 1 < count {
                    true => u16_at(entry, 20).into(),
                    false => block.len(),
                };
                let name = block.get(start..end).ok_or_else(damaged)?;
                let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
                if !matches!(name, b"." | b"..") {
                    found.push((name.to_vec(), self.inode(u64_at(entry, 0))?));
                }
            }
        }
        Ok(found)
    }
}

/// A file's content as a stream.
#[derive(Debug)]
pub(crate) struct Content {
    file: File,
    inode: Inode,
    at: u64,
}

impl Read for Content {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let inode = &self.inode;
        let (place, left) = match inode.whole.checked_sub(self.at) {
            Some(left @ 1..) => (inode.start.checked_add(self.at), left),
            _ => (
                inode.tail.checked_add(self.at - inode.whole),
                inode.size - self.at,
            ),
        };
        let place = place.ok_or_else(damaged)?;
        let length = usize::try_from(left)
            .unwrap_or(usize::MAX)
            .min(buffer.len());
        let got = self.file.read_at(&mut buffer[..length], place)?;
        if got == 0 && length > 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.at += got as u64;
        Ok(got)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Limits;
    use crate::layer::Unpacker;
    use crate::tarball::Tarball;
    use std::io::{Seek, Write};
    use std::sync::Arc;

    fn image(tar: &[u8]) -> File {
        let out = tempfile::tempfile().unwrap();
        let mut unpacker =
            Unpacker::new(out.try_clone().unwrap(), Limits::default(), Arc::default());
        let mut blob = tempfile::tempfile().unwrap();
        blob.write_all(tar).unwrap();
        blob.rewind().unwrap();
        unpacker.layer(blob, crate::Digest::of(tar)).unwrap();
        unpacker.finish([0; 16]).unwrap();
        out
    }

    #[test]
    fn a_path_is_found_through_its_directories() {
        let tar = Tarball::new()
            .dir("boot", 0o755)
            .dir("boot/a", 0o755)
            .file("boot/a/kernel", 0o644, b"K")
            .finish();
        let files = FileSystem::new(image(&tar)).unwrap();
        let read = |path: &str| {
            let inode = files.find(path).unwrap().filter(Inode::is_file)?;
            let mut content = Vec::new();
            files
                .open(&inode)
                .unwrap()
                .read_to_end(&mut content)
                .unwrap();
            Some(content)
        };
        assert_eq!(read("/boot/a/kernel").as_deref(), Some(&b"K"[..]));
        assert_eq!(read("boot//a/kernel").as_deref(), Some(&b"K"[..]));
        for path in ["/", "/boot/a", "/boot/b", "/boot/a/kernel/x", "/../boot"] {
            assert_eq!(read(path), None, "{path}");
        }
    }

    #[test]
    fn files_of_a_directory_are_found_and_read() {
        let contents: Vec<Vec<u8>> = [0usize, 1, 4095, 4096, 4097, 20_000]
            .map(|length| (0..length).map(|i| (i % 251) as u8).collect())
            .into();
        let mut tar = Tarball::new().dir("disk", 0o755).dir("other", 0o755);
        for content in &contents {
            tar = tar.file(&format!("disk/{}", content.len()), 0o644, content);
        }
        // Enough names for several blocks.
        for i in 0..600 {
            tar = tar.file(&format!("other/a-name-of-some-length-{i}"), 0o644, b"x");
        }
        let files = FileSystem::new(image(&tar.finish())).unwrap();
        let root: Vec<_> = files.list(None).unwrap();
        assert!(
            root.iter()
                .map(|(name, _)| &name[..])
                .eq([&b"disk"[..], b"other"])
        );
        let disk = files.list(Some(b"disk")).unwrap();
        assert_eq!(disk.len(), contents.len());
        for content in &contents {
            let name = content.len().to_string().into_bytes();
            let (_, inode) = disk.iter().find(|(found, _)| *found == name).unwrap();
            assert!(inode.is_file());
            let mut back = Vec::new();
            files.open(inode).unwrap().read_to_end(&mut back).unwrap();
            assert_eq!(&back, content);
        }
        assert_eq!(files.list(Some(b"other")).unwrap().len(), 600);
        assert!(files.list(Some(b"none")).unwrap().is_empty());
    }

    #[test]
    fn a_damaged_image_gives_errors_and_no_panic() {
        let tar = Tarball::new()
            .dir("disk", 0o755)
            .file("disk/a", 0o644, &[7; 5000])
            .finish();
        let mut bytes = Vec::new();
        let mut file = image(&tar);
        file.rewind().unwrap();
        file.read_to_end(&mut bytes).unwrap();
        for at in (1024..bytes.len()).step_by(3) {
            let mut copy = tempfile::tempfile().unwrap();
            let mut damaged = bytes.clone();
            damaged[at] ^= 0xff;
            copy.write_all(&damaged).unwrap();
            let Ok(files) = FileSystem::new(copy) else {
                continue;
            };
            for (_, inode) in files.list(Some(b"disk")).unwrap_or_default() {
                let _ = files
                    .open(&inode)
                    .unwrap()
                    .take(1 << 20)
                    .read_to_end(&mut Vec::new());
            }
        }
        assert!(FileSystem::new(tempfile::tempfile().unwrap()).is_err());
    }
}
