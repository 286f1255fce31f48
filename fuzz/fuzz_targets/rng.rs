//! See [`podvisor_fuzz::rng`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| podvisor_fuzz::rng::run(data));
