//! See [`podvisor_fuzz::serial`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| podvisor_fuzz::serial::run(data));
