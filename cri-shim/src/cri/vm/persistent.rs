//! A root disk that outlives its pods: a block volume to which the image is written once.
//!
//! Its first sector says which image that was; the guest's disk are the sectors after it. The
//! header is written last, so that a volume to which half an image was written counts as empty. It
//! is the one that Virtlet wrote: big-endian magic number (8 bytes), version (2), SHA-256 (32).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use podvisor_images::{copy_disk, disk_len};
use podvisor_sandbox::machine::{BlockDeviceError, IoEngine, open_disk_for_writing};

/// Sectors of the volume that are not the guest's.
pub(super) const HEADER_SECTORS: u32 = 1;

/// Bytes of a sector.
const SECTOR: u64 = 512;

/// What a volume with an image begins with.
const MAGIC: [u8; 8] = 0x263d_be52_ba57_6702_u64.to_be_bytes();

/// The version of the header.
const VERSION: u16 = 1;

/// The id of an image: its SHA-256.
pub(super) type ImageDigest = [u8; 32];

/// Why a volume cannot be a root disk.
#[derive(Debug, thiserror::Error)]
pub(super) enum PersistentError {
    /// The image and its header do not fit, or not the size that was asked for.
    #[error("it has {volume} bytes, but the root disk needs {needed}: take a larger volume")]
    TooSmall { volume: u64, needed: u64 },
    /// Something newer wrote the header.
    #[error(
        "its header has version {0}, but this podvisor knows version {VERSION}: take another \
         volume, or the program that wrote it; nothing was changed"
    )]
    Version(u16),
    /// Another machine has it, or another pod's root is being written to it.
    #[error(transparent)]
    Busy(#[from] BlockDeviceError),
    /// It cannot be read or written.
    #[error("failed to {action}")]
    Io {
        action: &'static str,
        source: io::Error,
    },
}

impl PersistentError {
    fn io(action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, source }
    }
}

/// Writes `image` to `volume`, unless it is there already; the volume is then left as it is.
/// Returns whether it was written. The volume is open for reading and writing, and is locked
/// meanwhile. It blocks for as long as the copy takes.
pub(super) fn prepare(
    volume: &File,
    image: &File,
    digest: &ImageDigest,
    size: Option<u64>,
) -> Result<bool, PersistentError> {
    let locked = volume
        .try_clone()
        .map_err(PersistentError::io("open the volume once more"))?;
    let _locked = open_disk_for_writing(locked, IoEngine::Sync)?;
    let has = disk_len(volume).map_err(PersistentError::io("find the volume's size"))?;
    let len = disk_len(image).map_err(PersistentError::io("find the image's size"))?;
    let needed = len
        .max(size.unwrap_or(0))
        .saturating_add(u64::from(HEADER_SECTORS) * SECTOR);
    if has < needed {
        return Err(PersistentError::TooSmall {
            volume: has,
            needed,
        });
    }
    let mut header = [0; SECTOR as usize];
    volume
        .read_exact_at(&mut header, 0)
        .map_err(PersistentError::io("read the volume's header"))?;
    match found(&header) {
        Some((VERSION, image)) if image == digest => return Ok(false),
        Some((VERSION, _)) | None => {}
        Some((version, _)) => return Err(PersistentError::Version(version)),
    }
    // Another image's header must not survive its image.
    write_header(volume, &[0; SECTOR as usize])
        .map_err(PersistentError::io("clear the volume's header"))?;
    let start = u64::from(HEADER_SECTORS) * SECTOR;
    copy_disk(image, volume, 0..len, start, &|_| ())
        .map_err(PersistentError::io("copy the image to the volume"))?;
    volume
        .sync_data()
        .map_err(PersistentError::io("make the copy durable"))?;
    write_header(volume, &made(digest))
        .map_err(PersistentError::io("write the volume's header"))?;
    Ok(true)
}

/// Returns the version and the image of a header.
fn found(header: &[u8; SECTOR as usize]) -> Option<(u16, &[u8])> {
    let rest = header.strip_prefix(&MAGIC)?;
    let (version, rest) = rest.split_first_chunk()?;
    Some((u16::from_be_bytes(*version), rest.get(..32)?))
}

fn made(digest: &ImageDigest) -> [u8; SECTOR as usize] {
    let mut header = [0; SECTOR as usize];
    let fields = [&MAGIC[..], &VERSION.to_be_bytes(), digest].concat();
    header[..fields.len()].copy_from_slice(&fields);
    header
}

fn write_header(volume: &File, header: &[u8; SECTOR as usize]) -> io::Result<()> {
    volume.write_all_at(header, 0)?;
    volume.sync_data()
}

