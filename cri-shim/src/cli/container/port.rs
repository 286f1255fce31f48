//! `podvisor port`: shows which ports of the host are forwarded to a container.

use anyhow::{bail, ensure};
use clap::Args;
use serde_json::json;

use super::ports::{Port, Protocol};
use super::{Containers, State, sweep};
use crate::cli::{FormatArgs, Globals};

#[derive(Debug, Args)]
pub(in crate::cli) struct PortArgs {
    #[command(flatten)]
    shown: FormatArgs,

    /// Name or id
    #[arg(value_name = "CONTAINER")]
    container: String,

    /// Show only this port of the container
    #[arg(value_name = "PORT[/PROTOCOL]", value_parser = parse)]
    port: Option<PortQuery>,
}

/// A port of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PortQuery {
    port: u16,
    protocol: Protocol,
}

fn parse(text: &str) -> Result<PortQuery, String> {
    let (port, protocol) = match text.split_once('/') {
        None => (text, Protocol::Tcp),
        Some((port, "tcp")) => (port, Protocol::Tcp),
        Some((port, "udp")) => (port, Protocol::Udp),
        Some((_, other)) => {
            return Err(format!("unknown protocol `{other}`: there are tcp and udp"));
        }
    };
    let port = port
        .parse()
        .map_err(|_| "write a port such as 80 or 53/udp")?;
    Ok(PortQuery { port, protocol })
}

pub(in crate::cli) fn run(globals: &Globals, args: &PortArgs) -> anyhow::Result<u8> {
    let containers = Containers::open(&globals.root()?)?;
    let (entry, state) = crate::cli::runtime()?.block_on(async {
        sweep(&containers).await?;
        let entry = containers.find(&args.container)?;
        let state = State::of(&entry).await?;
        anyhow::Ok((entry, state))
    })?;
    let (name, ports) = (&entry.record.name, entry.ports(Some(&state)));
    let asked = |port: &&Port| {
        let is_it =
            |asked: PortQuery| (asked.port, asked.protocol) == (port.guest_port, port.protocol);
        args.port.is_none_or(is_it)
    };
    let shown: Vec<&Port> = ports.iter().filter(asked).collect();
    if let Some(PortQuery { port, protocol }) = args.port {
        ensure!(
            !state.has_ended(),
            "container {name} is {}; ports lead to running ones",
            state.word()
        );
        if shown.is_empty() {
            let command = match entry.record.pod {
                None => "run",
                Some(_) => "pod create",
            };
            bail!(
                "port {port}/{protocol} of container {name} is not published; `podvisor {command} \
                 -p` does so"
            );
        }
    }
    if args.shown.is_json() {
        let views = shown.iter().map(|port| view(port));
        crate::cli::print_json(&views.collect::<Vec<_>>())?;
        return Ok(0);
    }
    let lines = shown.iter().map(|port| match args.port {
        Some(_) => format!("{}\n", port.host()),
        None => format!("{} -> {}\n", port.guest(), port.host()),
    });
    crate::cli::print(&lines.collect::<String>())?;
    Ok(0)
}

/// Returns a port's description with podman's field names.
pub(in crate::cli) fn view(port: &Port) -> serde_json::Value {
    json!({
        "host_ip": port.host().ip().to_string(),
        "host_port": port.host_port,
        "container_port": port.guest_port,
        "protocol": port.protocol,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_of_tcp_unless_said() {
        let asked = |port, protocol| Ok(PortQuery { port, protocol });
        assert_eq!(parse("80"), asked(80, Protocol::Tcp));
        assert_eq!(parse("53/udp"), asked(53, Protocol::Udp));
        for bad in ["", "x", "80/sctp", "80/", "70000"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
