//! What the loader would start from an image's disk, as it writes it to a disk of the host.
//!
//! The disk begins with one block that describes the rest ([`Frame`]). The kernel follows it, and
//! the initial file system from the next whole block on. The block is written last: a disk without
//! it was not written to the end.
//!
//! The loader has read file systems that anybody may have made, so that the host takes a frame for
//! hostile: [`Frame::parse`] accepts no length out of bounds and no control character.

use std::ops::Range;

use thiserror::Error;

/// Bytes of the block that describes the rest; files begin at multiples of it.
pub const BLOCK: usize = 4096;

/// Most bytes of a disk with a frame: of the block, the kernel and the initial file system.
pub const DISK_BYTES: u64 = 512 << 20;

/// Most bytes of a command line: what Linux takes on x86, without its NUL.
pub const CMDLINE_BYTES: usize = 2047;

/// Most bytes of a title, which is cut off there.
pub const TITLE_BYTES: usize = 200;

const MAGIC: &[u8; 16] = b"podvisor kernel\0";
const VERSION: u32 = 1;
/// Where the texts begin: the command line, then the title.
const TEXTS: usize = 64;

/// Why a frame is not one, or cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The block is not there.
    #[error("the loader has written no kernel: its messages say why")]
    Missing,
    /// Another version wrote it.
    #[error("the loader wrote version {0} of the frame, and version {VERSION} is known")]
    Version(u32),
    /// There is no kernel in it.
    #[error("the kernel is empty")]
    NoKernel,
    /// The files do not fit.
    #[error(
        "the kernel has {kernel} bytes and the initial file system {initramfs}: more than \
         {DISK_BYTES} together"
    )]
    TooLarge {
        /// Bytes of the kernel.
        kernel: u64,
        /// Bytes of the initial file system.
        initramfs: u64,
    },
    /// A text is too long, not UTF-8, or has control characters.
    #[error("the {0} is too long or no text of one line")]
    Text(&'static str),
}

/// What a frame's block says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    kernel: u64,
    initramfs: u64,
    cmdline: String,
    title: String,
}

impl Frame {
    /// Describes a kernel and an initial file system of so many bytes (0 if there is none), its
    /// command line, and the title of the entry that names them.
    ///
    /// # Errors
    /// Something is out of bounds.
    pub fn new(
        kernel: u64,
        initramfs: u64,
        cmdline: &str,
        title: &str,
    ) -> Result<Self, FrameError> {
        let title: String = title.chars().filter(|c| !c.is_control()).collect();
        let end = title.floor_char_boundary(TITLE_BYTES);
        let frame = Self {
            kernel,
            initramfs,
            cmdline: cmdline.to_owned(),
            title: title.get(..end).unwrap_or_default().to_owned(),
        };
        frame.check()
    }

    /// Reads the block at the begin of a disk.
    ///
    /// # Errors
    /// It is not a frame's, or something in it is out of bounds.
    pub fn parse(block: &[u8; BLOCK]) -> Result<Self, FrameError> {
        let mut rest = block.as_slice();
        if take::<16>(&mut rest)? != *MAGIC {
            return Err(FrameError::Missing);
        }
        let version = u32::from_le_bytes(take(&mut rest)?);
        if version != VERSION {
            return Err(FrameError::Version(version));
        }
        let [cmdline, title] = [take(&mut rest)?, take(&mut rest)?].map(u32::from_le_bytes);
        let [kernel, initramfs] = [take(&mut rest)?, take(&mut rest)?].map(u64::from_le_bytes);
        let mut texts = block.get(TEXTS..).unwrap_or_default();
        let frame = Self {
            kernel,
            initramfs,
            cmdline: text(&mut texts, cmdline).ok_or(FrameError::Text("command line"))?,
            title: text(&mut texts, title).ok_or(FrameError::Text("title"))?,
        };
        frame.check()
    }

    /// Returns the block.
    #[must_use]
    pub fn to_block(&self) -> [u8; BLOCK] {
        // Texts have their bounds, which are those of 32 bits, too.
        let len = |text: &str| u32::try_from(text.len()).unwrap_or(u32::MAX);
        let mut bytes = Vec::with_capacity(BLOCK);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(len(&self.cmdline).to_le_bytes());
        bytes.extend(len(&self.title).to_le_bytes());
        bytes.extend(self.kernel.to_le_bytes());
        bytes.extend(self.initramfs.to_le_bytes());
        bytes.resize(TEXTS, 0);
        bytes.extend(self.cmdline.bytes());
        bytes.extend(self.title.bytes());
        bytes.resize(BLOCK, 0);
        let mut block = [0; BLOCK];
        block.copy_from_slice(&bytes);
        block
    }

    /// Where the kernel is on the disk.
    #[must_use]
    pub fn kernel(&self) -> Range<u64> {
        BLOCK as u64..BLOCK as u64 + self.kernel
    }

