//! Decompression, with the format detected by the first bytes. Media types and file names are
//! ignored: servers are known to report wrong ones, and the digest decides in the end. Memory is
//! bounded whatever a stream asks for.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};

use flate2::bufread::MultiGzDecoder;
use lzma_rust2::XzReader;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

/// KiB of memory that an xz stream may need (130 MiB); streams of `xz -9` need 65 MiB.
const XZ_MEMORY_KIB: u32 = 130 << 10;

/// How a stream is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compression {
    None,
    Gzip,
    Xz,
    Zstd,
}

impl Compression {
    /// Detects the compression of a stream by its first bytes.
    pub(crate) fn detect(head: &[u8]) -> Self {
        match head {
            [0x1f, 0x8b, ..] => Self::Gzip,
            [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Self::Xz,
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Self::Zstd,
            // A skippable frame: zstd streams may start with one.
            [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Self::Zstd,
            _ => Self::None,
        }
    }

    /// Opens `file` for reading without its compression.
    pub(crate) fn open(file: File) -> io::Result<Box<dyn Read + Send>> {
        let mut input = BufReader::with_capacity(256 << 10, file);
        Ok(Self::detect(input.fill_buf()?).reader(input))
    }

    /// Reads a stream of this compression.
    pub(crate) fn reader<'a>(self, input: impl BufRead + Send + 'a) -> Box<dyn Read + Send + 'a> {
        match self {
            Self::None => Box::new(input),
            Self::Gzip => Box::new(MultiGzDecoder::new(input)),
            Self::Xz => Box::new(XzReader::new_mem_limit(input, true, XZ_MEMORY_KIB)),
            Self::Zstd => Box::new(ZstdReader::new(input)),
        }
    }
}

/// Decompresses all frames of a zstd stream; windows are bounded by the decoder (128 MiB).
pub(crate) struct ZstdReader<R> {
    input: R,
    frame: FrameDecoder,
    in_frame: bool,
}

impl<R: BufRead> ZstdReader<R> {
    pub(crate) fn new(input: R) -> Self {
        Self {
            input,
            frame: FrameDecoder::new(),
            in_frame: false,
        }
    }

    /// Starts the next frame; returns false at the end of the stream.
    fn next_frame(&mut self) -> io::Result<bool> {
        loop {
            if self.input.fill_buf()?.is_empty() {
                return Ok(false);
            }
            match self.frame.init(&mut self.input) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let length = u64::from(length);
                    let skipped = io::copy(&mut (&mut self.input).take(length), &mut io::sink())?;
                    if skipped < length {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(error) => return Err(invalid(error)),
            }
        }
    }
}

impl<R: BufRead> Read for ZstdReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        loop {
            if !self.in_frame {
                if !self.next_frame()? {
                    return Ok(0);
                }
                self.in_frame = true;
            }
            while self.frame.can_collect() == 0 && !self.frame.is_finished() {
                let one = BlockDecodingStrategy::UptoBlocks(1);
                self.frame
                    .decode_blocks(&mut self.input, one)
                    .map_err(invalid)?;
            }
            let got = self.frame.read(buffer)?;
            if got > 0 {
                return Ok(got);
            }
            self.in_frame = false;
            let expected = self.frame.get_checksum_from_data();
            if expected.is_some() && expected != self.frame.get_calculated_checksum() {
                let fault = "the content does not have the checksum that its frame names";
                return Err(io::Error::new(io::ErrorKind::InvalidData, fault));
            }
        }
    }
}

fn invalid(error: FrameDecoderError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};
    use std::io::{Seek, SeekFrom, Write};

    fn unpack(bytes: &[u8]) -> io::Result<Vec<u8>> {
        let mut file = tempfile::tempfile()?;
        file.write_all(bytes)?;
        file.seek(SeekFrom::Start(0))?;
        let mut out = Vec::new();
        Compression::open(file)?.read_to_end(&mut out)?;
        Ok(out)
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn zstd(bytes: &[u8]) -> Vec<u8> {
        compress_to_vec(bytes, CompressionLevel::Fastest)
    }

    /// Compresses with the `xz` program.
    fn xz(bytes: &[u8], arguments: &[&str]) -> Vec<u8> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file.seek(SeekFrom::Start(0)).unwrap();
        let out = std::process::Command::new("xz")
            .args(["-c", "-T1"])
            .args(arguments)
            .stdin(file)
            .output()
            .expect("xz is needed: apt-get install xz-utils");
        assert!(out.status.success());
        out.stdout
    }

    #[test]
    fn members_and_frames_follow_each_other() {
        assert_eq!(unpack(b"plain").unwrap(), b"plain");
        assert_eq!(unpack(b"").unwrap(), b"");
        assert_eq!(
            unpack(&[gzip(b"one "), gzip(b"two")].concat()).unwrap(),
            b"one two"
        );
        let skippable = [&[0x5a, 0x2a, 0x4d, 0x18, 3, 0, 0, 0][..], b"xyz"].concat();
        let frames = [
            &skippable[..],
            &zstd(b"one "),
            &zstd(b""),
            &zstd(b"two"),
            &skippable,
        ]
        .concat();
        assert_eq!(unpack(&frames).unwrap(), b"one two");
        let padded = [&xz(b"one ", &[])[..], &[0; 8], &xz(b"two", &["-9"])].concat();
        assert_eq!(unpack(&padded).unwrap(), b"one two");
    }

    #[test]
    fn broken_and_cut_streams_are_errors() {
        let data: Vec<u8> = (0..100_000u32)
            .flat_map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes())
            .collect();
        for packed in [gzip(&data), xz(&data, &["-6"]), zstd(&data)] {
            assert_eq!(unpack(&packed).unwrap(), data);
            assert!(unpack(&packed[..packed.len() / 2]).is_err());
            assert!(unpack(&packed[..20]).is_err());
        }
        assert!(unpack(&[&zstd(b"x")[..], b"trailing junk"].concat()).is_err());
    }

    #[test]
    fn an_xz_stream_that_wants_a_gigabyte_of_memory_is_refused() {
        let greedy = xz(b"x", &["--lzma2=dict=1GiB"]);
        let error = unpack(&greedy).unwrap_err();
        assert!(error.to_string().contains("mem"), "{error}");
    }
}
