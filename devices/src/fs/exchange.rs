//! Turns a chain into the form that `fuse-backend-rs` reads requests from and writes replies to.
//!
//! Its reader and writer can only be created from a descriptor chain, which they walk themselves.
//! They get a private one: a ring and a buffer in a region of memory after the guest's, which the
//! guest cannot see. The part of a request that is parsed is copied to that buffer, and the ring's
//! descriptors refer to it and to the segments of the chain, which were checked when it was taken.
//! So nothing that the guest may write meanwhile is walked or parsed twice.

use std::sync::Arc;

use fuse_backend_rs::abi::fuse_abi::{
    CreateIn, GetxattrIn, InHeader, LinkIn, MkdirIn, MknodIn, Opcode, OutHeader, Rename2In,
    RenameIn, SetxattrIn, WriteIn,
};
use fuse_backend_rs::transport::{Reader, VirtioFsWriter, Writer};
use virtio_queue::{DescriptorChain, QueueT};
use vm_memory::{
    Address, ByteValued, Bytes, GuestAddress, GuestMemory, GuestMemoryRegion, GuestRegionMmap,
    MmapRegion,
};

use crate::GuestRam;
use crate::virtio::{Chain, ChainError, Segment};

/// The address of the private region: no guest physical address has so many bits.
const BASE: u64 = 1 << 56;

/// Descriptors of the private ring: those of the longest chain, and one for the copy.
const RING_SIZE: u16 = 2048;

const AVAIL: u64 = BASE + 0x8000;
const USED: u64 = BASE + 0xa000;
const BUFFER: u64 = BASE + 0x1_0000;

/// The maximum bytes of a request that are copied: the longest request, apart from data of a write,
/// is an extended attribute of 64 KiB.
pub(super) const MAX_REQUEST: usize = 128 << 10;

const REGION_LEN: usize = 0x1_0000 + MAX_REQUEST;

/// Sizes of `struct fuse_in_header` and of what precedes the data of a write.
const HEADER_LEN: usize = size_of::<InHeader>();
const WRITE_HEADER_LEN: usize = HEADER_LEN + size_of::<WriteIn>();

/// Requests that carry names: their opcodes, the bytes before the names, and how many names.
const NAMES: [(u32, usize, usize); 13] = [
    (Opcode::Lookup as u32, 0, 1),
    (Opcode::Create as u32, size_of::<CreateIn>(), 1),
    (Opcode::Unlink as u32, 0, 1),
    (Opcode::Getxattr as u32, size_of::<GetxattrIn>(), 1),
    (Opcode::Mkdir as u32, size_of::<MkdirIn>(), 1),
    (Opcode::Rmdir as u32, 0, 1),
    (Opcode::Rename as u32, size_of::<RenameIn>(), 2),
    (Opcode::Rename2 as u32, size_of::<Rename2In>(), 2),
    (Opcode::Symlink as u32, 0, 2),
    (Opcode::Link as u32, size_of::<LinkIn>(), 1),
    (Opcode::Mknod as u32, size_of::<MknodIn>(), 1),
    (Opcode::Setxattr as u32, size_of::<SetxattrIn>(), 1),
    (Opcode::Removexattr as u32, 0, 1),
];

/// Requests that make something; their names may be followed by extensions.
const MAKING: [u32; 4] = [
    Opcode::Create as u32,
    Opcode::Mkdir as u32,
    Opcode::Mknod as u32,
    Opcode::Symlink as u32,
];

/// Where `struct fuse_in_header` has the length of the extensions at a request's end, in units of 8
/// bytes.
const EXTENSIONS_LEN: usize = 36;

/// Size of `struct fuse_ext_header`, and its type of a user's supplementary groups
/// (`FUSE_EXT_GROUPS`).
const EXTENSION_HEADER_LEN: usize = 8;
const EXTENSION_GROUPS: u32 = 32;

/// What the longer `struct fuse_setxattr_in` has at its end: flags of 32 bits, and padding.
const SETXATTR_MORE: u32 = 8;

/// `FUSE_SETXATTR_ACL_KILL_SGID`.
const SETXATTR_KILL_SGID: u8 = 1;

/// Where `struct fuse_read_in` has the size that a client asks for.
const READ_SIZE: usize = HEADER_LEN + 16;

const F_NEXT: u16 = 1;
const F_WRITE: u16 = 2;

