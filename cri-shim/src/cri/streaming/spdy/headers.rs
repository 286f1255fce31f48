//! Header blocks (SPDY protocol draft 3, section 2.6.10): names and values, compressed by one
//! zlib stream per direction that begins with a known dictionary.

use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress, Status};

use super::{Headers, SpdyError};

/// Longest header block, inflated.
const BLOCK_BYTES: usize = 64 << 10;
/// Most names of a header.
const PAIRS: u32 = 64;

/// Words of the dictionary that have their length before them, in its order.
const WORDS: &[&str] = &[
    "options",
    "head",
    "post",
    "put",
    "delete",
    "trace",
    "accept",
    "accept-charset",
    "accept-encoding",
    "accept-language",
    "accept-ranges",
    "age",
    "allow",
    "authorization",
    "cache-control",
    "connection",
    "content-base",
    "content-encoding",
    "content-language",
    "content-length",
    "content-location",
    "content-md5",
    "content-range",
    "content-type",
    "date",
    "etag",
    "expect",
    "expires",
    "from",
    "host",
    "if-match",
    "if-modified-since",
    "if-none-match",
    "if-range",
    "if-unmodified-since",
    "last-modified",
    "location",
    "max-forwards",
    "pragma",
    "proxy-authenticate",
    "proxy-authorization",
    "range",
    "referer",
    "retry-after",
    "server",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "user-agent",
    "vary",
    "via",
    "warning",
    "www-authenticate",
    "method",
    "get",
    "status",
    "200 OK",
    "version",
    "HTTP/1.1",
    "url",
    "public",
    "set-cookie",
    "keep-alive",
    "origin",
];

/// The rest of the dictionary.
const TAIL: &str = "100101201202205206300302303304305306307402405406407408409410411412413414415416\
    417502504505203 Non-Authoritative Information204 No Content301 Moved Permanently400 Bad \
    Request401 Unauthorized403 Forbidden404 Not Found500 Internal Server Error501 Not \
    Implemented503 Service UnavailableJan Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec 00:00:00 \
    Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMTchunked,text/html,image/png,image/jpg,image/gif,\
    application/xml,application/xhtml+xml,text/plain,text/javascript,publicprivatemax-age=gzip,\
    deflate,sdchcharset=utf-8charset=iso-8859-1,utf-,*,enq=0.";

/// The dictionary of SPDY/3.
pub(super) fn dictionary() -> Vec<u8> {
    let mut bytes = Vec::with_capacity(1423);
    for word in WORDS {
        let length = u32::try_from(word.len()).unwrap_or_default();
        bytes.extend_from_slice(&length.to_be_bytes());
        bytes.extend_from_slice(word.as_bytes());
    }
    bytes.extend_from_slice(TAIL.as_bytes());
    bytes
}

/// Reads header blocks, in the order in which they come.
pub(in crate::cri::streaming) struct Inflater(Decompress);

impl Default for Inflater {
    fn default() -> Self {
        Self(Decompress::new(true))
    }
}

impl Inflater {
    /// The header of a block.
    pub(in crate::cri::streaming) fn read(&mut self, block: &[u8]) -> Result<Headers, SpdyError> {
        const BROKEN: SpdyError = SpdyError::Protocol("a header cannot be inflated");
        let mut inflated = Vec::with_capacity(4096);
        let begin = self.0.total_in();
        loop {
            let done = usize::try_from(self.0.total_in() - begin).map_err(|_| BROKEN)?;
            let rest = block.get(done..).unwrap_or_default();
            let room = inflated.capacity() - inflated.len();
            let step = self
                .0
                .decompress_vec(rest, &mut inflated, FlushDecompress::Sync);
            match step {
                Ok(Status::StreamEnd) => return Err(BROKEN),
                Ok(_) => {}
                Err(error) if error.needs_dictionary().is_some() => {
                    self.0.set_dictionary(&dictionary()).map_err(|_| BROKEN)?;
                    continue;
                }
                Err(_) => return Err(BROKEN),
            }
            let done = usize::try_from(self.0.total_in() - begin).map_err(|_| BROKEN)?;
            let is_full = inflated.len() == inflated.capacity();
            if done == block.len() && !is_full {
                return parse(&inflated);
            }
            if !is_full && room == inflated.capacity() - inflated.len() {
                // Neither takes nor gives anything: cut off in the middle.
                return Err(BROKEN);
            }
            if inflated.len() >= BLOCK_BYTES {
                return Err(SpdyError::Protocol("a header is too long"));
            }
            inflated.reserve(4096);
        }
    }
}

fn parse(mut block: &[u8]) -> Result<Headers, SpdyError> {
    fn number(block: &mut &[u8]) -> Result<u32, SpdyError> {
        let (word, rest) = block
            .split_first_chunk()
            .ok_or(SpdyError::Protocol("a header is cut off"))?;
        *block = rest;
        Ok(u32::from_be_bytes(*word))
    }
    fn text(block: &mut &[u8]) -> Result<String, SpdyError> {
        let length = number(block)? as usize;
        let (text, rest) = block
            .split_at_checked(length)
            .ok_or(SpdyError::Protocol("a header is cut off"))?;
        *block = rest;
        let text = std::str::from_utf8(text);
        let text = text.map_err(|_| SpdyError::Protocol("a header is not UTF-8"))?;
        Ok(text.to_owned())
    }
    let count = number(&mut block)?;
    if count > PAIRS {
        return Err(SpdyError::Protocol("a header has too many names"));
    }
    let mut headers = Headers::new();
    for _ in 0..count {
        let name = text(&mut block)?.to_ascii_lowercase();
        headers.push((name, text(&mut block)?));
    }
    Ok(headers)
}

/// Writes header blocks, in the order in which they are sent.
pub(in crate::cri::streaming) struct Deflater(Compress);

impl Deflater {
    pub(in crate::cri::streaming) fn new() -> Result<Self, SpdyError> {
        let mut compress = Compress::new(Compression::default(), true);
        compress
            .set_dictionary(&dictionary())
            .map_err(|_| SpdyError::Protocol("no dictionary"))?;
        Ok(Self(compress))
    }

    /// The block of a header.
    pub(in crate::cri::streaming) fn write(
        &mut self,
        headers: &[(String, String)],
    ) -> Result<Vec<u8>, SpdyError> {
        let mut plain = Vec::new();
        let number = |length: usize| u32::try_from(length).unwrap_or_default().to_be_bytes();
        plain.extend_from_slice(&number(headers.len()));
        for (name, value) in headers {
            for text in [name, value] {
                plain.extend_from_slice(&number(text.len()));
                plain.extend_from_slice(text.as_bytes());
            }
        }
        let mut block = Vec::with_capacity(plain.len() + 256);
        let begin = self.0.total_in();
        loop {
            let done = usize::try_from(self.0.total_in() - begin).unwrap_or(plain.len());
            let rest = plain.get(done..).unwrap_or_default();
            let step = self.0.compress_vec(rest, &mut block, FlushCompress::Sync);
            step.map_err(|_| SpdyError::Protocol("a header cannot be deflated"))?;
            if block.len() < block.capacity() {
                return Ok(block);
            }
            block.reserve(256);
        }
    }
}
