//! See [`podvisor_fuzz::mem`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| podvisor_fuzz::mem::run(data));
