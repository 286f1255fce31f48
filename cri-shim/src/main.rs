//! `podvisor`: programs from OCI images, each in a virtual machine of its own.
//!
//! `cli` is what a person types and reads; `sandbox` is one virtual machine with its agent
//! and the programs in it. The sandbox knows nothing of the command line, and neither
//! touches KVM: that is the library's.

mod cli;
mod sandbox;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
