//! The `podvisor-ga` binary: it finds the machine's port, and answers the host until it is ended.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use podvisor_ga::linux::{Guest, Port, PortError, Signals, ThisKernel, serve};

const USAGE: &str = "\
podvisor's guest agent: answers the machine's host at the port org.qemu.guest_agent.0

Usage: podvisor-ga [--path PATH]

  --path PATH  the port's device, or a socket to connect to, in place of the machine's port
  --version    the version
  --help       this text
";

fn main() -> ExitCode {
    let mut words = std::env::args_os().skip(1);
    let mut path = None;
    while let Some(word) = words.next() {
        match word.to_str() {
            Some("--help" | "-h") => {
                print!("{USAGE}");
                return ExitCode::SUCCESS;
            }
            Some("--version") => {
                println!("podvisor-ga {}", env!("CARGO_PKG_VERSION"));
                return ExitCode::SUCCESS;
            }
            Some("--path") => match words.next() {
                Some(named) => path = Some(PathBuf::from(named)),
                None => return misunderstood("--path needs a path"),
            },
            _ => return misunderstood(&format!("{} is unknown", word.display())),
        }
    }
    // Before the port is opened, from which they come.
    let signals = match Signals::take() {
        Ok(signals) => signals,
        Err(error) => return failed(&error),
    };
    let port = match path {
        Some(path) => Port::open(&path),
        None => Port::find(),
    };
    let port = match port {
        Ok(port) => port,
        Err(PortError::Taken(path)) => {
            // That one answers the host.
            say(&format!(
                "another agent has the port {}: there is nothing to do",
                path.display()
            ));
            return ExitCode::SUCCESS;
        }
        Err(error) => return failed(&error),
    };
    let mut guest = Guest::new(Path::new("/"), ThisKernel);
    match serve(&port, &mut guest, Some(signals)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failed(&error),
    }
}

fn misunderstood(why: &str) -> ExitCode {
    eprint!("podvisor-ga: {why}\n\n{USAGE}");
    ExitCode::from(2)
}

/// Says something where the service's log is, at the beginning or the end: never meanwhile, when
/// file systems may be frozen.
fn say(what: &str) {
    eprintln!("podvisor-ga: {what}");
}

fn failed(error: &dyn std::error::Error) -> ExitCode {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text = format!("{text}: {cause}");
        next = cause.source();
    }
    say(&text);
    ExitCode::FAILURE
}
