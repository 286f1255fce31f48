//! Builds an initramfs in memory: a cpio archive in the "newc" format, as the kernel documents it
//! in `driver-api/early-userspace/buffer-format.rst`.

use super::{BootError, Initramfs};

const S_IFDIR: u32 = 0o040_000;
const S_IFCHR: u32 = 0o020_000;
const S_IFREG: u32 = 0o100_000;
const S_IFLNK: u32 = 0o120_000;

/// Collects the files of an initramfs. Everything belongs to root and dates from 1970, so that the
/// same calls give the same bytes. Directories must be added before their contents.
///
/// ```
/// # use podvisor_vmm::InitramfsBuilder;
/// let initramfs = InitramfsBuilder::new()
///     .directory("dev", 0o755)
///     .character_device("dev/console", 0o600, 5, 1)
///     .file("init", 0o755, b"#!/bin/sh\n")
///     .build()?;
/// # Ok::<(), podvisor_vmm::BootError>(())
/// ```
#[derive(Clone, Debug, Default)]
#[must_use = "nothing happens before `build`"]
pub struct InitramfsBuilder {
    archive: Vec<u8>,
    entries: u32,
}

struct Entry<'a> {
    path: &'a str,
    mode: u32,
    links: u32,
    device: (u32, u32),
    data: &'a [u8],
}

impl InitramfsBuilder {
    /// Creates an empty archive.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a directory.
    pub fn directory(self, path: &str, permissions: u32) -> Self {
        let mode = S_IFDIR | permissions & 0o7777;
        self.entry(&Entry {
            path,
            mode,
            links: 2,
            device: (0, 0),
            data: &[],
        })
    }

    /// Adds a regular file of less than 4 GiB.
    pub fn file(self, path: &str, permissions: u32, data: &[u8]) -> Self {
        let mode = S_IFREG | permissions & 0o7777;
        self.entry(&Entry {
            path,
            mode,
            links: 1,
            device: (0, 0),
            data,
        })
    }

    /// Adds a symbolic link.
    pub fn symlink(self, path: &str, target: &str) -> Self {
        let (mode, data) = (S_IFLNK | 0o777, target.as_bytes());
        self.entry(&Entry {
            path,
            mode,
            links: 1,
            device: (0, 0),
            data,
        })
    }

    /// Adds a character device, such as `dev/console` (5, 1), without which init has no output.
    pub fn character_device(self, path: &str, permissions: u32, major: u32, minor: u32) -> Self {
        let mode = S_IFCHR | permissions & 0o7777;
        self.entry(&Entry {
            path,
            mode,
            links: 1,
            device: (major, minor),
            data: &[],
        })
    }

    /// Finishes the archive.
    ///
    /// # Errors
    /// None with the calls above; the signature is that of [`Initramfs::from_bytes`].
    pub fn build(self) -> Result<Initramfs, BootError> {
        let trailer = Entry {
            path: "TRAILER!!!",
            mode: 0,
            links: 1,
            device: (0, 0),
            data: &[],
        };
        Initramfs::from_bytes(self.entry(&trailer).archive)
    }

    fn entry(mut self, entry: &Entry<'_>) -> Self {
        self.entries += 1;
        let size = u32::try_from(entry.data.len()).unwrap_or(u32::MAX);
        let data = &entry.data[..size as usize];
        let path = entry.path.trim_start_matches('/');
        let name_size = u32::try_from(path.len() + 1).unwrap_or(u32::MAX);
        self.archive.extend_from_slice(b"070701");
        // Inode, mode, uid, gid, links, mtime, size, device of the file system, device,
        // name size, checksum.
        let (major, minor) = entry.device;
        let fields = [
            self.entries,
            entry.mode,
            0,
            0,
            entry.links,
            0,
            size,
            0,
            0,
            major,
            minor,
            name_size,
            0,
        ];
        for field in fields {
            self.archive
                .extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.archive.extend_from_slice(path.as_bytes());
        self.archive.push(0);
        self.pad();
        self.archive.extend_from_slice(data);
        self.pad();
        self
    }

    /// Pads names and data to multiples of 4.
    fn pad(&mut self) {
        self.archive
            .resize(self.archive.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The header's fields, the name and the data of the entry at the start of `archive`.
    fn first(archive: &[u8]) -> (Vec<u32>, &str, &[u8], &[u8]) {
        assert_eq!(&archive[..6], b"070701");
        let field = |i: usize| {
            let text = std::str::from_utf8(&archive[6 + i * 8..14 + i * 8]).unwrap();
            u32::from_str_radix(text, 16).unwrap()
        };
        let fields: Vec<u32> = (0..13).map(field).collect();
        let name_end = 110 + fields[11] as usize;
        let name = std::str::from_utf8(&archive[110..name_end - 1]).unwrap();
        let data_start = name_end.next_multiple_of(4);
        let data_end = data_start + fields[6] as usize;
        let rest = &archive[data_end.next_multiple_of(4)..];
        (fields, name, &archive[data_start..data_end], rest)
    }

    #[test]
    fn entries_follow_each_other_as_the_format_says() {
        let builder = InitramfsBuilder::new()
            .directory("dev", 0o755)
            .character_device("dev/console", 0o600, 5, 1)
            .file("/init", 0o755, b"abcde")
            .symlink("sh", "init");
        let (fields, name, _, rest) = first(&builder.archive);
        assert_eq!((name, fields[1]), ("dev", 0o040_755));
        let (fields, name, _, rest) = first(rest);
        assert_eq!((name, fields[9], fields[10]), ("dev/console", 5, 1));
        let (fields, name, data, rest) = first(rest);
        assert_eq!((name, fields[1], data), ("init", 0o100_755, &b"abcde"[..]));
        let (_, name, data, rest) = first(rest);
        assert_eq!((name, data), ("sh", &b"init"[..]));
        assert!(rest.is_empty());
    }
}
