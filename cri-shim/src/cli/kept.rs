//! What commands about containers are about: containers, or VMs.

/// What is found by its name.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Kept {
    #[default]
    Containers,
    Vms,
}

impl Kept {
    /// Returns what one is called, and the command that lists all.
    pub(super) fn named(self) -> (&'static str, &'static str) {
        match self {
            Self::Containers => ("container", "ps -a"),
            Self::Vms => ("VM", "vm ps"),
        }
    }
}
