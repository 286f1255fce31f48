//! Disks whose contents move with the memory, because the two hosts do not share them.

use std::io::{self, Read, Write};
use std::ops::Range;

use podvisor_devices::blk::{ChangeLog, Disk, flush_disk, write_disk, zero_disk};

use super::error::ReceiveError;
use super::send::{SendEnd, Sender};
use super::stream::{MAX_PAGES, MessageKind, StreamError};
use crate::memory::runs_of_data;

/// Most disks that move with one VM, and most bytes of a name or an identity.
const MAX_DISKS: usize = 64;
const MAX_NAME: usize = 2048;

/// Bytes of a sector: a guest sees whole ones.
pub(crate) const SECTOR: u64 = 512;

/// A disk whose contents move with the memory. The VM's device was built with
/// [`BlockDevice::copied`](crate::BlockDevice::copied).
///
/// Only what the disk [has changed](Disk::next_change) is sent: the other side has a new disk of
/// the same kind and length, over the same image if it is an overlay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MovingDisk {
    /// The name of its device.
    pub device: String,
    /// What both sides must agree on before anything is sent, such as the image of an overlay.
    pub identity: String,
    /// Its length in bytes, in whole sectors; a migration finds it out itself.
    pub len: u64,
}

/// A device that was plugged into a VM, which both sides have: the other side's VM needs it in the
/// same place among its devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PluggedIdentity {
    /// The name of the device.
    pub device: String,
    /// By what the other side knows it, such as a disk's serial number.
    pub identity: String,
}

/// Writes the list of devices that were plugged in.
pub(crate) fn encode_plugged(devices: &[PluggedIdentity]) -> Vec<u8> {
    let as_disk = |one: &PluggedIdentity| MovingDisk {
        device: one.device.clone(),
        identity: one.identity.clone(),
        len: 0,
    };
    encode(&devices.iter().map(as_disk).collect::<Vec<_>>())
}

/// Reads the list of devices that were plugged in; `devices` are all that were announced.
pub(super) fn decode_plugged(
    bytes: &[u8],
    devices: &[String],
) -> Result<Vec<PluggedIdentity>, ReceiveError> {
    let mut plugged: Vec<PluggedIdentity> = Vec::new();
    for MovingDisk {
        device, identity, ..
    } in decode(bytes)?
    {
        let is_twice = plugged.iter().any(|one| one.device == device);
        if is_twice || !devices.contains(&device) {
            return Err(ReceiveError::Plugged { device });
        }
        plugged.push(PluggedIdentity { device, identity });
    }
    Ok(plugged)
}

/// Writes the list of disks that move.
pub(crate) fn encode(disks: &[MovingDisk]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for disk in disks {
        bytes.extend(disk.len.to_le_bytes());
        for text in [&disk.device, &disk.identity] {
            let text = &text.as_bytes()[..text.floor_char_boundary(MAX_NAME)];
            bytes.extend((text.len() as u16).to_le_bytes());
            bytes.extend(text);
        }
    }
    bytes
}

/// Reads the list of disks that move.
pub(super) fn decode(mut bytes: &[u8]) -> Result<Vec<MovingDisk>, ReceiveError> {
    let mut disks = Vec::new();
    while !bytes.is_empty() {
        let disk = decode_one(&mut bytes).filter(|_| disks.len() < MAX_DISKS);
        disks.push(disk.ok_or(ReceiveError::DiskList)?);
    }
    Ok(disks)
}

