//! See [`podvisor_fuzz::firmware`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| podvisor_fuzz::firmware::run(data));
