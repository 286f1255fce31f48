//! A writer of cpio archives in the "newc" format, which is what Linux unpacks as an
//! initramfs (Documentation/driver-api/early-userspace/buffer-format.rst).

use std::io::{self, Write};

const REGULAR: u32 = 0o100_000;
const DIRECTORY: u32 = 0o040_000;
const CHARACTER_DEVICE: u32 = 0o020_000;

/// Writes entries to `W`; every file belongs to root and has a zero time, so that the same contents
/// give the same bytes.
#[derive(Debug)]
pub(crate) struct Writer<W> {
    out: W,
    inode: u32,
    written: usize,
}

impl<W: Write> Writer<W> {
    pub(crate) fn new(out: W) -> Self {
        Self {
            out,
            inode: 0,
            written: 0,
        }
    }

    /// Writes a directory. Its parents must have been written before.
    pub(crate) fn directory(&mut self, path: &str) -> io::Result<()> {
        self.entry(path, DIRECTORY | 0o755, (0, 0), &[])
    }

    /// Writes a file with the permission bits `mode`.
    pub(crate) fn file(&mut self, path: &str, mode: u32, data: &[u8]) -> io::Result<()> {
        self.entry(path, REGULAR | mode, (0, 0), data)
    }

    /// Writes a character device node.
    pub(crate) fn character_device(
        &mut self,
        path: &str,
        mode: u32,
        (major, minor): (u32, u32),
    ) -> io::Result<()> {
        self.entry(path, CHARACTER_DEVICE | mode, (major, minor), &[])
    }

    /// Writes the trailer and returns the output.
    pub(crate) fn finish(mut self) -> io::Result<W> {
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
}
