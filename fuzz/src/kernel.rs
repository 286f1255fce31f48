//! Kernel files: ELF and bzImage with some of their bytes changed, or arbitrary bytes.

/// A file is loaded into guest memory or refused; a loaded file lies in memory and does not
/// overwrite the boot parameters.
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
