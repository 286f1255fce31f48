//! Blocks of names and values (SPDY draft 3.1, §2.6.10): lengths and strings, compressed by zlib
//! with a dictionary, in one compression stream for each direction of a connection.

use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress, Status};

/// Most bytes of an unpacked block; Kubernetes' have a few hundred.
const MAX_BLOCK: usize = 64 << 10;

/// Most names of a block.
const MAX_PAIRS: u32 = 256;

/// Words that clients and servers expect in blocks: in the dictionary, those before the raw tail
/// follow their lengths.
const WORDS: &str = "options head post put delete trace accept accept-charset accept-encoding \
    accept-language accept-ranges age allow authorization cache-control connection content-base \
    content-encoding content-language content-length content-location content-md5 content-range \
    content-type date etag expect expires from host if-match if-modified-since if-none-match \
    if-range if-unmodified-since last-modified location max-forwards pragma proxy-authenticate \
    proxy-authorization range referer retry-after server te trailer transfer-encoding upgrade \
    user-agent vary via warning www-authenticate method get status 200_OK version HTTP/1.1 url \
    public set-cookie keep-alive origin";

const TAIL: &str = "1001012012022052063003023033043053063074024054064074084094104114124134144154\
    16417502504505203 Non-Authoritative Information204 No Content301 Moved Permanently400 Bad \
    Request401 Unauthorized403 Forbidden404 Not Found500 Internal Server Error501 Not \
    Implemented503 Service UnavailableJan Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec 00:00:00 \
    Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMTchunked,text/html,image/png,image/jpg,image/gif,\
    application/xml,application/xhtml+xml,text/plain,text/javascript,publicprivatemax-age=gzip,\
    deflate,sdchcharset=utf-8charset=iso-8859-1,utf-,*,enq=0.";

/// The reason why a block cannot be read. The compression is out of step then: the connection is
/// lost.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HeadersError {
    /// It is not a zlib stream with SPDY's dictionary.
    #[error("a block of headers cannot be decompressed")]
    Decompress(#[source] flate2::DecompressError),
    /// It is larger than `MAX_BLOCK`, or has more than `MAX_PAIRS` names.
    #[error("a block of headers is too large")]
    TooLarge,
    /// Its lengths are inconsistent.
    #[error("a block of headers is cut off")]
    CutOff,
}

/// Returns SPDY/3's dictionary for zlib.
fn dictionary() -> Vec<u8> {
    let mut bytes = Vec::with_capacity(1423);
    for word in WORDS.split(' ').filter(|word| !word.is_empty()) {
        let word = word.replace('_', " ");
        let len = u32::try_from(word.len()).unwrap_or(0);
        bytes.extend_from_slice(&len.to_be_bytes());
        bytes.extend_from_slice(word.as_bytes());
    }
    bytes.extend_from_slice(TAIL.as_bytes());
    bytes
}

/// Unpacks the blocks of one direction, in order.
#[derive(Debug)]
pub struct Unpacker {
    zlib: Decompress,
    has_dictionary: bool,
}

impl Default for Unpacker {
    fn default() -> Self {
        Self {
            zlib: Decompress::new(true),
            has_dictionary: false,
        }
    }
}

impl Unpacker {
    /// Returns the names (in lower case, as the client wrote them) and values of a block.
    ///
    /// # Errors
    /// See [`HeadersError`].
    pub fn unpack(&mut self, block: &[u8]) -> Result<Vec<(String, String)>, HeadersError> {
        let plain = self.inflate(block)?;
        parse(&plain)
    }

    fn inflate(&mut self, mut block: &[u8]) -> Result<Vec<u8>, HeadersError> {
        let mut plain = Vec::with_capacity(1024);
        loop {
            if plain.len() >= MAX_BLOCK {
                return Err(HeadersError::TooLarge);
            }
            if plain.capacity() == plain.len() {
                plain.reserve(plain.len().min(MAX_BLOCK));
            }
            let (taken, given) = (self.zlib.total_in(), self.zlib.total_out());
            let flush = FlushDecompress::Sync;
            let result = self.zlib.decompress_vec(block, &mut plain, flush);
            let taken = usize::try_from(self.zlib.total_in() - taken).unwrap_or(usize::MAX);
            block = block.get(taken..).unwrap_or(&[]);
            match result {
                Err(error) if error.needs_dictionary().is_some() && !self.has_dictionary => {
                    self.has_dictionary = true;
                    self.zlib
                        .set_dictionary(&dictionary())
                        .map_err(HeadersError::Decompress)?;
                }
                Err(error) => return Err(HeadersError::Decompress(error)),
                Ok(Status::StreamEnd) => return Ok(plain),
                Ok(Status::Ok | Status::BufError) => {
                    let idle = taken == 0 && self.zlib.total_out() == given;
                    let has_room = plain.capacity() > plain.len();
                    if has_room && (idle || block.is_empty()) {
                        return Ok(plain);
                    }
                }
            }
        }
    }
}

/// Packs the blocks of one direction, in order.
#[derive(Debug)]
pub struct Packer {
    zlib: Compress,
}

