//! PID 1 of the loader's kernel: it mounts the machine's disks read-only, reads what their
//! distribution would boot, and starts that kernel in place of its own (kexec).
//!
//! It takes its arguments from the end of its kernel's command line, after ` -- ` ([`args`]), and
//! tells each phase in a line on the console. It can also hand what it would start over to the
//! host, and start nothing ([`hand_over`]). Whatever goes wrong is one line that begins with
//! `podvisor-loader: error:`, after which the machine is powered off; a step that does not end goes
//! wrong after a minute ([`watchdog`]). Disks are hostile: they are never written, no program of
//! theirs is run here, and what their configurations say is parsed by `podvisor-boot-entries`.

mod args;
mod console;
mod disks;
mod error;
mod hand_over;
mod image;
mod kexec;
mod machine;
mod sys;
mod trees;
mod watchdog;

use std::process::ExitCode;
use std::time::Duration;

use podvisor_boot_entries::{cmdline, find};

use crate::args::Args;
use crate::console::{now, say};
use crate::error::LoaderError;
use crate::watchdog::Watchdog;

fn main() -> ExitCode {
    std::panic::set_hook(Box::new(|panic| {
        say(&format!("error: the loader itself failed: {panic}"));
        machine::power_off();
    }));
    if let Err(error) = start() {
        say(&format!("error: {}", error::with_causes(&error)));
    }
    machine::power_off();
    // Nothing worked: the kernel panics because PID 1 ends.
    ExitCode::FAILURE
}

/// Starts the disk's kernel, and returns only if that fails; or hands it over.
fn start() -> Result<(), LoaderError> {
    let begun = now();
    machine::mount_kernel_file_systems()?;
    let own = std::fs::read_to_string("/proc/cmdline").unwrap_or_default();
    let args = Args::parse(std::env::args().skip(1), &own)?;
    let watchdog = Watchdog::start(args.timeout);

    let disks = disks::find(&args.roots, &watchdog)?;
    let trees = trees::mount(&disks, &watchdog)?;
    watchdog.step("reading the disks' boot entries");
    let found = find(&trees).map_err(|source| LoaderError::Entry {
        source: Box::new(source),
        others: disks::unusable(&disks),
    })?;
    for failed in &found.failed {
        say(&format!("passed over: {failed}"));
    }
    let entry = found.entry;
    say(&format!(
        "entry {:?} ({} in {})",
        entry.title,
        entry.format,
        trees.name(&entry.config)
    ));
    let is_found = now();

    // Who starts the kernel later knows what machine it is for.
    let of_the_machine = match &args.hand_over {
        None => cmdline::of_the_machine(&own),
        Some(_) => Vec::new(),
    };
    let no_self_tests = match args.no_self_tests {
        true => cmdline::without_self_tests(&entry.cmdline),
        false => None,
    };
    let needed: Vec<String> = of_the_machine
        .into_iter()
        .chain(no_self_tests)
        .chain(args.append)
        .collect();
    let line = cmdline::complete(&entry.cmdline, &needed);
    watchdog.step_of(
        kexec::LOAD_FACTOR,
        "reading the kernel and its initial file systems",
    );
    let image = image::open(&trees, &entry)?;
    if let Some(serial) = &args.hand_over {
        say(&format!("command line: {line}"));
        hand_over::write(&image, &entry.title, &line, serial)?;
        say(&format!("handed the kernel over at {}", seconds(now())));
        return Ok(());
    }
    image::check_memory(&image)?;
    say(&format!("command line: {line}"));
    kexec::load(&image, &entry.title, &line)?;
    drop(image);
    let is_loaded = now();

    watchdog.step("unmounting the disks");
    trees.unmount();
    say(&format!(
        "starting the kernel at {} (entry found in {}, kernel loaded in {})",
        seconds(now()),
        seconds(is_found.saturating_sub(begun)),
        seconds(is_loaded.saturating_sub(is_found)),
    ));
    watchdog.step("resetting the devices");
    kexec::start()?;
    Ok(())
}

fn seconds(time: Duration) -> String {
    format!("{:.3} s", time.as_secs_f64())
}
