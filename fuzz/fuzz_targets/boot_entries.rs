//! See [`podvisor_fuzz::boot_entries`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| podvisor_fuzz::boot_entries::run(data));
