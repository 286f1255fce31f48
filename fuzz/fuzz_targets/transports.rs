//! See [`podvisor_fuzz::transports`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| podvisor_fuzz::transports::run(data));
