//! See [`podvisor_fuzz::images_qcow2`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| podvisor_fuzz::images_qcow2::run(data));