#[cfg(test)]
mod tests {
    use super::*;

    const IMAGE: u64 = 3 << 20;

    /// An image of data, a hole, and data up to an odd sector.
    fn image() -> File {
        let image = tempfile::tempfile().unwrap();
        image.set_len(IMAGE + SECTOR).unwrap();
        image.write_all_at(&[1; 5000], 0).unwrap();
        image.write_all_at(&[2; 5000], 2 << 20).unwrap();
        image.write_all_at(&[3; 512], IMAGE).unwrap();
        image
    }

    /// A volume that was used for something else.
    fn used(len: u64) -> File {
        let volume = tempfile::tempfile().unwrap();
        volume.write_all_at(&vec![0xaa; len as usize], 0).unwrap();
        volume
    }

    fn contents(file: &File, at: u64, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        file.read_exact_at(&mut bytes, at).unwrap();
        bytes
    }

    #[test]
    fn an_image_is_written_once_and_what_the_guest_writes_stays() {
        let (image, volume) = (image(), used(5 << 20));
        let digest = [7; 32];
        assert!(prepare(&volume, &image, &digest, None).unwrap());
        let len = IMAGE + SECTOR;
        assert!(contents(&volume, SECTOR, len) == contents(&image, 0, len));
        let header = contents(&volume, 0, SECTOR);
        assert_eq!(
            header[..10],
            [0x26, 0x3d, 0xbe, 0x52, 0xba, 0x57, 0x67, 2, 0, 1]
        );
        assert_eq!((&header[10..42], header[42]), (&digest[..], 0));

        volume.write_all_at(b"the guest's", SECTOR).unwrap();
        assert!(!prepare(&volume, &image, &digest, None).unwrap());
        assert_eq!(contents(&volume, SECTOR, 11), b"the guest's");
        // Another image replaces all of it.
        assert!(prepare(&volume, &image, &[8; 32], None).unwrap());
        assert!(contents(&volume, SECTOR, len) == contents(&image, 0, len));
    }

    #[test]
    fn a_copy_that_was_cut_off_counts_as_none() {
        let volume = used(5 << 20);
        let digest = [7; 32];
        assert!(prepare(&volume, &image(), &digest, None).unwrap());
        // An image that cannot be read to its end: a write-only file.
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let unreadable = File::create(&path).unwrap();
        unreadable.set_len(1 << 20).unwrap();
        unreadable.write_all_at(&[1; 512], 0).unwrap();
        let error = prepare(&volume, &unreadable, &[8; 32], None).unwrap_err();
        assert!(error.to_string().contains("copy the image"), "{error}");
        // Neither the one nor the other is believed to be there.
        assert!(prepare(&volume, &image(), &digest, None).unwrap());
    }

    #[test]
    fn a_volume_that_does_not_fit_stays_as_it_is() {
        let (image, digest) = (image(), [7; 32]);
        let len = IMAGE + SECTOR;
        let small = used(len);
        let error = prepare(&small, &image, &digest, None).unwrap_err();
        let said = error.to_string();
        let both = [len.to_string(), (len + SECTOR).to_string()];
        assert!(both.iter().all(|size| said.contains(size)), "{said}");
        assert!(contents(&small, 0, len).iter().all(|byte| *byte == 0xaa));
        let volume = used(5 << 20);
        let asked = prepare(&volume, &image, &digest, Some(5 << 20)).unwrap_err();
        assert!(matches!(asked, PersistentError::TooSmall { .. }), "{asked}");

        let mut newer = made(&digest);
        newer[9] = 2;
        volume.write_all_at(&newer, 0).unwrap();
        let error = prepare(&volume, &image, &digest, None).unwrap_err();
        assert!(matches!(error, PersistentError::Version(2)), "{error}");
        assert_eq!(contents(&volume, SECTOR, 4), [0xaa; 4]);
    }

    #[test]
    fn a_volume_that_a_machine_has_is_not_touched() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("volume");
        std::fs::write(&path, vec![0xaa; 5 << 20]).unwrap();
        let open = || File::options().read(true).write(true).open(&path).unwrap();
        let machines = open_disk_for_writing(open(), IoEngine::Sync).unwrap();
        let error = prepare(&open(), &image(), &[7; 32], None).unwrap_err();
        assert!(matches!(error, PersistentError::Busy(_)), "{error}");
        assert!(error.to_string().contains("in use"), "{error}");
        drop(machines);
        assert!(prepare(&open(), &image(), &[7; 32], None).unwrap());
    }
}
