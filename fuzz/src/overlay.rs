//! Overlays from an untrusted source, and drivers that write to them.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use arbitrary::{Arbitrary, Unstructured};
use podvisor_devices::GuestRam;
use podvisor_devices::blk::{Disk, Operation, Qcow2Disk, Submitted, create_qcow2};
use podvisor_devices::testing::memory;
use rustix::fs::{MemfdFlags, memfd_create};
use vm_memory::{Bytes, GuestAddress, GuestMemory};

/// The size of the image: some clusters, and a part of one.
const LEN: usize = (6 << 16) + 512 * 7;
/// The maximum size of a request.
const MOST: usize = 3 << 16;

#[derive(Arbitrary, Debug)]
enum Step {
    Write(u16, u16, u8),
    Read(u16, u16),
    Zero(u16, u16, bool),
    Discard(u16, u16),
    Flush,
    /// The disk is closed, and opened again.
    Reopen,
    /// It is opened again without closing, as after a kill.
    Kill,
}

#[derive(Arbitrary, Debug)]
struct Input {
    /// The steps before the file is manipulated.
    before: Vec<Step>,
    /// The changes of the file: words, and their offsets.
    changes: Vec<(u32, u64)>,
    /// The number of bytes that are cut off the file.
    cut: u32,
    after: Vec<Step>,
}

/// An unchanged disk has the content that was written to it; a manipulated one is opened or
/// refused.
pub fn run(data: &[u8]) {
    let Ok(input) = Input::arbitrary(&mut Unstructured::new(data)) else {
        return;
    };
    let image: Vec<u8> = (0..LEN / 4)
        .flat_map(|n| (n as u32 | 1 << 31).to_le_bytes())
        .collect();
    let (base, file) = (anonymous(), anonymous());
    base.write_all_at(&image, 0).expect("memory");
    create_qcow2(&base, Path::new("base"), &file).expect("an overlay");
    let mut rig = Rig {
        base,
        file,
        mem: memory(1 << 20),
        model: Some(image.clone()),
    };
    rig.play(&input.before);
    if !input.changes.is_empty() || input.cut != 0 {
        rig.model = None;
        let len = rig.file.metadata().expect("its length").len();
        for (at, word) in &input.changes {
            // Half of them in the header, the others anywhere.
            let at = match at % 2 {
                0 => u64::from(*at) / 2 % 160,
                _ => u64::from(*at) / 2 * 8 % len,
            };
            rig.file
                .write_all_at(&word.to_be_bytes(), at)
                .expect("memory");
        }
        let left = len.saturating_sub(u64::from(input.cut) % (len + 1));
        rig.file.set_len(left).expect("memory");
    }
    rig.play(&input.after);
    let mut found = vec![0; LEN];
    rig.base.read_exact_at(&mut found, 0).expect("memory");
    assert!(found == image, "the image was written");
}

fn anonymous() -> File {
    memfd_create("fuzz", MemfdFlags::CLOEXEC)
        .expect("a file in memory")
        .into()
}

struct Rig {
    base: File,
    file: File,
    mem: GuestRam,
    /// The expected content of the disk, unless its file was manipulated.
    model: Option<Vec<u8>>,
}

impl Rig {
    fn open(&self) -> Option<Qcow2Disk> {
        let clone = |file: &File| file.try_clone().expect("a descriptor");
        let disk = Qcow2Disk::open(clone(&self.base), clone(&self.file));
        assert!(disk.is_ok() || self.model.is_none(), "{disk:?}");
        disk.ok()
    }

    fn play(&mut self, steps: &[Step]) {
        let Some(mut disk) = self.open() else { return };
        let size = disk.len() / 512 * 512;
        for step in steps.iter().take(64) {
            let range = |at: u16, sectors: u16| {
                let at = u64::from(at) * 512 % size.max(512);
                let most = size.saturating_sub(at).min(MOST as u64);
                (at, (u64::from(sectors) * 512).min(most))
            };
            match *step {
                Step::Write(at, sectors, byte) => {
                    let (offset, len) = range(at, sectors);
                    let bytes = vec![byte; len as usize];
                    self.mem
                        .write_slice(&bytes, GuestAddress(0))
                        .expect("memory");
                    let slice = self.mem.get_slice(GuestAddress(0), len as usize);
                    let slices = [slice.expect("memory")];
                    self.ask(
                        &mut disk,
                        Operation::Write {
                            offset,
                            slices: &slices,
                        },
                    );
                    self.change(offset, &bytes);
                }
                Step::Read(at, sectors) => {
                    let (offset, len) = range(at, sectors);
                    let found = self.read(&mut disk, offset, len as usize);
                    self.compare(offset, &found);
                }
                Step::Zero(at, sectors, unmap) => {
                    let (offset, len) = range(at, sectors);
                    if len > 0 {
                        self.ask(&mut disk, Operation::WriteZeroes { offset, len, unmap });
                        self.change(offset, &vec![0; len as usize]);
                    }
                }
                Step::Discard(at, sectors) => {
                    let (offset, len) = range(at, sectors);
                    if len > 0 {
                        self.ask(&mut disk, Operation::Discard { offset, len });
                        let found = self.read(&mut disk, offset, len as usize);
                        self.change(offset, &found);
                    }
                }
                Step::Flush => self.ask(&mut disk, Operation::Flush),
                Step::Reopen => {
                    drop(disk);
                    let Some(again) = self.open() else { return };
                    disk = again;
                }
                Step::Kill => drop(self.open_copy()),
            }
        }
        if self.model.is_some() {
            for at in (0..LEN).step_by(MOST) {
                let found = self.read(&mut disk, at as u64, MOST.min(LEN - at));
                self.compare(at as u64, &found);
            }
        }
    }

    /// Opens a copy of the file, which is an overlay in every state, without what is in memory.
    fn open_copy(&self) -> Option<Qcow2Disk> {
        let mut bytes = vec![0; self.file.metadata().expect("its length").len() as usize];
        self.file.read_exact_at(&mut bytes, 0).expect("memory");
        let copy = anonymous();
        copy.write_all_at(&bytes, 0).expect("memory");
        let disk = Qcow2Disk::open(self.base.try_clone().expect("a descriptor"), copy);
        assert!(disk.is_ok() || self.model.is_none(), "{disk:?}");
        disk.ok()
    }

    fn ask(&self, disk: &mut Qcow2Disk, operation: Operation<'_, '_>) {
        match disk.submit(&self.mem, 0, operation) {
            Submitted::Done(Ok(())) => {}
            Submitted::Done(Err(error)) => assert!(self.model.is_none(), "{error}"),
            Submitted::Queued => panic!("it works at once"),
        }
    }

    fn read(&self, disk: &mut Qcow2Disk, offset: u64, len: usize) -> Vec<u8> {
        let slices = [self.mem.get_slice(GuestAddress(0), len).expect("memory")];
        self.ask(
            disk,
            Operation::Read {
                offset,
                slices: &slices,
            },
        );
        let mut bytes = vec![0; len];
        self.mem
            .read_slice(&mut bytes, GuestAddress(0))
            .expect("memory");
        bytes
    }

    fn change(&mut self, offset: u64, bytes: &[u8]) {
        let at = offset as usize;
        if let Some(model) = &mut self.model {
            model[at..at + bytes.len()].copy_from_slice(bytes);
        }
    }

    fn compare(&self, offset: u64, found: &[u8]) {
        let at = offset as usize;
        if let Some(model) = &self.model {
            assert!(
                model[at..at + found.len()] == *found,
                "{at:x}: something else is read"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn smoke() {
        crate::smoke::run("overlay", super::run);
    }
}
