//! See [`podvisor_fuzz::cloud_init`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| podvisor_fuzz::cloud_init::run(data));
