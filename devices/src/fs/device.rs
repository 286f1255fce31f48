//! The file system device and its queues.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fuse_backend_rs::abi::fuse_abi::{InitOut, KERNEL_MINOR_VERSION, KERNEL_VERSION, Opcode};
use fuse_backend_rs::api::filesystem::{FileSystem, FsOptions};
use fuse_backend_rs::api::server::{MAX_BUFFER_SIZE, MAX_REQ_PAGES, Server};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use vm_memory::ByteValued;

use super::counters::{Counters, REPLY_HEADER_LEN};
use super::exchange::{Exchange, ExchangeError, Refused};
use super::tree::{Access, FsProcess, IdMap, Tree};
use crate::GuestRam;
use crate::descriptors::Quota;
use crate::virtio::{
    Chain, ConfigSpace, DeviceInfo, DeviceType, Fault, MAX_TURN, Placement, Progress, Queue,
    Queues, RestoreError, SavedDevice, StartError, VirtioDevice,
};

/// The high-priority queue (for FORGET and INTERRUPT) and one for requests (§5.11.2). A request of
/// 1 MiB takes 260 descriptors, and Linux sizes its requests by the queue.
const QUEUE_SIZES: [u16; 2] = [128, 512];

/// Maximum bytes of a tag (§5.11.4).
pub const MAX_TAG_LEN: usize = 36;

/// Bytes, and descriptors counted as bytes, before the event loop gets control back.
const BUDGET: usize = 4 << 20;

/// The minimum cost of a request: a few system calls.
const REQUEST_COST: usize = 16 << 10;

/// `FUSE_SYNCFS` of linux/fuse.h.
const SYNCFS: u32 = 50;

/// The maximum length of a request by its header, which `fuse-backend-rs` checks, too.
const MAX_MESSAGE: u32 = MAX_BUFFER_SIZE + 0x1000;

/// The first minor version whose answer to `FUSE_INIT` has today's length. Linux has virtio-fs
/// since 31.
const MIN_MINOR_VERSION: u32 = 23;

/// The guest's first process.
const INIT: u32 = 1;

/// Why a directory cannot be shared.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FsDeviceError {
    /// §5.11.4: 1 to 36 bytes, without a NUL.
    #[error("invalid tag {tag:?}: write 1 to {MAX_TAG_LEN} bytes")]
    Tag {
        /// The tag.
        tag: String,
    },
    /// It does not exist, or is not a directory.
    #[error("failed to open the shared directory {}", path.display())]
    Open {
        /// The directory.
        path: PathBuf,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// The descriptor is not a directory, or `/proc` is not mounted.
    #[error("the root of a shared directory cannot be served")]
    Root(#[source] io::Error),
}

/// A virtio file system device that shares one directory of the host.
///
/// Files and their modes are those of the host. If the process may change its user (root with its
/// capabilities), new objects belong to the guest's users by their numbers; otherwise all belong to
/// the process's user.
pub struct FsDevice {
    tag: String,
    root: OwnedFd,
    process: FsProcess,
    access: Access,
    quota: Quota,
    ids: Option<IdMap>,
    tree: Arc<Tree>,
    server: Server<Arc<Tree>>,
    exchange: Option<Exchange>,
    queues: Queues,
    /// After how long a turn ends; tests have other values.
    max_turn: Duration,
    config: Arc<ConfigSpace>,
    counters: Arc<Counters>,
}

impl fmt::Debug for FsDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FsDevice")
            .field("tag", &self.tag)
            .field("root", &self.root)
            .field("access", &self.access)
            .field("quota", &self.quota)
            .field("ids", &self.ids)
            .field("queues", &self.queues)
            .finish_non_exhaustive()
    }
}

impl FsDevice {
    /// Shares the directory `root` under `tag`, which the guest uses to mount it
    /// (`mount -t virtiofs TAG DIR`). Mounts below it are shared too, whenever they are created.
    ///
    /// # Errors
    /// If the tag is empty or too long, or `root` is not a directory.
    pub fn new(tag: &str, root: OwnedFd) -> Result<Self, FsDeviceError> {
        let process = FsProcess::open().map_err(FsDeviceError::Root)?;
        Self::served_by(&process, tag, root)
    }

