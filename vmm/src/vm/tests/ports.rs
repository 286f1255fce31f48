//! Port accesses of any width, and those of string instructions.

use super::*;

/// Where the guest stores what it read.
const READ: u64 = ORDERS + 0x1000;

#[rustfmt::skip]
const CODE: &[u8] = &[
    0xfc,                               // cld
    0xba, 0xf8, 0x0c, 0x00, 0x00,       // mov edx, 0xcf8
    0xb8, 0x00, 0x00, 0x00, 0x80,       // mov eax, 1 << 31
    0xef,                               // out dx, eax
    0xba, 0xfc, 0x0c, 0x00, 0x00,       // mov edx, 0xcfc
    0xbf, 0x00, 0x10, 0x20, 0x00,       // mov edi, READ
    0xb9, 0x02, 0x00, 0x00, 0x00,       // mov ecx, 2
    0xf3, 0x6d,                         // rep insd
    0xb9, 0x04, 0x00, 0x00, 0x00,       // mov ecx, 4
    0x66, 0xf3, 0x6d,                   // rep insw
    0xb9, 0x04, 0x00, 0x00, 0x00,       // mov ecx, 4
    0xf3, 0x6c,                         // rep insb
    0xba, 0xfe, 0x03, 0x00, 0x00,       // mov edx, COM1 + 6
    0xb8, 0x00, 0x5a, 0x00, 0x00,       // mov eax, 0x5a << 8
    0x66, 0xef,                         // out dx, ax
    0x66, 0xed,                         // in ax, dx
    0x66, 0xab,                         // stosw
    0xba, 0xff, 0x03, 0x00, 0x00,       // mov edx, COM1 + 7
    0x66, 0xed,                         // in ax, dx
    0x66, 0xab,                         // stosw
    0xba, 0xf8, 0x03, 0x00, 0x00,       // mov edx, COM1
    0xb8, b'A', 0x03, 0x00, 0x00,       // mov eax, 'A' and interrupts on
    0x66, 0xef,                         // out dx, ax
    0x42,                               // inc edx
    0xec,                               // in al, dx
    0xaa,                               // stosb
    0x4a,                               // dec edx
    0xbe, 0x00, 0x10, 0x20, 0x00,       // mov esi, READ
    0xb9, 0x02, 0x00, 0x00, 0x00,       // mov ecx, 2
    0xf3, 0x6e,                         // rep outsb
    0xb0, 0xfe, 0xe6, 0x64,             // mov al, 0xfe; out 0x64, al
];

#[test]
fn string_instructions_are_as_many_accesses_and_wide_ones_reach_ports_that_follow() {
    let sent = Kept::default();
    let vm = tiny(CODE).transport(crate::Transport::Pci);
    let vm = Arc::new(vm.serial(sent.clone()).build().unwrap());
    let mem = vm.context.machine.memory.ram().clone();
    vm.start().unwrap();
    let ended = vm.clone();
    in_time("wait", move || ended.wait()).unwrap();
    let mut read = [0; 25];
    mem.read_slice(&mut read, GuestAddress(READ)).unwrap();
    // The bridge's IDs, by double words, words and bytes.
    let (ids, rest) = read.split_at(20);
    assert_eq!(ids[..8], [0x36, 0x1b, 8, 0, 0x36, 0x1b, 8, 0]);
    assert_eq!(ids[8..16], [0x36, 0x1b].repeat(4));
    assert_eq!(ids[16..], [0x36; 4]);
    // Modem status and scratch; scratch and nothing after it; enabled interrupts.
    assert_eq!(rest, [0xb0, 0x5a, 0x5a, 0xff, 3]);
    assert_eq!(*sent.0.lock().unwrap(), [b'A', 0x36, 0x1b]);
}
