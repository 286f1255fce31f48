//! Kernel files: ELF and bzImage with some of their bytes changed, or anything.

/// A file is loaded into guest memory or refused; what was loaded lies in memory and left what
/// the kernel is told alone.
pub fn run(data: &[u8]) {
    podvisor_vmm::boot_testing::fuzz_kernel(data);
}

#[cfg(test)]
mod tests {
    #[test]
    fn kernel_files_load_or_are_refused() {
        crate::smoke::run("kernel", super::run);
    }
}
