//! `podvisor image inspect` and `podvisor history`: one image in detail.

use std::time::SystemTime;

use anyhow::Context as _;
use clap::Args;
use podvisor_images::{HistoryEntry, ImageDetails};
use serde::Serialize;
use serde_json::{Value, json};

use super::format::{NONE, ago, rfc3339};
use super::images::short_id;
use super::table::Table;
use super::{FormatArgs, Globals, JsonArgs, size};

/// Maximum number of characters of a command that are shown, as in docker.
const MAX_COMMAND_CHARS: usize = 45;

#[derive(Debug, Args)]
pub(super) struct InspectArgs {
    #[command(flatten)]
    shown: JsonArgs,

    /// Names, ids or digests
    #[arg(value_name = "IMAGE", required = true)]
    images: Vec<String>,
}

#[derive(Debug, Args)]
pub(super) struct HistoryArgs {
    /// Name, id or digest
    image: String,

    /// Show ids and commands in full
    #[arg(long)]
    no_trunc: bool,

    #[command(flatten)]
    shown: FormatArgs,
}

/// Prints the images that are found; each failure is reported, and any failure makes the command
/// fail.
pub(super) fn run(globals: &Globals, args: &InspectArgs) -> anyhow::Result<u8> {
    let store = globals.store()?;
    let mut found = Vec::new();
    let mut code = 0;
    for name in &args.images {
        let details = store.inspect(name).map_err(anyhow::Error::from);
        match details.and_then(|details| view(&details)) {
            Ok(view) => found.push(view),
            Err(error) => {
                super::report(&error);
                code = super::FAILURE;
            }
        }
    }
    super::print_json(&found)?;
    Ok(code)
}

/// Returns an image's description with docker's field names, for existing scripts.
fn view(details: &ImageDetails) -> anyhow::Result<Value> {
    let image = &details.image;
    let config: Value =
        serde_json::from_slice(&details.config).context("cannot read the configuration")?;
    let part = |name: &str| config.get(name).cloned().unwrap_or_default();
    let layers = details.layers.iter();
    let stored = layers.clone().map(|layer| {
        json!({
            "Digest": layer.digest,
            "MediaType": layer.media_type,
            "Size": layer.size,
        })
    });
    Ok(json!({
        "Id": image.id(),
        "Digest": image.manifest_digest(),
        "RepoTags": image.tags(),
        "RepoDigests": image.digests(),
        "Created": part("created"),
        "Author": part("author"),
        "Architecture": part("architecture"),
        "Os": part("os"),
        "Config": part("config"),
        "RootFS": {
            "Type": "layers",
            "Layers": layers.map(|layer| layer.diff_id).collect::<Vec<_>>(),
        },
        "Layers": stored.collect::<Vec<_>>(),
        "History": part("history"),
        "Size": image.size(),
        "File": image.rootfs(),
        "Pulled": rfc3339(image.pulled()),
        "LastUsed": rfc3339(image.used()),
        "Pinned": image.pinned(),
    }))
}

/// The JSON representation of a build step.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct StepView<'a> {
    /// The id of the image, for the newest step.
    id: Option<String>,
    created: Option<String>,
    created_by: Option<&'a str>,
    comment: Option<&'a str>,
    /// Digest of the layer as it was pulled; not all steps create one.
    layer: Option<String>,
    /// Size of the layer as it was pulled, in bytes.
    size: u64,
}

pub(super) fn history(globals: &Globals, args: &HistoryArgs) -> anyhow::Result<u8> {
    let details = globals.store()?.inspect(&args.image)?;
    if args.shown.is_json() {
        let steps = details.history.iter().rev().enumerate();
        let views = steps.map(|(index, step)| {
            let layer = step.layer.and_then(|layer| details.layers.get(layer));
            StepView {
                id: (index == 0).then(|| details.image.id().to_string()),
                created: step.created.map(rfc3339),
                created_by: step.created_by.as_deref(),
                comment: step.comment.as_deref(),
                layer: layer.map(|layer| layer.digest.to_string()),
                size: layer.map_or(0, |layer| layer.size),
            }
        });
        super::print_json(&views.collect::<Vec<_>>())?;
    } else {
        super::print(&table(&details, args.no_trunc, SystemTime::now()))?;
    }
    Ok(0)
}

fn table(details: &ImageDetails, in_full: bool, now: SystemTime) -> String {
    let mut table = Table::new(["IMAGE", "CREATED", "CREATED BY", "SIZE", "COMMENT"]);
    let newest_first = details.history.iter().rev().enumerate();
    for (index, step) in newest_first {
        let id = match index {
            0 => short_id(&details.image, in_full),
            _ => "<missing>".to_owned(),
        };
        let layer = step.layer.and_then(|layer| details.layers.get(layer));
        table.row([
            id,
            ago(step.created, now),
            command(step, in_full),
            size::human(layer.map_or(0, |layer| layer.size)),
            step.comment.clone().unwrap_or_default(),
        ]);
    }
    table.render()
}

fn command(step: &HistoryEntry, in_full: bool) -> String {
    let text = step.created_by.as_deref().unwrap_or(NONE);
    if in_full || text.chars().count() <= MAX_COMMAND_CHARS {
        return text.to_owned();
    }
    let mut cut: String = text.chars().take(MAX_COMMAND_CHARS - 1).collect();
    cut.push('…');
    cut
}