    /// As [`Self::new`], in a process that can open nothing of `/proc` any more.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn served_by(process: &FsProcess, tag: &str, root: OwnedFd) -> Result<Self, FsDeviceError> {
        let bytes = tag.as_bytes();
        if bytes.is_empty() || bytes.len() > MAX_TAG_LEN || bytes.contains(&0) {
            return Err(FsDeviceError::Tag { tag: tag.into() });
        }
        let (access, quota) = (Access::ReadWrite, Quota::of_files());
        let tree = tree(process, &root, access, &quota, None)?;
        Ok(Self {
            process: process.clone(),
            tag: tag.to_owned(),
            root,
            access,
            quota,
            ids: None,
            server: Server::new(tree.clone()),
            counters: Counters::of(&tree),
            tree,
            exchange: None,
            queues: Queues::new(2),
            max_turn: MAX_TURN,
            config: Arc::new(ConfigSpace::new(config(bytes))),
        })
    }

    /// As [`Self::new`], for the directory at `path`.
    ///
    /// # Errors
    /// As [`Self::new`], or if it cannot be opened.
    pub fn open(tag: &str, path: impl AsRef<Path>) -> Result<Self, FsDeviceError> {
        let path = path.as_ref();
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root =
            rustix::fs::open(path, flags, Mode::empty()).map_err(|source| FsDeviceError::Open {
                path: path.into(),
                source: source.into(),
            })?;
        Self::new(tag, root)
    }

    /// Makes the directory read-only for the guest.
    ///
    /// # Errors
    /// If the root cannot be reopened.
    pub fn read_only(mut self) -> Result<Self, FsDeviceError> {
        self.access = Access::ReadOnly;
        self.rebuild()
    }

    /// Lets the guest change what is mounted below the root, as those mounts allow, and nothing
    /// else: only the host may change the root and everything else in the root's own mount. This is
    /// for a root that consists only of mount points, which the host mounts on while the guest
    /// runs.
    ///
    /// # Errors
    /// If the root cannot be reopened.
    pub fn writable_below_mounts(mut self) -> Result<Self, FsDeviceError> {
        self.access = Access::BelowMounts;
        self.rebuild()
    }

    /// Sets how many objects and handles the guest may have open at the same time, each of which
    /// costs the process a descriptor; beyond that it gets `ENFILE`. By default, all shared
    /// directories of this process together have half of its soft limit of open files.
    ///
    /// # Errors
    /// If the root cannot be reopened.
    pub fn max_open(mut self, limit: usize) -> Result<Self, FsDeviceError> {
        self.quota = Quota::own(limit);
        self.rebuild()
    }

    /// Maps users of the guest to other users of the host.
    ///
    /// # Errors
    /// If the root cannot be reopened.
    pub fn map_ids(mut self, ids: IdMap) -> Result<Self, FsDeviceError> {
        self.ids = Some(ids);
        self.rebuild()
    }

    /// Checks some thousands of the objects that the guest knows, different ones each time, and
    /// counts files and directories that the host has removed, but whose space it cannot reuse
    /// since the guest remembers their names. Objects that are open, or that lie on other hosts, do
    /// not count. The guest forgets them when it drops names that it does not use
    /// (`echo 2 > /proc/sys/vm/drop_caches`).
    ///
    /// One that stays is counted when it is checked for the 1st, 2nd, 4th, 8th time and so on.
    pub fn count_removed_objects(&mut self) -> usize {
        self.tree.nameless()
    }

    fn rebuild(mut self) -> Result<Self, FsDeviceError> {
        self.tree = tree(
            &self.process,
            &self.root,
            self.access,
            &self.quota,
            self.ids,
        )?;
        self.counters = Counters::of(&self.tree);
        self.server = Server::new(self.tree.clone());
        Ok(self)
    }

    fn serve(&mut self, index: u16) -> Result<Progress, Fault> {
        let Some(queue) = self.queues.get(index) else {
            return Ok(Progress::Idle);
        };
        self.tree
            .prepare_thread()
            .map_err(|error| Fault::host("failed to set up the file server thread", error))?;
        let exchange = match &mut self.exchange {
            Some(exchange) => exchange,
            none => none.insert(Exchange::new(queue.memory()).map_err(fault)?),
        };
        let (server, tree, counters) = (&self.server, &self.tree, &self.counters);
        let (max_turn, begin) = (self.max_turn, Instant::now());
        let mut last = begin;
        queue.serve(BUDGET, |queue, chain| {
            let answer = answer(server, tree, exchange, &chain, queue.memory())?;
            counters.requests.one();
            if answer.malformed {
                counters.malformed.one();
            }
            counters.note_error(&chain, queue.memory(), answer.len as usize);
            let cost = chain.readable_len().saturating_add(answer.len as usize);
            queue.complete(chain, answer.len)?;
            let now = Instant::now();
            counters.latency.add(now.duration_since(last));
            last = now;
            if now.duration_since(begin) >= max_turn && queue.available()? > 0 {
                return Ok(usize::MAX);
            }
            Ok(cost.saturating_add(REQUEST_COST))
        })
    }
}

