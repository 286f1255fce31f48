//! Decompression of layers, by what their first bytes say. Media types are not asked: registries are known to be
//! wrong about them, and the digest decides in the end.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};

use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

/// How a blob is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compression {
    None,
    Gzip,
    Zstd,
}

impl Compression {
    /// Recognises a blob by its first bytes.
    pub(crate) fn detect(head: &[u8]) -> Self {
        match head {
            [0x1f, 0x8b, ..] => Self::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Self::Zstd,
            // A skippable frame: zstd streams may begin with one.
            [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Self::Zstd,
            _ => Self::None,
        }
    }

    /// Reads `file` without its compression.
    pub(crate) fn open(file: File) -> io::Result<Box<dyn Read + Send>> {
        let mut input = BufReader::with_capacity(256 << 10, file);
        Ok(match Self::detect(input.fill_buf()?) {
            Self::None => Box::new(input),
            Self::Gzip => Box::new(MultiGzDecoder::new(input)),
            Self::Zstd => Box::new(ZstdReader::new(input)),
        })
    }
}

/// Decompresses all frames of a zstd stream; windows are bounded by the decoder (128 MiB).
struct ZstdReader<R> {
    input: R,
    frame: FrameDecoder,
    in_frame: bool,
}

impl<R: BufRead> ZstdReader<R> {
    fn new(input: R) -> Self {
        Self {
            input,
            frame: FrameDecoder::new(),
            in_frame: false,
        }
    }

    /// Begins the next frame; false at the end of the stream.
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
    }

    #[test]
    fn broken_and_cut_streams_are_errors() {
        let data: Vec<u8> = (0..100_000u32)
            .flat_map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes())
            .collect();
        for packed in [gzip(&data), zstd(&data)] {
            assert_eq!(unpack(&packed).unwrap(), data);
            assert!(unpack(&packed[..packed.len() / 2]).is_err());
            assert!(unpack(&packed[..20]).is_err());
        }
        assert!(unpack(&[&zstd(b"x")[..], b"trailing junk"].concat()).is_err());
    }
}
