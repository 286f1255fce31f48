//! Reads dumps, as the specification says.

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes[at..at + 2].try_into().unwrap())
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// A program header: kind, offset, physical address, length.
pub(crate) type Segment = (u32, u64, u64, u64);

pub(crate) fn segments(head: &[u8]) -> Vec<Segment> {
    let (at, len) = (u64_at(head, 32) as usize, u16_at(head, 54) as usize);
    let count = usize::from(u16_at(head, 56));
    (0..count)
        .map(|number| {
            let header = &head[at + number * len..][..len];
            assert_eq!(u64_at(header, 16), u64_at(header, 24), "virtual address");
            assert_eq!(u64_at(header, 32), u64_at(header, 40), "length in memory");
            (
                u32_at(header, 0),
                u64_at(header, 8),
                u64_at(header, 24),
                u64_at(header, 32),
            )
        })
        .collect()
}

/// The vendors, kinds and contents of notes.
pub(crate) fn notes(mut bytes: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
    let mut notes = Vec::new();
    while !bytes.is_empty() {
        let (name, content) = (u32_at(bytes, 0) as usize, u32_at(bytes, 4) as usize);
        let begin = 12 + name.next_multiple_of(4);
        let text = String::from_utf8(bytes[12..12 + name - 1].to_vec()).unwrap();
        assert_eq!(bytes[12 + name - 1], 0);
        notes.push((
            text,
            u32_at(bytes, 8),
            bytes[begin..begin + content].to_vec(),
        ));
        bytes = &bytes[begin + content.next_multiple_of(4)..];
    }
    notes
}