/// Why a request could not be prepared.
#[derive(Debug, thiserror::Error)]
pub(super) enum ExchangeError {
    #[error("the private region could not be mapped")]
    Map(#[source] vm_memory::mmap::MmapRegionError),
    #[error("the private region could not be added to the guest's memory")]
    Region(#[source] vm_memory::GuestRegionCollectionError),
    #[error("the private region overlaps the guest's memory")]
    Place,
    #[error("the private ring could not be set up")]
    Ring(#[source] virtio_queue::Error),
    #[error("the private region could not be accessed")]
    Access(#[source] vm_memory::GuestMemoryError),
    #[error("the private ring lost a chain")]
    Lost,
    #[error("a descriptor chain has the wrong shape")]
    Chain(#[from] ChainError),
    #[error("a descriptor chain could not be presented")]
    Present(#[source] fuse_backend_rs::transport::Error),
}

/// The start of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestHeader {
    /// Bytes of the request, as the header says.
    pub(super) len: u32,
    pub(super) opcode: u32,
    pub(super) unique: u64,
    /// The object that it refers to.
    pub(super) node: u64,
    /// The requester: the number of a thread of the guest.
    pub(super) process: u32,
    /// The group of the directory in which something is made, if it is a supplementary one of the
    /// user.
    pub(super) group: Option<u32>,
    /// The access control list that the request sets takes the set-group-ID bit away.
    pub(super) clears_group_bit: bool,
}

/// Why a request cannot be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// Shorter than its header: there is nothing to answer.
    NoHeader,
    /// Longer than any request; answered with an error.
    TooLong { unique: u64 },
    /// A name is missing or not terminated; answered with an error. `fuse-backend-rs` would log the
    /// whole request.
    NoName { unique: u64 },
}

/// The private ring and buffer.
#[derive(Debug)]
pub(super) struct Exchange {
    /// The guest's memory and the private region.
    mem: GuestRam,
    ring: virtio_queue::Queue,
    available: u16,
    copy: Vec<u8>,
}

impl Exchange {
    pub(super) fn new(guest: &GuestRam) -> Result<Self, ExchangeError> {
        let region = MmapRegion::new(REGION_LEN).map_err(ExchangeError::Map)?;
        let region =
            GuestRegionMmap::new(region, GuestAddress(BASE)).ok_or(ExchangeError::Place)?;
        let mem = guest
            .insert_region(Arc::new(region))
            .map_err(ExchangeError::Region)?;
        let ring = ring().map_err(ExchangeError::Ring)?;
        Ok(Self {
            mem,
            ring,
            available: 0,
            copy: Vec::new(),
        })
    }

    /// Copies the part of the request that is parsed, and prepares it for [`Self::present`].
    pub(super) fn load(
        &mut self,
        chain: &Chain,
        guest: &GuestRam,
    ) -> Result<Result<RequestHeader, Refused>, ExchangeError> {
        let len = chain.readable_len();
        if len < HEADER_LEN {
            return Ok(Err(Refused::NoHeader));
        }
        let mut header = [0u8; HEADER_LEN];
        chain.read(guest, 0, &mut header)?;
        let mut request = RequestHeader::decode(&header);
        let copied = if request.opcode == Opcode::Write as u32 {
            len.min(WRITE_HEADER_LEN)
        } else if len <= MAX_REQUEST {
            len
        } else {
            return Ok(Err(Refused::TooLong {
                unique: request.unique,
            }));
        };
        self.copy.resize(copied, 0);
        if let Some((first, rest)) = self.copy.split_at_mut_checked(HEADER_LEN) {
            first.copy_from_slice(&header);
            chain.read(guest, HEADER_LEN, rest)?;
        }
        if request.opcode == Opcode::Setxattr as u32 {
            request.clears_group_bit = shorten(&mut request.len, &mut self.copy);
        }
        if !has_names(request.opcode, request.len, &self.copy) {
            return Ok(Err(Refused::NoName {
                unique: request.unique,
            }));
        }
        if MAKING.contains(&request.opcode) {
            request.group = group(request.len, &self.copy);
        }
        if [Opcode::Readdir as u32, Opcode::Readdirplus as u32].contains(&request.opcode) {
            cut_list(&mut self.copy, chain.writable_len());
        }
        self.mem
            .write_slice(&self.copy, GuestAddress(BUFFER))
            .map_err(ExchangeError::Access)?;
        self.describe(chain, copied)?;
        Ok(Ok(request))
    }

    /// What follows the header of the request that was loaded, as far as it was copied.
    pub(super) fn body(&self) -> &[u8] {
        self.copy.get(HEADER_LEN..).unwrap_or_default()
    }

    /// Writes the descriptors: the copy, the rest of the request after the bytes that were copied,
    /// and the room for the reply.
    fn describe(&mut self, chain: &Chain, copied: usize) -> Result<(), ExchangeError> {
        let copy = Segment {
            addr: GuestAddress(BUFFER),
            // At most MAX_REQUEST.
            len: u32::try_from(self.copy.len()).unwrap_or(0),
        };
        let rest = chain.readable_parts(copied).map(|segment| (segment, 0));
        let room = chain.writable_parts().map(|segment| (segment, F_WRITE));
        let mut all = std::iter::once((copy, 0)).chain(rest).chain(room);
        let mut index = 0u16;
        let mut last = all.next();
        while let Some((segment, flags)) = last {
            last = all.next();
            let mut segment = segment;
            while let Some(joined) = last
                .and_then(|(next, its)| (its == flags).then(|| self.join(segment, next)).flatten())
            {
                segment = joined;
                last = all.next();
            }
            let more = if last.is_some() { F_NEXT } else { 0 };
            self.write_descriptor(index, segment, flags | more)?;
            index = index.wrapping_add(1);
        }
        Ok(())
    }

    /// Joins two adjacent segments of one memory region: a driver's buffer of many pages is often
    /// contiguous, and each segment costs time in every list that it is added to.
    fn join(&self, first: Segment, second: Segment) -> Option<Segment> {
        let end = first.addr.checked_add(first.len.into())?;
        let len = first.len.checked_add(second.len)?;
        let last = first.addr.checked_add(u64::from(len).checked_sub(1)?)?;
        if end != second.addr || self.mem.find_region(first.addr)?.last_addr() < last {
            return None;
        }
        let addr = first.addr;
        Some(Segment { addr, len })
    }

    fn write_descriptor(
        &self,
        index: u16,
        segment: Segment,
        flags: u16,
    ) -> Result<(), ExchangeError> {
        let mut raw = [0; 16];
        let fields = segment
            .addr
            .0
            .to_le_bytes()
            .into_iter()
            .chain(segment.len.to_le_bytes())
            .chain(flags.to_le_bytes())
            .chain(index.wrapping_add(1).to_le_bytes());
        for (to, from) in raw.iter_mut().zip(fields) {
            *to = from;
        }
        let at = u64::from(index).saturating_mul(16).saturating_add(BASE);
        self.mem
            .write_slice(&raw, GuestAddress(at))
            .map_err(ExchangeError::Access)
    }

    /// Returns the request that was loaded, once.
    pub(super) fn present(&mut self) -> Result<(Reader<'_>, Writer<'_>), ExchangeError> {
        let slot = u64::from(self.available.checked_rem(RING_SIZE).unwrap_or(0));
        let at = slot.saturating_mul(2).saturating_add(AVAIL + 4);
        self.available = self.available.wrapping_add(1);
        // The only head is 0.
        self.mem
            .write_obj(0u16, GuestAddress(at))
            .and_then(|()| {
                self.mem
                    .write_obj(self.available.to_le(), GuestAddress(AVAIL + 2))
            })
            .map_err(ExchangeError::Access)?;
        let mem = &self.mem;
        let chain: DescriptorChain<&GuestRam> = self
            .ring
            .pop_descriptor_chain(mem)
            .ok_or(ExchangeError::Lost)?;
        let reader =
            Reader::from_descriptor_chain(mem, chain.clone()).map_err(ExchangeError::Present)?;
        let writer = VirtioFsWriter::new(mem, chain).map_err(ExchangeError::Present)?;
        Ok((reader, Writer::VirtioFs(writer)))
    }
}

impl RequestHeader {
    fn decode(raw: &[u8; HEADER_LEN]) -> Self {
        let mut header = InHeader::default();
        header.as_mut_slice().copy_from_slice(raw);
        Self {
            len: u32::from_le(header.len),
            opcode: u32::from_le(header.opcode),
            unique: u64::from_le(header.unique),
            node: u64::from_le(header.nodeid),
            process: u32::from_le(header.pid),
            group: None,
            clears_group_bit: false,
        }
    }
}

/// Whether a request has the names that its opcode needs, each followed by a NUL, within the length
/// `len` that its header says.
fn has_names(opcode: u32, len: u32, request: &[u8]) -> bool {
    let Some((_, before, count)) = NAMES.iter().find(|(named, ..)| *named == opcode) else {
        return true;
    };
    let end = request.len().min(len as usize);
    let names = request.get(HEADER_LEN.saturating_add(*before)..end);
    let mut ends = names.unwrap_or_default().iter().filter(|byte| **byte == 0);
    ends.nth(count.saturating_sub(1)).is_some()
}

/// Gives a request that sets an attribute in the longer form (`FUSE_SETXATTR_EXT`) the one that
/// `fuse-backend-rs` knows. Returns whether the longer one says that the set-group-ID bit is to be
/// cleared.
///
/// A request's form is told by the request itself, since a client that was restored goes on as it
/// began with another device: where the shorter one has the attribute's name, which begins with a
/// letter, the longer one has flags, and zeroes after them.
fn shorten(len: &mut u32, request: &mut Vec<u8>) -> bool {
    let more = HEADER_LEN.saturating_add(size_of::<SetxattrIn>());
    let end = more.saturating_add(SETXATTR_MORE as usize);
    let flags = match request.get(more..end) {
        Some([flags @ 0..=SETXATTR_KILL_SGID, 0, 0, 0, 0, 0, 0, 0]) => *flags,
        _ => return false,
    };
    request.drain(more..end);
    *len = len.saturating_sub(SETXATTR_MORE);
    if let Some(first) = request.first_chunk_mut() {
        *first = len.to_le_bytes();
    }
    flags == SETXATTR_KILL_SGID
}

/// Returns the group that the extensions of a request name. A client sends one at most.
fn group(len: u32, request: &[u8]) -> Option<u32> {
    let request = request.get(..len as usize).unwrap_or(request);
    let word = |bytes: &[u8], at: usize| {
        let bytes = bytes.get(at..)?.first_chunk()?;
        Some(u32::from_le_bytes(*bytes))
    };
    let units = word(request, EXTENSIONS_LEN)? & 0xffff;
    let extensions = (units as usize).saturating_mul(8);
    let body = request.get(HEADER_LEN..)?;
    let mut rest = body.get(body.len().checked_sub(extensions)?..)?;
    while rest.len() > EXTENSION_HEADER_LEN {
        let (size, kind) = (word(rest, 0)? as usize, word(rest, 4)?);
        let after = size.max(EXTENSION_HEADER_LEN).next_multiple_of(8);
        if kind == EXTENSION_GROUPS && word(rest, 8)? > 0 {
            return word(rest, 12);
        }
        rest = rest.get(after..)?;
    }
    None
}

/// Cuts the size of a list to what fits into a reply of `room` bytes: `fuse-backend-rs` would log
/// that it does not.
fn cut_list(request: &mut [u8], room: usize) {
    let size = request
        .get_mut(READ_SIZE..)
        .and_then(<[u8]>::first_chunk_mut);
    let room = u32::try_from(room.saturating_sub(size_of::<OutHeader>())).unwrap_or(u32::MAX);
    if let Some(size) = size {
        *size = u32::from_le_bytes(*size).min(room).to_le_bytes();
    }
}

fn ring() -> Result<virtio_queue::Queue, virtio_queue::Error> {
    let mut ring = virtio_queue::Queue::new(RING_SIZE)?;
    ring.try_set_size(RING_SIZE)?;
    ring.try_set_desc_table_address(GuestAddress(BASE))?;
    ring.try_set_avail_ring_address(GuestAddress(AVAIL))?;
    ring.try_set_used_ring_address(GuestAddress(USED))?;
    ring.set_ready(true);
    Ok(ring)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{CountingInterrupt, DriverQueue, memory};
    use crate::virtio::Queue;
    use std::io::{Read, Write};

    fn setup() -> (GuestRam, DriverQueue, Queue, Exchange) {
        let mem = memory(1 << 20);
        let driver = DriverQueue::new(&mem, 0x1_0000, 64);
        let queue = driver.device_queue(0, Arc::new(CountingInterrupt::default()));
        let exchange = Exchange::new(&mem).unwrap();
        (mem, driver, queue, exchange)
    }

    fn request(opcode: u32, body: &[u8]) -> Vec<u8> {
        let len = u32::try_from(HEADER_LEN + body.len()).unwrap();
        let mut bytes = len.to_le_bytes().to_vec();
        bytes.extend(opcode.to_le_bytes());
        bytes.extend(77u64.to_le_bytes());
        bytes.resize(HEADER_LEN, 0);
        bytes.extend(body);
        bytes
    }

    #[test]
    fn what_is_parsed_does_not_change_when_the_guest_writes_to_it() {
        let (mem, mut driver, mut queue, mut exchange) = setup();
        let bytes = request(1, b"name\0");
        mem.write_slice(&bytes, GuestAddress(0x4_0000)).unwrap();
        driver.add(
            &[(0x4_0000, 10), (0x4_000a, 35)],
            &[(0x5_0000, 16), (0x6_0000, 100)],
        );
        let chain = queue.next().unwrap().unwrap();
        let header = exchange.load(&chain, &mem).unwrap().unwrap();
        assert_eq!((header.opcode, header.unique), (1, 77));
        mem.write_slice(&[0xff; 45], GuestAddress(0x4_0000))
            .unwrap();
        // Changed descriptors have no effect either.
        driver.descriptor(0, u64::MAX, u32::MAX, 3, 0);
        let (mut reader, mut writer) = exchange.present().unwrap();
        let mut seen = Vec::new();
        reader.read_to_end(&mut seen).unwrap();
        assert_eq!(seen, bytes);
        assert_eq!(writer.available_bytes(), 116);
        writer.write_all(&[3; 20]).unwrap();
        assert!(writer.write_all(&[3; 97]).is_err());
        let mut reply = [0; 4];
        mem.read_slice(&mut reply, GuestAddress(0x6_0000)).unwrap();
        assert_eq!(reply, [3; 4]);
    }

    #[test]
    fn the_data_of_a_write_stay_where_they_are() {
        let (mem, mut driver, mut queue, mut exchange) = setup();
        let bytes = request(Opcode::Write as u32, &[5; 200_000]);
        mem.write_slice(&bytes, GuestAddress(0x4_0000)).unwrap();
        driver.add(
            &[(0x4_0000, 100_000), (0x4_0000 + 100_000, 100_040)],
            &[(0x2_0000, 16)],
        );
        let chain = queue.next().unwrap().unwrap();
        exchange.load(&chain, &mem).unwrap().unwrap();
        mem.write_slice(&[9; 1000], GuestAddress(0x4_0000)).unwrap();
        let (mut reader, _) = exchange.present().unwrap();
        let mut seen = Vec::new();
        reader.read_to_end(&mut seen).unwrap();
        assert_eq!(seen.len(), bytes.len());
        assert_eq!(seen[..WRITE_HEADER_LEN], bytes[..WRITE_HEADER_LEN]);
        assert_eq!(seen[WRITE_HEADER_LEN], 9);
    }

    #[test]
    fn neighbouring_pages_are_one_piece_as_far_as_their_region_goes() {
        let ranges = [(GuestAddress(0), 1 << 20), (GuestAddress(1 << 20), 1 << 20)];
        let mem = GuestRam::from_ranges(&ranges).unwrap();
        let mut driver = DriverQueue::new(&mem, 0x1_0000, 64);
        let mut queue = driver.device_queue(0, Arc::new(CountingInterrupt::default()));
        let mut exchange = Exchange::new(&mem).unwrap();
        let bytes = request(Opcode::Write as u32, &[5; 40]);
        mem.write_slice(&bytes, GuestAddress(0x4_0000)).unwrap();
        let pages = [
            0xf_d000, 0xf_e000, 0xf_f000, 0x10_0000, 0x10_1000, 0x10_3000,
        ];
        driver.add(&[(0x4_0000, 80)], &pages.map(|page| (page, 0x1000)));
        let chain = queue.next().unwrap().unwrap();
        exchange.load(&chain, &mem).unwrap().unwrap();
        let piece = |index: u64| {
            let raw: [u8; 16] = exchange
                .mem
                .read_obj(GuestAddress(BASE + 16 * index))
                .unwrap();
            let addr = u64::from_le_bytes(raw[..8].try_into().unwrap());
            let len = u32::from_le_bytes(raw[8..12].try_into().unwrap());
            (addr, len, raw[12] & 1 != 0)
        };
        assert_eq!(
            [1, 2, 3].map(piece),
            [
                (0xf_d000, 0x3000, true),
                (0x10_0000, 0x2000, true),
                (0x10_3000, 0x1000, false),
            ]
        );
        let (_, mut writer) = exchange.present().unwrap();
        assert_eq!(writer.available_bytes(), 0x6000);
        writer.write_all(&[7; 0x6000]).unwrap();
        for page in pages {
            assert_eq!(mem.read_obj::<u8>(GuestAddress(page + 0xfff)).unwrap(), 7);
        }
    }

    #[test]
    fn a_group_is_found_among_extensions_of_any_form() {
        let words = |words: &[u32]| -> Vec<u8> {
            let bytes = words.iter().flat_map(|word| word.to_le_bytes());
            bytes.collect()
        };
        let with = |units: u8, extensions: &[u32]| {
            let name = b"name\0\0\0\0".to_vec();
            let mut bytes = request(Opcode::Symlink as u32, &[name, words(extensions)].concat());
            bytes[EXTENSIONS_LEN] = units;
            group(u32::MAX, &bytes)
        };
        assert_eq!(with(2, &[16, EXTENSION_GROUPS, 1, 77]), Some(77));
        // A label's is before it.
        let both = [12, 1, 5, 0, 16, EXTENSION_GROUPS, 1, 77];
        assert_eq!(with(4, &both), Some(77));
        for (units, extensions) in [
            (0, &[16, EXTENSION_GROUPS, 1, 77][..]),
            (2, &[16, EXTENSION_GROUPS, 0, 77]),
            (2, &[0, 0, 0, 0]),
            (2, &[u32::MAX, 1, 0, 0]),
            (1, &[16, EXTENSION_GROUPS]),
            (200, &[16, EXTENSION_GROUPS, 1, 77]),
        ] {
            assert_eq!(with(units, extensions), None, "{units} {extensions:?}");
        }
    }

    #[test]
    fn an_attribute_is_set_in_either_form() {
        let named = b"user.a\0value";
        let short = request(
            Opcode::Setxattr as u32,
            &[&[5, 0, 0, 0, 0, 0, 0, 0], &named[..]].concat(),
        );
        let shortened = |request: &[u8]| {
            let mut request = request.to_vec();
            let mut len = u32::from_le_bytes(*request.first_chunk().unwrap());
            let clears = shorten(&mut len, &mut request);
            assert_eq!(request.first_chunk(), Some(&len.to_le_bytes()));
            (request, clears)
        };
        assert_eq!(shortened(&short), (short.clone(), false));
        for flags in [0, 1] {
            let fields = [5, 0, 0, 0, 0, 0, 0, 0, flags, 0, 0, 0, 0, 0, 0, 0];
            let long = request(Opcode::Setxattr as u32, &[&fields, &named[..]].concat());
            assert_eq!(shortened(&long), (short.clone(), flags == 1));
        }
        // Nothing else is of the longer form.
        for cut in 0..short.len() {
            let cut = request(Opcode::Setxattr as u32, &short[HEADER_LEN..][..cut.min(7)]);
            assert_eq!(shortened(&cut), (cut.clone(), false));
        }
    }

    #[test]
    fn requests_too_short_or_too_long_are_refused() {
        let (mem, mut driver, mut queue, mut exchange) = setup();
        driver.add(&[(0x4_0000, 39)], &[(0x5_0000, 16)]);
        let chain = queue.next().unwrap().unwrap();
        let refused = exchange.load(&chain, &mem).unwrap().unwrap_err();
        assert_eq!(refused, Refused::NoHeader);
        mem.write_slice(&request(21, &[]), GuestAddress(0x4_0000))
            .unwrap();
        driver.add(&[(0x4_0000, 0x2_0001)], &[(0x8_0000, 16)]);
        let chain = queue.next().unwrap().unwrap();
        let refused = exchange.load(&chain, &mem).unwrap().unwrap_err();
        assert_eq!(refused, Refused::TooLong { unique: 77 });
    }

    #[test]
    fn the_ring_goes_round_for_ever() {
        let (mem, mut driver, mut queue, mut exchange) = setup();
        mem.write_slice(&request(1, b"a\0"), GuestAddress(0x4_0000))
            .unwrap();
        for _ in 0..70_000 {
            driver.add(&[(0x4_0000, 42)], &[(0x5_0000, 16)]);
            let chain = queue.next().unwrap().unwrap();
            exchange.load(&chain, &mem).unwrap().unwrap();
            let (reader, writer) = exchange.present().unwrap();
            assert_eq!(
                (reader.available_bytes(), writer.available_bytes()),
                (42, 16)
            );
            queue.complete(chain, 0).unwrap();
        }
    }
}
