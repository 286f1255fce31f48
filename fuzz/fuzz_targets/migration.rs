//! See [`podvisor_fuzz::migration`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| podvisor_fuzz::migration::run(data));
