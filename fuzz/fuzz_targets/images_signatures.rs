//! See [`podvisor_fuzz::images_signatures`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| podvisor_fuzz::images_signatures::run(data));
