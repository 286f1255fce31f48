//! See [`podvisor_fuzz::ports`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| podvisor_fuzz::ports::run(data));
