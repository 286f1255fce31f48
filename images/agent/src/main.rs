//! The `podvisor-agent` binary: `/init` of a guest, and the processes that `/init` starts from the
//! same binary: the launcher of a container, the first process of a shared pid namespace, and the
//! process that creates a user namespace.

use std::process::ExitCode;

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    match (args.next().as_deref(), std::process::id()) {
        (Some(podvisor_agent::launcher::SUBCOMMAND), _) => {
            podvisor_agent::launcher::main(args.next())
        }
        (Some(podvisor_agent::container::process::pidns::SUBCOMMAND), _) => {
            podvisor_agent::container::process::pidns::main()
        }
        (Some(podvisor_agent::container::users::namespace::SUBCOMMAND), _) => {
            podvisor_agent::container::users::namespace::main()
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
