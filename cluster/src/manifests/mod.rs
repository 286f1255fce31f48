//! What `podvisor-cluster install` prints: everything that a cluster needs, as one List.

/// What the subcommand takes from its command line.
#[derive(Debug, Clone, clap::Args)]
#[non_exhaustive]
pub struct Options {
    /// Namespace that the components run in.
    #[arg(long, default_value = "podvisor")]
    pub namespace: String,
}

/// The manifests as one List object.
#[must_use]
pub fn install(options: &Options) -> serde_json::Value {
    let namespace = serde_json::json!({
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": { "name": options.namespace },
    });
    serde_json::json!({ "apiVersion": "v1", "kind": "List", "items": [namespace] })
}
