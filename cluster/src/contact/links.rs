//! What the controller and a node's part know of each other about links of cards.

use serde::{Deserialize, Serialize};

/// Has a node take the link from cards of a VM, and give all others one.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct LinksRequest {
    /// The cards that are to have none, by their names in the specification.
    pub(crate) down: Vec<String>,
}