impl Packer {
    /// Creates a packer for a new connection.
    ///
    /// # Panics
    /// Never: zlib accepts a dictionary before the first byte.
    #[must_use]
    pub fn new() -> Self {
        let mut zlib = Compress::new(Compression::fast(), true);
        let taken = zlib.set_dictionary(&dictionary());
        debug_assert!(taken.is_ok());
        Self { zlib }
    }

    /// Packs these names and values into a block.
    pub fn pack(&mut self, pairs: &[(&str, &str)]) -> Vec<u8> {
        let mut plain = Vec::new();
        let mut put = |bytes: &[u8]| {
            let len = u32::try_from(bytes.len()).unwrap_or(0);
            plain.extend_from_slice(&len.to_be_bytes());
            plain.extend_from_slice(bytes);
        };
        for (name, value) in pairs {
            put(name.as_bytes());
            put(value.as_bytes());
        }
        let count = u32::try_from(pairs.len()).unwrap_or(0);
        let mut block = count.to_be_bytes().to_vec();
        block.append(&mut plain);

        let mut packed = Vec::with_capacity(block.len() + 64);
        let mut rest = block.as_slice();
        loop {
            let before = self.zlib.total_in();
            let done = self
                .zlib
                .compress_vec(rest, &mut packed, FlushCompress::Sync);
            let taken = usize::try_from(self.zlib.total_in() - before).unwrap_or(usize::MAX);
            rest = rest.get(taken..).unwrap_or(&[]);
            if done.is_err() || (rest.is_empty() && packed.len() < packed.capacity()) {
                return packed;
            }
            packed.reserve(64);
        }
    }
}

impl Default for Packer {
    fn default() -> Self {
        Self::new()
    }
}

/// Parses a count, and as many names and values, each after its length.
fn parse(mut plain: &[u8]) -> Result<Vec<(String, String)>, HeadersError> {
    let count = take_word(&mut plain)?;
    if count > MAX_PAIRS {
        return Err(HeadersError::TooLarge);
    }
    (0..count)
        .map(|_| Ok((take_text(&mut plain)?, take_text(&mut plain)?)))
        .collect()
}

fn take_word(rest: &mut &[u8]) -> Result<u32, HeadersError> {
    let (word, after) = rest.split_first_chunk::<4>().ok_or(HeadersError::CutOff)?;
    *rest = after;
    Ok(u32::from_be_bytes(*word))
}

fn take_text(rest: &mut &[u8]) -> Result<String, HeadersError> {
    let len = usize::try_from(take_word(rest)?).map_err(|_| HeadersError::CutOff)?;
    let (text, after) = rest.split_at_checked(len).ok_or(HeadersError::CutOff)?;
    *rest = after;
    Ok(String::from_utf8_lossy(text).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_dictionary_is_spdys() {
        let dictionary = dictionary();
        assert_eq!(dictionary.len(), 1423);
        let (mut a, mut b) = (1u32, 0u32);
        for byte in dictionary {
            a = (a + u32::from(byte)) % 65521;
            b = (b + a) % 65521;
        }
        // The dictionary's Adler-32, by which each SPDY/3 stream refers to it.
        assert_eq!(b << 16 | a, 0xe3c6_a7c2);
    }

    #[test]
    fn blocks_of_a_connection_share_their_compression() {
        let (mut packer, mut unpacker) = (Packer::new(), Unpacker::default());
        for pairs in [
            &[("streamtype", "stdin")][..],
            &[("streamtype", "stdout"), ("port", "80")],
            &[],
        ] {
            let expected: Vec<_> = pairs
                .iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
                .collect();
            let block = packer.pack(pairs);
            assert_eq!(unpacker.unpack(&block).unwrap(), expected);
        }
    }

    #[test]
    fn a_block_that_swells_is_refused() {
        let mut packer = Packer::new();
        let bomb = "x".repeat(MAX_BLOCK * 4);
        let block = packer.pack(&[("a", &bomb)]);
        assert!(block.len() < MAX_BLOCK / 8, "{}", block.len());
        let result = Unpacker::default().unpack(&block);
        assert!(matches!(result, Err(HeadersError::TooLarge)), "{result:?}");
    }

    #[test]
    fn lengths_that_lie_are_refused() {
        for plain in [
            &[0, 0, 0][..],
            &[0, 0, 0, 1],
            &[0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff, b'a'],
            &[0, 0, 1, 1],
        ] {
            assert!(parse(plain).is_err(), "{plain:?}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_block_or_an_error(blocks: Vec<Vec<u8>>) {
            let mut unpacker = Unpacker::default();
            for block in blocks {
                if unpacker.unpack(&block).is_err() {
                    break;
                }
            }
        }

        #[test]
        fn whatever_is_packed_is_unpacked(
            blocks in proptest::collection::vec(
                proptest::collection::vec(("[a-z]{1,9}", ".{0,300}"), 0..9), 0..6)
        ) {
            let (mut packer, mut unpacker) = (Packer::new(), Unpacker::default());
            for block in blocks {
                let pairs: Vec<_> =
                    block.iter().map(|(n, v)| (n.as_str(), v.as_str())).collect();
                let packed = packer.pack(&pairs);
                prop_assert_eq!(unpacker.unpack(&packed).unwrap(), block);
            }
        }
    }
}
