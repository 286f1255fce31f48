//! See [`podvisor_fuzz::pci`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| podvisor_fuzz::pci::run(data));
