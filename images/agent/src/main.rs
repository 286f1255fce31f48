//! The `podvisor-agent` binary: `/init` of a guest, and the single-threaded helper that
//! `/init` starts as itself to create a container.

use std::process::ExitCode;

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    match (args.next().as_deref(), std::process::id()) {
        (Some(podvisor_agent::launcher::SUBCOMMAND), _) => {
            podvisor_agent::launcher::main(args.next())
        }
        (_, 1) => podvisor_agent::init::main(),
        _ => {
            eprintln!(
                "podvisor-agent is PID 1 of a podvisor guest: pack it as /init of an initramfs"
            );
            ExitCode::from(2)
        }
    }
}
