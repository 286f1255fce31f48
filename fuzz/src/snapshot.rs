//! State files of snapshots: damaged with corrected checksums, or arbitrary bytes.

/// A file is refused, or writing the decoded state again gives the same state.
pub fn run(data: &[u8]) {
    podvisor_vmm::snapshot_testing::fuzz_state(data);
}

#[cfg(test)]
mod tests {
    #[test]
    fn state_files_are_read_or_refused() {
        crate::smoke::run("snapshot", super::run);
    }
}
