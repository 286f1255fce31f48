//! See [`podvisor_fuzz::balloon`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| podvisor_fuzz::balloon::run(data));
