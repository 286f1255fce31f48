//! The form of notes (System V ABI, chapter 5).

/// Notes are padded to this.
pub(super) const NOTE_ALIGN: usize = 4;

/// Appends a note.
pub(super) fn note(name: &str, kind: u32, content: &[u8], to: &mut Vec<u8>) {
    // Its NUL counts.
    to.extend((name.len() as u32 + 1).to_le_bytes());
    to.extend((content.len() as u32).to_le_bytes());
    to.extend(kind.to_le_bytes());
    let name = [name.as_bytes(), &[0]].concat();
    for part in [name.as_slice(), content] {
        to.extend(part);
        to.resize(to.len().next_multiple_of(NOTE_ALIGN), 0);
    }
}
