//! See [`podvisor_fuzz::mmio`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| podvisor_fuzz::mmio::run(data));
