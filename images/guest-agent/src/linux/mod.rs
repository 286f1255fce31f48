//! Commands on Linux, and the loop that waits for all that happens.
//!
//! [`Guest`] carries out what the host asks for, and [`serve`] feeds it from a [`Port`]. Nothing
//! here blocks for long: programs and the port are waited for together, what is asked of other
//! programs has a time limit, and files are opened without waiting.
//!
//! | file | contents |
//! | --- | --- |
//! | `guest` | which command is whose |
//! | `kernel` | what changes the whole system |
//! | `port` | the port, and the loop |
//! | `signals` | signals as bytes of a pipe |
//! | `programs` | programs that the host runs |
//! | `tool` | programs of the guest that the agent itself runs |
//! | `files` | files that the host reads and writes |
//! | `freeze` | frozen file systems |
//! | `mounts` | what is mounted |
//! | `system` | what the guest says of itself |
//! | `network` | its interfaces |
//! | `users` | who is there, and who is logged in |
//! | `keys` | keys by which users may log in |
//! | `cpus` | CPUs that come and go |
//! | `text` | files of the system itself |
//! | `sys` | system calls without safe wrappers |

mod cpus;
mod files;
mod freeze;
mod guest;
mod kernel;
mod keys;
mod mounts;
mod network;
mod port;
mod programs;
mod signals;
mod sys;
mod system;
mod text;
mod tool;
mod users;

pub use files::MAX_FILES;
pub use freeze::LONGEST_FREEZE;
pub use guest::Guest;
pub use kernel::{Kernel, ThisKernel};
pub use port::{Port, PortError, serve};
pub use programs::{MAX_KEPT, MAX_OUTPUT, MAX_PROGRAMS};
pub use signals::Signals;
