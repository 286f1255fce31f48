//! What is wrong with a `grub.cfg`.

use thiserror::Error;

use crate::bls::BlsError;
use crate::files::PathError;
use crate::limits;
use crate::uki::UkiError;
use crate::volumes::FileError;

/// A `grub.cfg` that names nothing to boot.
#[derive(Debug, Error)]
#[error("line {line} of {path}: {kind}")]
pub struct GrubError {
    /// The file, which may be one that the first includes.
    pub path: String,
    /// The line, from 1.
    pub line: usize,
    /// What is wrong there.
    #[source]
    pub kind: GrubErrorKind,
}

/// What is wrong in a line.
#[derive(Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum GrubErrorKind {
    /// The text is no commands.
    #[error("{0}")]
    Syntax(&'static str),
    /// Blocks within blocks.
    #[error("more than {max} blocks within each other", max = limits::NESTING)]
    Nesting,
    /// A loop of the language.
    #[error("`{0}` loops are not supported")]
    Loop(String),
    /// Files that include each other, or too many of them.
    #[error("{path} includes itself, or more than {max} files include each other", max = limits::INCLUDES)]
    Includes {
        /// The file to be included.
        path: String,
    },
    /// Too much work.
    #[error("more than {0} were used: does it loop?")]
    Quota(&'static str),
    /// A command that is not in the subset.
    #[error("the command `{0}` is not supported")]
    Command(String),
    /// A command without what it needs.
    #[error("`{0}` has no operand")]
    Operand(String),
    /// Another operating system's loader.
    #[error("it starts another boot loader ({0}), which needs a firmware")]
    Chainloader(String),
    /// A device that the machine does not have.
    #[error("there is no file system on the device {0:?}")]
    Device(String),
    /// A path that is not followed.
    #[error(transparent)]
    Path(#[from] PathError),
    /// A file that cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// Entries of the Boot Loader Specification.
    #[error(transparent)]
    Bls(#[from] BlsError),
    /// A unified kernel image.
    #[error(transparent)]
    Uki(#[from] UkiError),
    /// The menu is empty.
    #[error("there is no menu entry")]
    NoEntry,
    /// The chosen entry does not start a kernel.
    #[error("the entry {0:?} starts no kernel")]
    NoKernel(String),
}
