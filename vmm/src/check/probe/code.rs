//! The machine code of the probe's guests, their descriptor tables and where all of it lies.

/// Guest memory: 64 KiB from address 0, identity-mapped and accessible to ring 3.
pub(super) const MEMORY: usize = 0x1_0000;
pub(super) const PML4: u64 = 0x1000;
pub(super) const PDPT: u64 = 0x2000;
pub(super) const DIRECTORY: u64 = 0x3000;
pub(super) const KERNEL: u64 = 0x4000;
pub(super) const USER: u64 = 0x5000;
pub(super) const HANDLERS: u64 = 0x6000;
pub(super) const GDT: u64 = 0x7000;
pub(super) const IDT: u64 = 0x8000;
pub(super) const TSS: u64 = 0x9000;
pub(super) const KERNEL_STACK: u64 = 0xb000;
pub(super) const USER_STACK: u64 = 0xc000;

/// After the memory, within the 2 MiB that are mapped: a guest's writes there are MMIO.
pub(super) const REPORT: u64 = 0x10_0000;
/// Where the handlers write their vector.
pub(super) const VECTOR: u64 = 0x10_0008;

pub(super) const KERNEL_CODE: u16 = 0x08;
pub(super) const KERNEL_DATA: u16 = 0x10;
pub(super) const USER_DATA: u16 = 0x18 | 3;
pub(super) const USER_CODE: u16 = 0x20 | 3;
pub(super) const TASK: u16 = 0x28;

/// `IA32_STAR`: SYSCALL loads CS with bits 47:32 and SS with the next one; SYSRET loads SS with
/// bits 63:48 plus 8 and CS with the same plus 16.
pub(super) const STAR: u64 = (KERNEL_CODE as u64) << 32 | (KERNEL_DATA as u64 | 3) << 48;
pub(super) const RFLAGS_IF: u64 = 1 << 9;

/// The value of RAX in ring 3, for the kernel's entry to report.
pub(super) const TOKEN: u64 = 0x5150;
pub(super) const AFTER_SYSCALL: u64 = USER + 2;
pub(super) const SYSTEM_CALL_VECTOR: u8 = 0x80;
pub(super) const AFTER_INT_80: u64 = USER + 2;
pub(super) const INTERRUPT_VECTOR: u8 = 0x40;

/// `mov [REPORT], eax`
const REPORT_EAX: [u8; 7] = [0x89, 0x04, 0x25, 0x00, 0x00, 0x10, 0x00];
const HLT: u8 = 0xf4;

/// Ring 0: 6 × 7 to port 0x10.
#[rustfmt::skip]
pub(super) const COMPUTE: &[u8] = &[
    0xb8, 6, 0, 0, 0,       // mov eax, 6
    0x6b, 0xc0, 7,          // imul eax, eax, 7
    0xe6, 0x10,             // out 0x10, al
    HLT,
];

/// Ring 3: calls the kernel, then reports its CS.
pub(super) const SYSCALL: &[u8] = &concat::<2, 11, 13>([0x0f, 0x05], TELL_CS_CODE); // syscall; …

/// Ring 0: reports EAX and returns.
pub(super) const SYSCALL_ENTRY: &[u8] = &concat::<7, 3, 10>(REPORT_EAX, [0x48, 0x0f, 0x07]); // …; sysretq

/// Ring 3: reports its CS.
pub(super) const TELL_CS: &[u8] = &TELL_CS_CODE;
#[rustfmt::skip]
const TELL_CS_CODE: [u8; 11] = [
    0x8c, 0xc8,                                 // mov eax, cs
    0x89, 0x04, 0x25, 0x00, 0x00, 0x10, 0x00,   // mov [REPORT], eax
    0xeb, 0xfe,                                 // jmp $
];

/// Ring 0: builds an interrupt frame and "returns" to ring 3.
#[rustfmt::skip]
pub(super) const ENTER_RING_3: &[u8] = &[
    0x6a, USER_DATA as u8,          // push SS
    0x68, 0x00, 0xc0, 0x00, 0x00,   // push USER_STACK
    0x6a, 0x02,                     // push RFLAGS
    0x6a, USER_CODE as u8,          // push CS
    0x68, 0x00, 0x50, 0x00, 0x00,   // push USER
    0x48, 0xcf,                     // iretq
];

/// Any ring: permanently undefined on every processor.
pub(super) const UNDEFINED: &[u8] = &[0x0f, 0x0b]; // ud2

/// Ring 3: the system call of 32-bit programs.
pub(super) const INT_80: &[u8] = &[0xcd, SYSTEM_CALL_VECTOR];

