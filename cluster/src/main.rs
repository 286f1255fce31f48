//! `podvisor-cluster`: KubeVirt's API over podvisor's VM pods.

use clap::{Parser, Subcommand};
use podvisor_cluster::{admission, api, controller, manifests, node};

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
    Api(api::Options),
    /// Run the controllers.
    Controller(controller::Options),
    /// Report this node's VMs and carry out what is asked of them.
    Node(node::Options),
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let command = Cli::parse().command;
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
    }
}
