//! See [`podvisor_fuzz::upload_form`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| podvisor_fuzz::upload_form::run(data));
