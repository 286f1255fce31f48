//! See [`podvisor_fuzz::fs`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| podvisor_fuzz::fs::run(data));
