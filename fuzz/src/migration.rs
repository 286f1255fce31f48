//! The stream of a migration, as the side that a VM moves to receives it.

/// A stream is refused, or brings a machine.
pub fn run(data: &[u8]) {
    podvisor_vmm::migration_testing::fuzz_stream(data);
}

#[cfg(test)]
mod tests {
    #[test]
    fn streams_bring_a_machine_or_are_refused() {
        crate::smoke::run("migration", super::run);
    }
}
