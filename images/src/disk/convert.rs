//! From a stream to a raw file: hash, decompress, detect the format, write.

use std::fmt;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::str::FromStr;
use std::sync::atomic::AtomicBool;

use super::checksum::{Checksum, Hasher};
use super::convert_error::ConvertError;
use super::job::{Job, at_most, fill};
use super::qcow2;
use super::sparse::SparseFile;
use crate::decompress::Compression;
use crate::{Digest, Limits};

/// Bytes read at a time.
const CHUNK: usize = 256 << 10;
/// The size of a disk is a multiple of this.
const SECTOR: u64 = 512;

/// The format that a disk image has at its source. In the store all are raw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DiskFormat {
    /// The disk's bytes.
    Raw,
    /// QEMU's copy-on-write format.
    Qcow2,
}

impl fmt::Display for DiskFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        })
    }
}

impl FromStr for DiskFormat {
    type Err = ();

    fn from_str(name: &str) -> Result<Self, ()> {
        match name {
            "raw" => Ok(Self::Raw),
            "qcow2" => Ok(Self::Qcow2),
            _ => Err(()),
        }
    }
}

/// The result of a conversion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Converted {
    /// Digest of the file as received.
    pub(crate) digest: Digest,
    pub(crate) format: DiskFormat,
    /// Bytes of the disk.
    pub(crate) size: u64,
}

/// Why a conversion failed. A wrong checksum is known only at the end.
#[derive(Debug)]
pub(crate) enum Failure {
    Convert(ConvertError),
    Checksum(Checksum),
}

impl From<ConvertError> for Failure {
    fn from(error: ConvertError) -> Self {
        Self::Convert(error)
    }
}

/// Reads `input` to its end and writes the disk in it into `out`, which must be empty: raw or
/// qcow2, as it is or compressed. Returns the bytes of the disk.
///
/// Nothing is synced. On an error `out` has a part of the disk.
///
/// # Errors
/// Why the input is not a disk image that can be used, or why it cannot be written.
pub fn convert_disk(
    input: impl Read + Send,
    out: File,
    limits: &Limits,
) -> Result<u64, ConvertError> {
    let job = Job {
        limits,
        cancelled: &AtomicBool::new(false),
    };
    match convert(input, None, out, &job) {
        Ok(converted) => Ok(converted.size),
        Err(Failure::Convert(error)) => Err(error),
        Err(Failure::Checksum(_)) => Err(ConvertError::Read(io::ErrorKind::InvalidData.into())),
    }
}

/// Reads `input` to its end and writes the disk into `out`, which must be empty. If a checksum is
/// given, the input must match it; a wrong one is reported instead of other errors of the file.
pub(crate) fn convert(
    input: impl Read + Send,
    checksum: Option<&Checksum>,
    out: File,
    job: &Job<'_>,
) -> Result<Converted, Failure> {
    let mut input = Hashing {
        input,
        hasher: Hasher::new(checksum),
        bytes: 0,
        limit: job.limits.disk_file_bytes,
        overrun: false,
    };
    let mut converted = write_disk(&mut input, out, job);
    // A file that is not a disk image is only read to its end for its checksum.
    let hopeless = match converted {
        Ok(_) => false,
        Err(ConvertError::Write(_) | ConvertError::Cancelled) => true,
        Err(_) => checksum.is_none(),
    };
    if !hopeless {
        // Bytes that the format does not need are part of the file all the same.
        let drained = io::copy(&mut input, &mut io::sink());
        if let (Ok(_), Err(source)) = (&converted, drained) {
            converted = Err(ConvertError::Read(source));
        }
    }
    if input.overrun {
        let limit = input.limit;
        let what = "file";
        return Err(ConvertError::TooLarge { what, limit }.into());
    }
    if hopeless && let Err(error) = converted {
        return Err(error.into());
    }
    let digest = input.hasher.finish().map_err(Failure::Checksum)?;
    let (format, size) = converted?;
    Ok(Converted {
        digest,
        format,
        size,
    })
}

fn write_disk(
    input: &mut (impl Read + Send),
    out: File,
    job: &Job<'_>,
) -> Result<(DiskFormat, u64), ConvertError> {
    let (head, input) = peek(input)?;
    let input = BufReader::with_capacity(CHUNK, input);
    let mut plain = Compression::detect(&head).reader(input);
    let (head, mut plain) = peek(&mut *plain)?;
    let format = recognise(&head)?;
    let mut out = SparseFile::new(out, job.limits.disk_data_bytes);
    let size = match format {
        DiskFormat::Raw => raw(&mut plain, &mut out, job)?,
        DiskFormat::Qcow2 => qcow2::convert(&mut plain, &mut out, job)?,
    };
    if size == 0 {
        return Err(ConvertError::Empty);
    }
    let size = size.next_multiple_of(SECTOR);
    // A decompressor verifies what it has read when it reaches its end.
    io::copy(&mut plain, &mut io::sink()).map_err(ConvertError::Read)?;
    out.finish(size).map_err(ConvertError::Write)?;
    Ok((format, size))
}

/// Returns the first bytes, as many as detection needs, and all of the input.
fn peek<R: Read>(mut input: R) -> Result<(Vec<u8>, impl Read), ConvertError> {
    let mut head = vec![0; 512];
    let got = fill(&mut input, &mut head)?;
    head.truncate(got);
    Ok((head.clone(), io::Cursor::new(head).chain(input)))
}

/// Detects the format. A file in no known format is raw.
fn recognise(head: &[u8]) -> Result<DiskFormat, ConvertError> {
    match head {
        _ if head.starts_with(&qcow2::MAGIC) => Ok(DiskFormat::Qcow2),
        [b'K', b'D', b'M', b'V', ..] => Err(ConvertError::Format("VMDK")),
        [b'v', b'h', b'd', b'x', b'f', b'i', b'l', b'e', ..] => Err(ConvertError::Format("VHDX")),
        [b'c', b'o', b'n', b'e', b'c', b't', b'i', b'x', ..] => Err(ConvertError::Format("VHD")),
        [b'Q', b'E', b'D', 0, ..] => Err(ConvertError::Format("QED")),
        _ if head.get(0x40..0x44) == Some(&[0x7f, 0x10, 0xda, 0xbe]) => {
            Err(ConvertError::Format("VDI"))
        }
        _ => Ok(DiskFormat::Raw),
    }
}

fn raw(input: &mut dyn Read, out: &mut SparseFile, job: &Job<'_>) -> Result<u64, ConvertError> {
    let mut buffer = vec![0; CHUNK];
    let mut at = 0;
    loop {
        job.check_cancelled()?;
        let got = fill(input, &mut buffer)?;
        if got == 0 {
            return Ok(at);
        }
        at_most("disk", at + got as u64, job.limits.disk_bytes)?;
        out.write(at, &buffer[..got])?;
        at += got as u64;
    }
}

/// Hashes the bytes that pass through, and limits their number.
struct Hashing<R> {
    input: R,
    hasher: Hasher,
    bytes: u64,
    limit: u64,
    overrun: bool,
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = self.input.read(buffer)?;
        self.bytes += got as u64;
        if self.bytes > self.limit {
            self.overrun = true;
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.hasher.update(&buffer[..got]);
        Ok(got)
    }
}

#[cfg(test)]
#[path = "convert_tests.rs"]
mod tests;
