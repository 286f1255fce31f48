//! Dumps of a guest's memory: ELF core files as `crash`, `gdb` and `readelf` read them, in the form
//! of QEMU's `dump-guest-memory` without paging.
//!
//! A file has its head first, then memory: one `PT_LOAD` for each region, at its guest physical
//! address. The head says the registers of each vCPU twice: as Linux notes threads of a process
//! (`NT_PRSTATUS`), and as QEMU notes them, with segments and control registers, by which `crash`
//! finds a kernel that was moved at boot.
//!
//! * `registers.rs` takes a vCPU's registers from KVM, and writes them as notes, whose form is in
//!   `notes.rs`.
//! * `head.rs` writes what is before memory.
//!
//! Nothing here reads guest memory or writes files.

mod head;
mod notes;
mod registers;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

pub(crate) use head::{Region, head};
pub(crate) use registers::DumpedVcpu;
