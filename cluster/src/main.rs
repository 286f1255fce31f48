//! `podvisor-cluster`: KubeVirt's API over podvisor's VM pods.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser, Subcommand};
use clap_complete::Shell;
use podvisor_cluster::{
    Listen, admission, api, controller, copy, export, import, manifests, node, upload,
};

#[derive(Debug, Parser)]
#[command(version, about = "KubeVirt's API over podvisor's VM pods")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Print all manifests that a cluster needs, for `kubectl apply -f -`.
    Install(manifests::Options),
    /// Serve the admission webhooks.
    Admission(admission::Options),
    /// Serve the subresources of virtual machines.
    Api(Listen),
    /// Run the controllers.
    Controller(controller::Options),
    /// Report this node's VMs and carry out what is asked of them.
    Node(node::Options),
    /// Fill a claim: the program of an importer's pod.
    Import(Box<import::Options>),
    /// Send a claim's disk to an importer of another namespace.
    Send(copy::Options),
    /// Serve claims by HTTPS to who has a token: the program of an exporter's pod.
    Export(export::Options),
    /// Take uploads from outside of the cluster.
    UploadProxy(Listen),
    /// Print a shell's completion script.
    Completions {
        /// Shell to print the script for.
        shell: Shell,
    },
    /// Write the manual pages for a package.
    #[command(hide = true)]
    Manual {
        /// Directory for the pages, one for each command.
        dir: PathBuf,
    },
}

/// The stack of each thread. Objects of Kubernetes have hundreds of fields, and what reads them
/// takes more than tokio's 2 MiB where it is not optimized.
const STACK: usize = 8 << 20;

fn main() -> anyhow::Result<()> {
    let command = Cli::parse().command;
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.enable_all().thread_stack_size(STACK).build();
    let runtime = runtime.context("failed to start the threads of this program")?;
    runtime.block_on(run(command))
}

async fn run(command: Command) -> anyhow::Result<()> {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    match command {
        Command::Install(options) => {
            println!("{:#}", manifests::install(&options));
            Ok(())
        }
        Command::Admission(options) => admission::run(options).await,
        Command::Api(options) => api::run(options).await,
        Command::Controller(options) => controller::run(options).await,
        Command::Node(options) => node::run(options).await,
        Command::Import(options) => import::run(*options).await,
        Command::Send(options) => copy::run(options).await,
        Command::Export(options) => export::run(options).await,
        Command::UploadProxy(options) => upload::run(options).await,
        Command::Completions { shell } => {
            let name = env!("CARGO_BIN_NAME");
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), name, &mut script);
            print!("{}", String::from_utf8_lossy(&script));
            Ok(())
        }
        Command::Manual { dir } => manual(&dir),
    }
}

fn manual(dir: &Path) -> anyhow::Result<()> {
    let failed = || format!("failed to write manual pages to {}", dir.display());
    fs::create_dir_all(dir).with_context(failed)?;
    let command = Cli::command().disable_help_subcommand(true);
    clap_mangen::generate_to(command, dir).with_context(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_installed_programs_understand_their_arguments() {
        let installed = manifests::install(&manifests::Options::default());
        let items = installed["items"].as_array().expect("a list");
        let containers = items
            .iter()
            .filter_map(|item| item.pointer("/spec/template/spec/containers")?.as_array())
            .flatten();
        let mut programs = 0;
        for container in containers {
            let args = container["args"].as_array().expect("arguments").iter();
            let args = args.map(|arg| arg.as_str().expect("arguments are strings"));
            let words: Vec<_> = std::iter::once("podvisor-cluster").chain(args).collect();
            let parsed = Cli::try_parse_from(&words);
            assert!(parsed.is_ok(), "{words:?}: {parsed:?}");
            programs += 1;
        }
        assert_eq!(programs, 4);
    }
}
