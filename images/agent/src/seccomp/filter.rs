//! A compiled filter: stored next to a container, and installed.

use std::io;
use std::path::Path;

use crate::sys::{self, FilterInstruction as Instruction};

/// A filter and the flags that it is installed with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filter {
    pub(super) log: bool,
    pub(super) spec_allow: bool,
    pub(super) instructions: Vec<Instruction>,
}

const SECCOMP_FILTER_FLAG_LOG: u32 = 1 << 1;
const SECCOMP_FILTER_FLAG_SPEC_ALLOW: u32 = 1 << 2;

const INSTRUCTION_BYTES: usize = 8;

impl Filter {
    /// Writes the filter to a new file: its flags, then its instructions as the kernel has them.
    ///
    /// # Errors
    ///
    /// Errors of writing.
    pub fn store(&self, path: &Path) -> io::Result<()> {
        let flags = self.flags().to_ne_bytes().into_iter();
        let instructions = self.instructions.iter().flat_map(|instruction| {
            let Instruction { code, jt, jf, k } = *instruction;
            let [c0, c1] = code.to_ne_bytes();
            let [k0, k1, k2, k3] = k.to_ne_bytes();
            [c0, c1, jt, jf, k0, k1, k2, k3]
        });
        std::fs::write(path, flags.chain(instructions).collect::<Vec<u8>>())
    }

    /// Reads what [`Filter::store`] wrote.
    ///
    /// # Errors
    ///
    /// Errors of reading, and `InvalidData` for a file of another form.
    pub fn load(path: &Path) -> io::Result<Self> {
        let bytes = std::fs::read(path)?;
        let invalid = || io::Error::from(io::ErrorKind::InvalidData);
        let (flags, instructions) = bytes.split_first_chunk::<4>().ok_or_else(invalid)?;
        let flags = u32::from_ne_bytes(*flags);
        let (instructions, rest) = instructions.as_chunks::<INSTRUCTION_BYTES>();
        if !rest.is_empty() {
            return Err(invalid());
        }
        Ok(Self {
            log: flags & SECCOMP_FILTER_FLAG_LOG != 0,
            spec_allow: flags & SECCOMP_FILTER_FLAG_SPEC_ALLOW != 0,
            instructions: instructions
                .iter()
                .map(|&[c0, c1, jt, jf, k0, k1, k2, k3]| Instruction {
                    code: u16::from_ne_bytes([c0, c1]),
                    jt,
                    jf,
                    k: u32::from_ne_bytes([k0, k1, k2, k3]),
                })
                .collect(),
        })
    }

    /// Installs the filter for the calling thread and everything that it starts; this is
    /// irreversible.
    ///
    /// # Errors
    ///
    /// `EACCES` for a thread that has neither `CAP_SYS_ADMIN` nor `no_new_privs`.
    pub fn install(&self) -> io::Result<()> {
        sys::install_seccomp_filter(self.flags(), &self.instructions)
    }

    fn flags(&self) -> u32 {
        let flag = |on, bit| if on { bit } else { 0 };
        flag(self.log, SECCOMP_FILTER_FLAG_LOG)
            | flag(self.spec_allow, SECCOMP_FILTER_FLAG_SPEC_ALLOW)
    }
}
