//! `podvisor inspect`: containers in detail, as JSON.

use clap::Args;
use serde_json::{Value, json};

use super::{Containers, Entry, State, ps, sweep};
use crate::cli::Globals;

#[derive(Debug, Args)]
pub(in crate::cli) struct InspectArgs {
    /// Names or ids
    #[arg(value_name = "CONTAINER", required = true)]
    containers: Vec<String>,
}

pub(in crate::cli) fn run(globals: &Globals, args: &InspectArgs) -> anyhow::Result<u8> {
    let containers = Containers::open(&globals.root()?)?;
    let (found, code) = crate::cli::runtime()?.block_on(async {
        sweep(&containers).await?;
        let (mut found, mut code) = (Vec::new(), 0);
        for name in &args.containers {
            let shown = async {
                let entry = containers.find(name)?;
                let state = State::of(&entry).await?;
                anyhow::Ok(view(&entry, &state))
            };
            match shown.await {
                Ok(view) => found.push(view),
                Err(error) => {
                    crate::cli::report(&error);
                    code = crate::cli::FAILURE;
                }
            }
        }
        anyhow::Ok((found, code))
    })?;
    crate::cli::print_json(&found)?;
    Ok(code)
}

/// A container with docker's names for things, for scripts that know those.
fn view(entry: &Entry, state: &State) -> Value {
    let (record, short) = (&entry.record, ps::view(entry, state));
    let part = |name: &str| short.get(name).cloned().unwrap_or_default();
    let mounts = record.volumes.iter().map(|volume| {
        json!({
            "Type": "bind",
            "Source": volume.source,
            "Destination": volume.destination,
            "RW": !volume.read_only,
        })
    });
    json!({
        "Id": record.id,
        "Name": record.name,
        "Created": part("Created"),
        "Image": record.image_id,
        "ImageName": record.image,
        "State": {
            "Status": state.word(),
            "Running": matches!(state, State::Running { .. }),
            "Paused": state.word() == "paused",
            "OOMKilled": matches!(state, State::Exited(exit) if exit.oom_killed),
            "Pid": part("Pid"),
            "ExitCode": state.exit_code(),
            "Error": match state {
                State::Dead(Some(exit)) => exit.to_string(),
                State::Dead(None) => "the sandbox's process died".to_owned(),
                _ => String::new(),
            },
            "StartedAt": part("StartedAt"),
            "FinishedAt": part("FinishedAt"),
        },
        "Config": {
            "Hostname": record.hostname,
            "Cmd": record.process.args(),
            "Env": record.process.env(),
            "WorkingDir": record.process.cwd(),
            "User": record.user,
            "Tty": record.has_terminal(),
            "OpenStdin": record.interactive,
            "Labels": record.labels,
            "StopSignal": record.stop_signal,
        },
        "HostConfig": {
            "AutoRemove": record.remove,
            "Memory": record.memory,
            "NanoCpus": u64::from(record.cpus) * 1_000_000_000,
            "Jail": record.jailed,
        },
        "Mounts": mounts.collect::<Vec<_>>(),
        "LogPath": entry.log(),
        "Directory": entry.dir,
    })
}
