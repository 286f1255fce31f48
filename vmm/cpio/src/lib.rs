//! A writer of cpio archives in the "newc" format, which is what Linux unpacks as an initramfs
//! (Documentation/driver-api/early-userspace/buffer-format.rst). It needs nothing but the standard
//! library: the build's own commands use it, too.

use std::io::{self, Write};

const REGULAR: u32 = 0o100_000;
const DIRECTORY: u32 = 0o040_000;
const SYMBOLIC_LINK: u32 = 0o120_000;
const CHARACTER_DEVICE: u32 = 0o020_000;

/// The bits of a mode that are permissions.
const PERMISSIONS: u32 = 0o7777;

/// Writes entries to `W`; every file belongs to root and has a zero time, so that the same contents
/// give the same bytes. Paths are relative to the root; a slash before them is left out.
#[derive(Clone, Debug)]
pub struct Writer<W> {
    out: W,
    inode: u32,
    written: usize,
}

impl<W: Write> Writer<W> {
    /// Creates an archive without entries.
    pub fn new(out: W) -> Self {
        Self {
            out,
            inode: 0,
            written: 0,
        }
    }

    /// Writes a directory that all may read. Its parents must have been written before.
    ///
    /// # Errors
    /// Those of the output.
    pub fn directory(&mut self, path: &str) -> io::Result<()> {
        self.directory_with(path, 0o755)
    }

    /// As [`Self::directory`], with these permissions.
    ///
    /// # Errors
    /// Those of the output.
    pub fn directory_with(&mut self, path: &str, permissions: u32) -> io::Result<()> {
        self.entry(path, DIRECTORY | permissions & PERMISSIONS, (0, 0), &[])
    }

    /// Writes a file with the permission bits `mode`.
    ///
    /// # Errors
    /// Those of the output, and that the file has 4 GiB or more.
    pub fn file(&mut self, path: &str, mode: u32, data: &[u8]) -> io::Result<()> {
        self.entry(path, REGULAR | mode & PERMISSIONS, (0, 0), data)
    }

    /// Writes a symbolic link.
    ///
    /// # Errors
    /// Those of the output.
    pub fn symlink(&mut self, path: &str, target: &str) -> io::Result<()> {
        self.entry(path, SYMBOLIC_LINK | 0o777, (0, 0), target.as_bytes())
    }

    /// Writes a character device node.
    ///
    /// # Errors
    /// Those of the output.
    pub fn character_device(
        &mut self,
        path: &str,
        mode: u32,
        (major, minor): (u32, u32),
    ) -> io::Result<()> {
        self.entry(
            path,
            CHARACTER_DEVICE | mode & PERMISSIONS,
            (major, minor),
            &[],
        )
    }

    /// Writes the trailer and returns the output.
    ///
    /// # Errors
    /// Those of the output.
    pub fn finish(mut self) -> io::Result<W> {
        self.inode = 0;
        self.entry("TRAILER!!!", 0, (0, 0), &[])?;
        Ok(self.out)
    }

    fn entry(
        &mut self,
        path: &str,
        mode: u32,
        (major, minor): (u32, u32),
        data: &[u8],
    ) -> io::Result<()> {
        let path = path.trim_start_matches('/');
        let size = u32::try_from(data.len())
            .map_err(|_| io::Error::other(format!("{path} is larger than 4 GiB")))?;
        if mode != 0 {
            self.inode += 1;
        }
        let fields = [
            self.inode,
            mode,
            0, // uid
            0, // gid
            1, // links
            0, // time
            size,
            0, // device of the file itself
            0,
            major,
            minor,
            u32::try_from(path.len() + 1).map_err(io::Error::other)?,
            0, // checksum: none in this variant
        ];
        let mut header = String::from("070701");
        for field in fields {
            header.push_str(&format!("{field:08x}"));
        }
        self.put(header.as_bytes())?;
        self.put(path.as_bytes())?;
        self.put(&[0])?;
        self.pad()?;
        self.put(data)?;
        self.pad()
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.written += bytes.len();
        self.out.write_all(bytes)
    }

    fn pad(&mut self) -> io::Result<()> {
        let gap = self.written.next_multiple_of(4) - self.written;
        self.put(&[0; 3][..gap])
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
    fn entries_are_aligned_and_the_trailer_ends_them() {
        let mut cpio = Writer::new(Vec::new());
        cpio.directory("dev").unwrap();
        cpio.character_device("dev/console", 0o600, (5, 1)).unwrap();
        cpio.file("init", 0o755, b"hello").unwrap();
        let bytes = cpio.finish().unwrap();

        assert_eq!(bytes.len() % 4, 0);
        assert!(bytes.starts_with(b"070701000000010000"));
        let text = String::from_utf8_lossy(&bytes);
        assert!(text.contains("000081ed"), "mode of a 0755 file");
        assert!(text.contains("00000005000000010000000c00000000dev/console"));
        assert_eq!(text.matches("070701").count(), 4);
        assert!(text.contains("TRAILER!!!"));
        // Header (110) + "init\0" (5) is 115, padded to 116: the data starts there.
        let init = text.find("init\0").unwrap();
        assert_eq!(text.get(init + 6..init + 11), Some("hello"));
    }

    #[test]
    fn the_same_contents_give_the_same_bytes() {
        let write = || {
            let mut cpio = Writer::new(Vec::new());
            cpio.file("a", 0o644, b"x").unwrap();
            cpio.finish().unwrap()
        };
        assert_eq!(write(), write());
    }

    #[test]
    fn entries_follow_each_other_as_the_format_says() {
        let mut cpio = Writer::new(Vec::new());
        cpio.directory_with("dev", 0o755).unwrap();
        cpio.character_device("dev/console", 0o600, (5, 1)).unwrap();
        cpio.file("/init", 0o755, b"abcde").unwrap();
        cpio.symlink("sh", "init").unwrap();
        let (fields, name, _, rest) = first(&cpio.out);
        assert_eq!((name, fields[1]), ("dev", 0o040_755));
        let (fields, name, _, rest) = first(rest);
        assert_eq!((name, fields[9], fields[10]), ("dev/console", 5, 1));
        let (fields, name, data, rest) = first(rest);
        assert_eq!((name, fields[1], data), ("init", 0o100_755, &b"abcde"[..]));
        let (fields, name, data, rest) = first(rest);
        assert_eq!((name, fields[1], data), ("sh", 0o120_777, &b"init"[..]));
        assert!(rest.is_empty());
    }
}