    /// Where the initial file system is on the disk, if there is one.
    #[must_use]
    pub fn initramfs(&self) -> Option<Range<u64>> {
        let start = self.kernel().end.next_multiple_of(BLOCK as u64);
        (self.initramfs > 0).then_some(start..start + self.initramfs)
    }

    /// The command line.
    #[must_use]
    pub fn cmdline(&self) -> &str {
        &self.cmdline
    }

    /// The title of the entry that names them.
    #[must_use]
    pub fn title(&self) -> &str {
        &self.title
    }

    fn check(self) -> Result<Self, FrameError> {
        if self.kernel == 0 {
            return Err(FrameError::NoKernel);
        }
        let padding = 2 * BLOCK as u64;
        let all = self.kernel.checked_add(self.initramfs);
        if all.is_none_or(|all| all > DISK_BYTES - padding) {
            return Err(FrameError::TooLarge {
                kernel: self.kernel,
                initramfs: self.initramfs,
            });
        }
        let is_line = |text: &str, max| text.len() <= max && !text.chars().any(char::is_control);
        if !is_line(&self.cmdline, CMDLINE_BYTES) {
            return Err(FrameError::Text("command line"));
        }
        if !is_line(&self.title, TITLE_BYTES) {
            return Err(FrameError::Text("title"));
        }
        Ok(self)
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N], FrameError> {
    let (taken, left) = rest.split_first_chunk().ok_or(FrameError::Missing)?;
    *rest = left;
    Ok(*taken)
}

fn text(rest: &mut &[u8], len: u32) -> Option<String> {
    let (taken, left) = rest.split_at_checked(usize::try_from(len).ok()?)?;
    *rest = left;
    String::from_utf8(taken.to_vec()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_frame_is_read_as_it_was_written() {
        let frame = Frame::new(5000, 7, "root=/dev/vda1 ro", "Debian\n \"GNU\"").unwrap();
        assert_eq!(Frame::parse(&frame.to_block()), Ok(frame.clone()));
        assert_eq!(frame.kernel(), 4096..9096);
        assert_eq!(frame.initramfs(), Some(12288..12295));
        assert_eq!(frame.title(), "Debian \"GNU\"");
        assert_eq!(Frame::new(1, 0, "", "").unwrap().initramfs(), None);
    }

    #[test]
    fn what_is_out_of_bounds_is_refused() {
        assert_eq!(Frame::parse(&[0; BLOCK]), Err(FrameError::Missing));
        assert_eq!(Frame::new(0, 1, "", ""), Err(FrameError::NoKernel));
        for (kernel, initramfs) in [(DISK_BYTES, 0), (1, DISK_BYTES), (u64::MAX, 1)] {
            let refused = Frame::new(kernel, initramfs, "", "").unwrap_err();
            assert_eq!(refused, FrameError::TooLarge { kernel, initramfs });
        }
        let long = "x".repeat(CMDLINE_BYTES + 1);
        for cmdline in [long.as_str(), "a\nb", "a\0"] {
            let refused = Frame::new(1, 0, cmdline, "").unwrap_err();
            assert_eq!(refused, FrameError::Text("command line"));
        }
        let title = Frame::new(1, 0, "", &"ä".repeat(TITLE_BYTES)).unwrap();
        assert_eq!(title.title().len(), TITLE_BYTES);
        let mut block = title.to_block();
        block[16] = 2;
        assert_eq!(Frame::parse(&block), Err(FrameError::Version(2)));
        // Terminals obey what a hostile loader's kernel might write.
        let mut block = title.to_block();
        block[TEXTS] = 0x1b;
        assert!(Frame::parse(&block).is_err());
    }

    proptest! {
        #[test]
        fn what_is_accepted_lies_within_the_disk(
            numbers in prop::collection::vec(any::<u8>(), 48), texts: Vec<u8>,
        ) {
            let mut block = [0; BLOCK];
            block[..16].copy_from_slice(MAGIC);
            block[16] = 1;
            block[20..64].copy_from_slice(&numbers[..44]);
            let len = texts.len().min(BLOCK - TEXTS);
            block[TEXTS..TEXTS + len].copy_from_slice(&texts[..len]);
            // Small lengths are accepted, the others refused.
            for mask in [0xff, 0x1f, 0] {
                for at in [22, 23, 26, 27, 31, 32, 33, 34, 35, 39, 40, 41, 42, 43] {
                    block[at] &= mask;
                }
                if let Ok(frame) = Frame::parse(&block) {
                    prop_assert!(frame.kernel().end <= DISK_BYTES);
                    if let Some(initramfs) = frame.initramfs() {
                        prop_assert!(initramfs.end <= DISK_BYTES);
                        prop_assert!(initramfs.start >= frame.kernel().end);
                    }
                    prop_assert_eq!(Frame::parse(&frame.to_block()), Ok(frame));
                }
            }
        }
    }
}
