//! See [`podvisor_fuzz::images_layers`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| podvisor_fuzz::images_layers::run(data));
