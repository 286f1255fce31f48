//! See [`podvisor_fuzz::overlay`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| podvisor_fuzz::overlay::run(data));
