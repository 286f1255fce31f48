//! Any requests, with reopening and kills in between.

use proptest::prelude::*;

use super::*;

/// A driver's request: the first sector, and the number of sectors.
#[derive(Clone, Debug)]
enum Step {
    Write(u64, usize, u8),
    Zero(u64, usize, bool),
    Discard(u64, usize),
    Flush,
    Reopen,
    Kill,
}

const SECTORS: u64 = 10 * 128 + 5;

fn step() -> impl Strategy<Value = Step> {
    let at = 0..SECTORS;
    let len = prop_oneof![1usize..8, 100usize..400];
    prop_oneof![
        6 => (at.clone(), len.clone(), 1u8..).prop_map(|(at, len, b)| Step::Write(at, len, b)),
        2 => (at.clone(), len.clone(), any::<bool>()).prop_map(|(at, len, u)| Step::Zero(at, len, u)),
        1 => (at, len).prop_map(|(at, len)| Step::Discard(at, len)),
        1 => Just(Step::Flush),
        1 => Just(Step::Reopen),
        1 => Just(Step::Kill),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// The disk behaves like a vector of bytes; after a kill each sector is as it was last flushed,
    /// or as it was written since.
    #[test]
    fn a_disk_is_what_was_written(steps in proptest::collection::vec(step(), 1..40)) {
        let len = SECTORS as usize * 512;
        let image = numbered(len);
        let mut rig = Rig::new(&image);
        let mut now = image.clone();
        let mut flushed = image.clone();
        for step in steps {
            let range = |at: u64, len: usize| {
                let end = (at as usize + len).min(SECTORS as usize);
                at as usize * 512..end * 512
            };
            match step {
                Step::Write(at, len, byte) => {
                    let range = range(at, len);
                    rig.write(at * 512, &vec![byte; range.len()]);
                    now[range].fill(byte);
                }
                Step::Zero(at, len, unmap) => {
                    let range = range(at, len);
                    let (offset, len) = (at * 512, range.len() as u64);
                    rig.ask(Operation::WriteZeroes { offset, len, unmap }).unwrap();
                    now[range].fill(0);
                }
                Step::Discard(at, len) => {
                    let range = range(at, len);
                    let (offset, len) = (at * 512, range.len() as u64);
                    rig.ask(Operation::Discard { offset, len }).unwrap();
                    // Its sectors may hold anything; here, zeroes or their old content.
                    let found = rig.read(offset, range.len());
                    for (at, byte) in range.zip(found) {
                        prop_assert!(byte == 0 || byte == now[at]);
                        now[at] = byte;
                    }
                }
                Step::Flush => {
                    rig.flush();
                    flushed.clone_from(&now);
                }
                Step::Reopen => {
                    rig.reopen();
                    flushed.clone_from(&now);
                }
                Step::Kill => {
                    let mem = rig.mem.clone();
                    let found = read(&mut rig.killed(), &mem, 0, len).unwrap();
                    let sectors = found.chunks(512).zip(now.chunks(512)).zip(flushed.chunks(512));
                    for ((found, now), flushed) in sectors {
                        prop_assert!(found == now || found == flushed || found == [0; 512]);
                    }
                }
            }
            prop_assert!(rig.read(0, len) == now);
        }
        rig.agrees_with_qemu(&now);
        prop_assert!(std::fs::read(rig.path("base")).unwrap() == image);
    }
}
