//! A disk, or files, as the body of an answer, read while they are sent.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use bytes::Bytes;
use flate2::{Compression, write::GzEncoder};
use hyper::body::Body;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::archive::{self, Entry};
use super::format::Format;
use crate::https;

/// So much is read and sent at once.
const PIECE: usize = 256 << 10;

/// Pieces that wait to be sent.
const QUEUE: usize = 4;

/// How long a client may take nothing.
const STALL: Duration = Duration::from_secs(120);

/// Returns the body of an answer: `range` of a disk in a form. The permit is kept until it was
/// read.
pub(super) fn of(
    disk: File,
    range: Range<u64>,
    format: Format,
    permit: OwnedSemaphorePermit,
) -> impl Body<Data = Bytes, Error = io::Error> + Send {
    written_by(permit, move |pieces| send(&disk, range, format, pieces))
}

/// Returns the body of an answer with an archive of files. The permit is kept until they were read.
pub(super) fn of_files(
    entries: Vec<Entry>,
    permit: OwnedSemaphorePermit,
) -> impl Body<Data = Bytes, Error = io::Error> + Send {
    written_by(permit, move |pieces| send_files(entries, pieces))
}

/// Returns a body of what is written, as fast as it is sent.
fn written_by(
    permit: OwnedSemaphorePermit,
    write: impl FnOnce(&mut Sender) -> io::Result<()> + Send + 'static,
) -> impl Body<Data = Bytes, Error = io::Error> + Send {
    let (pieces, body) = mpsc::channel(QUEUE);
    let runtime = Handle::current();
    spawn_blocking(move || {
        let _permit = permit;
        let mut pieces = Sender { pieces, runtime };
        if let Err(error) = write(&mut pieces) {
            tracing::warn!(%error, "a download was broken off");
            let _ = pieces.give(Err(error.kind().into()));
        }
    });
    https::pieces(body)
}

/// Reads files into pieces of a packed archive.
fn send_files(entries: Vec<Entry>, pieces: &mut impl Write) -> io::Result<()> {
    let mut pieces = BufWriter::with_capacity(PIECE, pieces);
    let mut encoder = GzEncoder::new(&mut pieces, Compression::fast());
    archive::write(entries, &mut encoder)?;
    encoder.finish()?;
    pieces.flush()
}

/// Reads a disk into pieces of a form.
fn send(disk: &File, range: Range<u64>, format: Format, pieces: &mut impl Write) -> io::Result<()> {
    let mut pieces = BufWriter::with_capacity(PIECE, pieces);
    match format {
        Format::Raw => read(disk, range, &mut pieces)?,
        // Files are sent in another way.
        Format::Gzip | Format::Archive => {
            let mut encoder = GzEncoder::new(&mut pieces, Compression::fast());
            read(disk, range, &mut encoder)?;
            encoder.finish()?;
        }
    }
    pieces.flush()
}

fn read(disk: &File, range: Range<u64>, to: &mut impl Write) -> io::Result<()> {
    let mut buffer = vec![0; PIECE];
    let mut at = range.start;
    while at < range.end {
        let left = usize::try_from(range.end - at).unwrap_or(usize::MAX);
        let piece = buffer.get_mut(..left.min(PIECE)).unwrap_or_default();
        disk.read_exact_at(piece, at)?;
        to.write_all(piece)?;
        at += piece.len() as u64;
    }
    Ok(())
}

/// Takes what is written as pieces, as fast as they are sent.
struct Sender {
    pieces: mpsc::Sender<io::Result<Bytes>>,
    runtime: Handle,
}

impl Sender {
    fn give(&self, piece: io::Result<Bytes>) -> io::Result<()> {
        let given = self
            .runtime
            .block_on(timeout(STALL, self.pieces.send(piece)));
        let given = given.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?;
        given.map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

impl Write for Sender {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.give(Ok(Bytes::copy_from_slice(bytes)))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use flate2::read::GzDecoder;

    use super::*;

    fn disk(content: &[u8]) -> File {
        let mut disk = tempfile::tempfile().unwrap();
        disk.write_all(content).unwrap();
        disk
    }

    #[test]
    fn a_disk_is_sent_as_it_is_or_packed() {
        let content: Vec<u8> = (0..PIECE + 5000).map(|at| (at % 251) as u8).collect();
        let disk = disk(&content);
        let all = 0..content.len() as u64;
        let mut sent = Vec::new();
        send(&disk, all.clone(), Format::Raw, &mut sent).unwrap();
        assert!(sent == content);
        sent.clear();
        send(&disk, 3..7, Format::Raw, &mut sent).unwrap();
        assert_eq!(sent, content[3..7]);
        sent.clear();
        send(&disk, all, Format::Gzip, &mut sent).unwrap();
        let mut unpacked = Vec::new();
        let read = GzDecoder::new(&*sent).read_to_end(&mut unpacked);
        read.unwrap();
        assert!(unpacked == content && sent.len() < content.len());
    }

    #[test]
    fn a_disk_that_became_shorter_is_no_end() {
        let disk = disk(b"abc");
        for format in Format::OF_DISK {
            let sent = send(&disk, 0..4, format, &mut Vec::new());
            assert_eq!(sent.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        }
    }
}
