//! The orders that the guest executes, and its code.

/// Where orders lie: the order, address, value, answer, and a counter that the guest increments.
pub(super) const ORDERS: u64 = 0x20_0000;

/// The kind of an order.
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub(super) enum Order {
    Write32 = 1,
    Read32 = 2,
    Out8 = 3,
    In8 = 4,
    Out32 = 5,
    In32 = 6,
    Write8 = 7,
    Write16 = 8,
    Read8 = 9,
    Read16 = 10,
}

#[rustfmt::skip]
pub(super) const OBEY: &[u8] = &[
    0xbe, 0x00, 0x00, 0x20, 0x00,       // mov esi, ORDERS
    // next:
    0xff, 0x46, 0x10,                   // inc dword [esi + 16]
    0x8b, 0x06,                         // mov eax, [esi]
    0x85, 0xc0,                         // test eax, eax
    0x74, 0xf7,                         // jz next
    0x8b, 0x7e, 0x04,                   // mov edi, [esi + 4]
    0x8b, 0x5e, 0x08,                   // mov ebx, [esi + 8]
    0x89, 0xfa,                         // mov edx, edi
    0x48, 0x74, 0x26,                   // dec eax; jz write32
    0x48, 0x74, 0x27,                   // dec eax; jz read32
    0x48, 0x74, 0x28,                   // dec eax; jz out8
    0x48, 0x74, 0x2a,                   // dec eax; jz in8
    0x48, 0x74, 0x2d,                   // dec eax; jz out32
    0x48, 0x74, 0x2f,                   // dec eax; jz in32
    0x48, 0x74, 0x31,                   // dec eax; jz write8
    0x48, 0x74, 0x32,                   // dec eax; jz write16
    0x48, 0x74, 0x34,                   // dec eax; jz read8
    0x0f, 0xb7, 0x0f,                   // movzx ecx, word [edi]
    // answer:
    0x89, 0x4e, 0x0c,                   // mov [esi + 12], ecx
    // done:
    0xc7, 0x06, 0x00, 0x00, 0x00, 0x00, // mov dword [esi], 0
    0xeb, 0xc6,                         // jmp next
    // write32:
    0x89, 0x1f, 0xeb, 0xf4,             // mov [edi], ebx; jmp done
    // read32:
    0x8b, 0x0f, 0xeb, 0xed,             // mov ecx, [edi]; jmp answer
    // out8:
    0x88, 0xd8, 0xee, 0xeb, 0xeb,       // mov al, bl; out dx, al; jmp done
    // in8:
    0xec, 0x0f, 0xb6, 0xc8, 0xeb, 0xe2, // in al, dx; movzx ecx, al; jmp answer
    // out32:
    0x89, 0xd8, 0xef, 0xeb, 0xe0,       // mov eax, ebx; out dx, eax; jmp done
    // in32:
    0xed, 0x89, 0xc1, 0xeb, 0xd8,       // in eax, dx; mov ecx, eax; jmp answer
    // write8:
    0x88, 0x1f, 0xeb, 0xd7,             // mov [edi], bl; jmp done
    // write16:
    0x66, 0x89, 0x1f, 0xeb, 0xd2,       // mov [edi], bx; jmp done
    // read8:
    0x0f, 0xb6, 0x0f, 0xeb, 0xca,       // movzx ecx, byte [edi]; jmp answer
];
