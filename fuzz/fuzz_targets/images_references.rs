//! See [`podvisor_fuzz::images_references`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| podvisor_fuzz::images_references::run(data));
