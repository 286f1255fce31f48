//! What runs beside each kubelet: it reports the state of its VMs and carries out requests.

/// What the subcommand takes from its command line.
#[derive(Debug, Clone, clap::Args)]
#[non_exhaustive]
pub struct Options {}

/// Runs until the process is told to end.
///
/// # Errors
///
/// The API server cannot be reached.
pub async fn run(_options: Options) -> anyhow::Result<()> {
    let client = kube::Client::try_default().await?;
    let version = client.apiserver_version().await?;
    tracing::info!(api_server = %version.git_version, "connected");
    tokio::signal::ctrl_c().await?;
    Ok(())
}
