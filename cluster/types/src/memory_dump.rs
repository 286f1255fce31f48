//! Dumps of a VM's memory to a claim (`status.memoryDumpRequest` of a VM).

use serde::{Deserialize, Serialize};

/// How far a dump is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub enum MemoryDumpPhase {
    /// The claim is to become a volume of the VM and of its instance.
    #[default]
    Associating,
    /// It is on its way to the node, or the memory is written.
    InProgress,
    /// The memory is written, and the claim leaves the instance.
    Unmounting,
    /// The dump is in the claim, which stays a volume of the VM.
    Completed,
    /// The claim leaves the VM.
    Dissociating,
    /// There is no dump.
    Failed,
    /// One that a newer version knows.
    #[serde(other)]
    Unknown,
}

impl MemoryDumpPhase {
    /// Whether nothing more happens until something is asked for.
    #[must_use]
    pub const fn is_over(self) -> bool {
        matches!(self, Self::Completed | Self::Failed)
    }
}

/// What was asked for, and what became of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct MemoryDumpRequest {
    /// The claim.
    #[serde(default)]
    pub claim_name: String,
    /// How far it is.
    #[serde(default)]
    pub phase: MemoryDumpPhase,
    /// The claim is to be no volume of the VM any more.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub remove: bool,
    /// When the dump began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_timestamp: Option<String>,
    /// When it ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end_timestamp: Option<String>,
    /// The file in the claim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_name: Option<String>,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}
