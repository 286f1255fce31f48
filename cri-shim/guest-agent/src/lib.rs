//! A client of QEMU's guest agent: the program that distributions have as `qemu-guest-agent`, and
//! that listens at the port [`PORT`] of a virtual machine.
//!
//! [`GuestAgent`] has a method for each command. It knows nothing of virtual machines: its other
//! end is any stream. Commands are sent one after the other, because the agent reads no second one
//! before it has answered the first; each has a time limit, after which the next command finds the
//! stream in step again (`guest-sync-delimited`).
//!
//! Answers come from the guest and are not trusted:
//!
//! | input | what happens |
//! | --- | --- |
//! | a line longer than [`MAX_ANSWER`] | error; nothing of the rest is kept |
//! | lists that are longer, texts that are longer than shown | cut off |
//! | control characters in texts | shown as spaces |
//! | no answer, or a part of one | error at the end of the time limit |
//! | answers to nothing, or to another command | passed over before the next command |
//! | no JSON, other types, nested too deeply | error that names the command |
//!
//! | file | contents |
//! | --- | --- |
//! | `lines` | bytes to answers |
//! | `bounded` | texts and lists of limited size |
//! | `client` | the stream: one command after the other |
//! | `commands` | each command |
//! | `base64_bytes` | bytes in JSON of our own |
//! | `files` | files of the guest, piece by piece |
//! | `program` | programs that run in the guest |
//! | `types` | what the guest says of itself |

mod base64_bytes;
mod bounded;
mod client;
mod commands;
mod error;
mod files;
#[cfg(feature = "test-utils")]
pub mod fuzzing;
mod lines;
mod program;
mod types;

pub use client::GuestAgent;
pub use commands::ShutdownMode;
pub use error::GuestAgentError;
pub use files::{FileUse, OpenFile};
pub use lines::MAX_ANSWER;
pub use program::{Program, ProgramEnd, ProgramExit};
pub use types::{GuestAddress, GuestFileSystem, GuestInfo, GuestInterface, GuestOs, GuestUser};

/// The name of the port at which the agent listens in its default configuration.
pub const PORT: &str = "org.qemu.guest_agent.0";
