//! See [`podvisor_fuzz::console`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| podvisor_fuzz::console::run(data));