/// `FUSE_CREATE_SUPP_GROUP`, which `fuse-backend-rs` does not know, among the high flags: requests
/// that make something tell of a supplementary group of their user that the directory has.
const CREATE_SUPP_GROUP: u32 = 1 << 2;

/// `FUSE_SETXATTR_EXT`, which `fuse-backend-rs` does not know, among the low flags: requests that
/// set an attribute tell whether an access control list takes the set-group-ID bit away.
const SETXATTR_EXT: u32 = 1 << 29;

/// `struct virtio_fs_config` (§5.11.4): tag and number of request queues.
fn config(tag: &[u8]) -> Vec<u8> {
    let mut config = tag.to_vec();
    config.resize(MAX_TAG_LEN, 0);
    config.extend(1u32.to_le_bytes());
    config
}

/// The result of a request.
struct Answer {
    /// Bytes of the reply.
    len: u32,
    malformed: bool,
}

fn answer(
    server: &Server<Arc<Tree>>,
    tree: &Tree,
    exchange: &mut Exchange,
    chain: &Chain,
    mem: &GuestRam,
) -> Result<Answer, Fault> {
    let request = match exchange.load(chain, mem).map_err(fault)? {
        Ok(request) => request,
        Err(Refused::NoHeader) => {
            return Err(Fault::protocol(
                "a file system request shorter than its header",
            ));
        }
        Err(Refused::TooLong { unique }) => {
            return refuse(chain, mem, unique, Errno::NOMEM);
        }
        Err(Refused::NoName { unique }) => return refuse(chain, mem, unique, Errno::INVAL),
    };
    if request.opcode == SYNCFS {
        let synced = match request.process {
            // A guest that shuts down writes to its host, which keeps running: nothing needs to be
            // on disk.
            INIT => Ok(()),
            _ => tree.sync_file_system(request.node),
        };
        let error = synced.err().map(|error| Errno::from_io_error(&error));
        let error = error.map(|error| error.unwrap_or(Errno::IO));
        return reply(chain, mem, request.unique, error).map(Answer::whole);
    }
    // What a client may do to have `fuse-backend-rs` log a line is answered here.
    let is = |opcodes: &[Opcode]| {
        opcodes
            .iter()
            .any(|opcode| *opcode as u32 == request.opcode)
    };
    let silent = is(&[Opcode::Forget, Opcode::BatchForget]);
    let unanswered = Answer {
        len: 0,
        malformed: true,
    };
    if request.len > MAX_MESSAGE {
        return match silent {
            true => Ok(unanswered),
            false => refuse(chain, mem, request.unique, Errno::NOMEM),
        };
    }
    if is(&[Opcode::Init]) {
        return begin(tree, chain, mem, request.unique, exchange.body());
    }
    if is(&[Opcode::Destroy]) {
        tree.destroy();
        return reply(chain, mem, request.unique, None).map(Answer::whole);
    }
    if is(&[Opcode::SetupMapping, Opcode::RemoveMapping]) {
        return reply(chain, mem, request.unique, Some(Errno::NOSYS)).map(Answer::whole);
    }
    tree.make_with_group(request.group);
    tree.clear_group_bit(request.clears_group_bit);
    let (reader, writer) = exchange.present().map_err(fault)?;
    let room = chain.writable_len();
    let handled = server.handle_message(reader, writer, None, None);
    if let Some(error) = tree.take_list_error() {
        return reply(chain, mem, request.unique, Some(error)).map(Answer::whole);
    }
    match handled {
        Ok(len) => Ok(Answer::whole(len.min(room))),
        Err(_) if silent => Ok(unanswered),
        Err(_) => refuse(chain, mem, request.unique, Errno::INVAL),
    }
}

