use std::sync::{Arc, Mutex};

use super::*;
use proptest::prelude::*;

#[derive(Clone, Debug, Default)]
struct Sent(Arc<Mutex<Vec<(u64, u32)>>>);

impl Sent {
    fn take(&self) -> Vec<(u64, u32)> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

impl MessageInterrupt for Sent {
    fn send(&self, address: u64, data: u32) {
        self.0.lock().unwrap().push((address, data));
    }
}

/// Three vectors with different messages, unmasked and enabled.
fn msix() -> (Msix, Sent) {
    let sent = Sent::default();
    let mut msix = Msix::new(3, sent.clone());
    for vector in 0..3u32 {
        set(&mut msix, vector, vector + 40);
        mask(&mut msix, vector, 0);
    }
    msix.set_control(ENABLE);
    (msix, sent)
}

fn set(msix: &mut Msix, vector: u32, data: u32) {
    let at = u64::from(vector) * ENTRY_LEN;
    msix.write_table(at, &0xfee0_0000u64.to_le_bytes());
    msix.write_table(at + 8, &data.to_le_bytes());
}

fn mask(msix: &mut Msix, vector: u32, mask: u32) {
    msix.write_table(u64::from(vector) * ENTRY_LEN + 12, &mask.to_le_bytes());
}

fn pending(msix: &Msix) -> u64 {
    let mut bytes = [0; 8];
    msix.read_pending(0, &mut bytes);
    u64::from_le_bytes(bytes)
}

#[test]
fn a_vector_sends_its_message() {
    let (mut msix, sent) = msix();
    msix.signal(1);
    msix.signal(2);
    assert_eq!(sent.take(), [(0xfee0_0000, 41), (0xfee0_0000, 42)]);
    for unknown in [3, 64, 65, NO_VECTOR] {
        msix.signal(unknown);
    }
    assert_eq!((sent.take(), pending(&msix)), (vec![], 0));
}

#[test]
fn a_masked_vector_is_pending_and_sent_once_when_it_is_unmasked() {
    let (mut msix, sent) = msix();
    mask(&mut msix, 1, 1);
    msix.signal(1);
    msix.signal(1);
    msix.signal(2);
    assert_eq!(sent.take(), [(0xfee0_0000, 42)]);
    assert_eq!(pending(&msix), 2);
    // The message may change while it is pending.
    set(&mut msix, 1, 77);
    assert_eq!(sent.take(), []);
    mask(&mut msix, 1, 0);
    assert_eq!(sent.take(), [(0xfee0_0000, 77)]);
    assert_eq!(pending(&msix), 0);
    mask(&mut msix, 1, 0);
    assert_eq!(sent.take(), []);
}

#[test]
fn all_vectors_are_masked_and_unmasked_at_once() {
    let (mut msix, sent) = msix();
    mask(&mut msix, 0, 1);
    msix.set_control(ENABLE | MASK_ALL);
    (0..3).for_each(|vector| msix.signal(vector));
    assert_eq!((sent.take(), pending(&msix)), (vec![], 7));
    mask(&mut msix, 2, 0);
    assert_eq!(sent.take(), []);
    msix.set_control(ENABLE);
    assert_eq!(sent.take(), [(0xfee0_0000, 41), (0xfee0_0000, 42)]);
    assert_eq!(pending(&msix), 1);
    msix.clear_pending();
    mask(&mut msix, 0, 0);
    assert_eq!(sent.take(), []);
}

#[test]
fn nothing_is_sent_or_pending_while_it_is_disabled() {
    let (mut msix, sent) = msix();
    msix.set_control(0);
    assert!(!msix.is_enabled());
    msix.signal(0);
    msix.set_control(ENABLE);
    assert_eq!((sent.take(), pending(&msix)), (vec![], 0));
}

#[test]
fn accesses_of_odd_widths_and_places_read_zero_and_change_nothing() {
    let (mut msix, sent) = msix();
    let before = msix.save();
    for (offset, len) in [
        (0, 0),
        (0, 1),
        (0, 2),
        (0, 3),
        (0, 5),
        (0, 16),
        (1, 4),
        (2, 4),
        (4, 8),
        (12, 8),
        (48, 4),
        (48, 8),
        (u64::MAX, 1),
        (u64::MAX - 3, 4),
        (u64::MAX - 7, 8),
        (1 << 40, 8),
    ] {
        let mut bytes = vec![0xee; len];
        msix.write_table(offset, &vec![0xff; len]);
        assert_eq!(msix.save(), before, "{offset:#x} {len}");
        msix.read_table(offset, &mut bytes);
        assert_eq!(bytes, vec![0; len], "{offset:#x} {len}");
    }
    for (offset, len) in [(0, 1), (4, 8), (8, 4), (8, 8), (u64::MAX - 7, 8)] {
        let mut bytes = vec![0xee; len];
        msix.read_pending(offset, &mut bytes);
        assert_eq!(bytes, vec![0; len]);
    }
    let mut wide = [0; 8];
    msix.read_table(8, &mut wide);
    assert_eq!(wide, [40, 0, 0, 0, 0, 0, 0, 0]);
    // Reserved bits of vector control.
    mask(&mut msix, 0, 0xffff_fffe);
    msix.read_table(8, &mut wide);
    assert_eq!(wide, [40, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(sent.take(), []);
}

#[test]
fn a_restored_table_sends_what_was_pending() {
    let (mut old, sent) = msix();
    mask(&mut old, 2, 1);
    old.signal(2);
    let saved = old.save();
    let mut new = Msix::new(3, sent.clone());
    new.check(&saved).unwrap();
    new.restore(&saved);
    new.set_control(ENABLE);
    assert_eq!((new.save(), sent.take()), (saved.clone(), vec![]));
    mask(&mut new, 2, 0);
    assert_eq!(sent.take(), [(0xfee0_0000, 42)]);
    let damage: [fn(&mut SavedMsix); 4] = [
        |saved| saved.pending |= 8,
        |saved| saved.table[0][3] = 2,
        |saved| saved.table.truncate(2),
        |saved| saved.table.push([0; 4]),
    ];
    for damage in damage {
        let mut bad = saved.clone();
        damage(&mut bad);
        assert!(new.check(&bad).is_err(), "{bad:?}");
    }
    assert!(
        Msix::new(64, sent)
            .check(&SavedMsix {
                table: vec![[0; 4]; 64],
                pending: u64::MAX
            })
            .is_ok()
    );
}

proptest! {
    /// Each signal of an enabled table is sent immediately, or becomes pending, or is merged with a
    /// pending one.
    #[test]
    fn no_interrupt_is_lost(
        steps in prop::collection::vec((0u8..4, 0u32..3, any::<bool>()), 0..60),
    ) {
        let (mut msix, sent) = msix();
        let (mut masks, mut all, mut waiting) = ([false; 3], false, [false; 3]);
        for (what, vector, flag) in steps {
            let at = vector as usize;
            let mut expected = Vec::new();
            match what {
                0 | 1 => {
                    msix.signal(vector as u16);
                    waiting[at] = true;
                }
                2 => {
                    mask(&mut msix, vector, u32::from(flag));
                    masks[at] = flag;
                }
                _ => {
                    msix.set_control(if flag { ENABLE | MASK_ALL } else { ENABLE });
                    all = flag;
                }
            }
            for n in 0..3 {
                if waiting[n] && !masks[n] && !all {
                    waiting[n] = false;
                    expected.push((0xfee0_0000, 40 + n as u32));
                }
            }
            prop_assert_eq!(sent.take(), expected);
        }
    }
}
