//! Creates tar streams for tests, valid and invalid ones.

use std::io::Write;

/// A tar stream under construction; every method adds one entry.
#[derive(Debug, Default, Clone)]
pub struct Tarball {
    bytes: Vec<u8>,
    pax: Vec<(String, Vec<u8>)>,
    owner: (u64, u64),
    mtime: u64,
}

impl Tarball {
    pub fn new() -> Self {
        Self {
            mtime: 1_700_000_000,
            ..Self::default()
        }
    }

    /// Owner of the entries that follow.
    pub fn owner(mut self, uid: u64, gid: u64) -> Self {
        self.owner = (uid, gid);
        self
    }

    /// Time of the entries that follow.
    pub fn mtime(mut self, mtime: u64) -> Self {
        self.mtime = mtime;
        self
    }

    /// A PAX record for the next entry.
    pub fn pax(mut self, key: &str, value: &[u8]) -> Self {
        self.pax.push((key.to_owned(), value.to_vec()));
        self
    }

    pub fn file(self, path: &str, mode: u32, data: &[u8]) -> Self {
        self.entry(path.as_bytes(), b'0', mode, b"", (0, 0), data)
    }

    pub fn dir(self, path: &str, mode: u32) -> Self {
        self.entry(path.as_bytes(), b'5', mode, b"", (0, 0), b"")
    }

    pub fn symlink(self, path: &str, target: &str) -> Self {
        self.entry(path.as_bytes(), b'2', 0o777, target.as_bytes(), (0, 0), b"")
    }

    pub fn hardlink(self, path: &str, target: &str) -> Self {
        self.entry(path.as_bytes(), b'1', 0o644, target.as_bytes(), (0, 0), b"")
    }

    pub fn device(self, path: &str, kind: u8, major: u32, minor: u32) -> Self {
        self.entry(path.as_bytes(), kind, 0o600, b"", (major, minor), b"")
    }

    /// Any entry. Long names get GNU's extra entries.
    pub fn entry(
        mut self,
        path: &[u8],
        kind: u8,
        mode: u32,
        link: &[u8],
        device: (u32, u32),
        data: &[u8],
    ) -> Self {
        if !self.pax.is_empty() {
            let mut records = Vec::new();
            for (key, value) in std::mem::take(&mut self.pax) {
                let body = key.len() + value.len() + 3;
                let mut length = body + 1;
                while length != body + length.to_string().len() {
                    length = body + length.to_string().len();
                }
                write!(records, "{length} {key}=").unwrap();
                records.extend_from_slice(&value);
                records.push(b'\n');
            }
            self = self
                .header(b"pax", b'x', 0, b"", (0, 0), records.len() as u64)
                .data(&records);
        }
        for (kind, name) in [(b'L', path), (b'K', link)] {
            if name.len() > 100 {
                let name = [name, b"\0"].concat();
                self = self
                    .header(b"././@LongLink", kind, 0, b"", (0, 0), name.len() as u64)
                    .data(&name);
            }
        }
        let cut = |name: &[u8]| name[..name.len().min(100)].to_vec();
        self.header(
            &cut(path),
            kind,
            mode,
            &cut(link),
            device,
            data.len() as u64,
        )
        .data(data)
    }

    /// Only a header, with any size.
    pub fn header(
        mut self,
        path: &[u8],
        kind: u8,
        mode: u32,
        link: &[u8],
        device: (u32, u32),
        size: u64,
    ) -> Self {
        let mut header = [0; 512];
        let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, path);
        put(100, format!("{mode:07o}").as_bytes());
        put(108, &number(self.owner.0, 8));
        put(116, &number(self.owner.1, 8));
        put(124, &number(size, 12));
        put(136, &number(self.mtime, 12));
        put(148, b"        ");
        put(156, &[kind]);
        put(157, link);
        put(257, b"ustar\x0000");
        put(329, &number(device.0.into(), 8));
        put(337, &number(device.1.into(), 8));
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        self.bytes.extend_from_slice(&header);
        self
    }

    /// Raw bytes, padded like data.
    pub fn data(mut self, data: &[u8]) -> Self {
        self.bytes.extend_from_slice(data);
        self.bytes.resize(self.bytes.len().next_multiple_of(512), 0);
        self
    }

    /// The stream without its end.
    pub fn unfinished(self) -> Vec<u8> {
        self.bytes
    }

    pub fn finish(mut self) -> Vec<u8> {
        self.bytes.resize(self.bytes.len() + 1024, 0);
        self.bytes
    }
}

/// Octal if it fits, otherwise base 256.
fn number(value: u64, width: usize) -> Vec<u8> {
    let octal = format!("{value:0width$o}", width = width - 1);
    if octal.len() < width {
        return octal.into_bytes();
    }
    let mut field = vec![0; width];
    let bytes = value.to_be_bytes();
    let length = width.min(8);
    field[width - length..].copy_from_slice(&bytes[8 - length..]);
    field[0] |= 0x80;
    field
}
