//! What the two nodes of a migration say of it.

pub use crate::contact::migration::{MigrationReport, NodeReport, NodeState};

/// What is known of one node of a migration.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Seen {
    /// It was not asked.
    #[default]
    NotAsked,
    /// It does not answer.
    Unreachable(String),
    /// It has no such VM.
    NoVm,
    /// It says this.
    Vm(NodeReport),
}

impl Seen {
    /// The migration, if the node has it.
    #[must_use]
    pub fn migration(&self) -> Option<&MigrationReport> {
        match self {
            Self::Vm(report) => report.migration.as_ref(),
            _ => None,
        }
    }

    /// How far the migration is, if the node has it.
    #[must_use]
    pub fn state(&self) -> Option<NodeState> {
        self.migration().map(|migration| migration.state)
    }

    /// Whether the node answers, and does not have the migration.
    #[must_use]
    pub fn has_none(&self) -> bool {
        match self {
            Self::NoVm => true,
            Self::Vm(report) => report.migration.is_none(),
            Self::NotAsked | Self::Unreachable(_) => false,
        }
    }
}
