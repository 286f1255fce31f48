//! The protocol of QEMU's guest agent, version 7.2's form: a request is a line of JSON, and so is
//! its answer. The byte 0xFF makes both sides forget what they have of a line.
//!
//! [`Session`] takes bytes and returns answers; what a command does is up to its [`Handler`].
//!
//! | file | contents |
//! | --- | --- |
//! | `lines` | bytes to lines |
//! | `bounded` | texts, lists and bytes of limited size |
//! | `request` | a line to a command |
//! | `command` | the commands, and their arguments |
//! | `only` | arguments that are one value |
//! | `fault` | errors in the protocol's form |
//! | `session` | commands that need no guest, and what is allowed when |

mod bounded;
mod command;
mod fault;
mod lines;
mod only;
mod request;
mod session;

pub use command::{
    Capture, Command, Exec, FileOpen, FileRead, FileSeek, FileWrite, Keys, Password, ShutdownMode,
    Vcpu, Whence,
};
pub use fault::Fault;
pub use lines::MAX_REQUEST;
pub use session::{Handler, Session};