/// Ring 0: counts 8 bits, then compares 16 bytes of zeroes with zero.
#[rustfmt::skip]
pub(super) const POPCNT_CMPXCHG16B: &[u8] = &[
    0xb8, 0xf0, 0xf0, 0x00, 0x00,               // mov eax, 0xf0f0
    0xf3, 0x0f, 0xb8, 0xc0,                     // popcnt eax, eax
    0x89, 0x04, 0x25, 0x00, 0x00, 0x10, 0x00,   // mov [REPORT], eax
    0x31, 0xc0,                                 // xor eax, eax
    0x31, 0xd2,                                 // xor edx, edx
    0x31, 0xc9,                                 // xor ecx, ecx
    0xbb, 1, 0, 0, 0,                           // mov ebx, 1
    0xbe, 0x00, 0xd0, 0x00, 0x00,               // mov esi, 0xd000
    0xf0, 0x48, 0x0f, 0xc7, 0x0e,               // lock cmpxchg16b [rsi]
    0x0f, 0x94, 0xc0,                           // sete al
    0x0f, 0xb6, 0xc0,                           // movzx eax, al
    0x89, 0x04, 0x25, 0x00, 0x00, 0x10, 0x00,   // mov [REPORT], eax
    HLT,
];

/// Ring 0: reads, adds 1 and writes back at an address without memory.
#[rustfmt::skip]
pub(super) const READ_ADD_WRITE: &[u8] = &[
    0x8b, 0x04, 0x25, 0x00, 0x00, 0x10, 0x00,   // mov eax, [REPORT]
    0xff, 0xc0,                                 // inc eax
    0x89, 0x04, 0x25, 0x00, 0x00, 0x10, 0x00,   // mov [REPORT], eax
    HLT,
];

/// Ring 0: reports 0, then waits for interrupts.
#[rustfmt::skip]
pub(super) const WAIT: &[u8] = &[
    0x31, 0xc0,                                 // xor eax, eax
    0x89, 0x04, 0x25, 0x00, 0x00, 0x10, 0x00,   // mov [REPORT], eax
    0xfb,                                       // sti
    HLT,
    0xeb, 0xfd,                                 // jmp to the hlt
];

/// Never ends.
#[cfg(test)]
pub(super) const HANG: &[u8] = &[0xeb, 0xfe]; // jmp $

/// The length of a handler.
pub(super) const HANDLER: u64 = 16;

/// The code that runs when `vector` is raised: reports it and halts.
#[rustfmt::skip]
pub(super) const fn handler(vector: u8) -> [u8; HANDLER as usize] {
    [
        0xb8, vector, 0, 0, 0,                      // mov eax, vector
        0x89, 0x04, 0x25, 0x08, 0x00, 0x10, 0x00,   // mov [VECTOR], eax
        HLT,
        0xeb, 0xfd,                                 // jmp to the hlt
        0x90,
    ]
}

/// The descriptor table for the selectors above.
pub(super) const GDT_ENTRIES: [u64; 7] = [
    0,
    0x00af_9b00_0000_ffff, // ring 0 code, 64 bits
    0x00cf_9300_0000_ffff, // ring 0 data
    0x00cf_f300_0000_ffff, // ring 3 data
    0x00af_fb00_0000_ffff, // ring 3 code, 64 bits
    // TSS, busy, of the smallest size; its second half holds the base's upper half.
    0x0000_8b00_0000_0067 | TSS << 16,
    0,
];

/// An interrupt gate (SDM vol. 3, §7.14.1) that ring 3 may use, to the [`handler`] of `vector`.
pub(super) const fn gate(vector: u8) -> [u64; 2] {
    let target = HANDLERS + vector as u64 * HANDLER;
    let present_ring_3_gate = 0xee00_u64 << 32;
    [
        target & 0xffff
            | (KERNEL_CODE as u64) << 16
            | present_ring_3_gate
            | (target & 0xffff_0000) << 32,
        target >> 32,
    ]
}

/// Returns the exception's name, for messages.
pub(super) fn exception_name(vector: u64) -> &'static str {
    const NAMES: [&str; 20] = [
        "#DE", "#DB", "an NMI", "#BP", "#OF", "#BR", "#UD", "#NM", "#DF", "#9", "#TS", "#NP",
        "#SS", "#GP", "#PF", "#15", "#MF", "#AC", "#MC", "#XM",
    ];
    usize::try_from(vector)
        .ok()
        .and_then(|vector| NAMES.get(vector))
        .unwrap_or(&"an interrupt")
}

const fn concat<const A: usize, const B: usize, const N: usize>(a: [u8; A], b: [u8; B]) -> [u8; N] {
    assert!(A + B == N);
    let mut all = [0; N];
    let mut i = 0;
    while i < N {
        all[i] = if i < A { a[i] } else { b[i - A] };
        i += 1;
    }
    all
}
