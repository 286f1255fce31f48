//! Kernel command lines.

/// A command line is stored in guest memory unchanged, or is refused.
pub fn run(data: &[u8]) {
    podvisor_vmm::boot_testing::fuzz_cmdline(data);
}

#[cfg(test)]
mod tests {
    #[test]
    fn command_lines_arrive_or_are_refused() {
        crate::smoke::run("cmdline", super::run);
    }
}
