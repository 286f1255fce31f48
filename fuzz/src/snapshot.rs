//! State files of snapshots: damaged behind mended checksums, or anything.

/// A file is read, and written again as the same, or refused.
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
