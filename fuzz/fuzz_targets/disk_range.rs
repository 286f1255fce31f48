//! See [`podvisor_fuzz::disk_range`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| podvisor_fuzz::disk_range::run(data));
