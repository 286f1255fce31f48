//! Handmade streams, for tests and the body of a fuzz target.

use std::io::{self, Read, Write};

use podvisor_devices::GuestRam;
use podvisor_devices::blk::{Disk, Operation, Submitted};

use super::disks::{MovingDisk, TargetDisks, encode as encode_disks};
use super::error::ReceiveError;
use super::incoming::{IncomingMigration, MigrationLimits};
use super::stream::MessageKind;
use crate::memory::{GuestMemory, MemorySize};
use crate::snapshot::testing::sample;
use crate::snapshot::{MachineState, encode_moving};
use crate::transport::Transport;

/// Reads what was prepared; what is written is lost.
#[derive(Debug)]
struct Prepared<'a>(&'a [u8]);

impl Read for Prepared<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Write for Prepared<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The length of the disk that [`stream`] announces.
const DISK: u64 = 1 << 20;

/// A disk that forgets.
#[derive(Debug)]
struct Zeroes;

impl Disk for Zeroes {
    fn len(&self) -> u64 {
        DISK
    }

    fn submit(&mut self, _: &GuestRam, _: u16, _: Operation<'_, '_>) -> Submitted {
        Submitted::Done(Ok(()))
    }
}

/// The machine that [`stream`] announces.
pub(super) fn machine() -> MachineState {
    MachineState {
        base: None,
        ..sample(Transport::Pci)
    }
}

/// A stream with these messages after the announcement of a machine.
pub(super) fn stream(messages: &[(MessageKind, u64, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = b"PODVMIGR\x02\0\0\0".to_vec();
    let hello = (MessageKind::Hello, 1, encode_moving(&machine()));
    let disk = MovingDisk {
        device: "blk0".to_owned(),
        identity: String::new(),
        len: DISK,
    };
    let disks = (MessageKind::Disks, 0, encode_disks(&[disk]));
    for (kind, number, contents) in [hello, disks].iter().chain(messages) {
        bytes.extend((*kind as u32).to_le_bytes());
        bytes.extend((contents.len() as u32).to_le_bytes());
        bytes.extend(number.to_le_bytes());
        bytes.extend(contents);
    }
    bytes
}

/// Takes what such a stream brings, without KVM.
pub(super) fn receive(bytes: &[u8]) -> Result<(MachineState, GuestMemory, u64), ReceiveError> {
    let limits = MigrationLimits::memory(MemorySize::mib(64));
    let mut incoming = IncomingMigration::open(Prepared(bytes), limits)?;
    incoming.disks = TargetDisks(vec![Box::new(Zeroes)]);
    let memory = GuestMemory::anonymous(incoming.announced.memory)?;
    let (state, paused_at) = incoming.receive_into(&memory)?;
    Ok((state, memory, paused_at))
}

/// Takes `data` as a stream, and as the messages that follow the announcement of a sound machine:
/// of each, a byte chooses kind, page and length.
pub fn fuzz_stream(data: &[u8]) {
    drop(receive(data));
    let mut messages = Vec::new();
    for edit in data.chunks_exact(4) {
        let [kind, page, len, value] = *edit else {
            continue;
        };
        let address = u64::from(page) << 12 | u64::from(value & 1) << 8;
        let state = || encode_moving(&machine());
        messages.push(match kind % 10 {
            0 => (
                MessageKind::Pages,
                address,
                vec![value; usize::from(len) << 10],
            ),
            1 => {
                let len = u64::from(len) << (value % 64);
                (
                    MessageKind::Zeroes,
                    address << (value % 32),
                    len.to_le_bytes().to_vec(),
                )
            }
            2 => (MessageKind::Round, address, Vec::new()),
            3 => {
                let mut state = state();
                let at = usize::from(page) * usize::from(len) % state.len();
                state[at] = value;
                (MessageKind::State, address, state)
            }
            4 => (MessageKind::State, address, state()),
            5 => (MessageKind::Refused, address, vec![value; usize::from(len)]),
            6 => (MessageKind::Run, address, Vec::new()),
            7 => (
                MessageKind::Blocks,
                address,
                vec![value % 2; usize::from(len) << 8],
            ),
            8 => {
                let len = (u64::from(len) << (page % 64)).to_le_bytes();
                let contents = [&[value, 0, 0, 0][..], &len].concat();
                (MessageKind::BlockZeroes, address, contents)
            }
            _ => (MessageKind::Hello, address, state()),
        });
        if messages.len() >= 32 {
            break;
        }
    }
    drop(receive(&stream(&messages)));
}