/// Answers the first request of a client (`FUSE_INIT`), after which it has nothing open.
fn begin(
    tree: &Tree,
    chain: &Chain,
    mem: &GuestRam,
    unique: u64,
    body: &[u8],
) -> Result<Answer, Fault> {
    let (words, _) = body.as_chunks::<4>();
    let word = |index: usize| words.get(index).map(|word| u32::from_le_bytes(*word));
    let ([Some(major), Some(minor), Some(max_readahead), Some(low)], high) =
        ([0, 1, 2, 3].map(word), word(4))
    else {
        return refuse(chain, mem, unique, Errno::INVAL);
    };
    let mut out = InitOut {
        major: KERNEL_VERSION,
        minor: KERNEL_MINOR_VERSION,
        ..InitOut::default()
    };
    if chain.writable_len() < REPLY_HEADER_LEN.saturating_add(out.as_slice().len()) {
        return refuse(chain, mem, unique, Errno::INVAL);
    }
    if (major, minor) < (KERNEL_VERSION, MIN_MINOR_VERSION) {
        return refuse(chain, mem, unique, Errno::PROTO);
    }
    // A client of a later major version asks once more, with ours.
    if major == KERNEL_VERSION {
        let mut offered = FsOptions::from_bits_truncate(low.into());
        if offered.contains(FsOptions::INIT_EXT) {
            let Some(high) = high else {
                return refuse(chain, mem, unique, Errno::INVAL);
            };
            offered |= FsOptions::from_bits_truncate(u64::from(high) << 32);
        }
        let wanted = match tree.init(offered) {
            Ok(wanted) => wanted,
            Err(error) => {
                let error = Errno::from_io_error(&error).unwrap_or(Errno::IO);
                return reply(chain, mem, unique, Some(error)).map(Answer::whole);
            }
        };
        let common = offered & wanted;
        let [a, b, c, d, flags2 @ ..] = common.bits().to_le_bytes();
        out.flags = u32::from_le_bytes([a, b, c, d]) | low & SETXATTR_EXT;
        out.flags2 = u32::from_le_bytes(flags2);
        if offered.contains(FsOptions::INIT_EXT) {
            out.flags2 |= high.unwrap_or(0) & CREATE_SUPP_GROUP;
        }
        out.max_readahead = max_readahead;
        out.max_background = u16::MAX;
        out.congestion_threshold = u16::MAX / 4 * 3;
        out.max_write = 4096;
        out.time_gran = 1;
        if common.intersects(FsOptions::BIG_WRITES | FsOptions::MAX_PAGES) {
            out.max_write = MAX_BUFFER_SIZE;
        }
        if common.contains(FsOptions::MAX_PAGES) {
            out.max_pages = MAX_REQ_PAGES;
        }
    }
    reply_with(chain, mem, unique, None, out.as_slice()).map(Answer::whole)
}

impl Answer {
    fn whole(len: usize) -> Self {
        Self {
            len: u32::try_from(len).unwrap_or(u32::MAX),
            malformed: false,
        }
    }
}