fn decode_one(bytes: &mut &[u8]) -> Option<MovingDisk> {
    let (len, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    let mut text = || {
        let (len, rest) = bytes.split_first_chunk()?;
        let len = usize::from(u16::from_le_bytes(*len));
        let (text, rest) = rest.split_at_checked(len).filter(|_| len <= MAX_NAME)?;
        *bytes = rest;
        String::from_utf8(text.to_vec()).ok()
    };
    Some(MovingDisk {
        device: text()?,
        identity: text()?,
        len: u64::from_le_bytes(*len),
    })
}

/// A disk that is sent: how its bytes are read, and what is written meanwhile.
pub(crate) trait SourceDisk {
    /// Reads bytes as the guest sees them.
    fn read(&self, range: Range<u64>) -> io::Result<Vec<u8>>;

    /// Returns the next range that the other side's new disk may not have.
    fn next_change(&self, from: u64) -> io::Result<Option<Range<u64>>>;
}

impl<S: Read + Write> Sender<S> {
    /// Sends all of a disk that differs from a new one.
    pub(crate) fn whole_disk(
        &mut self,
        index: u32,
        len: u64,
        disk: &impl SourceDisk,
        tell: &mut impl FnMut(u64, u64) -> std::ops::ControlFlow<()>,
    ) -> Result<u64, SendEnd> {
        let (mut at, mut sent) = (0, 0);
        while let Some(range) = disk.next_change(at).map_err(SendEnd::Disk)? {
            at = range.end;
            sent += self.disk(index, len, disk, &[range], tell)?;
        }
        Ok(sent)
    }

    /// Sends ranges of a disk. Returns the number of bytes.
    pub(crate) fn disk(
        &mut self,
        index: u32,
        len: u64,
        disk: &impl SourceDisk,
        ranges: &[Range<u64>],
        tell: &mut impl FnMut(u64, u64) -> std::ops::ControlFlow<()>,
    ) -> Result<u64, SendEnd> {
        let began = std::time::Instant::now();
        let mut done = 0;
        let total: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        for range in ranges {
            let (mut at, end) = (range.start, range.end.min(len));
            while at < end {
                let next = end.min(at + MAX_PAGES as u64);
                let bytes = disk.read(at..next).map_err(SendEnd::Disk)?;
                self.blocks(index, at, &bytes)?;
                done += next - at;
                self.sent += next - at;
                at = next;
                self.pace(began, done, total.saturating_sub(done), tell)?;
            }
        }
        Ok(done)
    }

    /// Sends bytes of a disk, and only the length of those that are zeroes.
    fn blocks(&mut self, index: u32, offset: u64, bytes: &[u8]) -> Result<(), StreamError> {
        let mut at = 0;
        let zeroes = |sender: &mut Self, from: usize, to: usize| {
            if from == to {
                return Ok(());
            }
            let mut contents = index.to_le_bytes().to_vec();
            contents.extend(((to - from) as u64).to_le_bytes());
            let number = offset + from as u64;
            sender
                .stream
                .send(MessageKind::BlockZeroes, number, &contents)
        };
        for run in runs_of_data(bytes) {
            zeroes(self, at, run.start)?;
            let contents = [&index.to_le_bytes()[..], &bytes[run.clone()]].concat();
            let number = offset + run.start as u64;
            self.stream.send(MessageKind::Blocks, number, &contents)?;
            at = run.end;
        }
        zeroes(self, at, bytes.len())
    }
}

/// The disks of the side that a VM moves to.
#[derive(Debug, Default)]
pub(super) struct TargetDisks(pub(super) Vec<Box<dyn Disk>>);

impl TargetDisks {
    /// Checks that each disk that was announced has a place of its length.
    pub(super) fn check(&self, announced: &[MovingDisk]) -> Result<(), ReceiveError> {
        if announced.len() != self.0.len() {
            return Err(ReceiveError::Disks {
                announced: announced.len(),
                here: self.0.len(),
            });
        }
        for (moving, disk) in announced.iter().zip(&self.0) {
            let len = disk.len();
            if moving.len != len - len % SECTOR {
                return Err(ReceiveError::DiskLen {
                    device: moving.device.clone(),
                    theirs: moving.len,
                    ours: len,
                });
            }
        }
        Ok(())
    }

    /// Stores bytes that have come.
    pub(super) fn put(&mut self, offset: u64, contents: &mut [u8]) -> Result<(), ReceiveError> {
        let (index, bytes) = contents
            .split_first_chunk_mut()
            .ok_or(ReceiveError::NoBlocks { offset, len: 0 })?;
        let len = bytes.len() as u64;
        let disk = self.find(u32::from_le_bytes(*index), offset, len)?;
        write_disk(disk, offset, bytes).map_err(ReceiveError::DiskWrite)
    }

    /// Stores zeroes.
    pub(super) fn clear(&mut self, offset: u64, contents: &[u8]) -> Result<(), ReceiveError> {
        let none = ReceiveError::NoBlocks { offset, len: 0 };
        let Some((index, len)) = contents.split_first_chunk() else {
            return Err(none);
        };
        let len = len.first_chunk().copied().map(u64::from_le_bytes);
        let len = len.ok_or(none)?;
        let disk = self.find(u32::from_le_bytes(*index), offset, len)?;
        zero_disk(disk, offset, len).map_err(ReceiveError::DiskWrite)
    }

    /// Finds a disk that has these bytes: whole sectors.
    fn find(&mut self, index: u32, offset: u64, len: u64) -> Result<&mut dyn Disk, ReceiveError> {
        let none = ReceiveError::NoBlocks { offset, len };
        let disk = self.0.get_mut(index as usize);
        let Some(disk) = disk else {
            return Err(none);
        };
        let is_whole = offset.is_multiple_of(SECTOR) && len.is_multiple_of(SECTOR) && len > 0;
        let end = offset.checked_add(len).filter(|_| is_whole);
        match end.is_some_and(|end| end <= disk.len()) {
            true => Ok(&mut **disk),
            false => Err(none),
        }
    }

    /// Makes all of it durable, and closes the disks.
    pub(super) fn finish(&mut self) -> Result<(), ReceiveError> {
        for mut disk in self.0.drain(..) {
            flush_disk(&mut *disk).map_err(ReceiveError::DiskWrite)?;
        }
        Ok(())
    }
}

/// A log of a disk's changes that ends when this is dropped.
#[derive(Debug)]
pub(crate) struct RunningLog(pub(crate) ChangeLog);

impl Drop for RunningLog {
    fn drop(&mut self) {
        self.0.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FileDisk;

    fn moving(device: &str, len: u64) -> MovingDisk {
        MovingDisk {
            device: device.to_owned(),
            identity: "sha256:é".to_owned(),
            len,
        }
    }

    fn disks(len: u64) -> TargetDisks {
        let file = tempfile::tempfile().unwrap();
        file.set_len(len).unwrap();
        TargetDisks(vec![Box::new(FileDisk::new(file).unwrap())])
    }

    #[test]
    fn a_list_of_disks_is_read_as_it_was_written_or_refused() {
        let all = vec![moving("blk0", 1 << 20), moving("blk3", 0)];
        let bytes = encode(&all);
        assert_eq!(decode(&bytes).unwrap(), all);
        assert_eq!(decode(&[]).unwrap(), []);
        for cut in 1..bytes.len() {
            if cut != encode(&all[..1]).len() {
                assert!(decode(&bytes[..cut]).is_err(), "{cut}");
            }
        }
        let many = vec![moving("blk0", 512); MAX_DISKS + 1];
        assert!(matches!(
            decode(&encode(&many)),
            Err(ReceiveError::DiskList)
        ));
    }

    #[test]
    fn what_was_plugged_in_is_a_device_that_was_announced() {
        let one = |device: &str| PluggedIdentity {
            device: device.to_owned(),
            identity: "serial".to_owned(),
        };
        let devices = ["blk0".to_owned(), "blk3".to_owned()];
        let read = |list: &[PluggedIdentity]| decode_plugged(&encode_plugged(list), &devices);
        let list = [one("blk3"), one("blk0")];
        assert_eq!(read(&list).unwrap(), list);
        for list in [vec![one("blk1")], vec![one("blk0"), one("blk0")]] {
            let error = read(&list).unwrap_err();
            assert!(matches!(error, ReceiveError::Plugged { .. }), "{error}");
        }
    }

    #[test]
    fn a_disk_has_the_length_that_was_announced() {
        let here = disks(1 << 20);
        here.check(&[moving("blk0", 1 << 20)]).unwrap();
        let short = here.check(&[moving("blk0", 1 << 10)]).unwrap_err();
        assert!(short.to_string().contains("blk0"), "{short}");
        assert!(here.check(&[]).is_err());
    }

    #[test]
    fn bytes_outside_of_a_disk_are_refused() {
        let mut here = disks(4096);
        let contents = |index: u32, len: usize| [&index.to_le_bytes()[..], &vec![7; len]].concat();
        here.put(512, &mut contents(0, 1024)).unwrap();
        for (offset, index, len) in [
            (0, 1, 512),
            (0, 0, 0),
            (0, 0, 511),
            (256, 0, 512),
            (4096, 0, 512),
            (u64::MAX - 511, 0, 512),
        ] {
            let refused = here.put(offset, &mut contents(index, len));
            assert!(
                matches!(refused, Err(ReceiveError::NoBlocks { .. })),
                "{offset} {len}"
            );
        }
        assert!(here.put(0, &mut [0; 3]).is_err());
        let zeroes = |len: u64| [&0u32.to_le_bytes()[..], &len.to_le_bytes()].concat();
        here.clear(512, &zeroes(512)).unwrap();
        assert!(here.clear(0, &zeroes(8192)).is_err() && here.clear(0, &[0; 5]).is_err());
        let mut bytes = [0; 4096];
        podvisor_devices::blk::read_disk(&mut *here.0[0], 0, &mut bytes).unwrap();
        assert_eq!(
            (bytes[511], bytes[512], bytes[1024], bytes[1536]),
            (0, 0, 7, 0)
        );
        here.finish().unwrap();
    }
}