/// Replies with only an error, if there is room for it.
fn refuse(chain: &Chain, mem: &GuestRam, unique: u64, error: Errno) -> Result<Answer, Fault> {
    let len = reply(chain, mem, unique, Some(error))?;
    Ok(Answer {
        malformed: true,
        ..Answer::whole(len)
    })
}

/// Writes a reply that is only a header, if there is room for it; returns its length.
fn reply(chain: &Chain, mem: &GuestRam, unique: u64, error: Option<Errno>) -> Result<usize, Fault> {
    reply_with(chain, mem, unique, error, &[])
}

/// As [`reply`], with what follows the header.
fn reply_with(
    chain: &Chain,
    mem: &GuestRam,
    unique: u64,
    error: Option<Errno>,
    body: &[u8],
) -> Result<usize, Fault> {
    let whole = REPLY_HEADER_LEN.saturating_add(body.len());
    if chain.writable_len() < whole {
        return Ok(0);
    }
    let mut header = [0; REPLY_HEADER_LEN];
    let len = u32::try_from(whole).unwrap_or(0);
    let error = error.map_or(0, |error| error.raw_os_error().saturating_neg());
    let bytes = len
        .to_le_bytes()
        .into_iter()
        .chain(error.to_le_bytes())
        .chain(unique.to_le_bytes());
    for (to, from) in header.iter_mut().zip(bytes) {
        *to = from;
    }
    chain.write(mem, 0, &header)?;
    chain.write(mem, REPLY_HEADER_LEN, body)?;
    Ok(whole)
}

/// Attributes an error to the guest or the host.
fn fault(error: ExchangeError) -> Fault {
    match error {
        ExchangeError::Chain(error) => error.into(),
        ExchangeError::Present(_) => Fault::protocol("a FUSE request with unusable buffers"),
        other => Fault::host(
            "the private ring of a file system device",
            io::Error::other(other),
        ),
    }
}

fn tree(
    process: &FsProcess,
    root: &OwnedFd,
    access: Access,
    quota: &Quota,
    ids: Option<IdMap>,
) -> Result<Arc<Tree>, FsDeviceError> {
    Tree::served_by(process, root, access, quota.clone(), ids)
        .map(Arc::new)
        .map_err(FsDeviceError::Root)
}

impl VirtioDevice for FsDevice {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            device_type: DeviceType::FileSystem,
            queue_sizes: QUEUE_SIZES.to_vec(),
            features: 0,
            config: self.config.clone(),
            counters: self.counters.clone(),
        }
    }

    /// Files may be on slow disks and networks.
    fn placement(&self) -> Placement {
        Placement::Own
    }

    fn start_queue(&mut self, queue: Queue) -> Result<(), StartError> {
        self.queues.start(queue)
    }

    fn stop_queue(&mut self, index: u16) -> Option<Queue> {
        let queue = self.queues.stop(index);
        if self.queues.running().next().is_none() {
            // It keeps a reference to guest memory.
            self.exchange = None;
        }
        queue
    }

    fn reset(&mut self) {
        self.tree.forget_all();
    }

    fn on_queue(&mut self, index: u16) -> Result<Progress, Fault> {
        self.serve(index)
    }

    fn save(&self) -> SavedDevice {
        SavedDevice {
            version: 1,
            bytes: self.tree.next_number().to_le_bytes().into(),
        }
    }

    /// What the client had open is lost: it gets `ESTALE` and `EBADF`, and mounts the share again.
    /// Its old numbers are never reused for other objects.
    fn restore(&mut self, saved: &SavedDevice) -> Result<(), RestoreError> {
        let invalid = RestoreError::Invalid {
            what: "the state of a shared directory is a number",
        };
        let Ok(next) = saved.of_version(1)?.try_into().map(u64::from_le_bytes) else {
            return Err(invalid);
        };
        if !self.tree.begin_numbers_at(next) {
            return Err(invalid);
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "device_tests/mod.rs"]
mod tests;
